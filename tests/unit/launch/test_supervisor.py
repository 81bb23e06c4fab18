"""The processes of one machine under the supervisor: ended together, named, and none left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from packtrain.launch import supervisor
from packtrain.launch.coordinator import Coordinator, Reporter, Verdict, tail_of
from packtrain.launch.supervisor import Supervisor
from packtrain.monitor.heartbeat import TimeLimits, read_exits
from packtrain.monitor.watchdog import Watchdog
from tests.waiting import until

LEAVE = """
import os, pathlib, signal, subprocess, sys, time
from packtrain.monitor.heartbeat import write_exit
exits = pathlib.Path(sys.argv[1])
"""
LINGERS = f"""{LEAVE}
write_exit(exits, 0, pid=os.getpid(), code=0)
time.sleep(300)
"""
RAISES = f"""{LEAVE}
write_exit(exits, 0, pid=os.getpid(), lost="rank 0 lost the others", code=4)
write_exit(exits, 1, pid=os.getpid(), code=1)
exits.with_name("rank-00001.log").write_text("torch.AcceleratorError: CUDA error: unspecified launch failure")
sys.exit(1)
"""
DIES = f"""{LEAVE}
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
write_exit(exits, 1, pid=worker.pid)
time.sleep(0.5)
worker.kill()
write_exit(exits, 1, ended=worker.wait())
time.sleep(300)
"""
ONE_IS_LATE = f"""{LEAVE}
write_exit(exits, 1, ended=-15)
time.sleep(0.3)
write_exit(exits, 0, pid=os.getpid(), code=2)
sys.exit(1)
"""
HALTS = f"""{LEAVE}
worker = subprocess.Popen(["sleep", "300"])
write_exit(exits, 0, pid=worker.pid, code=0)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"EXIT_LIMIT_S": 0.5, "SELF_EXIT_S": 0.2, "TERM_S": 0.2, "TORCHRUN_EXIT_S": 0.2}.items():
        monkeypatch.setattr(supervisor, name, seconds)


def run(folder: Path, code: str, ranks: int = 1) -> Verdict:
    """What becomes of `ranks` on n1, whose torchrun is the Python program `code`."""
    (folder / "exits").mkdir()
    watchdog = Watchdog([("n1", range(ranks))], TimeLimits(), folder)
    with Reporter(0, "n1", 30, Coordinator({0: "n1"}, ranks, 30, watchdog)) as reporter:
        one = Supervisor(folder / "exits", folder / "launcher.log", range(ranks), "n1", reporter)
        return one.run([sys.executable, "-c", code, str(folder / "exits")], {**os.environ})


CUDA_ERROR = "n1, rank 1: torch.AcceleratorError: CUDA error: unspecified launch failure"
ENDS = {  # code and first and last line of the verdict
    "killed": (DIES, 4, r"rank 1 on n1 .*ended without an error message \(SIGKILL\), in starting", ""),
    "raises": (RAISES, 4, r"n1, rank 1 failed \(exit code 1\): see ", CUDA_ERROR),
    "ended by torchrun before it has started": (ONE_IS_LATE, 2, "", ""),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_rank_that_failed_is_named_with_its_signal_or_last_lines_and_no_other_hides_it(end: str, tmp_path: Path):
    program, code, first, last = ENDS[end]
    verdict = run(tmp_path, program, ranks=2)
    assert verdict.code == code and re.match(first, "\n".join(verdict.lines))
    assert not last or list(verdict.lines[1:]) == [last]


@pytest.mark.parametrize("code", [LINGERS, HALTS], ids=["worker", "torchrun"])
def test_what_does_not_end_when_all_are_at_their_end_is_ended_and_the_run_is_done(code, tmp_path, capsys):
    assert run(tmp_path, code).code == 0
    assert "n1 have finished but did not exit: they are killed now" in capsys.readouterr().err
    until(lambda: not psutil.pid_exists(read_exits(tmp_path / "exits")[0]["pid"]), 60)


def test_the_last_words_of_a_process_are_those_after_its_last_step() -> None:
    steps = [f"2026-01-01 00:00:00 step {step}/9  loss 1.0" for step in (1, 2)]
    assert tail_of(["model      x", *steps]) == []
    assert tail_of(["model      x", *steps, "munmap failed"]) == ["munmap failed"]
    assert tail_of(["a", "Traceback …", "error:", "  bad data"]) == ["error:", "  bad data"]
    assert tail_of([str(one) for one in range(30)]) == [str(one) for one in range(10, 30)]


@pytest.fixture
def sleepers() -> Any:
    """torchrun's stand-in and two workers, each with a session of its own."""
    started = [subprocess.Popen(["sleep", "100"], start_new_session=True) for _ in range(3)]
    yield started
    for one in started:
        one.kill()
        one.wait()


def test_a_second_signal_reaches_workers_that_the_launcher_has_not_looked_at(tmp_path: Path, sleepers: Any) -> None:
    """Also those after one that is gone."""
    torchrun, first, second = sleepers
    report: Any = SimpleNamespace(report=SimpleNamespace(signal=None))
    supervisor = Supervisor(tmp_path, tmp_path / "launcher.log", range(2), "host", report)
    supervisor._torchrun, supervisor._passed_on = torchrun, 1
    first.kill()
    first.wait()
    for rank, process in enumerate((first, second)):
        (tmp_path / f"{rank}.json").write_text(json.dumps({"pid": process.pid}))
    supervisor._pass_on(signal.SIGINT)
    assert second.wait(10) == -signal.SIGINT
    assert torchrun.poll() is None
