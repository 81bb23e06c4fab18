"""Standard streams that cannot end a training: its terminal may go away, or the disk that it is sent to fill up.

`packtrain sft … | head -1`, `>&-` and `> /dev/full` cost what would have been printed, and nothing else: logs/ has it.
"""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from typing import Any

from packtrain.redact import CleanStream

_OUTPUTS = {"stdout": 1, "stderr": 2}


def outlive_terminal() -> None:
    """From now on what can no longer be printed is dropped. Called once, before a process trains or launches."""
    open_all()
    for name, number in _OUTPUTS.items():
        stream: Any = getattr(sys, name)
        if isinstance(stream, CleanStream):
            stream.unchanged = _lasting(stream.unchanged, number)
        else:
            setattr(sys, name, _lasting(stream, number))


def wait_for_readers() -> None:
    """Makes writes to stdout and stderr block until they are read, also on a pipe that another process made non-blocking."""
    for number in _OUTPUTS.values():
        with suppress(OSError):
            os.set_blocking(number, True)


def open_all() -> None:
    """Opens /dev/null for each standard stream that is closed: else the next file takes its number, and all that is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name, number in _OUTPUTS.items():
        if getattr(sys, name) is None:  # as Python leaves those that were closed when it began
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


class _Lasting(io.FileIO):
    """A descriptor that becomes /dev/null when writing to it fails, and is waited for while its reader is slow."""

    def write(self, data: Any, /) -> int:
        try:
            while (written := super().write(data)) is None:  # full, and not to be waited for (O_NONBLOCK)
                select.select([], [self], [])
            return written
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def _lasting(stream: Any, number: int) -> Any:
    """A stream in place of `stream` that writes to its descriptor and does not fail; what is no such stream stays as it is."""
    with suppress(OSError, ValueError):  # a stream of a test or a notebook has no descriptor
        if isinstance(stream, io.TextIOWrapper) and stream.fileno() == number:
            stream.flush()
            return _to_descriptor(stream, number)
    return stream


def _to_descriptor(stream: io.TextIOWrapper, number: int) -> io.TextIOWrapper:
    raw = _Lasting(number, "w", closefd=False)
    by_lines = raw.isatty() or number == 2
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "replace", line_buffering=by_lines)
