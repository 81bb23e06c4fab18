"""Standard streams that cannot end a run, even if terminal or disk fails.

`packtrain sft … | head -1`, `>&-` and `> /dev/full` only lose the printed text; logs/ has it, too.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from packtrain.redact import CleanStream

_OUTPUTS = {"stdout": 1, "stderr": 2}
kept: list[str] = []
"""Output of libraries in `kept_from_terminal`, for the log of this process."""


def open_streams() -> None:
    """Open /dev/null for each closed standard stream, and make writes blocking.

    Otherwise the next open file would get the closed stream's number, and all output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name, number in _OUTPUTS.items():
        if getattr(sys, name) is None:  # Python sets it to None if it was closed at the start
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
        with suppress(OSError):
            os.set_blocking(number, True)


def outlive_terminal() -> None:
    """Drop output that cannot be printed, from now on. Called once, before a process trains or launches."""
    open_streams()
    for name, number in _OUTPUTS.items():
        stream: Any = getattr(sys, name)
        inner = stream.unchanged if isinstance(stream, CleanStream) else stream
        with suppress(OSError, ValueError):  # a stream of a test or a notebook has no descriptor, and stays
            if isinstance(inner, io.TextIOWrapper) and inner.fileno() == number:
                inner.flush()
                raw = _LastingFile(number, "w", closefd=False)
                by_lines = raw.isatty() or number == 2
                lasting = io.TextIOWrapper(io.BufferedWriter(raw), inner.encoding, "replace", line_buffering=by_lines)
                if isinstance(stream, CleanStream):
                    stream.unchanged = lasting
                else:
                    setattr(sys, name, lasting)


def redirect_output(file: Path) -> None:
    """Append the output of this process and its children to `file` from now on."""
    _point_outputs_at(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))


def _point_outputs_at(*descriptors: int) -> None:
    """Replace stdout and stderr by two descriptors, or by one, and close these."""
    with suppress(OSError, ValueError):  # the reader may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    for number, descriptor in zip(_OUTPUTS.values(), descriptors * 2, strict=False):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)


@contextmanager
def kept_from_terminal() -> Iterator[None]:
    """Keep all output of the block, even from C libraries, in `kept`.

    It is printed on stderr, too, if the block fails.
    """
    memory = os.memfd_create("printed") if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDWR)
    outputs, failed = [os.dup(number) for number in _OUTPUTS.values()], False
    _point_outputs_at(os.dup(memory))
    try:
        yield
    except Exception:
        failed = True
        raise
    finally:
        _point_outputs_at(*outputs)
        with open(memory, "rb") as file:
            file.seek(0)
            text = file.read().decode(errors="replace")
        kept.append(text)
        if failed:
            print(text, end="", file=sys.stderr, flush=True)


def quiet_at_exit() -> None:
    """Drop all output while Python tears down its objects.

    C++ libraries complain about objects that are still there.
    """
    atexit.register(lambda: _point_outputs_at(os.open(os.devnull, os.O_WRONLY)))


class _LastingFile(io.FileIO):
    """A descriptor that becomes /dev/null when a write fails. Writes wait even if another process made it non-blocking."""

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # the pipe is full
                select.select([], [self], [])
            return written
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return super().write(data)
