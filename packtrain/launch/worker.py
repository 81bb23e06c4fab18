"""The life of a process that the launcher started: where its output goes, how it ends, and what it leaves behind.

Imports nothing heavy: from its first line on, a signal ends a worker with a word and an exit code, not with a traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from packtrain.launch.ending import exit_code_of

EXIT_DIR = "PACKTRAIN_EXIT_DIR"
LOG_DIR = "PACKTRAIN_LOG_DIR"


def run_worker(work: Callable[[], int]) -> NoReturn:
    """The whole life of a process that the launcher started: does `work`, and ends with its exit code.

    All but rank 0 write to logs/rank-0000N.log in place of the terminal. Errors are printed, never raised.
    """
    redirect_output()
    code = exit_code_of(work)
    report_exit(code)
    sys.exit(code)


def report_exit(code: int) -> None:
    """Leaves a worker's exit code where its launcher looks for it; does nothing where no launcher of ours waits."""
    if EXIT_DIR in os.environ:
        Path(os.environ[EXIT_DIR], os.environ.get("RANK", "0")).write_text(str(code))


def redirect_output() -> None:
    """Sends what a worker prints to logs/rank-0000N.log, unless it is rank 0 or has no launcher of ours."""
    rank = int(os.environ.get("RANK", "0"))
    if LOG_DIR not in os.environ or rank == 0:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(Path(os.environ[LOG_DIR], f"rank-{rank:05d}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
