"""Errors for the user, the boundary around others' code, and a process's exit code.

A PacktrainError is raised where the fault is detected. `boundary` turns errors of libraries, or of a model's code, into a UserError with
the file or config key, the first line of the error, and a fix. Bugs of packtrain stay bugs (exit code 1); the file that raised an error
tells them apart. `explain` is the last boundary, for errors that no stage expected. `exit_code_of` prints all of them. A run of several
processes has an exit code of its own (launch/coordinator.py).
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from packtrain.system import ENDING, Stopped, holding, kept, listening, outlive_terminal, stopped_by
from packtrain.wording import BUGS, Redactor, clean, first_line, visible

_OURS = f"{Path(__file__).parent}{os.sep}"
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
_SITE_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
TRACEBACK = "PACKTRAIN_TRACEBACK"
"""Environment variable: if it is set, errors for the user are printed with their traceback."""
_SHOW_TRACEBACK = f"{TRACEBACK}=1 shows where it was raised."
_LIMIT_REACHED = "A limit is reached: see ulimit -a and free -h."
_UNREACHABLE = (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free some space there, or in your quota, or name another place."),
    **dict.fromkeys((errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM), _LIMIT_REACHED),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Name another place, or check its permissions: ls -ld."),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP), "Name another place: its name is too long, or a link loops."),
    **dict.fromkeys(_UNREACHABLE, "The disk, or the network behind it, fails: see dmesg, and check its mount."),
}
"""Errors of the operating system and advice about them. They are never a bug."""
Fix = str | Callable[[BaseException], str]
Json = dict[str, Any]
"""An object of JSON, in plain containers."""
BUG = "This is a bug of packtrain: please report it with the lines above."


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault: `what` is wrong, `where` ("run.yaml:12, optim.learning_rate"), and how to `fix` it.

    `code` names the fault, as in "no-model". It stays when the sentence changes; docs/errors.md lists all codes.
    """

    what: str
    where: str = ""
    fix: str = ""
    code: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        head += f" [{self.code}]" if self.code else ""
        return f"{head}\n    → {self.fix}" if self.fix else head


class PacktrainError(Exception):
    """Base of all errors for the user. `exit_code` is the process's; `shown` says whether the error is printed."""

    exit_code = 1
    shown = True

    def __init__(
        self, problems: str | Problem | Sequence[Problem], *, where: str = "", fix: str = "", code: str = ""
    ) -> None:
        if isinstance(problems, str):
            problems = Problem(problems, where, fix, code)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self):  # exceptions of data workers are pickled
        return (type(self), (self.problems,))

    def in_words(self) -> str:
        """Return the problems without their codes, to be part of a report."""
        return "\n".join(str(replace(problem, code="")) for problem in self.problems)

    def to_json(self) -> Json:
        """Return exit code and problems in plain containers, for `error_from_json` in another process."""
        return {"code": self.exit_code, "problems": [asdict(problem) for problem in self.problems]}


class UserError(PacktrainError):
    """The config, the data or the arguments are wrong."""

    exit_code = 2


class CheckFailed(PacktrainError):
    """A check before or during training failed: isolation, preflight, environment."""

    exit_code = 3


class Disagreement(CheckFailed):
    """The processes of a run disagree. All raise it with the same text; only those with `shown` print it."""

    def __init__(self, problems: str | Problem | Sequence[Problem], *, code: str = "", shown: bool = True) -> None:
        super().__init__(problems, code=code)
        self.shown = shown


class PeerFailed(PacktrainError):
    """Another process or the network failed while running."""

    exit_code = 4


class LostPeers(PeerFailed):
    """The other ranks disappeared during an operation. The rank that failed first usually says why."""


def read_json(path: Path) -> Json:
    """Return the JSON object in a file of the user. Raises UserError if there is none."""
    what = "not a JSON object" if path.is_file() else "there is no such file"  # reading a pipe could block
    try:
        if path.is_file() and isinstance(content := json.loads(path.read_bytes()), dict):
            return content
    except (OSError, ValueError, RecursionError) as error:
        what = f"not valid JSON: {error}"
    raise UserError(what, where=str(path), fix="Correct it, or download it again.", code="json-unreadable")


def error_from_json(content: Json) -> PacktrainError:
    """Return the error of another process, from its `to_json`."""
    kind = {UserError.exit_code: UserError, CheckFailed.exit_code: CheckFailed}.get(content["code"], PeerFailed)
    return kind([Problem(**problem) for problem in content["problems"]])


@contextmanager
def boundary(
    what: str, where: str = "", fix: Fix = "", code: str = "", through: type[Exception] = PacktrainError
) -> Iterator[None]:
    """Turn any exception of the block, even SystemExit, into a UserError.

    Its text is `what` and the first line of the exception. `fix` may depend on the error. PacktrainError, Ctrl-C, bugs of packtrain and errors
    of the type `through` pass unchanged. With RuntimeError as `through`, lost ranks and a lack of memory keep their own messages.
    """
    try:
        yield
    except (PacktrainError, KeyboardInterrupt, through):
        raise
    except BaseException as error:
        if is_ours(error):
            raise
        advice = fix if isinstance(fix, str) else fix(error)
        raise UserError(f"{what}: {first_line(error)}", where=where, fix=advice, code=code) from error


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Name another place in a UserError of the block."""
    try:
        yield
    except UserError as error:
        raise UserError([replace(problem, where=where) for problem in error.problems]) from error


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
        what = f"the other side does not answer: {error}"
        return PeerFailed(what, fix="Check whether it is up, and try again.", code="no-answer")
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        return UserError("there is not enough memory", fix=_LIMIT_REACHED, code="host-memory")
    place = raised_in(error)
    ours = place.startswith(_OURS)
    if isinstance(error, ImportError) and not (error.name.startswith("packtrain") if error.name else ours):
        cause = f" ({first_line(error.__cause__)})" if error.__cause__ else ""  # transformers imports lazily
        fix = f"Reinstall it, in a version that packtrain supports: pip check. {_SHOW_TRACEBACK}"
        return UserError(f"a package cannot be used: {first_line(error)}{cause}", fix=fix, code="package-unusable")
    if isinstance(error, OSError) and (not ours or error.errno in _FIXES):
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
        fix = _FIXES.get(error.errno or 0, f"Check the path and its contents. {_SHOW_TRACEBACK}")
        what = error.strerror or str(error) or type(error).__name__
        return UserError(what, where=" → ".join(names), fix=fix, code="system-refused")
    if isinstance(error, FileNotFoundError) and error.filename is None:  # raised by os.getcwd
        return UserError("the current folder is gone", fix="Go to one that exists: cd.", code="folder-gone")
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    imported = any(code.co_name == "<module>" and code.co_filename == place for code in frames)
    if "surrogates" in str(error) or (not ours and (imported or isinstance(error, (UnicodeError, RecursionError)))):
        fix = f"Correct the file, name or environment variable that it reads. {_SHOW_TRACEBACK}"
        return UserError(f"a library failed: {first_line(error)}", where=place, fix=fix, code="library-failed")
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
def staying() -> Iterator[None]:
    """Turn os._exit, called by other code in this thread, into UserError. It could end a run or a proof with exit code 0."""
    leave, process, thread = os._exit, os.getpid(), threading.get_ident()

    def stay(code: int) -> None:
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith(_OURS) or (os.getpid(), threading.get_ident()) != (process, thread):
            leave(code)
        what = f"it ended the process by os._exit({code})"
        raise UserError(what, where=caller, fix="Make it return or raise.", code="ends-process")

    with holding(os, _exit=stay):
        yield


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
        if isinstance(exit_.__context__, BrokenPipeError):  # rich ends a process like this, with code 1
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
        # a failed disk, perhaps on one machine only, is not the user's mistake
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
    print(clean("".join(kept)), end="", file=sys.stderr)  # what libraries said before there was a log
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
