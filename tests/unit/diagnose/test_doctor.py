"""packtrain doctor on run folders as ended runs leave them; tests/cluster has it on runs that go on."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from packtrain.diagnose.doctor import Finding, examine, show_run
from packtrain.errors import UserError
from packtrain.launch.attempt import RunLock
from packtrain.monitor.heartbeat import UNKNOWN, ProcessState
from packtrain.monitor.watchdog import RANKS, RankState
from packtrain.run_folder import RunFolder


def leave(folder: Path, codes: tuple = (None, None), status: str = "", diagnosis: str = "") -> RunFolder:
    """A run as it is left by ranks that ended with `codes`."""
    run = RunFolder(folder)
    run.logs.mkdir(parents=True, exist_ok=True)
    run.mark.touch()
    ends = [(code is not None and ProcessState(77, "gone", code, reported=True)) or UNKNOWN for code in codes]
    ranks = [RankState(rank, "n0", 77, "backward", 7, heard_s=1.0, process=end) for rank, end in enumerate(ends)]
    (run.logs / RANKS).write_text(json.dumps({"ranks": [asdict(one) for one in ranks]}))
    if status:
        run.summary.write_text(json.dumps({"status": status, "steps": 12}))
    if diagnosis:
        (run.logs / "diagnosis.txt").write_text(diagnosis)
    return run


def test_a_finished_run_is_in_order_also_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave(tmp_path, codes=(0, 0), status="done")
    assert show_run(str(tmp_path), ask=False, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "done"


def test_a_run_that_was_ended_by_the_watchdog_has_its_diagnosis_repeated(tmp_path: Path) -> None:
    found = examine(leave(tmp_path, diagnosis="rank 1 on n0 is stopped\n  likely cause: …\n"))
    assert (found.status, found.exit_code, found.lines[0]) == ("failed", 4, "rank 1 on n0 is stopped")


def test_a_rank_that_failed_is_shown_with_the_end_of_its_log(tmp_path: Path) -> None:
    run = leave(tmp_path, codes=(143, 2))
    run.log(1).write_text("ready\nerror:\n  bad data\n")
    found = examine(run)
    assert found.exit_code == 4
    assert found.lines[0].startswith("rank 1 failed (exit code 2)") and found.lines[-1].strip() == "bad data"


def test_an_attempt_that_started_nothing_is_not_mistaken_for_the_run_before(tmp_path: Path) -> None:
    run = leave(tmp_path, codes=(0, 0), status="done")
    run.attempt.root.mkdir()
    run.attempt.config.touch()
    os.utime(run.logs / RANKS, (1, 1))
    found = examine(run)
    assert found.status == "failed" and "was ended before it had started any process" in found.lines[0]
    with RunLock() as lock:
        lock.take(run.root)
        assert examine(run).lines == ["a run is about to start here, or has just ended"]


def silent(folder: Path, **about: object) -> Finding:
    """Of a run whose channel nobody serves."""
    run = RunFolder(folder)
    run.logs.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    usual = {"address": "127.0.0.1", "port": port, "secret": "", "host": platform.node(), "pid": os.getpid()}
    (run.logs / "channel.json").write_text(json.dumps({**usual, **about}))
    return examine(run)


def test_a_launcher_that_was_killed_or_does_not_answer_is_named(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    found = silent(tmp_path / "killed", pid=gone.pid)
    assert (found.status, found.exit_code) == ("failed", 4)
    found = silent(tmp_path / "another program has its number")
    assert (found.status, found.exit_code) == ("failed", 4)
    found = silent(tmp_path / "elsewhere", host="n7.invalid")
    assert (found.status, found.exit_code) == ("stalled", 4) and found.lines[0].startswith("n7.invalid (process ")


def test_a_folder_without_a_run_or_with_one_in_slurms_queue_is_the_users_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match=r"\[no-run\]"):
            examine(RunFolder(tmp_path))
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "logs" / "slurm-1.sbatch").write_text("#!/bin/bash\n")


def test_a_run_that_was_stopped_before_its_first_step_has_not_failed(tmp_path: Path) -> None:
    found = examine(leave(tmp_path, codes=(130, 143)))
    assert (found.status, found.exit_code) == ("stopped", 0)


@pytest.mark.parametrize(
    ("file", "broken", "wrong"),
    [
        ("ranks.json", '{"ranks": [{"rank": "x", "host": "n0"}]}', "rank: "),
        ("ranks.json", '{"ranks": [{"rank": 1, "host": "n0", "process": {"state": "lost"}}]}', "state: "),
        ("ranks.json", '{"ranks": {"a": 1}}', "array"),
        ("channel.json", '{"host": "n0"}', "address"),
    ],
)
def test_a_file_of_the_run_of_another_shape_is_named(file: str, broken: str, wrong: str, tmp_path: Path) -> None:
    (leave(tmp_path, codes=(0,)).logs / file).write_text(broken)
    with pytest.raises(UserError, match=wrong) as error:
        examine(RunFolder(tmp_path))
    assert error.value.problems[0].where.endswith(file)
