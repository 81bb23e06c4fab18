"""Files as streams of chunks, in bounded memory (but for one JSON list, one text), without losing the line number.

JSON Lines and csv are read here rather than through `datasets` or pandas: those infer one schema for the whole file
(a row that differs fails far from its line, structs are filled with nulls), and name neither the line nor the field.
Compressed files are unpacked while they are read; zstd comes from pyarrow, which reads several frames in one file.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from packtrain.config.schema import SplitText
from packtrain.data.sources.chunks import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    BadRow,
    Chunk,
    LineChunk,
    ParsedChunk,
    RawRow,
    TableChunk,
    check_object,
    not_utf8,
    refuse_repeated_keys,
)
from packtrain.errors import UserError

PACKED = (".gz", ".zst")
_TEXTUAL = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
_TABLES = (".parquet", ".arrow")
SUFFIXES = (*_TEXTUAL, *(f"{suffix}{packed}" for suffix in _TEXTUAL for packed in PACKED), *_TABLES)
READABLE = f"Readable are {', '.join(_TEXTUAL)} (also with {' or '.join(PACKED)}), {', '.join(_TABLES)}"
LONGEST_TEXT = 1 << 25
"""Characters of a text that is tokenised as a whole, which takes up to 300 bytes for each."""
_UTF8 = "utf-8-sig"
_MARKS = {  # UTF-32 first: its mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_find_damage = re.compile("[\0\udc80-\udcff]").search
"""Finds NUL, or a byte that is not UTF-8, which open_text keeps as such a character."""


def check_regular(path: Path, where: str = "") -> None:
    """Raises UserError, at `where` or the path itself, for a folder, a FIFO (read without end) or a device."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"not a regular file: {path}", where=where or str(path), fix="Put a regular file there.")


def suffix_of(path: Path) -> str | None:
    """The suffix of SUFFIXES that the file's name ends with; None for a file that is not read."""
    name = path.name.lower()
    return max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default=None)


def kind_of(path: Path) -> str:
    """The suffix of SUFFIXES without that of a compression; "" for a file that is not read."""
    suffix = suffix_of(path) or ""
    return next((suffix.removesuffix(packed) for packed in PACKED if suffix.endswith(packed)), suffix)


def open_bytes(path: Path) -> BinaryIO:
    """The file, decompressed where its name ends in one of PACKED."""
    name = path.name.lower()
    if name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path))
    if name.endswith(".zst"):
        unpacked: Any = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")
        return io.BufferedReader(unpacked, 1 << 20)
    return open(path, "rb", 1 << 20)


def detect_encoding(path: Path) -> str:
    """_UTF8, or the form of Unicode that the byte order mark names; raises UserError for UTF-16 without a mark."""
    with open_bytes(path) as file:
        head = file.read(4)
    encoding = next((name for mark, name in _MARKS.items() if head.startswith(mark)), _UTF8)
    if encoding == _UTF8 and b"\0" in head[:2]:
        what = "the file begins with a NUL byte, as UTF-16 without a byte order mark does"
        fix = f"Convert it (iconv -f utf-16{'be' if head[0] == 0 else 'le'} -t utf-8), or get it anew if it is damaged."
        raise UserError(what, where=str(path), fix=fix)
    return encoding


def open_text(path: Path, newline: str | None = "") -> TextIO:
    """The file as text, `newline` as in `open`; in UTF-8, bytes that are none are kept as surrogates (\\udc80 to \\udcff)."""
    encoding = detect_encoding(path)
    return io.TextIOWrapper(open_bytes(path), encoding, "surrogateescape" if encoding == _UTF8 else "strict", newline)


def read_lines(path: Path) -> Iterator[bytes]:
    """Lines in UTF-8, each with the \\n that ends it."""
    encoding = detect_encoding(path)
    with open_bytes(path) as file:
        if encoding == _UTF8:
            yield from filter(None, [file.readline().removeprefix(codecs.BOM_UTF8)])
            yield from file
        else:
            yield from (line.encode() for line in io.TextIOWrapper(file, encoding, newline="\n"))


def read_file(path: Path, split_text: SplitText = "document") -> Iterator[Chunk]:
    """The rows of one file, in order; `split_text` says what is a row of running text.

    Raises UserError when the file as a whole cannot be read.
    """
    kind = kind_of(path)
    try:
        if kind in _TABLES:
            yield from _table(path, _parquet(path) if kind == ".parquet" else _arrow(path))
        elif kind in (".csv", ".tsv"):
            yield from _in_chunks(path, _csv(path, "\t" if kind == ".tsv" else None))
        elif kind == ".txt":
            yield from _in_chunks(path, read_texts(path, split_text))
        elif kind == ".json" and _is_list(path):
            yield from _in_chunks(path, _json_list(path))
        else:
            yield from _json_lines(path)
    except (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the file: {error}", where=str(path), fix="Check or renew the file.") from error


def _is_list(path: Path) -> bool:
    with open_text(path) as file:
        return file.read(1 << 16).lstrip().startswith("[")


def _json_lines(path: Path) -> Iterator[Chunk]:
    first, lines, size = 1, [], 0
    for number, line in enumerate(read_lines(path), 1):
        lines.append(line)
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


def _table(path: Path, batches: Iterator[pa.RecordBatch]) -> Iterator[Chunk]:
    first = 1
    for batch in batches:
        for start in range(0, batch.num_rows, CHUNK_ROWS):
            rows = range(start, min(start + CHUNK_ROWS, batch.num_rows))
            part = batch.take(pa.array(rows))  # a slice is pickled with the rest
            yield TableChunk(str(path), first, part, part.num_rows)
            first += part.num_rows


def _parquet(path: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=CHUNK_ROWS)


def _arrow(path: Path) -> Iterator[pa.RecordBatch]:
    """A file of Arrow's IPC, which is a stream (so `datasets` writes it) or a file with an index (Feather)."""
    with pa.memory_map(str(path)) as mapped:
        if mapped.read(6) == b"ARROW1":
            indexed = pa.ipc.open_file(mapped)
            yield from map(indexed.get_batch, range(indexed.num_record_batches))
        else:
            mapped.seek(0)
            yield from pa.ipc.open_stream(mapped)


def read_texts(path: Path, split: SplitText) -> Iterator[tuple[int, RawRow, int]]:
    """Each text with the line that it begins on and its length: the file, its lines, or what blank lines separate.

    Blank ones are no rows; a text has no line end before or after it.
    """
    with open_text(path, newline=None) as file:
        lines = enumerate(iter(lambda: file.readline(LONGEST_TEXT + 1), ""), 1)
        if split == "paragraph":
            groups = (group for blank, group in groupby(lines, lambda line: line[1].isspace()) if not blank)
        else:
            groups = [lines] if split == "document" else ([line] for line in lines)
        for group in groups:
            first, parts, size = 0, [], 0
            for number, line in group:
                first, size = first or number, size + len(line)
                if size > LONGEST_TEXT:
                    what = f"a {split} of more than {LONGEST_TEXT / 1e6:.0f} million characters is too long to be tokenised"
                    fix = "Set data.split_text to line or paragraph, or cut the file into several."
                    raise UserError(what, where=f"{path}:{first}", fix=fix)
                parts.append(line)
            text = "".join(parts).strip("\n")
            if text and not text.isspace():
                yield first, _refuse_damage(text, split) or {"text": text}, size


def _refuse_damage(text: str, thing: str, field: str = "") -> BadRow | None:
    """The BadRow of a `thing` of a text file with NUL or bytes that are not UTF-8; None for one without."""
    if (damage := _find_damage(text)) is None:
        return None
    line = f" (its line {1 + text.count(chr(10), 0, damage.start())})" if "\n" in text else ""
    if damage[0] == "\0":
        return BadRow("NUL bytes", f"the {thing}{line} holds NUL bytes", field, "The file is damaged: get it anew.")
    return not_utf8(f"the {thing}{line} holds bytes that are not", field)


def _csv(path: Path, separator: str | None) -> Iterator[tuple[int, RawRow, int]]:
    """Each row with its line and its length. All fields are strings: a column of digits stays text.

    Without a `separator` it is what the first line has most of: Excel writes semicolons in half of Europe, and tabs.
    """
    csv.field_size_limit(sys.maxsize)
    with open_text(path) as file:
        start = file.readline()
        separator = separator or max(",;\t", key=start.count)
        # strict: else an open quote swallows the rest of the file
        reader = csv.reader(chain([start], file), delimiter=separator, strict=True)
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
                if repeated := [name for name in header if header.count(name) > 1]:
                    fix = "Give each column its own name."
                    raise UserError(f"two columns are called {repeated[0]!r}", where=f"{path}:{line}", fix=fix)
            elif fields:
                yield line, _csv_row(header, fields), sum(map(len, fields)) + len(fields)


def _csv_row(header: list[str], fields: list[str]) -> RawRow:
    if len(fields) != len(header):
        return BadRow("broken csv", f"{len(fields)} fields, but the header names {len(header)}: {', '.join(header)}")
    damage = (_refuse_damage(field, "field", name) for name, field in zip(header, fields, strict=True))
    return next(filter(None, damage), None) or dict(zip(header, fields, strict=True))


def _json_list(path: Path) -> Iterator[tuple[int, RawRow, int]]:
    """Each element of a JSON list with its line and its length; the file's text is in memory, its rows are not.

    After a broken element the start of the next one is unknown, so it is an error even with data.bad_rows=skip.
    """
    with open_text(path) as file:
        text = file.read()
    decoder = json.JSONDecoder(object_pairs_hook=refuse_repeated_keys)
    space, comma = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n]*(?:,[ \t\r\n]*|(?=\]))")
    start, line, end = 0, 1, text.index("[") + 1
    at = cast("re.Match[str]", space.match(text, end)).end()
    try:
        while not text.startswith("]", at):
            line += text.count("\n", start, at)
            value, end = decoder.raw_decode(text, at)
            yield line, _refuse_damage(text[at:end], "element") or check_object(value), end - at
            if (following := comma.match(text, end)) is None:
                raise ValueError(f"expected ',' or ']' after an element, found {text[end : end + 1]!r}")
            start, at = at, following.end()
        if text[at + 1 :].strip():
            raise ValueError("there is more after the list's closing ]")
    except (ValueError, RecursionError) as error:
        fix = "A broken list cannot be skipped row by row: mend it, or write one object a line (.jsonl)."
        raise UserError(f"broken JSON: {error}", where=f"{path}:{line}", fix=fix) from error
