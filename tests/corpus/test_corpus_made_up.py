"""A short run of benchmarks/hostile.py: cases that hypothesis makes up, of a fixed seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_made_up_case_breaks() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/hostile.py"), "--cases", "12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "12 cases" in done.stdout
