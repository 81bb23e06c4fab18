"""Files as streams of chunks, in bounded memory (but for one JSON list), without losing the line number.

JSON Lines and csv are read here rather than through `datasets` or pandas: those infer one schema for the whole file
(a row that differs fails far from its line, structs are filled with nulls), and name neither the line nor the field.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from packtrain.data.sources.chunks import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    BadRow,
    Chunk,
    LineChunk,
    ParsedChunk,
    RawRow,
    TableChunk,
    checked_object,
    not_utf8,
)
from packtrain.errors import UserError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".json.gz", ".ndjson.gz", ".csv", ".parquet")
_undecoded = re.compile("[\udc80-\udcff]").search
"""Finds a byte that was not UTF-8: `surrogateescape` keeps it as such a character."""


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
            yield from _in_chunks(path, _csv(path))
        elif suffix in (".json", ".json.gz") and _first_character(path) == b"[":
            yield from _in_chunks(path, _json_list(path))
        else:
            yield from _json_lines(path)
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise UserError(f"cannot read the file: {error}", where=str(path), fix="Check or renew the file.") from error


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.name.lower().endswith(".gz") else open(path, "rb")


def _open_text(path: Path) -> TextIO:
    """The file as text, line ends as they are; bytes that are not UTF-8 are kept as surrogates, see `_undecoded`."""
    return io.TextIOWrapper(_open(path), encoding="utf-8-sig", errors="surrogateescape", newline="")


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


def _in_chunks(path: Path, rows: Iterator[tuple[int, RawRow, int]]) -> Iterator[Chunk]:
    """Chunks of (line, row, bytes)."""
    numbers: list[int] = []
    values: list[RawRow] = []
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


def _parquet(path: Path) -> Iterator[Chunk]:
    with pq.ParquetFile(path) as file:
        first = 1
        for batch in file.iter_batches(batch_size=CHUNK_ROWS):
            yield TableChunk(str(path), first, batch, batch.num_rows)
            first += batch.num_rows


def _csv(path: Path) -> Iterator[tuple[int, RawRow, int]]:
    """Each row with its line and its length. All fields are strings: a column of digits stays text."""
    csv.field_size_limit(sys.maxsize)
    with _open_text(path) as file:
        reader = csv.reader(file, strict=True)  # else an open quote swallows the rest of the file
        header: list[str] = []
        while True:
            line = reader.line_num + 1
            try:
                fields = next(reader, None)
            except csv.Error as error:
                yield line, BadRow("broken csv", f"broken csv: {error}"), 1
                continue
            if fields is None:
                return
            if not header:
                header = fields
                if twice := [name for name in header if header.count(name) > 1]:
                    fix = "Give each column its own name."
                    raise UserError(f"two columns are called {twice[0]!r}", where=f"{path}:{line}", fix=fix)
            elif fields:
                yield line, _csv_row(header, fields), sum(map(len, fields)) + len(fields)


def _csv_row(header: list[str], fields: list[str]) -> RawRow:
    if len(fields) != len(header):
        return BadRow("broken csv", f"{len(fields)} fields, but the header names {len(header)}: {', '.join(header)}")
    for name, field in zip(header, fields, strict=True):
        if _undecoded(field):
            return not_utf8("the field holds bytes that are not", name)
    return dict(zip(header, fields, strict=True))


def _json_list(path: Path) -> Iterator[tuple[int, RawRow, int]]:
    """Each element of a JSON list with its line and its length; the file's text is in memory, its rows are not.

    After a broken element the start of the next one is unknown, so it is an error even with data.bad_rows=skip.
    """
    with _open_text(path) as file:
        text = file.read()
    decoder, after_space = json.JSONDecoder(), re.compile(r"[ \t\r\n]*")

    def after(at: int) -> int:
        """The place of the next character from `at` on that is not white space."""
        found = after_space.match(text, at)
        assert found is not None
        return found.end()

    def broken(what: str, at: int) -> UserError:
        fix = "A broken list cannot be skipped row by row: mend it, or write one object a line (.jsonl)."
        line = 1 + text.count("\n", 0, at)
        return UserError(what, where=f"{path}:{line}", fix=fix)

    at = after(text.index("[") + 1)
    line = 1 + text.count("\n", 0, at)
    while text[at : at + 1] != "]":
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise broken(f"broken JSON: {error}", getattr(error, "pos", at)) from error
        read = text[at:end]
        row = not_utf8("the element holds bytes that are not") if _undecoded(read) else checked_object(value)
        yield line, row, len(read)
        following = after(end)
        if text.startswith(",", following):
            following = after(following + 1)
        elif not text.startswith("]", following):
            found = text[following : following + 1] or "the end of the file"
            raise broken(f"expected ',' or ']' after an element, found {found!r}", following)
        line += text.count("\n", at, following)
        at = following
    if after(at + 1) < len(text):
        raise broken("there is more after the list's closing ]", after(at + 1))
