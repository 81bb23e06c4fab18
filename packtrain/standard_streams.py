"""Standard streams whose failure does not end a run: the terminal may close, or the disk behind a redirection may be full.

`packtrain sft … | head -1`, `>&-` and `> /dev/full` only lose what would have been printed; logs/ has it, too.
"""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from packtrain.redact import CleanStream

_OUTPUTS = {"stdout": 1, "stderr": 2}


def open_streams() -> None:
    """Opens /dev/null for each standard stream that is closed (else the next open file gets its number, and all output), and makes
    writes blocking."""
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
    """From now on, output that cannot be printed is dropped. Called once, before a process trains or launches."""
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
    """From now on, what this process and its children print is added to `file`."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in _OUTPUTS.values():
        os.dup2(descriptor, number)
    os.close(descriptor)


class _LastingFile(io.FileIO):
    """A descriptor that becomes /dev/null when a write fails; writes wait even if another process made it non-blocking."""

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
