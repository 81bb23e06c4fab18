"""Several launches of small_launch.py on two hosts, out of one process on each, which imports once what all workers need:
`python -m tests.cluster.forked_launches FILE`, a JSON list of Launch.

Importing torch, transformers and TRL takes longer than a tiny run does. Launcher, torchrun's stand-in and worker are processes
of their own, as they are in a run, but forks of this one. Prints how each has ended as JSON: [exit code, time].
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from packtrain.errors import exit_code_of
from packtrain.system import ENDING
from tests.cluster.small_launch import PRELOAD, ROOT, instead_of_torchrun, launch, start, start_arguments
from tests.cluster.two_hosts import ADDRESSES, TwoHosts, both

_FORK = multiprocessing.get_context("fork")
_MAX_S = 400
_LOOK_S = 0.05
_MAX_FILES = 1024


@dataclass(frozen=True)
class Launch:
    """One in `folder`, with KEY=VALUE arguments and environment variables of its own; what it says goes to `output`."""

    folder: str
    output: str
    overrides: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a launch ended, when (time.time()), and what it said."""

    code: int
    at: float
    text: str


def to_their_end(hosts: TwoHosts, launches: list[list[Launch]], folder: Path, *preload: str) -> list[list[Ended]]:
    """How the launches of both hosts ended, which had imported `preload` before; `folder` is for their lists."""
    env = {"PYTHONPATH": str(ROOT), PRELOAD: " ".join(preload), "TORCH_CPP_LOG_LEVEL": "ERROR"}  # as launchers set it
    running = []
    for host, ours in enumerate(launches, start=1):
        file = folder / f"{host}.json"
        file.write_text(json.dumps([asdict(one) for one in ours]))
        running.append(hosts.start(host, "-m", "tests.cluster.forked_launches", str(file), cwd=folder, env=env))
    codes = both(running, _MAX_S)
    assert codes == [0, 0], running[0].text + running[1].text
    ends = [json.loads(one.output.read_text().splitlines()[-1]) for one in running]  # imports may print, too
    return [
        [Ended(*end, Path(one.output).read_text()) for end, one in zip(found, ours, strict=True)]
        for found, ours in zip(ends, launches, strict=True)
    ]


class Fork:
    """What launchers need of subprocess.Popen, for torchrun's command."""

    def __init__(self, argv: list[str], *, env: Mapping[str, str], start_new_session: bool) -> None:
        self._process = _begun(lambda: start(*start_arguments(argv)), env)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float) -> None:
        limit = time.monotonic() + timeout
        while self.returncode is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired("start", timeout)
            time.sleep(_LOOK_S)


def _begun(work: Callable[[], int], env: Mapping[str, str], place: Launch | None = None) -> multiprocessing.Process:
    """A process that does `work` in a session of its own, and has as little of this one as if it were a new program."""

    def run() -> None:
        os.setsid()
        os.closerange(3, _MAX_FILES)
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        if place is not None:
            os.chdir(place.folder)
            output = os.open(place.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
        sys.exit(work())

    process = _FORK.Process(target=run)
    process.start()
    return process


def _wait_for_the_other(file: Path) -> None:
    """Until both have imported everything: what one may wait for the other is the launchers' business only after that."""
    file.with_suffix(".ready").touch()
    while len(list(file.parent.glob("*.ready"))) < len(ADDRESSES):
        time.sleep(_LOOK_S)


def main(file: str) -> None:
    """Carries out the launches listed in `file`."""
    for module in os.environ[PRELOAD].split():
        importlib.import_module(module)
    gc.freeze()  # what is imported by now is never garbage
    _wait_for_the_other(Path(file))
    instead_of_torchrun(Fork)
    launches = [Launch(**one) for one in json.loads(Path(file).read_text())]
    running = [
        _begun(lambda one=one: exit_code_of(lambda: launch(list(one.overrides))), {**os.environ, **one.env}, one)
        for one in launches
    ]
    ended: dict[int, tuple[int, float]] = {}
    while len(ended) < len(running):
        time.sleep(_LOOK_S)
        for number, process in enumerate(running):
            if process.exitcode is not None and number not in ended:
                ended[number] = process.exitcode, time.time()
    print(json.dumps([ended[number] for number in range(len(running))]))


if __name__ == "__main__":
    main(sys.argv[1])
