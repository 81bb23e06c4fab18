"""Workers that are through and whose processes do not end: no wait without a limit. And what is told of one that raises."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from packtrain.launch import children
from packtrain.launch.line import Order
from packtrain.launch.processes import sight
from packtrain.launch.verdict import ONE_RAISED, Outcome, Verdict, judge
from packtrain.monitor.old.heartbeat import HEARTBEAT_DIR
from packtrain.monitor.old.watchdog import Watchdog

STUB = """
import pathlib, os, sys, time
exits = pathlib.Path(sys.argv[1])
(exits / "0.pid").write_text(str(os.getpid()))
(exits / "0").write_text("0")
time.sleep(300)
"""
SENDS = """
import pathlib, os, sys, time
from packtrain.monitor.old.heartbeat import own_pulse
own_pulse().enter("done")
exits = pathlib.Path(sys.argv[1])
(exits / "0.pid").write_text(str(os.getpid()))
(exits / "0").write_text("0")
while not exits.with_name("seen").exists(): sum(range(1000))
time.sleep(60)
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
import os, pathlib, subprocess, sys, time
gone = subprocess.Popen(["true"])
gone.wait()
file = pathlib.Path(sys.argv[1], "1.pid")
file.with_suffix(".new").write_text(str(gone.pid))
file.with_suffix(".new").rename(file)
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
XID = "NVRM: Xid (PCI:0000:c3:00): 79, pid=4711, GPU has fallen off the bus."


def test_a_worker_that_is_through_and_does_not_end_is_ended_and_the_run_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(children, "LINGER_S", 0.5)
    monkeypatch.setattr(children, "GRACE_S", 0)
    (tmp_path / "exits").mkdir()
    watchdog = Watchdog(tmp_path, tmp_path, ranks=range(1), host="n1", step_timeout=60)
    argv, begun = [sys.executable, "-c", STUB, str(tmp_path / "exits")], time.monotonic()
    verdict = children.run_children(
        argv, {}, tmp_path / "exits", tmp_path / "launcher.log", range(1), "n1", None, watchdog
    )
    assert verdict.code == 0 and time.monotonic() - begun < 100
    assert "n1 are through, and do not end" in capsys.readouterr().err


@pytest.mark.parametrize("code", ["", "0"], ids=["going-on", "through"])
def test_a_torchrun_that_is_stopped_is_named_and_ended_with_its_workers(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in {"STOPPED_S": 0.3, "GRACE_S": 0, "TERM_S": 0}.items():
        monkeypatch.setattr(children, name, seconds)
    exits = tmp_path / "exits"
    exits.mkdir()
    watchdog = Watchdog(tmp_path, tmp_path, ranks=range(1), host="n1", step_timeout=60)
    argv = [sys.executable, "-c", HALTS, str(exits), code]
    verdict = children.run_children(
        argv, {**os.environ}, exits, tmp_path / "launcher.log", range(1), "n1", None, watchdog
    )
    said = capsys.readouterr().err if code else "\n".join(verdict.lines)
    assert verdict.code == (0 if code else 4)
    if code:
        assert re.match(
            r"the processes on n1 are through, but torchrun there \(process \d+\) is stopped: they are ended", said
        )
    else:
        assert re.match(r"torchrun on n1 \(process \d+\), which starts and ends the ranks there, is stopped\n", said)
        assert "likely cause: the process is stopped" in said
    limit = time.monotonic() + 60
    while sight(int((exits / "0.pid").read_text())).state not in ("", "Z") and time.monotonic() < limit:
        time.sleep(0.05)
    assert time.monotonic() < limit


def test_a_worker_that_is_through_and_still_at_work_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("packtrain.monitor.old.watchdog.LOOK_S", 0.1)
    monkeypatch.setattr(children, "LINGER_S", 2)
    monkeypatch.setattr(children, "QUIET_S", 1)
    exits, seen = tmp_path / "exits", tmp_path / "seen"
    exits.mkdir()
    watchdog = Watchdog(tmp_path, tmp_path, ranks=range(1), host="n1", step_timeout=60)
    at_work = watchdog.at_work

    def asked(lately_s: float) -> list[int]:
        if found := at_work(lately_s):
            seen.touch()
        return found

    monkeypatch.setattr(watchdog, "at_work", asked)
    argv, given = [sys.executable, "-c", SENDS, str(exits)], {**os.environ, HEARTBEAT_DIR: str(tmp_path), "RANK": "0"}
    verdict = children.run_children(argv, given, exits, tmp_path / "launcher.log", range(1), "n1", None, watchdog)
    assert verdict.code == 0 and seen.exists()
    waits, *_, ends = capsys.readouterr().err.splitlines()
    assert waits == "rank 0 on n1 is through, and still at work: a tracker that sends its files?"
    assert ends == "the processes on n1 are through, and do not end by themselves: they are ended now"


def test_a_rank_that_raises_is_shown_with_what_the_kernel_says_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packtrain.monitor.old.watchdog.gpu_error", lambda since: XID)
    (tmp_path / "exits").mkdir()
    watchdog = Watchdog(tmp_path, tmp_path, ranks=range(2), host="n1", step_timeout=60)
    argv = [sys.executable, "-c", RAISES, str(tmp_path / "exits")]
    verdict = children.run_children(
        argv, {}, tmp_path / "exits", tmp_path / "launcher.log", range(2), "n1", None, watchdog
    )
    assert verdict.code == 4
    assert [line.partition(": ")[2] for line in verdict.lines[1:]] == [
        "torch.AcceleratorError: CUDA error: unspecified launch failure",
        f"the kernel says: {XID}",
        ONE_RAISED.partition(": ")[2],
    ]


class OtherMachine:
    """The line to one that has lost the rank of this machine, and says so before this one has looked at it."""

    node, reports = 1, {}

    def __init__(self, died: Path) -> None:
        self._died, self._told = died, False

    def order(self) -> Order | None:
        if self._told or not self._died.exists():
            return None
        self._told = True
        return Order(None, "rank 0 on n1 failed (exit code 4)")

    def tell_failure(self, why: str) -> None:
        pass

    def finish(self, outcome: Outcome) -> Verdict:
        return judge({0: Outcome(codes={0: 4}), 1: outcome}, {0: "n1", 1: "n2"}, 1)


def test_a_rank_that_died_is_told_of_where_another_machine_was_quicker_to_lose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "GRACE_S", 0)
    monkeypatch.setattr(children, "TERM_S", 0)
    exits = tmp_path / "exits"
    exits.mkdir()
    watchdog = Watchdog(tmp_path, tmp_path, ranks=range(1, 2), host="n2", step_timeout=60)
    line: Any = OtherMachine(exits / "1.pid")
    argv = [sys.executable, "-c", DIES, str(exits)]
    verdict = children.run_children(argv, {}, exits, tmp_path / "launcher.log", range(1, 2), "n2", line, watchdog)
    assert verdict.code == 4
    assert verdict.lines[0].startswith("rank 1 on n2 ended without a word, before it said anything")
    assert verdict.lines[1].startswith("  likely cause: the process was killed")
