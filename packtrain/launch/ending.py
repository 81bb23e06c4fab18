"""The one place where errors and signals become words on stderr and an exit code, for the command line and every worker."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

from packtrain.errors import PacktrainError
from packtrain.launch.signals import ENDING, heard_by

BUG = "This is a bug of packtrain: please report it with the lines above."


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM, where nothing better listens for it: a run that trains does (train/stop.py)."""


def say_stopped(number: int) -> None:
    """That a signal has ended this process."""
    print(f"stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)


def exit_code_of(work: Callable[[], int], *, alone: bool = True, stopped: Callable[[int], None] = say_stopped) -> int:
    """Does `work` and returns its exit code, or that of the error or signal it ended with, which is printed.

    Where it is one of many (not `alone`), whether an exception is a bug is not for it to say, nor may be whether a signal was
    meant to stop all (`stopped`).
    """
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        raise Stopped

    try:
        with heard_by(stop):
            code = work()
            sys.stdout.flush()
            return code
    except (Exception, KeyboardInterrupt) as error:
        if not received:
            return _ended_by(error, alone)
        # whatever came of it: an import that is interrupted may end with an error of its own
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        stopped(received[0])
        return 128 + received[0]


def _ended_by(error: Exception | KeyboardInterrupt, alone: bool) -> int:
    if isinstance(error, PacktrainError):
        if error.shown:
            _print_problems(error)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, BrokenPipeError):  # the reader of our output has left (`packtrain plan … | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    traceback.print_exception(error)
    if alone:
        print(BUG, file=sys.stderr)
    return 1


def _print_problems(error: PacktrainError) -> None:
    """Each problem once: where, what, and what to do; in colour on a terminal."""
    red, bold, green, plain = ("\033[31m", "\033[1m", "\033[32m", "\033[0m") if _in_colour() else ("",) * 4
    number = len(error.problems)
    print(f"{red}error{plain}: {number} problems" if number > 1 else f"{red}error{plain}:", file=sys.stderr)
    for problem in error.problems:
        place = f"{bold}{problem.where}{plain}: " if problem.where else ""
        print(f"  {place}{problem.what}", file=sys.stderr)
        if problem.fix:
            print(f"    {green}→{plain} {problem.fix}", file=sys.stderr)


def _in_colour() -> bool:
    return sys.stderr.isatty() and "NO_COLOR" not in os.environ
