"""A worker process of the launcher: where its output goes, how it ends, and which files it writes for the launcher.

Imports nothing heavy, so that from the first line on a signal ends a worker with a message and an exit code, not a traceback.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

from packtrain.errors import LostPeers, PacktrainError
from packtrain.launch.exit_status import exit_code_of
from packtrain.redact import clean
from packtrain.standard_streams import outlive_terminal

EXIT_DIR = "PACKTRAIN_EXIT_DIR"
LOG_DIR = "PACKTRAIN_LOG_DIR"
PARENT = "PACKTRAIN_PARENT"
_PR_SET_PDEATHSIG = 1


def run_worker(work: Callable[[], int]) -> NoReturn:
    """The main function of a worker: does `work`, and ends the process with its exit code.

    All but rank 0 write to logs/rank-0000N.log in place of the terminal. Errors are printed, never raised.
    """
    redirect_output()
    outlive_terminal()
    _leave(pid=os.getpid())
    if EXIT_DIR in os.environ:
        end_with_parent(int(os.environ[PARENT]))
    code = exit_code_of(lambda: _beating(work), alone=False)
    _leave(code=code)
    sys.exit(code)


@contextmanager
def last_words(log: Path) -> Iterator[None]:
    """Inside the block an error is written to `log`, too: packtrain doctor reads it after the terminal is gone."""
    try:
        yield
    except Exception as error:
        ours = isinstance(error, PacktrainError)
        words = str(error) if ours else "".join(traceback.format_exception(error)).rstrip()
        with suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.write(f"error:\n{clean(words)}\n")
        raise


def _beating(work: Callable[[], int]) -> int:
    """Does `work`, with heartbeats; a lost peer is reported to the launcher, which prints it if it finds no better cause."""
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
        _leave(lost=str(error))
        if _rank():  # into its log
            print(error, file=sys.stderr, flush=True)
        return error.exit_code


def leave(exits: Path, rank: int, **facts: int | str) -> None:
    """Adds `facts` about a rank to its file in the folder `exits`, which its launcher reads.

    The rank writes its process id (`pid`) as it starts, its exit `code` as it ends, and its message if it ended only because it
    `lost` the others; torchrun writes how the process `ended`: the exit code, negative for a signal.
    """
    known = read_exits(exits).get(rank, {})
    aside = exits / f".{rank}.json"
    aside.write_text(json.dumps({**known, **facts}))
    aside.rename(exits / f"{rank}.json")


def read_exits(exits: Path) -> dict[int, dict[str, Any]]:
    """The facts in `exits`, by rank."""
    return {int(file.stem): json.loads(file.read_text()) for file in exits.glob("*.json") if file.stem.isdigit()}


def end_with_parent(parent: int) -> None:
    """Has the system kill this process when `parent`, which started it, ends, however that happens (Linux only).

    A killed launcher cannot end its workers, which have sessions of their own and would keep GPUs and port.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the call
            os.kill(os.getpid(), signal.SIGKILL)


def _leave(**facts: int | str) -> None:
    """Writes `facts` for packtrain's launcher; does nothing without one."""
    if EXIT_DIR in os.environ:
        leave(Path(os.environ[EXIT_DIR]), _rank(), **facts)


def redirect_output() -> None:
    """Sends what a worker prints to logs/rank-0000N.log, unless it is rank 0 or runs without packtrain's launcher."""
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
