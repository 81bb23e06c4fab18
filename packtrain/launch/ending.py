"""The one place where errors become words on stderr and an exit code, for the command line and for every worker."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

from packtrain.errors import PacktrainError

BUG = "This is a bug of packtrain: please report it with the lines above."


def exit_code_of(work: Callable[[], int]) -> int:
    """Does `work` and returns its exit code, or that of the error it ended with, which is printed."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except PacktrainError as error:
        _print_problems(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output has left (`packtrain plan … | head`): nothing to say to nobody
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception:
        traceback.print_exc()
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
