"""Standard streams that cannot end a training: its terminal may go away, or the disk that it is sent to fill up.

`packtrain sft … | head -1`, `>&-` and `> /dev/full` cost what would have been printed, and nothing else: logs/ has it.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO


def outlive_terminal() -> None:
    """From now on what can no longer be printed is dropped. Called once, before a process trains or launches."""
    open_all()
    sys.stdout, sys.stderr = _lasting(sys.stdout, 1), _lasting(sys.stderr, 2)


def open_all() -> None:
    """Opens /dev/null for each standard stream that is closed: else the next file takes its number, and all that is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


class _Lasting(io.FileIO):
    """A descriptor that becomes /dev/null when writing to it fails."""

    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # pyright: ignore[reportArgumentType]
        except BlockingIOError:
            raise
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)  # pyright: ignore[reportArgumentType]


def _lasting(stream: TextIO | None, number: int) -> TextIO:
    """`stream`, or in its place one that writes to its descriptor and does not fail; what is no descriptor stays as it is."""
    encoding, errors = "utf-8", "replace"
    if stream is not None:
        if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != number:
            return stream
        encoding = stream.encoding
        with suppress(OSError, ValueError):
            stream.flush()
    raw = _Lasting(number, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=raw.isatty() or number == 2)
