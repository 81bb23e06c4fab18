"""Chunks of raw rows for the tokenising processes: picklable, with the place (file and line, or number) of every row.

The process that receives a chunk parses it (JSON, Arrow to Python), so parsing runs in parallel; the reader only cuts files
into chunks. A row that cannot be read is replaced by a `BadRow` that says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from packtrain.errors import Problem

CHUNK_ROWS = 256
CHUNK_BYTES = 1 << 20
UNLISTED = " (not in dataset_info.json)"
"""Ends the names of columns that an entry of LLaMA-Factory's list leaves out."""


class BadRow(Exception):
    """A row that cannot be used: it is counted under `reason`; `what` is the sentence, `field` the place in the row."""

    def __init__(self, reason: str, what: str, field: str = "", fix: str = "") -> None:
        super().__init__(reason, what, field, fix)
        self.reason, self.what, self.field, self.fix = reason, what, field, fix

    def problem(self, where: str) -> Problem:
        """The error for the user; `where` is the row's file and line."""
        place = f"{where}, {self.field}" if self.field else where
        return Problem(self.what, place, f"{self.fix or 'Fix the row.'} data.bad_rows=skip skips and counts such rows.")


RawRow = dict[str, Any] | BadRow
Value = bytes | RawRow
"""A row that is parsed, or a line of JSON."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of the file or data set `origin`, as values or as a batch of a table.

    `numbers` are those of their lines or, where `by_line` is not set, of the rows, from 1. `size` is in bytes or rows, as the
    source's. `translate` renames the columns of each row (dataset_info.py); `columns` are our names: its own.
    """

    origin: str
    numbers: Sequence[int]
    values: Sequence[Value] | pa.RecordBatch
    size: int
    by_line: bool = True
    translate: Callable[[RawRow], RawRow] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.numbers)

    def rows(self) -> Iterator[tuple[str, RawRow]]:
        """Each row with its place."""
        for at, number in enumerate(self.numbers):
            if isinstance(self.values, pa.RecordBatch):
                row = _read_table_row(self.values, at)
            else:
                value = self.values[at]
                row = _parse_line(value) if isinstance(value, bytes) else value
            row = row if self.translate is None else self.translate(row)
            yield f"{self.origin}{':' if self.by_line else ', row '}{number}", row


def cut_into_chunks(origin: str, rows: Iterable[tuple[int, Value, int]], *, by_line: bool = True) -> Iterator[Chunk]:
    """Chunks of rows, each given by its number, value and size."""
    numbers: list[int] = []
    values: list[Value] = []
    size = 0
    for number, value, weight in rows:
        numbers.append(number)
        values.append(value)
        size += weight
        if len(values) >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield Chunk(origin, numbers, values, size, by_line)
            numbers, values, size = [], [], 0
    if values:
        yield Chunk(origin, numbers, values, size, by_line)


def _read_table_row(batch: pa.RecordBatch, at: int) -> RawRow:
    """Row `at`, without nulls inside its columns.

    All objects of a table have the same fields; those that a row lacks are null, so a tool call would get the arguments of
    every other tool. A value that Python cannot hold is a BadRow, which `wrong_type` gives to whoever reads it.
    """
    return {name: _drop_nulls(_as_python(batch.column(name)[at])) for name in batch.schema.names}


def _as_python(value: Any) -> Any:
    """A value of Arrow, or the BadRow in its place: text that is not UTF-8, a date beyond the year 9999, nanoseconds."""
    try:
        return value.as_py()
    except Exception as error:  # ValueError and OverflowError mostly; of time zones LookupError
        if isinstance(value, pa.StructScalar):
            return {name: _as_python(part) for name, part in value.items()}
        if isinstance(value, pa.ListScalar) and value.values is not None:
            return [_as_python(part) for part in value.values]
        return BadRow("unreadable", f"the value cannot be read: {error}")


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list) and value and not isinstance(value[0], (int, float, str)):  # not long lists of token ids
        return [_drop_nulls(part) for part in value]
    return value


def _parse_line(line: bytes) -> RawRow:
    try:
        return check_object(json.loads(line.decode("utf-8"), object_pairs_hook=refuse_repeated_keys))
    except UnicodeDecodeError as error:
        what = f"not UTF-8: byte {error.start + 1} of the line is 0x{line[error.start]:02x}"
        return BadRow("not UTF-8", what, fix="Convert the file (iconv -f latin1 -t utf-8, or -f utf-16).")
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


def check_object(row: Any) -> RawRow:
    """`row` if it is a JSON object, else the BadRow that says what it is."""
    return row if isinstance(row, dict) else wrong_type("an object", row, "")


def wrong_type(expected: str, value: Any, where: str) -> BadRow:
    """The BadRow of a field that should be `expected`, with the value's type in the words of JSON, and a short value itself."""
    if isinstance(value, BadRow):
        return BadRow(value.reason, value.what, where)
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    name = names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
    shown = "" if value is None or len(repr(value)) > 40 else f": {value!r}"
    return BadRow("wrong type", f"expected {expected}, found {name}{shown}", where)
