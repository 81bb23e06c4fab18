"""Verbs that do not train: inspect, verify, bench, env, report and doctor with hostile options, data, code and surroundings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.corpus.case import Case, command, each_of
from tests.corpus.test_corpus_data import CONTENTS, LABELS, PAIRS, ROWS_OF, data
from tests.corpus.test_corpus_machine import RUN, leave_the_folder
from tests.corpus.test_corpus_run_folders import WHOLE
from tests.corpus.test_corpus_secrets import JOB
from tests.corpus.test_corpus_surroundings import closed, full, unread
from tests.corpus.tiny_run import Make, changed, gone, link, trains

MADE = ("page.html", "__pycache__*", "mine/__pycache__*")
NUMBERS = {"zero": "0", "10^30": "1" + "0" * 30}
SOURCES = {
    "line zero": "data.jsonl:0",
    "another file": "c.yaml:1",
    "a file that is nowhere": "nowhere.jsonl:1",
    "a home of nobody": "~nobody-here/x:1",
}
PAGES: dict[str, tuple[str, Make | str]] = {
    "a file of the user's": ("c.yaml", lambda at: None),
    "/dev/full": ("page", link("/dev/full")),
    "in no folder": ("none/page", lambda at: None),
    "its data": ("data.jsonl", lambda at: None),
}  # fmt: skip
LOOPS = {name: link(name) for name in ("loop", "loop.py")}


def inspect(name: str, *options: str, files: dict[str, Any] | None = None, **more: Any) -> Case:
    return trains(name, files, *options, verb="inspect", **more)


def of_inspect() -> Iterator[Case]:
    for option in ("--rows", "--step"):
        for name, number in NUMBERS.items():
            yield inspect(f"{option} {name}", option, number, expect=(0, 2))
    for name, one in SOURCES.items():
        yield inspect(f"--source {name}", "--source", one, files=LOOPS, says=("--source",))
    yield inspect("--source and --step", "--source", "data.jsonl:1", "--step", "1", says=("--source",))
    for name, (page, make) in PAGES.items():
        made = {} if page.partition("/")[0] in ("c.yaml", "data.jsonl", "none") or len(page) > 9 else {page: make}
        yield inspect(f"--html is {name}", "--html", page, files=made, says=("--html",))
    for name, content in CONTENTS.items():
        yield data(name, "data.jsonl", content, verb="inspect", expect=(0, 2))
    for name, row in ROWS_OF.items():
        yield data(f"rows, {name}", "data.jsonl", [row] * 4, "--json", verb="inspect", expect=(0, 2))
    labelled = {name: {"prompt": "a", "completion": "b", "label": label} for name, label in LABELS.items()}
    for kind, rows in (("dpo", PAIRS), ("kto", labelled)):
        how = {"verb": "inspect", "groups": {"objective": {"kind": kind}}, "expect": (0, 2) if kind == "dpo" else (2,)}
        for name, row in rows.items():
            yield data(f"{kind}, {name}", "data.jsonl", [row] * 4, **how)
    texts = {"escapes": "\x1b[31m\x07\x1b]0;title\x07", "marks": "\u202e\u0000é"}
    texts["markup"] = "<script>alert(1)</script>[red]{{ 7 }}"
    how = {"verb": "inspect", "expect": (0,), "writes": MADE}
    for name, text in texts.items():
        for option in ((), ("--json",), ("--html", "page.html"), ("--rows", "3")):
            yield data(f"texts of {name} {option[:1]}", "data.jsonl", [{"text": text * 5}] * 4, *option, **how)
    for how, numbers in ((closed, (1,)), (full, (1,)), (full, (1, 2)), (unread, (1,)), (closed, (0, 1, 2))):
        begin = partial(how, *numbers)
        yield inspect(f"{how.__name__} {numbers}", "--json", begin=begin, expect=(0, 2, 141))


CODE = {
    "no Python": "def f(",
    "that raises": "raise ValueError('mine')",
    "that kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "whose f is a class that needs more": "class f:\n    def __init__(self, much): pass",
    "whose f gives texts": "def f(rows): return {'input_ids': 'abc'}",
    "whose f gives an empty row": "import torch\ndef f(rows): return {'input_ids': torch.zeros(1, 0, dtype=int)}",
    "whose f gives ids of nobody": "import torch\ndef f(rows): return {'input_ids': torch.full((1, 9), 10**9)}",
    "not UTF-8": b"f = '\xff'",
}
SPECS = {
    "no name": "mine.py:",
    "a file that is nowhere": "nowhere.py:f",
    "an exit of Python's own": "sys:exit",
    "/dev/zero": "/dev/zero:f",
    "a home of nobody": "~nobody-here/x.py:f",
}


def verify(name: str, *options: str, files: dict[str, Any] | None = None, **more: Any) -> Case:
    return trains(name, files, *options, verb="verify", writes=MADE, **more)


def of_verify() -> Iterator[Case]:
    for name, code in CODE.items():
        files = {"mine.py": code}
        yield verify(f"a file {name}", "--collator", "mine.py:f", files=files, says=("--collator",), expect=(2, 3))
    for name, one in SPECS.items():
        yield verify(f"--collator {name}", "--collator", one, files=LOOPS, says=("--collator",))
    collator = ("--collator", "trl.trainer.sft_trainer:DataCollatorForLanguageModeling")
    for name in ("", "nope", "²", "\x1b[31m", "x" * 5000):
        yield verify(f"--attention {name:.9}", *collator, "--attention", name, expect=(2, 3))
    yield verify("--attach alone", "--attach", says=("--attach",))
    yield verify("--attention alone", "--attention", "eager", says=("--attention",))
    broken = {
        "weights cut": {"model/model.safetensors": lambda at: os.truncate(at, 100)},
        "no weights": {"model/model.safetensors": gone},
        "no layers": {"model/config.json": changed(num_hidden_layers=0)},
        "an endless size": {"model/config.json": changed(hidden_size=10**9)},
        "a tokenizer of nothing": {"model/tokenizer.json": ""},
        "a template that loops": {"model/chat_template.jinja": "{% for a in range(9) %}{{ b.c.d }}{% endfor %}"},
        "no room for a folder": {},
    }
    for verb in ("verify", "bench"):
        for name, files in broken.items():
            more: dict[str, Any] = {"env": {"TMPDIR": "/none"}} if not files else {}
            expect = (0, 2) if "template" in name or not files else (2,)
            if verb == "verify" or expect == (2,):
                yield trains(f"{name}", files, verb=verb, expect=expect, **more)


def of_bench() -> Iterator[Case]:
    for name, number in {**NUMBERS, "no number": "nan", "for ever": "inf", "beyond": "1e999", "a second": "1"}.items():
        yield trains(f"--seconds {name}", {}, "--seconds", number, verb="bench", says=("--seconds",))
    for name in ("nothing", "nested 100000 deep", "a lone surrogate"):
        yield data(f"{name}", "data.jsonl", CONTENTS[name], verb="bench")
    yield trains("data that is gone", {"data.jsonl": gone}, verb="bench", says=("data.train",))
    yield trains("no current folder", {}, verb="bench", begin=leave_the_folder)


TORCHES = {
    "that is not there": "raise ModuleNotFoundError('No module named torch')",
    "that crashes": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "that never ends": "import time; time.sleep(600)",
}


def of_env() -> Iterator[Case]:
    """Each imports torch in a process of its own."""
    for name, code in TORCHES.items():
        how = {"files": {"mine/torch.py": code}, "env": {"PYTHONPATH": "mine"}, "expect": (0, 3), "writes": MADE}
        yield command(f"env: a torch {name}", "env", "--json", **how)
    secrets = {"WANDB_API_KEY": "hunter2hunter2", "HTTP_PROXY": "http://joe:hunter2/hunter2@host:1"}
    for option in ((), ("--json",)):
        yield command(f"env: secrets {option}", "env", *option, env=secrets, secrets=("hunter2",), expect=(0, 3))
    for nodes, address in ((2, "nowhere.invalid"), (20_000, "127.0.0.1"), (2, "-x"), (2, "192.0.2.1")):
        machines = f"kind: manual, nodes: {nodes}, main_address: {address}, node_rank: 1, join_timeout: 2"
        given = (f"topology={{{machines}}}", "--cluster")
        yield trains(f"{nodes} machines at {address}", {}, *given, verb="env", expect=(2, 4))


def of_reports() -> Iterator[Case]:
    for one in (("report", "run"), ("sbatch", "sft", *RUN, *JOB)):
        files = {**WHOLE, "page": lambda at: at.write_text("mine")}
        yield command(f"{one[0]}: -o is the user's file", *one, "-o", "page", files=files, says=("page",))
    writes = ("run/report.html", "home/*", "run/data.json")
    yield command("report: a run 500 times", "report", *["run"] * 500, files=WHOLE, expect=(0,), writes=writes)
    yield command("report: one of two is none", "report", "run", "other", files=WHOLE, says=("other",))
    for verb in ("report", "doctor"):
        yield command(f"{verb}: nothing", verb)
        yield command(f"{verb}: no current folder", verb, "run", files=WHOLE, begin=leave_the_folder)


def of_folders() -> Iterator[Case]:
    """Run folders that cannot be."""
    for folder in ("c.yaml/x", "loop/x", "/proc/x", "data.jsonl/../x"):
        given, files = f"trainer.output_dir={folder}", {**LOOPS, "c.yaml": "", "data.jsonl": ""}
        yield trains(f"a run folder {folder}", LOOPS, given, says=("output_dir",))
        job = ("sbatch", "sft", *RUN[:-1], given, *JOB, "-o", "home/job.sh")
        yield command(f"sbatch: a run folder {folder}", *job, files=files)


CASES = [*of_folders(), *of_inspect(), *of_verify(), *of_bench(), *of_reports()]
SLOW = [*of_env()]
test_case = each_of(CASES, one_in=8)
test_slow_case = each_of(SLOW, one_in=len(SLOW))
