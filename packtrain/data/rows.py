"""Raw rows on their way to a tokenising process: picklable chunks that know where every row came from.

Parsing (JSON, Arrow to Python) is left to whoever receives the chunk, so that it runs in parallel; the reader only
cuts files into chunks. A row that cannot be read travels as the `BadRow` that says why, in its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from packtrain.errors import Problem

CHUNK_ROWS = 256
CHUNK_BYTES = 1 << 20
SKIP_ADVICE = "data.bad_rows=skip counts and skips such rows."


class BadRow(Exception):
    """A row that cannot be used: it is counted under `reason`; `what` is the sentence, `field` the place in it."""

    def __init__(self, reason: str, what: str, field: str = "", fix: str = "") -> None:
        super().__init__(reason, what, field, fix)
        self.reason, self.what, self.field, self.fix = reason, what, field, fix

    def problem(self, where: str) -> Problem:
        """The row's fault as the user sees it; `where` is its file and line."""
        place = f"{where}, {self.field}" if self.field else where
        return Problem(self.what, place, f"{self.fix} Or: {SKIP_ADVICE}" if self.fix else f"Mend it, or {SKIP_ADVICE}")


Row = dict[str, Any] | BadRow


@dataclass(frozen=True, slots=True)
class LineChunk:
    """Lines of a JSON Lines file; `first` is the number of the first one, from 1. `size` in bytes."""

    origin: str
    first: int
    lines: list[bytes]
    size: int

    def __len__(self) -> int:
        return len(self.lines)

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Each row with its place; blank lines are not rows."""
        for number, line in enumerate(self.lines, self.first):
            if not line.isspace():
                yield f"{self.origin}:{number}", _parse_line(line)


@dataclass(frozen=True, slots=True)
class ParsedChunk:
    """Rows that the reader had to parse itself (csv, one JSON list), each with its line number. `size` in bytes."""

    origin: str
    numbers: list[int]
    values: list[Row]
    size: int

    def __len__(self) -> int:
        return len(self.values)

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Each row with its place."""
        for number, row in zip(self.numbers, self.values, strict=True):
            yield f"{self.origin}:{number}", row


@dataclass(frozen=True, slots=True)
class TableChunk:
    """Rows of a table (parquet, Arrow); `first` is the number of the first one, from 1. `size` in rows."""

    origin: str
    first: int
    batch: pa.RecordBatch
    size: int

    def __len__(self) -> int:
        return self.batch.num_rows

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Each row with its place."""
        for number, row in enumerate(self.batch.to_pylist(), self.first):
            yield f"{self.origin}, row {number}", row


Chunk = LineChunk | ParsedChunk | TableChunk


def _parse_line(line: bytes) -> Row:
    if b"\0" in line:
        return BadRow(
            "NUL bytes", "the line holds NUL bytes", fix="The file is damaged (crash or bad copy): get it anew."
        )
    try:
        text = line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        return not_utf8(f"byte {error.start + 1} of the line is 0x{line[error.start]:02x}")
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        return BadRow("broken JSON", f"broken JSON at column {error.colno}: {error.msg}")
    except RecursionError:
        return BadRow("broken JSON", "the JSON is nested too deeply")
    return checked_object(row)


def not_utf8(found: str) -> BadRow:
    """The fault of text in another encoding."""
    return BadRow("not UTF-8", f"not UTF-8: {found}", fix="Convert the file (iconv -f latin1 -t utf-8).")


def checked_object(row: Any) -> Row:
    """`row` if it is a JSON object."""
    if isinstance(row, dict):
        return row
    return BadRow("not an object", f"expected an object ({{...}}), found {kind_of(row)}")


def kind_of(value: Any) -> str:
    """A value's type in the words of JSON, with the value itself where it is short."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    name = names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
    shown = repr(value)
    return name if value is None or len(shown) > 40 else f"{name}: {shown}"
