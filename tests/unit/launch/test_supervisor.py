"""The processes of one machine under the supervisor: ended together, named, and none left behind."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import psutil
import pytest

from packtrain.launch import supervisor
from packtrain.launch.exit_status import ONE_RAISED, Verdict
from packtrain.launch.machines import Machines, Reporter
from packtrain.launch.supervisor import Supervisor
from packtrain.monitor.heartbeat import TimeLimits
from packtrain.monitor.watchdog import Watchdog

LINGERS = """
import pathlib, os, sys, time
exits = pathlib.Path(sys.argv[1])
(exits / "0.pid").write_text(str(os.getpid()))
(exits / "0").write_text("0")
time.sleep(300)
"""
RAISES = """
import pathlib, sys
exits = pathlib.Path(sys.argv[1])
(exits / "0.lost").write_text("rank 0 lost the others")
(exits / "0").write_text("4")
(exits / "1").write_text("1")
exits.with_name("rank-00001.log").write_text("torch.AcceleratorError: CUDA error: unspecified launch failure")
sys.exit(1)
"""
DIES = """
import json, pathlib, subprocess, sys, time
exits = pathlib.Path(sys.argv[1])
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
(exits / "1.pid").write_text(str(worker.pid))
time.sleep(0.5)
worker.kill()
(exits / "torchrun.json").write_text(json.dumps({1: worker.wait()}))
time.sleep(300)
"""
HALTS = """
import os, pathlib, signal, subprocess, sys
exits, code = pathlib.Path(sys.argv[1]), sys.argv[2]
worker = subprocess.Popen(["sleep", "300"])
(exits / "0.pid").write_text(str(worker.pid))
if code: (exits / "0").write_text(code)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"STOPPED_S": 0.3, "GRACE_S": 0.2, "TERM_S": 0.2, "LAST_S": 0.2}.items():
        monkeypatch.setattr(supervisor, name, seconds)


def run(folder: Path, code: str, *arguments: str, ranks: int = 1) -> Verdict:
    """What becomes of `ranks` on n1, whose torchrun is the Python program `code`."""
    (folder / "exits").mkdir()
    watchdog = Watchdog([("n1", range(ranks))], TimeLimits(), folder)
    with Reporter(0, "n1", 30, Machines({0: "n1"}, ranks, 30, watchdog)) as reporter:
        one = Supervisor(folder / "exits", folder / "launcher.log", range(ranks), "n1", reporter)
        return one.run([sys.executable, "-c", code, str(folder / "exits"), *arguments], {**os.environ})


def test_a_worker_at_its_end_that_does_not_end_is_ended_and_the_run_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "LINGER_S", 0.5)
    assert run(tmp_path, LINGERS).code == 0
    assert "n1 are at their end, and do not end by themselves: they are ended now" in capsys.readouterr().err


@pytest.mark.parametrize("code", ["", "0"], ids=["going-on", "at-its-end"])
def test_a_torchrun_that_is_stopped_is_named_and_ended_with_its_workers(
    code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = run(tmp_path, HALTS, code)
    said = capsys.readouterr().err if code else "\n".join(verdict.lines)
    assert verdict.code == (0 if code else 4)
    if code:
        assert re.match(
            r"the processes on n1 have ended, but torchrun there \(process \d+\) is stopped: they are", said
        )
    else:
        assert re.match(r"torchrun on n1 \(process \d+\), which starts and ends the ranks there, is stopped", said)
    limit = time.monotonic() + 60
    while psutil.pid_exists(int((tmp_path / "exits/0.pid").read_text())) and time.monotonic() < limit:
        time.sleep(0.05)
    assert time.monotonic() < limit


def test_a_rank_that_raises_is_shown_with_its_last_lines_and_not_the_one_that_lost_it(tmp_path: Path) -> None:
    verdict = run(tmp_path, RAISES, ranks=2)
    assert verdict.code == 4
    assert verdict.lines[0].startswith("n1, rank 1 failed (exit code 1): see ")
    assert list(verdict.lines[1:]) == [
        "n1, rank 1: torch.AcceleratorError: CUDA error: unspecified launch failure",
        ONE_RAISED,
    ]


def test_a_rank_that_is_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    verdict = run(tmp_path, DIES, ranks=2)
    assert verdict.code == 4
    assert re.match(r"rank 1 on n1 .*ended without a word \(SIGKILL\), in starting", verdict.lines[0])
