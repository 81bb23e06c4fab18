"""Chunks of raw rows for the tokenising processes; they pickle, and know each row's place.

(The place is file and line, or a row number.) The process that receives a chunk parses it (JSON, Arrow to Python), so parsing runs in
parallel; the reader only cuts files into chunks. A `BadRow` with a reason replaces a row that cannot be read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import pyarrow as pa

from packtrain.config import is_list
from packtrain.errors import Json, Problem

CHUNK_ROWS = 256
CHUNK_BYTES = 1 << 20
UNLISTED = " (not in dataset_info.json)"
"""Suffix for names of columns that an entry of LLaMA-Factory's list leaves out."""


class BadRow(Exception):
    """Unusable row, counted under `reason`. `what` is the sentence for the user, `field` the place in the row."""

    def __init__(self, reason: str, what: str, field: str = "", fix: str = "") -> None:
        super().__init__(reason, what, field, fix)
        self.reason, self.what, self.field, self.fix = reason, what, field, fix

    def problem(self, where: str) -> Problem:
        """Return the error for the user; `where` is the row's file and line."""
        place = f"{where}, {self.field}" if self.field else where
        fix = f"{self.fix or 'Fix the row.'} data.bad_rows=skip skips and counts such rows."
        return Problem(self.what, place, fix, f"row-{self.reason.replace(' ', '-').lower()}")


RawRow = Json | BadRow
Value = bytes | RawRow
"""A parsed row, or a line of JSON."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of the file or data set `origin`: values, or a batch of a table.

    `numbers` are line numbers if `by_line`, else row numbers, from 1. `size` is in bytes or rows, like the
    source's. `translate` renames the columns of each row (locate.py); `columns` maps our names to its own.
    `left_out` are the numbers of rows in data.leave_out.
    """

    origin: str
    numbers: Sequence[int]
    values: Sequence[Value] | pa.RecordBatch
    size: int
    by_line: bool = True
    translate: Callable[[RawRow], RawRow] | None = None
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    left_out: Collection[int] = ()

    @property
    def folder(self) -> str:
        """Return the file's folder. Relative paths of pictures start there."""
        if "://" in self.origin:
            return self.origin.rpartition("/")[0]
        return os.path.dirname(self.origin) if os.path.isfile(self.origin) else ""

    def __len__(self) -> int:
        return len(self.numbers)

    def place(self, at: int) -> str:
        """Return the place of row `at`, from 0."""
        return f"{self.origin}{':' if self.by_line else ', row '}{self.numbers[at]}"

    def rows(self) -> Iterator[tuple[str, RawRow]]:
        """Yield each row with its place."""
        for at in range(len(self)):
            if isinstance(self.values, pa.RecordBatch):
                row = _read_table_row(self.values, at)
            else:
                value = self.values[at]
                row = _parse_line(value) if isinstance(value, bytes) else value
            row = row if self.translate is None else self.translate(row)
            yield self.place(at), row


def cut_into_chunks(origin: str, rows: Iterable[tuple[int, Value, int]], *, by_line: bool = True) -> Iterator[Chunk]:
    """Cut rows into chunks; each row is given as (number, value, size)."""
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
    """Read row `at`, without nulls inside its columns.

    All objects of a table have the same fields, and fields that a row lacks are null: a tool call would get the arguments of
    every other tool. A value that Python cannot hold becomes a BadRow, which the reader's `wrong_type` returns.
    """
    return {name: drop_nulls(_as_python(batch.column(name)[at])) for name in batch.schema.names}


def _as_python(value: pa.Scalar) -> object:
    """Return an Arrow value in Python, or a BadRow. Bad values: text that is not UTF-8, a date beyond the year 9999, nanoseconds."""
    try:
        return value.as_py()
    except Exception as error:  # mostly ValueError and OverflowError; LookupError for time zones
        if isinstance(value, pa.StructScalar):
            return {name: _as_python(part) for name, part in value.items()}
        if isinstance(value, pa.ListScalar) and value.values is not None:
            return [_as_python(part) for part in value.values]
        return BadRow("unreadable", f"the value cannot be read: {error}")


def drop_nulls(value: object) -> object:
    """Return a value without the null fields of its objects."""
    if is_object(value):
        return {key: drop_nulls(part) for key, part in value.items() if part is not None}
    if is_list(value) and value and not isinstance(value[0], (int, float, str)):  # not for lists of token ids
        return [drop_nulls(part) for part in value]
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


def refuse_repeated_keys(pairs: list[tuple[str, object]]) -> Json:
    """Return a JSON object. Raises ValueError for a repeated key: Python would silently keep its last value."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return values


def is_object(value: object) -> TypeGuard[Json]:
    """Return whether it is a JSON object."""
    return isinstance(value, dict)


def check_object(row: object) -> RawRow:
    """Return `row` if it is a JSON object, else a BadRow that names its type."""
    return row if is_object(row) else wrong_type("an object", row, "")


def wrong_type(expected: str, value: object, where: str) -> BadRow:
    """Return the BadRow of a field that should be `expected`. It names the value's JSON type, and the value if it is short."""
    if isinstance(value, BadRow):
        return BadRow(value.reason, value.what, where)
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    name = names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
    shown = "" if value is None or len(repr(value)) > 40 else f": {value!r}"
    return BadRow("wrong type", f"expected {expected}, found {name}{shown}", where)
