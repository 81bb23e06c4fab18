"""How a process ends: its exit code, from the error or signal that ended its work, and what it prints about that.

Whether a signal or an exception of one rank is the run's fault is decided by its launcher (launch/exit_status.py).
"""

from __future__ import annotations

import errno
import os
import signal
import sys
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
    """SIGINT or SIGTERM outside training, which has a handler of its own (train/settings.py)."""


@contextmanager
def listening(listener: Callable[[int], None]) -> Iterator[None]:
    """Inside the block SIGINT and SIGTERM call `listener` with their number, which may raise; afterwards the old handlers return.

    Only for the main thread.
    """
    before = {number: signal.signal(number, lambda received, _: listener(received)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code_of(work: Callable[[], int], *, alone: bool = True) -> int:
    """Does `work` and returns its exit code, or that of the error or signal it ended with, which is printed.

    If this is one of many processes (not `alone`), an exception is not yet called a bug, nor a lost peer, and a signal is not
    reported: the launcher does so, because it knows how the others ended, and may start them again.
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
        if isinstance(exit_.__context__, BrokenPipeError):  # as rich ends the process, with code 1
            return 128 + signal.SIGPIPE
        raise
    except (Exception, KeyboardInterrupt) as error:
        if not received:
            return report_error(error, alone=alone)
        # whatever the error is: an interrupted import may raise its own
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        if alone:
            print(stopped_by(received[0]), file=sys.stderr, flush=True)
        return 128 + received[0]


def report_error(error: Exception | KeyboardInterrupt, *, alone: bool = True) -> int:
    """The exit code for an error, which is printed: as the user's, or with its traceback as a bug."""
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        outlive_terminal()  # it may be the terminal itself that cannot be written to
    known = error if isinstance(error, PacktrainError) else explain(error)
    if known is not error and not alone:
        # a disk that has failed, perhaps that of one machine alone, is no mistake of the user's
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
    if isinstance(error, BrokenPipeError):  # the reader of our output has left (`packtrain plan … | head`)
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
    # `where` has arguments and paths; values are quoted without secrets, and may be data
    for problem in error.problems:
        shown = redactor.certain(str(replace(problem, where=clean(problem.where))))
        print(f"  {visible(shown, whitespace=True)}", file=sys.stderr)


def stopped_by(number: int) -> str:
    return f"stopped by {signal.Signals(number).name}"
