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

CHUNK_ROWS = 256
CHUNK_BYTES = 1 << 20
SKIP_ADVICE = "data.bad_rows=skip counts and skips such rows."


class BadRow(Exception):
    """A row that cannot be used: it is counted under `reason`; `what` is the sentence, `field` the place in the row."""

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
    """Lines of a JSON Lines file; `first` is the number of the first one, from 1. `size` in bytes. Blank lines are no rows."""

    origin: str
    first: int
    lines: list[bytes]
    size: int

    def __len__(self) -> int:
        return sum(1 for line in self.lines if not line.isspace())

    def rows(self) -> Iterator[tuple[str, RawRow]]:
        """Each row with its place."""
        for number, line in enumerate(self.lines, self.first):
            if not line.isspace():
                yield f"{self.origin}:{number}", _parse_line(line)


@dataclass(frozen=True, slots=True)
class ParsedChunk:
    """Rows that the reader had to parse itself (csv, text, a JSON list), each with its line number. `size` in bytes."""

    origin: str
    numbers: list[int]
    values: list[RawRow]
    size: int

    def __len__(self) -> int:
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

    def rows(self) -> Iterator[tuple[str, RawRow]]:
        """Each row with its place."""
        for number in range(len(self)):
            try:
                values = self.batch.slice(number, 1).to_pylist()[0]
                row: RawRow = {name: _without_nulls(value) for name, value in values.items()}
            except UnicodeDecodeError as error:
                row = not_utf8(f"the row holds the byte 0x{error.object[error.start]:02x}")
            except (ValueError, OverflowError) as error:  # dates beyond Python's
                row = BadRow("unreadable", f"the row cannot be read: {error}")
            yield f"{self.origin}, row {self.first + number}", row


Chunk = LineChunk | ParsedChunk | TableChunk


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list) and value and not isinstance(value[0], (int, float, str)):  # not long lists of token ids
        return [_without_nulls(part) for part in value]
    return value


def _parse_line(line: bytes) -> RawRow:
    try:
        return check_object(json.loads(line.decode("utf-8"), object_pairs_hook=refuse_repeated_keys))
    except UnicodeDecodeError as error:
        return not_utf8(f"byte {error.start + 1} of the line is 0x{line[error.start]:02x}")
    except (ValueError, RecursionError) as error:
        fix = "Write one object a line (jq -c . FILE > rows.jsonl)."
        return BadRow("broken JSON", f"broken JSON: {error}", fix=fix)


def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises ValueError for one that has a key twice, of which Python would silently keep the last."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return values


def not_utf8(what: str, field: str = "") -> BadRow:
    """The BadRow of text in another encoding."""
    return BadRow("not UTF-8", f"not UTF-8: {what}", field, "Convert the file (iconv -f latin1 -t utf-8).")


def check_object(row: Any) -> RawRow:
    """`row` if it is a JSON object, else the BadRow that says what it is."""
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
