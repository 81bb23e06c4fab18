"""Commands on configs, arguments and variables that hypothesis makes up: none may end in a traceback, hang, lose a file or tell a secret.

    python benchmarks/hostile.py [--cases 2000] [--seed 0]
    python benchmarks/hostile.py --times 20

Each case is held to what tests/corpus/case.py asks of every case. Files, arguments and variables are drawn from the keys of the
schema with values of every kind, from text made of YAML's own pieces, and from Hydra's grammar; a planted secret is in most. The
same seed makes the same cases. Ends with the counts, by exit code, and with 1 if any case broke.

With --times it measures how long the user waits for an error: so many cases of the corpus at the config, at data and at the model,
each as `packtrain sft …` in a process made from nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/train")]
from packtrain.config.keys import choices, keys  # noqa: E402
from packtrain.config.schema import groups  # noqa: E402
from packtrain.config.yaml_files import options  # noqa: E402
from tests.corpus import test_corpus_configs, test_corpus_data, test_corpus_stages  # noqa: E402
from tests.corpus.case import Case, carry_out, environment_of, explained, faults, placed  # noqa: E402

WARM = ("packtrain.cli", "packtrain.plan.screen", "packtrain.launch.jobs", "packtrain.config.compose")
EVERY = 100
SECRET = "hunter2hunter2"
PLANTED = (f"https://joe:{SECRET}@host/x.jsonl", f"https://host/x?token={SECRET}", f"password={SECRET}")
ODD = (
    *(
        "null",
        "true",
        "no",
        "~",
        "''",
        "0",
        "-1",
        "1e999",
        ".nan",
        "-.inf",
        "010",
        "1:30",
        "1_0",
        "0x1F",
        "1e-5",
        "'2²'",
        "9" * 5000,
    ),
    *(
        "[]",
        "{}",
        "[[]]",
        "{a: {b: c}}",
        "[1, two, {}]",
        "a/b",
        "/dev/zero",
        "~nobody-here",
        "..",
        "x" * 300,
        "'\\x1b[31m'",
        '"\\0"',
    ),
    *(
        "${model.path}",
        "${nowhere}",
        "${oc.env:HOME}",
        "${oc.env:NOT_SET}",
        "${",
        "???",
        "!!python/none",
        "&a [*a]",
        "*b",
        "2001-01-01",
    ),
    *PLANTED[:2],
)
PIECES = (
    *ODD,
    ":",
    "-",
    "\n",
    "\n  ",
    "#",
    "defaults:",
    "[",
    "]",
    "{",
    "}",
    ",",
    "- ",
    "? ",
    "|",
    ">",
    "%",
    "@",
    "\t",
    "---\n",
    "é",
    "\udcff",
)
VARIABLES = (
    *(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_JOB_ID",
        "SLURM_JOB_NODELIST",
        "SLURM_NODEID",
    ),
    *(
        "SLURM_STEP_ID",
        "SLURM_STEP_TASKS_PER_NODE",
        "PMI_SIZE",
        "PET_NNODES",
        "CUDA_VISIBLE_DEVICES",
        "COLUMNS",
        "TERM",
        "LANG",
    ),
    *("HOME", "TMPDIR", "PACKTRAIN_CACHE", "HF_HOME", "OMP_NUM_THREADS"),
)
VALUES = (
    "",
    "0",
    "1",
    "2",
    "-1",
    "²",
    "9" * 5000,
    ",",
    "n[1-3]",
    "n[5-1]",
    "n[1-99999999]",
    "x",
    "/none",
    "4(x2)",
    "4(x999999999)",
)
GOOD = {
    "model.path": "owner/model",
    "data.train": "owner/data",
    "batch.examples_per_step": "32",
    "trainer.output_dir": "run",
}

paths = st.sampled_from(
    [*keys(), *keys(), "optim.lr", "nowhere", "model.config.hidden_size", "data.columns.x", "topology.environment.A"]
)


@st.composite
def values(draw: st.DrawFn, path: str) -> str:
    """A value for a key, right or wrong, as YAML."""
    known = choices(keys()[path].type) if path in keys() else ()
    return draw(
        st.one_of(st.sampled_from(ODD), st.sampled_from(known or ODD), st.integers().map(str), st.floats().map(str))
    )


@st.composite
def settings_of(draw: st.DrawFn) -> dict[str, str]:
    """Some keys with values, over those that a plan needs."""
    changed = {path: draw(values(path)) for path in draw(st.lists(paths, max_size=5))}
    return {**(GOOD if draw(st.booleans()) else {}), **changed}


@st.composite
def arguments_of(draw: st.DrawFn) -> str:
    """One argument in Hydra's grammar, or almost."""
    path = draw(paths)
    value = draw(st.one_of(values(path), st.lists(st.sampled_from(PIECES), max_size=4).map("".join)))
    group = draw(st.sampled_from(list(groups())))
    choice = draw(st.sampled_from([*options(group), "none", "../x", ""]))
    sign = draw(st.sampled_from(["", "", "", "+", "++", "~", "-", "--"]))
    return draw(
        st.sampled_from([f"{sign}{path}={value}", f"{sign}{path}={value}", f"{group}={choice}", f"{sign}{path}", value])
    )


def as_yaml(changed: dict[str, str]) -> str:
    """The keys in a YAML, one a line."""
    by_group: dict[str, list[str]] = {}
    for path, value in changed.items():
        group, _, name = path.partition(".")
        by_group.setdefault(group, []).append(f"  {name}: {value}\n")
    return "".join(f"{group}:\n{''.join(lines)}" for group, lines in by_group.items())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A command with a file, arguments and variables."""
    text = draw(
        st.one_of(
            settings_of().map(as_yaml),
            settings_of().map(as_yaml),
            st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
        )
    )
    given_ = [one.replace("\0", "") for one in draw(st.lists(arguments_of(), max_size=3))]
    rest = [f"{name}={value}" for name, value in GOOD.items()] if draw(st.booleans()) else []
    verb = draw(
        st.sampled_from(
            [
                ("plan",),
                ("plan", "--json"),
                ("plan", "--full"),
                ("sbatch", "sft"),
                ("sbatch", "sft", "-m"),
                ("sft", "--dry-run"),
            ]
        )
    )
    variables = draw(st.dictionaries(st.sampled_from(VARIABLES), st.sampled_from(VALUES), max_size=2))
    content = text.encode("utf-8", "surrogateescape")
    return Case(
        name="made up",
        arguments=(*verb, "c.yaml", *rest, *given_),
        files={"c.yaml": content},
        env=variables,
        expect=(0, 2, 3),
        secrets=(SECRET,),
        writes=("run", "run/*", "*"),
    )


def run(number: int, start: int, *, show: int = 5) -> tuple[Counter[str], list[str]]:
    """Carries out as many cases; returns their ends by exit code, and what broke, at most `show` of it in full."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in WARM:
        importlib.import_module(module)
    gc.freeze()
    context, ends, broken = multiprocessing.get_context("fork"), Counter[str](), list[str]()

    def begun(work: Any, *arguments: Any) -> BaseProcess:
        process = context.Process(target=work, args=arguments)
        process.start()
        return process

    @seed(start)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def one(case: Case) -> None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            outcome = carry_out(case, Path(folder), begun)
            ends[str(outcome.code)] += 1
            if ends.total() % EVERY == 0:
                print(f"{ends.total()} cases, {len(broken)} broke", file=sys.stderr, flush=True)
            if found := faults(case, outcome):
                broken.append(explained(case, outcome, found, Path(folder)) if len(broken) < show else "; ".join(found))

    one()
    return ends, broken


def times(number: int) -> int:
    """Prints a table of how long errors take, in seconds of the clock and of computing; returns 1 if one did not end with 2."""
    stages = {"config": test_corpus_configs.CASES, "data": test_corpus_data.CASES, "model": test_corpus_stages.CASES}
    print(
        "| error at | cases | median s | worst s | computing: median s | worst s | the slowest |\n|---|---|---|---|---|---|---|"
    )
    odd = 0
    for stage, cases in stages.items():
        refused = [one for one in cases if one.expect == (2,)]
        found = [(*_waited(one), one.name) for one in refused[:: max(len(refused) // number, 1)][:number]]
        odd += sum(code != 2 for _, _, code, _ in found)
        wall, computing = ([one[at] for one in found] for at in (0, 1))
        figures = (f"{one:.2f}" for many in (wall, computing) for one in (statistics.median(many), max(many)))
        print(f"| {stage} | {len(found)} | {' | '.join(figures)} | {max(found)[3]} |", flush=True)
    return int(bool(odd))


def _waited(case: Case) -> tuple[float, float, int]:
    """Seconds of the clock and of computing that a case takes as a process of its own, and its exit code."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = placed(case, Path(folder))
        arguments = ("sft", *case.arguments[1:])
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        command = [sys.executable, "-m", "packtrain", *arguments]
        environment = {**environment_of(case, work), "PYTHONPATH": str(ROOT)}
        code = subprocess.run(command, cwd=work, env=environment, capture_output=True).returncode
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, code


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, default=0, metavar="N", help="measure N errors at each stage instead")
    asked = parser.parse_args()
    if asked.times:
        return times(asked.times)
    began = time.monotonic()
    ends, broken = run(asked.cases, asked.seed)
    print(*broken, sep="\n\n")
    codes = ", ".join(f"{count} × exit code {code}" for code, count in ends.most_common())
    print(f"{ends.total()} cases in {time.monotonic() - began:.0f} s: {codes}; {len(broken)} broke")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
