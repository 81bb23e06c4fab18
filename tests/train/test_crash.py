"""Runs that are killed at every kind of moment, disks that lose power and checkpoints that are damaged: the short benchmark."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "crash.py"


@pytest.mark.exhaustive  # tests/train/test_resume.py kills three processes
@pytest.mark.skipif(
    not shutil.which("cc") or sys.platform != "linux", reason="what counts system calls is compiled with cc"
)
@pytest.mark.parametrize(
    ("arguments", "killed"),
    [(["--setups", "sft full 1"], 10), pytest.param([], 11, marks=pytest.mark.exhaustive)],
    ids=["one process", "two processes, too"],
)
def test_whoever_is_killed_anywhere_comes_to_the_same_end(arguments: list[str], killed: int) -> None:
    command = [sys.executable, str(SCRIPT), "--short", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert "| as it resumes, killed again | 1 |" in done.stdout and f"{killed} came to the same end" in done.stdout
