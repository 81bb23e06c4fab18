"""Real processes that stand still by their heartbeats, at work and not: with the usual time limit of collectives, only the
shortest limit of the watchdog is made shorter. All at once, each with a watchdog of its own: most of their time is waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from packtrain.launch import effort
from packtrain.monitor.old import time_limits as patience
from packtrain.monitor.old.diagnosis import Diagnosis
from packtrain.monitor.old.heartbeat import HEARTBEAT_DIR
from packtrain.monitor.old.watchdog import Watchdog

LEAST_S = 3
RANK = """
import os, subprocess, sys, time
from packtrain.monitor.old.heartbeat import own_pulse

phase, what = sys.argv[1:]

def opens():
    open("pipe").read()
def writes():
    with open("pipe", "w") as file: file.write("weights")
def writes_slowly():
    with open("weights", "wb") as file:
        while True:
            file.write(bytes(10**5))
            file.flush()
            time.sleep(0.2)
def computes():
    while True: sum(range(1000))
def has_children_that_compute():  # several: on a busy machine one gets next to nothing of a core
    code = "import os\\nparent = os.getppid()\\nwhile os.getppid() == parent: sum(range(10**6))"
    children = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    children[0].wait()
def goes_from_file_to_file():
    while True:
        time.sleep(0.1)

own_pulse().enter(phase, step=4)
globals()[what]()
"""
STALLED = {
    ("checkpoint", "writes"): ("storage", "slow or stalled storage"),
    ("prepare", "opens"): ("data", "reading the data does not come back"),
    ("load", "opens"): ("stuck", "neither computes nor waits"),
}
AT_WORK = [
    ("checkpoint", "writes_slowly"),
    ("checkpoint", "computes"),
    ("forward", "has_children_that_compute"),
    ("prepare", "goes_from_file_to_file"),
]


@dataclass
class Watched:
    process: subprocess.Popen[bytes]
    watchdog: Watchdog
    found: Diagnosis | None = None

    @property
    def still_s(self) -> float:
        return min((one.still_s for one in self.watchdog.states({}) if one.beat), default=0.0)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Watched]]:
    """All of them, when they are named or have stood still twice as long as one may that does nothing."""
    started: dict[tuple[str, str], Watched] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patience, "LEAST_S", LEAST_S)
        patch.setattr(effort, "stored", lambda: 0)  # what others write meanwhile is nothing to these
        for phase, what in (*STALLED, *AT_WORK):
            folder = tmp_path_factory.mktemp(what)
            (folder / "beats").mkdir()
            os.mkfifo(folder / "pipe")
            given = {**os.environ, HEARTBEAT_DIR: str(folder / "beats"), "RANK": "0"}
            process = subprocess.Popen([sys.executable, "-c", RANK, phase, what], cwd=folder, env=given)
            dog = Watchdog(folder / "beats", folder, ranks=range(1), host="n1", step_timeout=600)
            started[phase, what] = Watched(process, dog)
        try:
            _watch(started, time.monotonic() + 300)
            yield started
        finally:
            for one in started.values():
                one.process.kill()
                one.process.wait()


def _watch(started: dict[tuple[str, str], Watched], end: float) -> None:
    def over() -> bool:
        named = all(started[which].found for which in STALLED)
        return named and all(started[which].still_s >= 2 * LEAST_S for which in AT_WORK)

    while not over() and time.monotonic() < end:
        for one in started.values():
            one.found = one.found or one.watchdog.look({})
        time.sleep(0.05)


@pytest.mark.parametrize("which", STALLED, ids="-".join)
def test_a_rank_that_does_nothing_is_named_long_before_the_time_limit_of_collectives(
    which: tuple[str, str], watched: dict[tuple[str, str], Watched]
) -> None:
    found, (cause, words) = watched[which].found, STALLED[which]
    assert found is not None and found.cause == cause
    said = "\n".join(found.lines)
    assert words in said and f"in {which[1]}" in said and "rank 0 on n1" in said
    assert LEAST_S <= float(said.partition("for ")[2].partition(" s")[0]) < 60


@pytest.mark.parametrize("which", AT_WORK, ids="-".join)
def test_a_rank_at_work_goes_on(which: tuple[str, str], watched: dict[tuple[str, str], Watched]) -> None:
    assert watched[which].found is None and watched[which].still_s >= 2 * LEAST_S
    assert watched[which].process.poll() is None
