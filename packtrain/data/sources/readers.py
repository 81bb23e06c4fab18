"""Files as streams of chunks, in bounded memory, without losing the line number.

JSON Lines and csv are read here rather than through `datasets` or pandas: those infer one schema for the whole file
(a row that differs fails far from its line, structs are filled with nulls), and name neither the line nor the field.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from packtrain.data.sources.rows import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    BadRow,
    Chunk,
    LineChunk,
    ParsedChunk,
    Row,
    TableChunk,
    checked_object,
    not_utf8,
    too_much,
)
from packtrain.errors import UserError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".json.gz", ".ndjson.gz", ".csv", ".parquet")


def suffix_of(path: Path) -> str | None:
    """The suffix of SUFFIXES that the file's name ends with; None for a file we do not read."""
    name = path.name.lower()
    return max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default=None)


def read_file(path: Path) -> Iterator[Chunk]:
    """The rows of one file, in order. Raises UserError when the file as a whole cannot be read."""
    suffix = suffix_of(path)
    try:
        if suffix == ".parquet":
            yield from _parquet(path)
        elif suffix == ".csv":
            yield from _csv(path)
        elif suffix in (".json", ".json.gz"):
            yield from _json_list(path) if _first_character(path) == b"[" else _json_lines(path)
        else:
            yield from _json_lines(path)
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise UserError(f"cannot read the file: {error}", where=str(path), fix="Check or renew the file.") from error


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.name.lower().endswith(".gz") else open(path, "rb")


def _first_character(path: Path) -> bytes:
    with _open(path) as file:
        return file.read(1 << 16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _json_lines(path: Path) -> Iterator[Chunk]:
    with _open(path) as file:
        first, lines, size = 1, [], 0
        for number, line in enumerate(file, 1):
            lines.append(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
            size += len(line)
            if len(lines) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                yield LineChunk(str(path), first, lines, size)
                first, lines, size = number + 1, [], 0
        if lines:
            yield LineChunk(str(path), first, lines, size)


def _in_chunks(path: Path, rows: Iterator[tuple[int, Row, int]]) -> Iterator[Chunk]:
    """Chunks of (line, row, bytes)."""
    numbers: list[int] = []
    values: list[Row] = []
    size = 0
    for number, row, weight in rows:
        numbers.append(number)
        values.append(row)
        size += weight
        if len(values) >= CHUNK_ROWS or size >= CHUNK_BYTES:
            yield ParsedChunk(str(path), numbers, values, size)
            numbers, values, size = [], [], 0
    if values:
        yield ParsedChunk(str(path), numbers, values, size)


def _csv(path: Path) -> Iterator[Chunk]:
    """All fields as strings: a column of digits stays text. Bad bytes are kept as surrogates and found per field."""
    csv.field_size_limit(sys.maxsize)

    def rows() -> Iterator[tuple[int, Row, int]]:
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file, strict=True)  # else an open quote swallows the rest of the file
            header: list[str] = []
            while True:
                before = reader.line_num
                try:
                    fields = next(reader, None)
                except csv.Error as error:
                    yield before + 1, BadRow("broken csv", f"broken csv: {error}"), 1
                    continue
                if fields is None:
                    return
                if not header:
                    header = fields
                    if twice := [name for name in header if header.count(name) > 1]:
                        fix = "Give each column its own name."
                        raise UserError(f"two columns are called {twice[0]!r}", where=f"{path}:{before + 1}", fix=fix)
                elif fields:
                    yield before + 1, _csv_row(header, fields), sum(map(len, fields)) + len(fields)

    yield from _in_chunks(path, rows())


def _csv_row(header: list[str], fields: list[str]) -> Row:
    if len(fields) != len(header):
        return BadRow("broken csv", f"{len(fields)} fields, but the header names {len(header)}: {', '.join(header)}")
    for name, field in zip(header, fields, strict=True):
        if not field.isascii() and any("\udc80" <= character <= "\udcff" for character in field):
            bad = not_utf8("the field holds bytes that are not")
            return BadRow(bad.reason, bad.what, name, bad.fix)
    return dict(zip(header, fields, strict=True))


def _parquet(path: Path) -> Iterator[Chunk]:
    with pq.ParquetFile(path) as file:
        first = 1
        for batch in file.iter_batches(batch_size=CHUNK_ROWS):
            yield TableChunk(str(path), first, batch, batch.num_rows)
            first += batch.num_rows


def _json_list(path: Path) -> Iterator[Chunk]:
    """One JSON list, element by element: the buffer holds a few elements, never the list.

    A broken element hides where the next one starts, so it is an error of the whole file, whatever data.bad_rows says.
    """
    with _open(path) as file:
        yield from _in_chunks(path, _ListParser(file, path).elements())


class _ListParser:
    """Reads `[element, element, …]` with json's raw_decode on a growing buffer; counts lines as it goes."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.block = 1 << 16
        self.pending = b""
        self.text, self.at, self.line = "", 0, 1

    def elements(self) -> Iterator[tuple[int, Row, int]]:
        """Each element with its line and its length in characters."""
        self._peek()
        self.at += 1  # the [ that made us read the file as a list
        separator = self._peek()
        while separator != "]":
            line, start = self.line, self.at
            value = self._element()
            yield line, checked_object(value), max(1, self.at - start)
            separator = self._peek()
            if separator not in (",", "]"):
                raise self._broken(
                    f"expected ',' or ']' after an element, found {separator or 'the end of the file'!r}"
                )
            if separator == ",":
                self.at += 1
                self._peek()
        self.at += 1
        if self._peek():
            raise self._broken("there is more after the list's closing ]")

    def _fill(self) -> bool:
        """One more block of the file into the buffer; blocks double while one element needs more of them."""
        block = self.file.read(self.block)
        if not block and not self.pending:
            return False
        self.block = min(self.block * 2, 1 << 26)
        data = self.pending + block
        cut = _whole_characters(data) if block else len(data)
        try:
            text = data[:cut].decode("utf-8")
        except UnicodeDecodeError as error:
            line = self.line + self.text.count("\n", self.at) + data.count(b"\n", 0, error.start)
            raise UserError(
                f"not UTF-8: byte 0x{data[error.start]:02x}",
                where=f"{self.path}:{line}",
                fix="Convert the file (iconv -f latin1 -t utf-8).",
            ) from error
        self.pending = data[cut:]
        self.text, self.at = self.text[self.at :] + text.removeprefix("\ufeff"), 0
        return True

    def _peek(self) -> str:
        """The next character that is not white space, "" at the end of the file."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
                self.line += self.text[self.at] == "\n"
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._fill():
                return ""

    def _element(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if self._fill():
                    continue
                line = self.line + self.text.count("\n", self.at, error.pos)
                raise self._broken(f"broken JSON: {error.msg}", line) from error
            except (ValueError, RecursionError) as error:
                raise self._broken(f"broken JSON: {too_much(error)}") from error
            if end == len(self.text) and self._fill():
                continue
            self.line += self.text.count("\n", self.at, end)
            self.at = end
            self.block = 1 << 16
            return value

    def _broken(self, what: str, line: int | None = None) -> UserError:
        fix = "A broken list cannot be skipped row by row: mend it, or write one object a line (.jsonl)."
        return UserError(what, where=f"{self.path}:{line or self.line}", fix=fix)


def _whole_characters(data: bytes) -> int:
    """Length of `data` without a UTF-8 character that is cut off at its end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return len(data)
        if byte >= 0xC0:
            needed = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return len(data) - back if needed > back else len(data)
    return len(data)
