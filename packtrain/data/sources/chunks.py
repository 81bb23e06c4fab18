"""Chunks of raw rows for the tokenising processes: picklable, with the file and line of every row.

The process that receives a chunk parses it (JSON, Arrow to Python), so parsing runs in parallel; the reader only cuts files
into chunks. An unreadable row is replaced by a `BadRow` that says why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from packtrain.errors import Problem

_BLANK = b" \t\r\n\v\f\xef\xbb\xbf"
"""White space, and the mark that a line begins with where files with one were joined."""
CHUNK_ROWS = 256
CHUNK_BYTES = 1 << 20
SKIP_ADVICE = "data.bad_rows=skip counts and skips such rows."


class BadRow(Exception):
    """A row that cannot be used: it is counted under `reason`; `what` is the sentence, `field` the place in it."""

    def __init__(self, reason: str, what: str, field: str = "", fix: str = "") -> None:
        super().__init__(reason, what, field, fix)
        self.reason, self.what, self.field, self.fix = reason, what, field, fix

    def problem(self, where: str) -> Problem:
        """The error for the user; `where` is the row's file and line."""
        place = f"{where}, {self.field}" if self.field else where
        return Problem(self.what, place, f"{self.fix} Or: {SKIP_ADVICE}" if self.fix else f"Mend it, or {SKIP_ADVICE}")


class NoPair(BadRow):
    """A valid row that makes no preference pair: it is counted, and never an error."""


RawRow = dict[str, Any] | BadRow


@dataclass(frozen=True, slots=True)
class LineChunk:
    """Lines of a JSON Lines file; `first` is the number of the first one, from 1. `size` in bytes."""

    origin: str
    first: int
    lines: list[bytes]
    size: int

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def number_of_rows(self) -> int:
        """Rows, without parsing them."""
        return sum(1 for line in self.lines if line.strip(_BLANK))

    def rows(self) -> Iterator[tuple[str, RawRow]]:
        """Each row with its place; blank lines are not rows."""
        for number, line in enumerate(self.lines, self.first):
            if line.strip(_BLANK):
                yield f"{self.origin}:{number}", _parse_line(line)


@dataclass(frozen=True, slots=True)
class ParsedChunk:
    """Rows that the reader had to parse itself (csv, one JSON list), each with its line number. `size` in bytes."""

    origin: str
    numbers: list[int]
    values: list[RawRow]
    size: int

    def __len__(self) -> int:
        return len(self.values)

    @property
    def number_of_rows(self) -> int:
        """Rows."""
        return len(self.values)

    def rows(self) -> Iterator[tuple[str, RawRow]]:
        """Each row with its place."""
        for number, row in zip(self.numbers, self.values, strict=True):
            yield f"{self.origin}:{number}", row


@dataclass(frozen=True, slots=True)
class TableChunk:
    """Rows of a table (parquet, Arrow); `first` is the number of the first one, from 1. `size` in rows.

    All objects of a table have the same fields; fields that a row lacks are null, so a tool call would get the arguments of
    every other tool. Nulls inside a column are therefore dropped.
    """

    origin: str
    first: int
    batch: pa.RecordBatch
    size: int

    def __len__(self) -> int:
        return self.batch.num_rows

    @property
    def number_of_rows(self) -> int:
        """Rows."""
        return self.batch.num_rows

    def rows(self) -> Iterator[tuple[str, RawRow]]:
        """Each row with its place."""
        try:
            rows: list[RawRow] = self.batch.to_pylist()
        except (ValueError, OverflowError):
            rows = [_row_of_table(self.batch.slice(number, 1)) for number in range(len(self))]
        for number, row in enumerate(rows, self.first):
            if not isinstance(row, BadRow):
                row = {name: _without_nulls(value) for name, value in row.items()}
            yield f"{self.origin}, row {number}", row


Chunk = LineChunk | ParsedChunk | TableChunk


def _row_of_table(one: pa.RecordBatch) -> RawRow:
    """The row of a table of one row; text that is not UTF-8 and dates beyond Python's are found only by reading them."""
    try:
        return one.to_pylist()[0]
    except UnicodeDecodeError as error:
        return not_utf8(f"the row holds the byte 0x{error.object[error.start]:02x}")
    except (ValueError, OverflowError) as error:
        return BadRow("unreadable", f"the row cannot be read: {error}")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list) and not isinstance(
        next(iter(value), 0), (int, float, str)
    ):  # skips long lists of token ids
        return [_without_nulls(part) for part in value]
    return value


def _parse_line(line: bytes) -> RawRow:
    if b"\0" in line:
        return nul_bytes("the line")
    try:
        row = json.loads(line.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n"), object_pairs_hook=each_once)
    except UnicodeDecodeError as error:
        return not_utf8(f"byte {error.start + 1} of the line is 0x{line[error.start]:02x}")
    except json.JSONDecodeError as error:
        return BadRow("broken JSON", f"broken JSON at column {error.colno}: {error.msg}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; too deeply nested lists
        return BadRow("broken JSON", f"broken JSON: {error}")
    return checked_object(row)


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; raises ValueError for one that has a key twice, of which Python would keep the last, without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def nul_bytes(thing: str, field: str = "") -> BadRow:
    """The BadRow of UTF-16 that does not say so, and of damage."""
    fix = "The file is UTF-16 (iconv -f utf-16 -t utf-8), or damaged by a crash or a bad copy: get it anew."
    return BadRow("NUL bytes", f"{thing} holds NUL bytes", field, fix)


def not_utf8(found: str, field: str = "") -> BadRow:
    """The BadRow of text in another encoding."""
    return BadRow("not UTF-8", f"not UTF-8: {found}", field, "Convert the file (iconv -f latin1 -t utf-8).")


def checked_object(row: Any) -> RawRow:
    """`row` if it is a JSON object."""
    if isinstance(row, dict):
        return row
    fix = "If the file is one list of rows, call it .json." if isinstance(row, list) else ""
    return BadRow("not an object", f"expected an object ({{...}}), found {json_type(row)}", fix=fix)


def wrong_type(expected: str, value: Any, where: str) -> BadRow:
    """The BadRow of a field that should be `expected`."""
    return BadRow("wrong type", f"expected {expected}, found {json_type(value)}", where)


def json_type(value: Any) -> str:
    """A value's type in the words of JSON, with the value itself where it is short."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    name = names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
    shown = repr(value)
    return name if value is None or len(shown) > 40 else f"{name}: {shown}"
