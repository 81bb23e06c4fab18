"""The life of a process that the launcher started: where its output goes, how it ends, and what it leaves behind.

Imports nothing heavy: from its first line on, a signal ends a worker with a word and an exit code, not with a traceback.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NoReturn

from packtrain.errors import LostPeers, PacktrainError
from packtrain.launch.exit_status import exit_code_of, say_stopped

EXIT_DIR = "PACKTRAIN_EXIT_DIR"
LOG_DIR = "PACKTRAIN_LOG_DIR"
PARENT = "PACKTRAIN_PARENT"
_PR_SET_PDEATHSIG = 1


def run_worker(work: Callable[[], int]) -> NoReturn:
    """The whole life of a process that the launcher started: does `work`, and ends with its exit code.

    All but rank 0 write to logs/rank-0000N.log in place of the terminal. Errors are printed, never raised.
    """
    redirect_output()
    _report_start()
    code = exit_code_of(lambda: _beating(work), alone=False, stopped=report_stop)
    report_exit(code)
    sys.exit(code)


@contextmanager
def last_words(log: Path) -> Iterator[None]:
    """Inside the block an error is written to `log`, too: what the terminal had is gone when somebody asks later."""
    try:
        yield
    except Exception as error:
        ours = isinstance(error, PacktrainError)
        words = str(error) if ours else "".join(traceback.format_exception(error)).rstrip()
        with suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.write(f"error:\n{words}\n")
        raise


def _beating(work: Callable[[], int]) -> int:
    """Does `work`, with heartbeats; that it lost the others is left to the launcher, which knows whether there is more to say."""
    from packtrain.monitor.heartbeat import own_heartbeat

    heartbeat = own_heartbeat()
    first = LOG_DIR in os.environ and _rank() == 0  # the others' stderr is in their logs
    try:
        with last_words(_log_of(0)) if first else nullcontext():
            code = work()
        if code == 0:
            heartbeat.enter("done")
        return code
    except LostPeers as error:
        if EXIT_DIR not in os.environ:
            raise
        Path(os.environ[EXIT_DIR], f"{_rank()}.lost").write_text(str(error))
        if _rank():  # into its log
            print(error, file=sys.stderr, flush=True)
        return error.exit_code


def report_exit(code: int) -> None:
    """Leaves a worker's exit code where its launcher looks for it; does nothing where no launcher of ours waits."""
    if EXIT_DIR in os.environ:
        Path(os.environ[EXIT_DIR], str(_rank())).write_text(str(code))


def exit_codes(exits: Path) -> dict[int, int]:
    """Exit codes by rank, of the workers that left one in the folder `exits`."""
    found = {int(file.name): file.read_text() for file in exits.iterdir() if file.name.isdigit()}
    return {rank: int(text) for rank, text in found.items() if text.lstrip("-").isdigit()}


def process_ids(exits: Path) -> dict[int, int]:
    """Process ids by rank, of the workers that have started."""
    found = {int(file.stem): file.read_text() for file in exits.glob("*.pid")}
    return {rank: int(text) for rank, text in found.items() if text.isdigit()}


def report_stop(number: int) -> None:
    """Says that a signal has ended this process; for rank 0 its launcher does, which knows whether that is all there is to say."""
    if EXIT_DIR in os.environ and _rank() == 0:
        Path(os.environ[EXIT_DIR], "0.stopped").write_text(str(number))
    else:
        say_stopped(number)


def stop_of_rank_0(exits: Path) -> int | None:
    """The signal that rank 0 was stopped by, if any."""
    file = exits / "0.stopped"
    return int(file.read_text() or 0) or None if file.exists() else None


def losses(exits: Path) -> dict[int, str]:
    """Messages of the ranks that only lost the others."""
    return {int(file.stem): file.read_text() for file in exits.glob("*.lost")}


def end_with_parent(parent: int) -> None:
    """Has the system kill this process when `parent`, which started it, ends, however that happens (Linux only).

    A killed launcher cannot end its workers, which have sessions of their own and would keep GPUs and port.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # gone before
            os.kill(os.getpid(), signal.SIGKILL)


def _report_start() -> None:
    if EXIT_DIR in os.environ:
        Path(os.environ[EXIT_DIR], f"{_rank()}.pid").write_text(str(os.getpid()))
        end_with_parent(int(os.environ[PARENT]))


def redirect_output() -> None:
    """Sends what a worker prints to logs/rank-0000N.log, unless it is rank 0 or has no launcher of ours."""
    if LOG_DIR not in os.environ or _rank() == 0:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(_log_of(_rank()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _log_of(rank: int) -> Path:
    return Path(os.environ[LOG_DIR], f"rank-{rank:05d}.log")
