"""Worker process of the launcher: its output, its end, and its files for the launcher.

`python -m packtrain.launch.worker LOG ARGUMENTS…` is its parent: `accelerate launch ARGUMENTS…`, with torchrun's messages in LOG
(among them a traceback for every worker that ends with an error). Imports nothing heavy, so that from the first line on a signal
ends a worker with a message and an exit code, not a traceback.
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

from packtrain.errors import LostPeers, PacktrainError, exit_code_of
from packtrain.monitor.heartbeat import own_heartbeat, write_exit
from packtrain.system import fast_imports, outlive_terminal, redirect_output
from packtrain.wording import clean

EXIT_DIR = "PACKTRAIN_EXIT_DIR"
LOG_DIR = "PACKTRAIN_LOG_DIR"
PARENT = "PACKTRAIN_PARENT"
_PR_SET_PDEATHSIG = 1


def run_worker(work: Callable[[], int]) -> NoReturn:
    """Run `work` with heartbeats, and end the process with its exit code.

    All ranks but 0 write to logs/rank-0000N.log instead of the terminal. Errors are printed, never raised. A lost peer is reported
    to the launcher, which prints it if it finds no better cause.
    """
    rank, exits = int(os.environ.get("RANK", "0")), os.environ.get(EXIT_DIR)
    log = Path(os.environ[LOG_DIR], f"rank-{rank:05d}.log") if LOG_DIR in os.environ else None
    if log and rank:
        redirect_output(log)
    outlive_terminal()

    def report(**facts: int | str) -> None:
        if exits is not None:
            write_exit(Path(exits), rank, **facts)

    def work_with_heartbeats() -> int:
        heartbeat = own_heartbeat()
        try:
            with nullcontext() if rank or not log else errors_copied_to(log):  # the others' stderr is in their logs
                code = work()
            if code == 0:
                heartbeat.enter("done")
            return code
        except LostPeers as error:
            if exits is None:
                raise
            report(lost=str(error))
            if rank:  # into its log
                print(error, file=sys.stderr, flush=True)
            return error.exit_code

    report(pid=os.getpid())
    if exits is not None:
        end_with_parent(int(os.environ[PARENT]))
    code = exit_code_of(work_with_heartbeats, alone=False)
    report(code=code)
    sys.exit(code)


@contextmanager
def errors_copied_to(log: Path) -> Iterator[None]:
    """Copy an error inside the block to `log`. packtrain doctor reads it after the terminal is gone."""
    try:
        yield
    except Exception as error:
        ours = isinstance(error, PacktrainError)
        words = str(error) if ours else "".join(traceback.format_exception(error)).rstrip()
        with suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.write(f"error:\n{clean(words)}\n")
        raise


def end_with_parent(parent: int) -> None:
    """Let the system kill this process when its `parent` ends for any reason (Linux only).

    A killed launcher cannot end its workers, which lead their own sessions and would keep GPUs and port.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the call
            os.kill(os.getpid(), signal.SIGKILL)


def run_torchrun(log: str, arguments: list[str]) -> None:
    """Run `accelerate launch arguments…` in this process; end it with torchrun's exit code (1 for any failure).

    When the launcher that started it ends, the system kills it and its workers.
    """
    end_with_parent(int(os.environ[PARENT]))
    os.environ[PARENT] = str(os.getpid())
    # never closed: Python writes the last traceback to it after this function has ended
    sys.stderr = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    with fast_imports():
        from accelerate.commands.launch import launch_command, launch_command_parser
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        if "--use_deepspeed" in arguments:  # accelerate would import it later, and it prints on stdout
            import deepspeed  # noqa: F401  # pyright: ignore[reportUnusedImport]

    try:
        launch_command(launch_command_parser().parse_args(arguments))
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            write_exit(Path(os.environ[EXIT_DIR]), rank, ended=failure.exitcode)
        raise


if __name__ == "__main__":
    run_torchrun(sys.argv[1], sys.argv[2:])
