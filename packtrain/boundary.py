"""The boundary around what others wrote: a library at work on a user's file, or code that came with a model.

Whatever is raised there is for the user: a UserError with the file or config key, the library's own sentence, and a fix. Bugs of
packtrain stay bugs (exit code 1): `is_ours` tells them by the place where they were raised.
"""

from __future__ import annotations

import os
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from packtrain.errors import PacktrainError, UserError

_OURS = f"{Path(__file__).parent}{os.sep}"
_OF_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
_SITE_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_BUGS = (TypeError, AttributeError, LookupError, NameError, AssertionError, ArithmeticError, NotImplementedError)
_NAMELESS = (*_BUGS, StopIteration, RecursionError, SystemExit)
"""Errors whose text says little without their type: KeyError: 'added_tokens'."""
_LONGEST = 400
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


def raised_in(error: BaseException) -> str:
    """The file that raised the error, be it by a call of Python's own library; "" if nothing tells."""
    place, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(_OF_PYTHON) or any(folder in file for folder in _SITE_PACKAGES):
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
