"""Streams that are closed or full, run folders whose files hold something else, and limits of the system."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import pytest

from tests.corpus.case import Case, carry_out, command, each_of, faults
from tests.corpus.tiny_run import put, trains

TRAINED = "run/final/model.safetensors"


def closed(*numbers: int) -> None:
    for number in numbers:
        os.close(number)
    sys.stdout, sys.stderr = (None if one in numbers else stream for one, stream in ((1, sys.stdout), (2, sys.stderr)))


def full(*numbers: int) -> None:
    for number in numbers:
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)


def unread(*numbers: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for number in numbers:
        os.dup2(writer, number)
    for name, number in (("stdout", 1), ("stderr", 2)):  # as Python does where it starts
        setattr(sys, name, os.fdopen(number, "w", closefd=False))


def slowly_read() -> None:
    """stdout is a small pipe that is not waited for (O_NONBLOCK), as ssh and node leave theirs; its reader is slow."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    if (command := os.fork()) == 0:
        os.dup2(writer, 1)
        os.close(reader)
        os.close(writer)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        return
    os.close(writer)
    while read := os.read(reader, 999):
        os.write(1, read)
        time.sleep(0.01)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(command, 0)[1]))


STREAMS = [
    trains(f"{how.__name__} {', '.join(map(str, numbers))}", begin=partial(how, *numbers), expect=(0,))
    for how, numbers in ((closed, (0, 1, 2)), (full, (1, 2)), (unread, (1, 2)))
]


@pytest.mark.parametrize("case", STREAMS, ids=[case.name for case in STREAMS])
def test_a_terminal_that_is_gone_costs_no_training(case: Case, tmp_path: Path) -> None:
    outcome = carry_out(case, tmp_path)
    assert not faults(case, outcome)
    assert TRAINED in outcome.after
    assert json.loads((tmp_path / "work/run/summary.json").read_text())["status"] == "done"


def impatient() -> None:
    """Shorter limits, and a stand-in of wandb in the current folder, which the test's own environment has not."""
    from packtrain.train.log import trackers

    trackers.BEGIN_S = trackers.EVENT_S = 1.0
    sys.path.insert(0, os.getcwd())


WANDB = """
import atexit, importlib.machinery, sys, time, types
__spec__ = importlib.machinery.ModuleSpec("wandb", None)
run = None
config = {}
def init(**given): $init
def log(*given, **named): $log
def finish(): $finish
def termwarn(*given, **named): pass
for name in ("sdk", "sdk.lib", "sdk.lib.config_util"):
    sys.modules["wandb." + name] = types.ModuleType("wandb." + name)
sys.modules["wandb.sdk.lib.config_util"].ConfigError = ValueError
"""


def tracked(name: str, init: str = "pass", log: str = "pass", finish: str = "pass", top: str = "", **more: Any) -> Case:
    code = top + Template(WANDB).substitute(init=init, log=log, finish=finish)
    how = {"begin": impatient, "writes": ("__pycache__*",), "expect": (0,), "says": ("wandb is left out", "goes on")}
    return trains(f"wandb, {name}", {"wandb.py": code}, "tracking.report_to=[wandb]", **how | more)


TRACKERS = [
    tracked("without a network", init="time.sleep(3600)"),
    tracked("without a key", init="raise ValueError('api_key not configured (no-tty)')", says=("no-tty",)),
    tracked("whose end never comes", init="atexit.register(time.sleep, 3600); time.sleep(3600)"),
    tracked("that cannot be imported", top="raise ImportError('no symbol')\n", expect=(2,), says=("no symbol", "report_to")),
]  # fmt: skip
MARK = {"run/.packtrain": "packtrain made this folder: a new run may move what earlier ones wrote here.\n"}
OWN = ("run*", "home/*")
OTHER = {"null": "null", "noise": b"\xff\xfe\0", "an object": '{"status": 5}'}
RUN_FILES = ("summary.json", "metrics.jsonl", "plan.json", "env.json", "facts.json", "config.yaml")
RUN_FILES += ("logs/channel.json", "logs/ranks.json")


def in_a_run(name: str, files: dict[str, Any], *arguments: str, **more: Any) -> Case:
    """A run in the folder of an earlier one that has these files."""
    return trains(f"a run folder, {name}", {**MARK, **files}, *arguments, writes=OWN, **{"expect": (0,), **more})


FOLDERS = [
    *(in_a_run(f"{file} is {name}", {f"run/{file}": content}, "--dry-run") for file in RUN_FILES for name, content in OTHER.items()),
    in_a_run("checkpoints that are a file", {"run/checkpoints": "mine"}, "trainer.checkpoint_every=1", expect=(0, 2)),
    trains("resume from an empty manifest", {"mine/manifest.json": "{}"}, "trainer.resume=mine", says=("trainer.resume",)),
    trains("resume from a FIFO", {"mine/manifest.json": os.mkfifo}, "trainer.resume=mine", says=("trainer.resume",)),
    trains("a model in the run's own final/", {"run/final": put("model"), **MARK}, "model.path=run/final", says=("model.path",)),
    trains("data in the run's own checkpoints/", {"run/checkpoints/d.jsonl": '{"text": "a b c"}\n', **MARK}, "data.train=run/checkpoints/d.jsonl", says=("data.train",)),
    trains("someone's own final/", {"run/final/thesis.tex": "mine"}, says=("run",)),
]  # fmt: skip


def limited(what: int, number: int) -> Callable[[], None]:
    return partial(resource.setrlimit, what, (number, number))


LIMITS = [
    trains("files of 2,000 bytes", begin=limited(resource.RLIMIT_FSIZE, 2_000), expect=(2,)),
    trains("files of 60,000 bytes", begin=limited(resource.RLIMIT_FSIZE, 60_000), expect=(2,), says=("too large",)),
    trains("30 open files", begin=limited(resource.RLIMIT_NOFILE, 30), expect=(0, 2)),
]
GREEDY = {"model/generation_config.json": '{"do_sample": false, "temperature": 0.9, "top_p": 0.6}'}
CASES = [
    *TRACKERS,
    *FOLDERS,
    *LIMITS,
    trains("greedy answers with a temperature", GREEDY, "trainer.checkpoint_every=1", expect=(0,), says=("do_sample",)),
    command("a slow reader of help", "sft", "-h", begin=slowly_read, expect=(0,), says=("`data.train`",)),
    trains("a slow reader of a run", begin=slowly_read, expect=(0,), says=("ready",)),
]
test_case = each_of(CASES, one_in=4)
