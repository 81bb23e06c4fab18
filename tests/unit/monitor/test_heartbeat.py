"""What a rank tells of itself, and its stacks: by its own thread, and by faulthandler where that cannot answer."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from packtrain.monitor import heartbeat as heartbeats
from packtrain.monitor.heartbeat import Heartbeat, life_of
from tests.waiting import until

LONG_S = 60


def test_a_rank_tells_where_it_is_and_for_what_it_waits() -> None:
    heartbeat = Heartbeat(3)
    heartbeat.enter("forward", step=7, micro=2)
    heartbeat.usual_s = 0.25
    with heartbeat.waiting("the counts"), heartbeat.waiting("a barrier"):
        said = heartbeat.message()
        assert said["waits"] == "a barrier"
    assert (said["rank"], said["phase"], said["step"], said["micro"]) == (3, "forward", 7, 2)
    assert (said["pid"], said["usual_s"]) == (os.getpid(), 0.25)
    heartbeat.enter("backward")
    assert heartbeat.message() == said | {"phase": "backward", "micro": 0, "waits": "", "changes": said["changes"] + 3}
    with pytest.raises(KeyError), heartbeat.waiting("the others"):
        raise KeyError
    assert heartbeat.message()["waits"] == ""


@pytest.mark.parametrize(("phase", "counts"), [("prepare", True), ("load", True), ("data", False), ("forward", False)])
def test_computing_is_progress_where_no_collective_waits(phase, counts, monkeypatch):
    heartbeat, now = Heartbeat(), time.monotonic()
    heartbeat.enter(phase)
    reported = [heartbeat.message()["changes"]]
    heartbeat._clocks = (now, 10.0)
    for seconds, used in ((100, 0.0), (200, 40.0), (300, 41.0)):
        monkeypatch.setattr(heartbeats.time, "monotonic", lambda seconds=seconds: now + seconds)
        monkeypatch.setattr(heartbeats.time, "process_time", lambda used=used: 10.0 + used)
        reported.append(heartbeat.message()["changes"])
    assert [after - before for before, after in itertools.pairwise(reported)] == [0, int(counts), 0]
    heartbeat.progress()
    assert heartbeat.message()["changes"] == reported[-1] + 1


RANK = """
import ctypes, sys
from packtrain.monitor.heartbeat import write_stacks_on_signal
write_stacks_on_signal()
print("listens", flush=True)
libc = ctypes.PyDLL(None)
def holds_the_lock():
    while True:  # a signal ends each
        libc.sleep(600)
def crashes():
    ctypes.string_at(0)
globals()[sys.argv[1]]()
"""


def start(folder: Path, what: str) -> subprocess.Popen[str]:
    given = {**os.environ, heartbeats.STACKS: str(folder)}
    process = subprocess.Popen([sys.executable, "-c", RANK, what], env=given, stdout=-1, text=True)
    assert process.stdout is not None and process.stdout.readline() == "listens\n"
    return process


def shown(text: str) -> str:
    """The stacks, as soon as they are complete."""
    return text if "in holds_the_lock" in text else ""


def test_a_rank_whose_lock_of_python_is_held_still_shows_its_stack(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeats, "DUMP_S", LONG_S)
    process = start(tmp_path, "holds_the_lock")
    try:
        text = until(lambda: shown(heartbeats.dump(tmp_path, process.pid)))
        assert [call.rpartition(" in ")[2] for call in heartbeats.main_stack(text)] == ["holds_the_lock", "<module>"]
        assert process.poll() is None and life_of(process.pid) == "running"
        monkeypatch.setattr(heartbeats, "DUMP_S", 0.1)
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: life_of(process.pid) == "stopped")
        assert heartbeats.dump(tmp_path, process.pid) == ""
    finally:
        process.kill()
        process.wait()
    assert life_of(process.pid) == "gone"
    assert heartbeats.crash_of(tmp_path, process.pid) == ""
    assert heartbeats.dump(tmp_path, os.getpid()) == ""  # nobody listens: the signal would end it


def test_a_crash_leaves_its_stack(tmp_path: Path) -> None:
    process = start(tmp_path, "crashes")
    process.wait(LONG_S)
    assert "in crashes" in heartbeats.crash_of(tmp_path, process.pid)


def test_own_stacks_come_with_those_of_loader_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(heartbeats.STACKS, str(tmp_path))
    monkeypatch.setattr(heartbeats, "DUMP_S", LONG_S)
    loader = start(tmp_path, "holds_the_lock")
    try:
        text = until(lambda: shown(heartbeats.own_stacks()))
    finally:
        loader.kill()
        loader.wait()
    assert test_own_stacks_come_with_those_of_loader_processes.__name__ in "".join(heartbeats.main_stack(text))
