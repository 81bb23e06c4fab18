"""packtrain in a batch script or a shell of salloc: signals reach the machines (srun itself kills, or does nothing), and an
srun that fails is told from a run that does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import until

PROGRAM = """
import sys
from packtrain.errors import exit_code_of
from packtrain.launch.jobs import run_srun
sys.exit(exit_code_of(lambda: run_srun(("srun", "--nodes", "2", "task"))))
"""
FAKES = {
    "srun": 'trap "exit 99" TERM INT; echo "$1" > name; echo begun >&2; while [ ! -s told ]; do sleep 0.05; done; exit $(cat told)',
    "squeue": 'echo "17.batch batch"; echo "17.3 $(sed s/--job-name=// name)"; echo "17.4 other"',
    "scancel": 'echo "$@" >> cancelled; case $1 in --signal=INT) echo 130;; *) echo 143;; esac > told',
}

LONG_S = 120  # for what takes a moment, unless the machine has other things to do


def spread(folder: Path, **fakes: str) -> subprocess.Popen[bytes]:
    for name, text in {**FAKES, **fakes}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    started = subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, cwd=folder, stderr=subprocess.PIPE)
    if "srun" not in fakes:  # what it says is passed on: packtrain knows by then that it has started one
        assert started.stderr is not None and started.stderr.readline() == b"begun\n"
    return started


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_the_tasks_of_the_step_by_scancel(number: signal.Signals, code: int, tmp_path: Path) -> None:
    started = spread(tmp_path)
    started.send_signal(number)
    assert started.wait(LONG_S) == code
    assert (tmp_path / "cancelled").read_text() == f"--signal={number.name[3:]} 17.3\n"


def test_a_second_signal_is_for_srun_as_is_the_first_where_slurm_does_not_answer(tmp_path: Path) -> None:
    started = spread(tmp_path, scancel="echo > first")
    started.send_signal(signal.SIGINT)
    until((tmp_path / "first").exists)
    assert started.poll() is None
    started.send_signal(signal.SIGINT)
    assert started.wait(LONG_S) == 130
    (tmp_path / "name").unlink()
    started = spread(tmp_path, squeue="exit 1")
    started.send_signal(signal.SIGTERM)
    assert started.wait(LONG_S) == 143


def test_an_srun_that_fails_is_no_bug_of_ours(tmp_path: Path) -> None:
    started = spread(tmp_path, srun="echo > name; echo 'srun: error: Unable to create step' >&2; exit 1")
    text = started.communicate(timeout=LONG_S)[1].decode()
    assert started.returncode == 4 and text.startswith("srun: error: Unable to create step\n")
    assert "[srun-failed]" in text
