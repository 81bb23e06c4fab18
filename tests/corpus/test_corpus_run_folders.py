"""Run folders whose files hold anything: doctor and report say what they can, and what they cannot read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from tests.corpus.case import Case, Make, command, each_of

WHOLE: Mapping[str, str | bytes | Make] = {
    "run/.packtrain": "",
    "run/config.yaml": "model: {path: owner/model}\ndata: {train: owner/data}\nbatch: {examples_per_step: 32}\n",
    "run/plan.json": '{"num_processes": 1, "batch": {"summary": "a step"}}',
    "run/env.json": '{"python": "3.11", "versions": {"torch": "2.13"}}',
    "run/summary.json": '{"status": "done", "steps": 3, "train_loss": 2.5}',
    "run/metrics.jsonl": '{"step": 1, "loss": 2.0, "lr": 1e-5}\n{"step": 2, "loss": 1.5, "lr": 1e-5}\n',
    "run/data.json": '{"documents": 10}',
    "run/logs/ranks.json": '{"ranks": []}',
    "run/logs/rank-00000.log": "a line\n",
}
FILES = (*(one for one in WHOLE if one != "run/.packtrain"), "run/logs/channel.json", "run/logs/diagnosis.txt")
JSON = {
    "null": "null",
    "deep": "[" * 10**5,
    "values of other types": '{"status": [1], "steps": {"a": 1}, "ranks": {"a": 1}, "host": 3, "address": null, "port": "x", '
    '"secret": 1, "pid": "y", "num_processes": -1, "batch": [], "versions": 3, "step": "x", "loss": "high", "lr": []}\n',
    "huge numbers": f'{{"status": "done", "steps": 1{"0" * 4000}, "step": 1e999, "loss": 1e999, '
    f'"port": 99999999, "pid": 1{"0" * 30}}}\n',
    "ranks of wrong values": '{"ranks": [1, {"rank": "x"}, {"rank": -1, "host": [], "process": {"code": "z"}}, null]}',
    "a channel of nobody": '{"host": "nowhere.invalid", "address": "192.0.2.1", "port": 1, "secret": "s", "pid": 1, "packtrain": "0"}',
    "bytes": bytes(range(256)),
    "escapes": '{"status": "\\u001b[31m<script>alert(1)</script>", "step": 1, "loss": 1}\n',
}
KINDS: dict[str, Make] = {
    "a FIFO": lambda at: os.mkfifo(at),
    "a folder": lambda at: at.mkdir(),
    "/dev/zero": lambda at: at.symlink_to("/dev/zero"),
}
WRITES = ("run/report.html", "run/data.json", "home/*", "report.html")


def cases() -> Iterator[Case]:
    for number, file in enumerate(FILES):
        for at, (what, content) in enumerate({**JSON, **KINDS}.items()):
            verb = ("doctor", "report")[(number + at) % 2]
            how = ("--json",) if verb == "doctor" and at % 4 < 2 else ()
            name, files = f"{verb}: {file.removeprefix('run/')} is {what}", {**WHOLE, file: content}
            yield command(name, verb, "run", *how, files=files, expect=(0, 2, 4), writes=WRITES)


RUNS: dict[str, Mapping[str, str | bytes | Make]] = {
    "that is a file": {"run": "x"},
    "that is not there": {},
    "of someone else": {"run/notes.txt": "mine"},
    "with a mark alone": {"run/.packtrain": ""},
    "whose page is a folder": {**WHOLE, "run/report.html/x": ""},
    "whose checkpoints are a file": {**WHOLE, "run/checkpoints": "x"},
    "whose checkpoints have odd names": {**WHOLE, "run/checkpoints/step-x": "", "run/checkpoints/step-²/a": ""},
}
CASES = [
    *cases(),
    *(
        command(f"{' '.join(verb)}: a run {what}", *verb, "run", files=files, expect=(0, 2, 4), writes=WRITES)
        for what, files in RUNS.items()
        for verb in (("doctor",), ("doctor", "--stacks", "--json"), ("report",), ("report", "--watch"))
    ),
    *(
        command(f"{verb} of {what!r:.20}", verb, what)
        for what in ("~nobody-here/x", "x" * 5000, "a" * 300, "/dev/null", "/dev/zero", "", "\udcff")
        for verb in ("doctor", "report")
    ),
]
test_case = each_of(CASES, one_in=8)
