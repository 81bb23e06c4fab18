"""The boundary around what others wrote: a library at work on a user's file, or code that came with a model.

Whatever is raised there is for the user: a UserError with the file or config key, the library's own sentence, and a fix. Bugs of
packtrain stay bugs (exit code 1): they are told by the place where they were raised. `of_system` is the last boundary, for what no
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

_OURS = f"{Path(__file__).parent}{os.sep}"
_OF_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
_SITE_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_BUGS = (TypeError, AttributeError, LookupError, NameError, AssertionError, ArithmeticError, NotImplementedError)
_NAMELESS = (*_BUGS, StopIteration, RecursionError, SystemExit)
"""Errors whose text says little without their type: KeyError: 'added_tokens'."""
_LONGEST = 400
TRACEBACK = "PACKTRAIN_TRACEBACK"
"""Where this variable is set, errors that are for the user have their traceback, too."""
_SHOWS = f"{TRACEBACK}=1 shows where it was."
_ROOM, _RIGHTS = "Make room there, or name another place.", "Name another place, or see its rights: ls -ld."
_FIXES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: f"Your quota is used up. {_ROOM}",
    errno.EFBIG: "There is a limit on the size of files: ulimit -f.",
    errno.EMFILE: "There is a limit on open files: ulimit -n.",
    errno.ENFILE: "The machine has too many open files: see what holds them, lsof.",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: "It can only be read: name another place.",
    errno.ENAMETOOLONG: "A name has at most 255 bytes, and a path 4,096.",
    errno.ELOOP: "A link leads back to itself: ls -l shows where.",
    errno.EIO: "The disk or the network behind it fails: see dmesg.",
    errno.ESTALE: "The network disk lost it: see whether it is mounted as it was.",
    errno.ENODEV: "The device behind it is gone: see whether it is mounted.",
    errno.EAGAIN: "See the limits of processes and of memory: ulimit -u, ulimit -v.",
    errno.EADDRNOTAVAIL: "See the addresses of this machine: ip addr.",
    errno.ENETUNREACH: "See its network: ip route.",
    errno.EHOSTUNREACH: "See its network: ip route.",
}
"""What the machine refuses, whoever asks: never a bug, and what to do about it."""
Fix = str | Callable[[BaseException], str]


@contextmanager
def boundary(what: str, where: str = "", fix: Fix = "") -> Iterator[None]:
    """Inside the block, what is raised becomes a UserError: `what`, and the error's own first sentence; even SystemExit does.

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
        raise UserError(f"{what}: {sentence(error)}", where=where, fix=advice) from error


def is_ours(error: BaseException) -> bool:
    """Whether this is a bug of packtrain: of a kind that bugs have, with no code of others between us and Python's own.

    A library that is called wrongly counts as the user's; its traceback is in the log.
    """
    ours = isinstance(error, _BUGS) and type(error).__module__ == "builtins"
    return ours and raised_in(error).startswith(_OURS)


def of_system(error: BaseException) -> PacktrainError | None:
    """What the user can mend of an error that no stage expected; None for what may be a bug of packtrain.

    The user's is what the machine refuses (rights, room, limits, names), a package that cannot be imported, also for what it
    reads then, a name that is not Unicode, and a path or text at which a library failed. A path that is not there, nesting
    without end and bytes that are no text are bugs where our own code came upon them: it should have looked.
    """
    if isinstance(error, BrokenPipeError):
        return None
    if isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)):
        return PeerFailed(f"the other side does not answer: {error}", fix="Look whether it is up, and try again.")
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return UserError(
            "there is not enough memory", fix="See what uses it: free -h, ulimit -v, the limit of the job."
        )
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return UserError("the system gives no thread more", fix="See its limits: ulimit -v, ulimit -u.")
    ours = raised_in(error).startswith(_OURS)
    if isinstance(error, ImportError) and not (error.name.startswith("packtrain") if error.name else ours):
        what = f"a package cannot be used: {sentence(error)}"
        if error.__cause__ is not None:  # of transformers, which imports late
            what += f" ({sentence(error.__cause__)})"
        return UserError(what, fix=f"Install it anew, in a version that packtrain takes: pip check. {_SHOWS}")
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":  # ours never make one
        return UserError(f"not UTF-8 text: {error}", fix="Save it as UTF-8, or name it in ASCII.")
    if isinstance(error, OSError) and error.errno in _FIXES:
        return UserError(error.strerror or str(error), where=_paths_of(error), fix=_FIXES[error.errno])
    if ours:
        return None
    if isinstance(error, OSError):
        fix = f"Look at the path, and at what is there. {_SHOWS}"
        return UserError(error.strerror or str(error) or type(error).__name__, where=_paths_of(error), fix=fix)
    if isinstance(error, RecursionError):
        return UserError("something is nested without end", fix=f"Look for a file or value that holds itself. {_SHOWS}")
    if isinstance(error, UnicodeError):
        return UserError(f"not UTF-8 text: {error}", fix=f"Save it as UTF-8, or name it in ASCII. {_SHOWS}")
    frames = traceback.extract_tb(error.__traceback__)
    last = max((at for at, one in enumerate(frames) if one.filename.startswith(_OURS)), default=-1)
    if any(one.name == "<module>" for one in frames[last + 1 :]):  # while it was imported
        where = next((name for name in os.environ if "_" in name[1:] and name in f"{frames.format()} {error}"), "")
        fix = f"Mend or unset the environment variables that it reads; else install the package anew. {_SHOWS}"
        return UserError(f"a package cannot be imported: {sentence(error)}", where=where or raised_in(error), fix=fix)
    return None


def _paths_of(error: OSError) -> str:
    return " → ".join(os.fsdecode(one) for one in (error.filename, error.filename2) if isinstance(one, (str, bytes)))


def raised_in(error: BaseException) -> str:
    """The file that raised the error, be it by a call of Python's own library; "" if nothing tells."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((_OF_PYTHON, "<frozen ")) or any(folder in file for folder in _SITE_PACKAGES):
            place = file
        trace = trace.tb_next
    return place


def sentence(error: BaseException) -> str:
    """What the error says, shortly: its first line, with its type where that says more than the text."""
    said = str(error).strip()
    if isinstance(error, OSError) and error.strerror:
        said = (
            f"{error.strerror}{f': {os.fsdecode(error.filename)}' if isinstance(error.filename, str | bytes) else ''}"
        )
    if isinstance(error, SystemExit):
        return f"its code ended the process, by sys.exit({error.code!r})"
    if isinstance(error, ImportError) or type(error).__name__.startswith("StrictDataclass"):
        said = " ".join(said.split())  # which name the package or the field only further down
    first = said.partition("\n")[0][:_LONGEST]
    return f"{type(error).__name__}: {first}".rstrip(": ") if isinstance(error, _NAMELESS) or not first else first


@contextmanager
def staying(wanted: bool = True) -> Iterator[None]:
    """Inside the block os._exit is SystemExit, in this process and thread: else code of others could end a run with exit code 0."""
    if not wanted:
        yield
        return
    leave, process, thread = os._exit, os.getpid(), threading.get_ident()

    def stay(code: int) -> None:
        if (os.getpid(), threading.get_ident()) != (process, thread):
            leave(code)
        raise SystemExit(code)

    os._exit = stay  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        os._exit = leave
