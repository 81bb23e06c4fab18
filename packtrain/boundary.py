"""The boundary around what others wrote: a library at work on a user's file, or code that came with a model.

Whatever is raised there is for the user: a UserError with the file or config key, the library's own first line, and a fix. Bugs of
packtrain stay bugs (exit code 1): they are recognised by the file that raised them. `explain` is the last boundary, for what no
stage expected.
"""

from __future__ import annotations

import errno
import os
import socket
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from packtrain.errors import PacktrainError, PeerFailed, UserError
from packtrain.wording import BUGS, first_line

_OURS = f"{Path(__file__).parent}{os.sep}"
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
_SITE_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
TRACEBACK = "PACKTRAIN_TRACEBACK"
"""Where this variable is set, errors that are for the user are printed with their traceback, too."""
_SHOWS = f"{TRACEBACK}=1 shows where it was raised."
_SPACE = "Free some space there, or name another place."
_DISK = "The disk or the network behind it fails: see dmesg, and whether it is mounted."
_ACCESS = "Name another place, or check its permissions: ls -ld."
_FIXES = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: f"Your quota is used up. {_SPACE}",
    errno.EFBIG: "There is a limit on the size of files: ulimit -f.",
    errno.EMFILE: "There is a limit on open files: ulimit -n.",
    errno.ENFILE: "The machine has too many open files: lsof shows who holds them.",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _ACCESS),
    errno.ENAMETOOLONG: "A name has at most 255 bytes, and a path 4,096.",
    errno.ELOOP: "A link leads back to itself: ls -l shows where.",
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENODEV), _DISK),
    **dict.fromkeys(
        (errno.EAGAIN, errno.ENOMEM), "Check free -h and the limits of processes and memory: ulimit -u -v."
    ),
    **dict.fromkeys(
        (errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.EHOSTUNREACH), "Check the network: ip addr, ip route."
    ),
}
"""What the machine refuses, whoever asks: never a bug, and what to do about it."""
Fix = str | Callable[[BaseException], str]


@contextmanager
def boundary(what: str, where: str = "", fix: Fix = "") -> Iterator[None]:
    """Inside the block, what is raised (even SystemExit) becomes a UserError: `what`, and the error's own first line.

    Only a PacktrainError, Ctrl-C and bugs of packtrain stay as they are. `fix` may depend on the error.
    """
    try:
        with staying():
            yield
    except (PacktrainError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if is_ours(error):
            raise
        advice = fix if isinstance(fix, str) else fix(error)
        raise UserError(f"{what}: {first_line(error)}", where=where, fix=advice) from error


def is_ours(error: BaseException) -> bool:
    """Whether this is a bug of packtrain: of a kind that bugs have, with no code of others between us and Python's own.

    A library that is called wrongly counts as the user's; its traceback is in the log.
    """
    built_in = isinstance(error, BUGS) and type(error).__module__ == "builtins"
    return built_in and raised_in(error).startswith(_OURS)


def explain(error: BaseException) -> PacktrainError | None:
    """What the user can mend of an error that no stage expected; None for what may be a bug of packtrain.

    The user's are what the machine refuses (permissions, space, limits, names), a package that cannot be imported, a name that is
    not Unicode, and a path or text at which a library failed. A missing path, endless nesting and bytes that are no text are bugs
    where our own code came upon them: it should have checked.
    """
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
        return PeerFailed(f"the other side does not answer: {error}", fix="Check whether it is up, and try again.")
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        return UserError("there is not enough memory", fix=_FIXES[errno.ENOMEM])
    ours = raised_in(error).startswith(_OURS)
    if isinstance(error, ImportError) and not (error.name.startswith("packtrain") if error.name else ours):
        what = f"a package cannot be used: {first_line(error)}"
        if error.__cause__ is not None:  # of transformers, which imports late
            what += f" ({first_line(error.__cause__)})"
        return UserError(what, fix=f"Reinstall it, in a version that packtrain supports: pip check. {_SHOWS}")
    if isinstance(error, UnicodeError) and (not ours or "surrogates" in str(error)):  # ours never make surrogates
        return UserError(f"not UTF-8 text: {error}", fix=f"Save it as UTF-8, or name it in ASCII. {_SHOWS}")
    if isinstance(error, OSError) and (not ours or error.errno in _FIXES):
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
        fix = _FIXES.get(error.errno or 0, f"Check the path, and what is there. {_SHOWS}")
        return UserError(error.strerror or str(error) or type(error).__name__, where=" → ".join(names), fix=fix)
    if isinstance(error, RecursionError) and not ours:
        return UserError("something is nested without end", fix=f"Look for a file or value that holds itself. {_SHOWS}")
    frames = traceback.extract_tb(error.__traceback__)
    last = max((at for at, frame in enumerate(frames) if frame.filename.startswith(_OURS)), default=-1)
    if not ours and any(frame.name == "<module>" for frame in frames[last + 1 :]):  # while it was imported
        fix = f"Correct or unset the environment variables that it reads; else reinstall the package. {_SHOWS}"
        return UserError(f"a package cannot be imported: {first_line(error)}", where=raised_in(error), fix=fix)
    return None


def raised_in(error: BaseException) -> str:
    """The file that raised the error, be it by a call of Python's own library; "" if it is not known."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    others = [
        file
        for file in files
        if not file.startswith((_STANDARD_LIBRARY, "<frozen ")) or any(folder in file for folder in _SITE_PACKAGES)
    ]
    return others[-1] if others else ""


@contextmanager
def staying(wanted: bool = True) -> Iterator[None]:
    """Inside the block os._exit is SystemExit, in this process and thread: else code of others could end a run with exit code 0."""
    leave, process, thread = os._exit, os.getpid(), threading.get_ident()

    def stay(code: int) -> None:
        if (os.getpid(), threading.get_ident()) != (process, thread):
            leave(code)
        raise SystemExit(code)

    os._exit = stay if wanted else leave  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        os._exit = leave
