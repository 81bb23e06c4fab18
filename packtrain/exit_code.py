"""Exit code of a process after an error or signal, and the message about it.

A run of several processes has an exit code of its own (launch/exit_status.py).
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from packtrain.boundary import TRACEBACK, explain, staying
from packtrain.errors import PacktrainError, UserError
from packtrain.redact import Redactor, clean
from packtrain.standard_streams import outlive_terminal
from packtrain.wording import visible

ENDING = (signal.SIGINT, signal.SIGTERM)
"""The signals that ask a process to end."""
BUG = "This is a bug of packtrain: please report it with the lines above."


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM outside training. Training has its own handler (train/run_state.py)."""


@contextmanager
def listening(listener: Callable[[int], None]) -> Iterator[None]:
    """Call `listener` with the number of each SIGINT and SIGTERM in the block. It may raise.

    The old handlers are restored afterwards. Only for the main thread.
    """
    before = {number: signal.signal(number, lambda received, _: listener(received)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def told_at_once(tell: Callable[[int], None]) -> Iterator[None]:
    """Call `tell` with the first SIGINT or SIGTERM of the block, from a thread.

    The main thread may be inside a backward pass of many seconds. Only for the main thread.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait() -> None:
        with open(read, "rb", buffering=0) as pipe:
            numbers = (received[0] for received in iter(lambda: pipe.read(1), b""))
            if first := next(filter(ENDING.__contains__, numbers), 0):
                tell(first)
            for _ in numbers:  # Python complains if nobody reads
                pass

    threading.Thread(target=wait, name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)


def exit_code_of(work: Callable[[], int], *, alone: bool = True) -> int:
    """Return the exit code of `work`, or of the error or signal that ended it.

    The error or signal is printed. In one of several processes (not `alone`) an exception is not called a bug and a signal is not
    reported: that is up to the launcher, which knows how the others ended and may restart them.
    """
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        raise Stopped

    try:
        with listening(stop), staying():
            code = work()
            sys.stdout.flush()
            return code
    except SystemExit as exit_:
        if isinstance(exit_.__context__, BrokenPipeError):  # rich ends the process so, with code 1
            return 128 + signal.SIGPIPE
        raise
    except (Exception, KeyboardInterrupt) as error:
        if not received:
            return report_error(error, alone=alone)
        # the error's type does not matter: an interrupted import may raise another one
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        if alone:
            print(stopped_by(received[0]), file=sys.stderr, flush=True)
        return 128 + received[0]


def report_error(error: Exception | KeyboardInterrupt, *, alone: bool = True) -> int:
    """Print an error, for the user or as a bug with its traceback. Returns its exit code."""
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        outlive_terminal()  # the broken file may be the terminal
    known = error if isinstance(error, PacktrainError) else explain(error)
    if known is not error and not alone:
        # a failed disk, perhaps on one machine only, is no mistake of the user
        failed_disk = isinstance(error, OSError) and error.errno in (errno.EIO, errno.ESTALE, errno.ENODEV)
        if failed_disk or not isinstance(known, UserError):
            known = None
    if known is not None:
        if known.shown:
            if os.environ.get(TRACEBACK):
                _print_traceback(error)
            _print_problems(known)
        return known.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, BrokenPipeError):  # the reader of our output has ended (`packtrain plan … | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    _print_traceback(error)
    if alone:
        print(BUG, file=sys.stderr)
    return 1


def _print_traceback(error: BaseException) -> None:
    print(clean("".join(traceback.format_exception(error))), end="", file=sys.stderr)


def _print_problems(error: PacktrainError) -> None:
    number = len(error.problems)
    print(f"error: {number} problems" if number > 1 else "error:", file=sys.stderr)
    redactor = Redactor(os.environ)
    # `where` may hold command-line arguments; the other texts quote data, where only certain secrets are hidden
    for problem in error.problems:
        shown = redactor.certain(str(replace(problem, where=clean(problem.where))))
        print(f"  {visible(shown, whitespace=True)}", file=sys.stderr)


def leave(code: int) -> None:
    """End this process now, even if its threads are busy. Printed text is flushed first."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def stopped_by(number: int) -> str:
    return f"stopped by {signal.Signals(number).name}"
