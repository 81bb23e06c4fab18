"""Boundary around other people's code: libraries on a user's file, or code of a model.

Errors of that code are reported to the user as a UserError with the file or config key, the first line of the error, and a fix.
Bugs of packtrain stay bugs (exit code 1); the file that raised an error tells them apart. `explain` is the last boundary, for
errors that no stage expected.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packtrain.errors import PacktrainError, PeerFailed, UserError
from packtrain.wording import BUGS, first_line

_OURS = f"{Path(__file__).parent}{os.sep}"
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
_SITE_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
TRACEBACK = "PACKTRAIN_TRACEBACK"
"""Environment variable: if it is set, errors for the user are printed with their traceback."""
_SHOWS = f"{TRACEBACK}=1 shows where it was raised."
_LIMIT = "A limit is reached: see ulimit -a and free -h."
_UNREACHABLE = (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free some space there, or in your quota, or name another place."),
    **dict.fromkeys((errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM), _LIMIT),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Name another place, or check its permissions: ls -ld."),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP), "Name another place: its name is too long, or a link loops."),
    **dict.fromkeys(_UNREACHABLE, "The disk or the network behind it fails: see dmesg, and whether it is mounted."),
}
"""Errors of the operating system and advice about them. They are never a bug."""
Fix = str | Callable[[BaseException], str]


@contextmanager
def boundary(what: str, where: str = "", fix: Fix = "") -> Iterator[None]:
    """Turn any exception of the block, even SystemExit, into a UserError.

    Its text is `what` and the first line of the exception. Only PacktrainError, Ctrl-C and bugs of packtrain pass through unchanged. `fix`
    may depend on the error.
    """
    try:
        yield
    except (PacktrainError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if is_ours(error):
            raise
        advice = fix if isinstance(fix, str) else fix(error)
        raise UserError(f"{what}: {first_line(error)}", where=where, fix=advice) from error


def is_ours(error: BaseException) -> bool:
    """Return whether this is a bug of packtrain: one of BUGS, raised by our code.

    An error inside a library that was called wrongly counts as the user's; its traceback is in the log.
    """
    built_in = isinstance(error, BUGS) and type(error).__module__ == "builtins"
    return built_in and raised_in(error).startswith(_OURS)


def explain(error: BaseException) -> PacktrainError | None:
    """Return an unexpected error as an error for the user. None if it may be a bug of packtrain.

    Errors for the user are refusals of the operating system (permissions, space, limits, names), packages that cannot be imported, and
    paths or texts that made a library fail. A missing path or invalid UTF-8 that our own code met without a check is a bug.
    """
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
        return PeerFailed(f"the other side does not answer: {error}", fix="Check whether it is up, and try again.")
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        return UserError("there is not enough memory", fix=_LIMIT)
    place = raised_in(error)
    ours = place.startswith(_OURS)
    if isinstance(error, ImportError) and not (error.name.startswith("packtrain") if error.name else ours):
        cause = f" ({first_line(error.__cause__)})" if error.__cause__ else ""  # transformers imports lazily
        fix = f"Reinstall it, in a version that packtrain supports: pip check. {_SHOWS}"
        return UserError(f"a package cannot be used: {first_line(error)}{cause}", fix=fix)
    if isinstance(error, OSError) and (not ours or error.errno in _FIXES):
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
        fix = _FIXES.get(error.errno or 0, f"Check the path, and what is there. {_SHOWS}")
        return UserError(error.strerror or str(error) or type(error).__name__, where=" → ".join(names), fix=fix)
    if isinstance(error, FileNotFoundError) and error.filename is None:  # raised by os.getcwd
        return UserError("the current folder is gone", fix="Go to one that exists: cd.")
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    imported = any(code.co_name == "<module>" and code.co_filename == place for code in frames)
    if "surrogates" in str(error) or (not ours and (imported or isinstance(error, (UnicodeError, RecursionError)))):
        fix = f"Correct the file, name or environment variable that it reads. {_SHOWS}"
        return UserError(f"a library failed: {first_line(error)}", where=place, fix=fix)
    return None


def raised_in(error: BaseException) -> str:
    """Return the file that raised the error; "" if unknown. The error may come from a standard-library call in that file."""
    place = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith((_STANDARD_LIBRARY, "<frozen ")) or any(folder in file for folder in _SITE_PACKAGES):
            place = file
    return place


@contextmanager
def holding(thing: Any, **values: Any) -> Iterator[None]:
    """Give attributes of `thing`, an object or a module, these values inside the block."""
    own = getattr(thing, "__dict__", {})  # a class's own dict keeps its static methods wrapped
    before = {name: own.get(name, getattr(thing, name, None)) for name in values}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


@contextmanager
def staying() -> Iterator[None]:
    """Turn os._exit, called by other code in this thread, into UserError. It could end a run or a proof with exit code 0."""
    leave, process, thread = os._exit, os.getpid(), threading.get_ident()

    def stay(code: int) -> None:
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith(_OURS) or (os.getpid(), threading.get_ident()) != (process, thread):
            leave(code)
        raise UserError(f"it ended the process by os._exit({code})", where=caller, fix="Have it return or raise.")

    with holding(os, _exit=stay):
        yield
