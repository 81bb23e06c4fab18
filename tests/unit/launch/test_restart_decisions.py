"""Which failures are followed by a restart, and what is kept of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from packtrain.errors import BUG
from packtrain.launch.coordinator import Restarts, Verdict, newest_step
from packtrain.run_folder import RunFolder

KILLED = Verdict(4, ["rank 1 was killed"])


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.open_attempt("auto")
    return folder


def checkpoint(folder: RunFolder, step: int) -> None:
    (folder.checkpoints / f"step-{step:06d}").mkdir(parents=True)


@pytest.mark.parametrize(("code", "again"), [(0, 0), (1, 1), (2, 0), (3, 0), (4, 1), (130, 0), (143, 0)])
def test_only_a_failure_that_may_not_come_again_is_followed_by_a_restart(
    code: int, again: int, folder: RunFolder
) -> None:
    assert Restarts(1, folder).decide(Verdict(code), "", (0, 2)).restart == ((0, 2) if again else ())
    assert not Restarts(0, folder).decide(Verdict(code), "").restart


def test_there_are_as_many_as_asked_for_and_fewer_without_progress(folder: RunFolder) -> None:
    restarts, stuck = Restarts(3, folder), Restarts(9, folder)
    for step in (5, 10, 10):
        checkpoint(folder, step) if newest_step(folder) < step else None
        assert restarts.decide(KILLED, "").restart
    checkpoint(folder, 15)
    last = restarts.decide(KILLED, "")
    assert not last.restart and last.lines == [
        *KILLED.lines,
        "not started again: all trainer.restarts=3 have been used",
    ]
    assert [stuck.decide(KILLED, "").restart for _ in range(3)] == [(0,), (0,), ()]


def test_a_restart_resumes_this_run_and_never_an_earlier_one(folder: RunFolder) -> None:
    restarts = Restarts(3, folder)
    checkpoint(folder, 5)  # of an earlier run: this one has not begun
    restarts.decide(KILLED, "")
    assert restarts.resume_mode("never") == "never"
    folder.attempt.root.rmdir()
    assert restarts.resume_mode("never") == "auto"


def test_a_run_that_is_done_is_not_started_again(folder: RunFolder) -> None:
    folder.summary.write_text('{"status": "done"}')  # of an earlier run, until this one has begun
    assert Restarts(1, folder).decide(KILLED, "").restart
    folder.attempt.root.rmdir()
    assert Restarts(1, folder).decide(KILLED, "").lines[-1] == "not started again: the run had finished"


def test_each_restart_is_kept_also_by_the_launch_that_goes_on(folder: RunFolder) -> None:
    first = Restarts(2, folder)
    first.write_record(["n1", "n2"])
    assert folder.restarts() == []
    checkpoint(folder, 5)
    first.decide(Verdict(1, [BUG]), "rank 0 on n1 failed")
    first.write_record(["n1"])
    again = Restarts(2, folder)
    again.write_record(["n1"])
    again.decide(KILLED, "")
    again.write_record(["n1"])
    kept = folder.restarts()
    assert [one["why"] for one in kept] == [["rank 0 on n1 failed"], ["rank 1 was killed"]]
    assert [(one["step"], one["machines"]) for one in kept] == [(5, ["n1"])] * 2
