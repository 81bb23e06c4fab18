"""Files as streams of chunks, in bounded memory (but for one JSON list, one text), without losing the line number.

JSON Lines and csv are read here rather than through `datasets` or pandas: those infer one schema for the whole file
(a row that differs fails far from its line, structs are filled with nulls), and name neither the line nor the field.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import zlib
from collections.abc import Iterator
from itertools import chain, groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from packtrain.config.schema import COLUMNS, SplitText
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
    each_once,
    not_utf8,
    nul_bytes,
)
from packtrain.data.sources.opening import PACKED, lines_of, open_text
from packtrain.errors import UserError

_TEXTUAL = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
_TABLES = (".parquet", ".arrow")
SUFFIXES = (*_TEXTUAL, *(f"{suffix}{packed}" for suffix in _TEXTUAL for packed in PACKED), *_TABLES)
READABLE = f"Readable are {', '.join(_TEXTUAL)} (also with {' or '.join(PACKED)}), {', '.join(_TABLES)}"
LONGEST_TEXT = 1 << 25
"""Characters of a text that is tokenised as a whole, which takes up to 300 bytes for each."""
_damaged = re.compile("[\0\udc80-\udcff]").search
"""Finds NUL, or a byte that was not UTF-8: open_text keeps it as such a character."""


def suffix_of(path: Path) -> str | None:
    """The suffix of SUFFIXES that the file's name ends with; None for a file we do not read."""
    name = path.name.lower()
    return max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default=None)


def kind_of(path: Path) -> str:
    """The suffix of SUFFIXES without that of a compression; "" for a file that we do not read."""
    suffix = suffix_of(path) or ""
    return next((suffix.removesuffix(packed) for packed in PACKED if suffix.endswith(packed)), suffix)


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
            yield from _in_chunks(path, texts(path, split_text))
        elif kind == ".json" and _first_character(path) == "[":
            yield from _in_chunks(path, _json_list(path))
        elif kind == ".json" and (wrong := _one_object(path)):
            raise wrong
        else:
            yield from _json_lines(path)
    except (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the file: {error}", where=str(path), fix="Check or renew the file.") from error


def _first_character(path: Path) -> str:
    with open_text(path) as file:
        return file.read(1 << 16).lstrip()[:1]


def _one_object(path: Path) -> UserError | None:
    """What is wrong with a .json file of one object around the rows, or of objects that have several lines each."""
    with open_text(path) as file:
        line = next((line for line in file if not line.isspace()), "")
        try:
            value = json.loads(line)
            if file.read(1 << 16).strip():
                return None  # an object a line
        except (ValueError, RecursionError):
            try:
                value, _ = json.JSONDecoder().raw_decode((line + file.read(LONGEST_TEXT)).lstrip())
            except (ValueError, RecursionError):
                return None  # read line by line it is named, or skipped
            line = ""
    if not isinstance(value, dict) or not value:
        return None
    if all(isinstance(part, dict) for part in value.values()):
        what, fix = "the rows are spread inside an object", 'With pandas: to_json(PATH, orient="records", lines=True).'
        return UserError(what, where=str(path), fix=fix)
    lists = [name for name, part in value.items() if isinstance(part, list) and not value.keys() & set(COLUMNS)]
    if not lists and line:
        return None
    what, fix = "an object of several lines", f"Write an object a line: jq -c . {path.name} > rows.jsonl."
    if lists:
        what = f"the rows are inside an object, most likely under {lists[0]!r}"
        fix = f"Take them out: jq '.\"{lists[0]}\"' {path.name} > rows.json."
    return UserError(what, where=str(path), fix=fix)


def _json_lines(path: Path) -> Iterator[Chunk]:
    first, lines, size = 1, [], 0
    for number, line in enumerate(lines_of(path), 1):
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
            part = (
                batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
            )  # a slice is pickled with the rest
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


def texts(path: Path, split: SplitText) -> Iterator[tuple[int, RawRow, int]]:
    """Each text with the line that it begins on and its length: the file, its lines, or what blank lines part.

    Blank ones are no rows; a text has no line end before or after it.
    """
    with open_text(path, newline=None) as file:
        read = iter(lambda: file.readline(LONGEST_TEXT + 1), "")
        lines = enumerate((line.removeprefix("\ufeff") for line in read), 1)  # files with a mark, joined
        if split == "paragraph":
            groups = (group for blank, group in groupby(lines, lambda line: line[1].isspace()) if not blank)
        else:
            groups = [lines] if split == "document" else ([line] for line in lines)
        for group in groups:
            first, held, size = 0, [], 0
            for number, line in group:
                first, size = first or number, size + len(line)
                if size > LONGEST_TEXT:
                    what = f"a {split} of more than {LONGEST_TEXT / 1e6:.0f} million characters is too long to be tokenised"
                    fix = "Set data.split_text to line or paragraph, or cut the file into several."
                    raise UserError(what, where=f"{path}:{first}", fix=fix)
                held.append(line)
            text = "".join(held).strip("\n")
            if text and not text.isspace():
                yield first, _damage(text, split) or {"text": text}, size


def _damage(text: str, thing: str, field: str = "") -> BadRow | None:
    """Why a `thing` of a text file cannot be used, if so."""
    if (found := _damaged(text)) is None:
        return None
    line = f" (its line {1 + text.count(chr(10), 0, found.start())})" if "\n" in text else ""
    if found[0] == "\0":
        return nul_bytes(f"the {thing}{line}", field)
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
                if twice := [name for name in header if header.count(name) > 1]:
                    fix = "Give each column its own name."
                    raise UserError(f"two columns are called {twice[0]!r}", where=f"{path}:{line}", fix=fix)
            elif fields:
                yield line, _csv_row(header, fields), sum(map(len, fields)) + len(fields)


def _csv_row(header: list[str], fields: list[str]) -> RawRow:
    if len(fields) != len(header):
        return BadRow("broken csv", f"{len(fields)} fields, but the header names {len(header)}: {', '.join(header)}")
    for name, field in zip(header, fields, strict=True):
        if bad := _damage(field, "field", name):
            return bad
    return dict(zip(header, fields, strict=True))


def _json_list(path: Path) -> Iterator[tuple[int, RawRow, int]]:
    """Each element of a JSON list with its line and its length; the file's text is in memory, its rows are not.

    After a broken element the start of the next one is unknown, so it is an error even with data.bad_rows=skip.
    """
    with open_text(path) as file:
        text = file.read()
    decoder, after_space = json.JSONDecoder(object_pairs_hook=each_once), re.compile(r"[ \t\r\n]*")

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
        row = _damage(read, "element") or checked_object(value)
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
