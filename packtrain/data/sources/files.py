"""Read files as streams of chunks, on this machine or through fsspec.

fsspec reads buckets (s3://, gs://, https://) and the Hugging Face hub (hf://).
Memory is bounded, except for a file with one JSON value or a text that is one row.
We do not read JSON Lines and csv with `datasets` or pandas: those infer one schema for the whole file
(a row that differs fails far from its line, structs are filled with nulls), and name neither the line nor the field.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import BinaryIO, TextIO, cast

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from packtrain.config import is_list
from packtrain.config.schema import DataSource, SplitText
from packtrain.data.formats.columns import COLUMNS
from packtrain.data.sources.chunks import (
    CHUNK_ROWS,
    BadRow,
    Chunk,
    RawRow,
    Value,
    check_object,
    cut_into_chunks,
    is_object,
    refuse_repeated_keys,
)
from packtrain.data.tokens.pretrained import OFFLINE_ADVICE, offline_unless_reachable
from packtrain.errors import PeerFailed, UserError

COMPRESSED = (".gz", ".zst")
_TEXTUAL = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
_TABLES = (".parquet", ".arrow")
_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile, csv.Error, pa.ArrowException)
SUFFIXES = (*_TEXTUAL, *(f"{suffix}{packed}" for suffix in _TEXTUAL for packed in COMPRESSED), *_TABLES)
_TABLE_CHUNK_BYTES = 16 << 20
"""Most bytes of a chunk of a table: many chunks wait for their processes, and pictures are large."""
_HOLDERS = {"data", "rows", "train", "examples"}  # keys of all rows, even if the file is a .jsonl of one line
READABLE = f"packtrain reads {', '.join(_TEXTUAL)} (also with {' or '.join(COMPRESSED)}), {', '.join(_TABLES)}"


def suffix_of(path: Path | RemoteFile) -> str | None:
    """Return the suffix of SUFFIXES that ends the file's name; None for other files."""
    name = path.name.lower()
    return max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default=None)


def kind_of(path: Path | RemoteFile) -> str:
    """Return the suffix of SUFFIXES without the compression's; "" for other files."""
    suffix = suffix_of(path) or ""
    return next((suffix.removesuffix(packed) for packed in COMPRESSED if suffix.endswith(packed)), suffix)


def read_file(path: Path | RemoteFile, split_text: SplitText = "document", first: int = 0) -> Iterator[Chunk]:
    """Yield the rows of one file in order, from chunk number `first` on. `split_text` cuts running text into rows.

    Raises UserError if the file as a whole cannot be read, PeerFailed if its server does not answer.
    """
    kind = kind_of(path)
    try:
        if kind in _TABLES:
            yield from _read_parquet(path, first) if kind == ".parquet" else islice(_read_arrow(path), first, None)
        elif kind in (".csv", ".tsv"):
            yield from islice(
                cut_into_chunks(str(path), _read_csv(path, "\t" if kind == ".tsv" else None)), first, None
            )
        elif kind == ".txt":
            yield from islice(cut_into_chunks(str(path), _read_texts(path, split_text)), first, None)
        else:
            rows, by_line = _read_json(path)
            yield from islice(cut_into_chunks(str(path), rows, by_line=by_line), first, None)
    except UnicodeDecodeError as error:
        fix = "Convert it (iconv -f latin1 -t utf-8, or -f utf-16), or download it again if it is damaged."
        what = f"cannot read the file, it is not {error.encoding}: {error}"
        raise UserError(what, where=str(path), fix=fix, code="not-utf8") from error
    except Exception as error:
        remote = isinstance(path, RemoteFile) and not isinstance(error, UserError)  # libraries raise anything
        if not (remote or isinstance(error, (OSError, *_DAMAGED))):
            raise
        away = remote and not isinstance(error, (*_DAMAGED, PermissionError, FileNotFoundError))
        fix = "Check the network and your access to it." if remote else "Check the file, or download it again."
        kind_of_error = PeerFailed if away else UserError  # after PeerFailed an engine may start the job again
        raise kind_of_error(f"cannot read the file: {error}", where=str(path), fix=fix, code="bad-data-file") from error


def _open_raw(path: Path | RemoteFile) -> BinaryIO:
    return path.open() if isinstance(path, RemoteFile) else open(path, "rb", 1 << 20)


def _open_bytes(path: Path | RemoteFile) -> BinaryIO:
    """Open the file, and decompress it if its name ends in one of COMPRESSED."""
    name = path.name.lower()
    if name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(_open_raw(path)))
    if name.endswith(".zst"):
        packed = pa.OSFile(str(path)) if isinstance(path, Path) else pa.PythonFile(path.open(), mode="r")
        return io.BufferedReader(pa.CompressedInputStream(packed, "zstd"), 1 << 20)
    return _open_raw(path)


def _open_text(path: Path | RemoteFile, newline: str | None = "") -> TextIO:
    """Open the file as text, `newline` as in `open`."""
    return io.TextIOWrapper(_open_bytes(path), "utf-8-sig", newline=newline)


def _read_json(path: Path | RemoteFile) -> tuple[Iterator[tuple[int, Value, int]], bool]:
    """Read a JSON file. Return each row with its number and size, and whether rows are lines (not blank).

    Otherwise the file is one value, with any suffix: a list of rows, an object with one list of rows ({"data": [...]}), or a row.
    """
    file, head = _open_bytes(path), list[bytes]()
    while len(shown := [*filter(None, map(bytes.strip, head))]) < 2 and (line := file.readline()):
        head.append(line if head else line.removeprefix(codecs.BOM_UTF8))
    start = shown[0] if shown else b""
    is_lines = start.startswith(b"{") and start.endswith(b"}") and len(shown) == 2
    if start.startswith((b"[", b"{")) and not is_lines:
        text = b"".join([*head, file.read()])
        head, file = [], io.BytesIO(text)
        if (rows := _find_rows(text, path)) is not None:
            return ((number, check_object(row), len(text) // len(rows)) for number, row in enumerate(rows, 1)), False
    lines = enumerate(chain(head, file), 1)
    return ((number, line, len(line)) for number, line in lines if line and not line.isspace()), True


def _find_rows(text: bytes, path: Path | RemoteFile) -> list[object] | None:
    """Return the rows of a file that is one JSON value. None: read it by line. UserError for a broken list."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=refuse_repeated_keys)
    except (ValueError, RecursionError) as error:
        if kind_of(path) != ".json" or not text.lstrip().startswith(b"["):
            return None
        if isinstance(error, UnicodeDecodeError):
            raise
        fix = "A broken list cannot be skipped row by row: mend it, or write one object a line (.jsonl)."
        raise UserError(f"broken JSON: {error}", where=str(path), fix=fix, code="broken-json") from error
    if not is_object(value):
        return value
    lists = {name: part for name, part in value.items() if is_list(part) and part and all(map(is_object, part))}
    is_row = kind_of(path) != ".json" and b"\n" not in text.strip() and len(value) > 1 and not _HOLDERS & lists.keys()
    (rows,) = lists.values() if len(lists) == 1 and not is_row else ([],)
    if rows and not (value.keys() & COLUMNS or {"role", "from"} & rows[0].keys()):
        return rows
    return [value] if b"\n" in text.strip() else None


def _read_texts(path: Path | RemoteFile, split: SplitText) -> Iterator[tuple[int, RawRow, int]]:
    """Yield each text with its first line number and its length. A text is the file, a line or a paragraph (between blank lines).

    Blank texts are no rows; a text has no line end before or after it.
    """
    with _open_text(path, newline=None) as file:
        if split == "document":
            texts: Iterator[tuple[int, str]] = iter([(1, file.read())])
        elif split == "line":
            texts = enumerate(file, 1)
        else:
            paragraphs = groupby(enumerate(file, 1), lambda line: line[1].isspace())
            parts = ([*lines] for blank, lines in paragraphs if not blank)
            texts = ((lines[0][0], "".join(line for _, line in lines)) for lines in parts)
        for number, text in texts:
            if text and not text.isspace():
                yield number, _refuse_nul({"text": text.strip("\n")}), len(text)


def _refuse_nul(row: dict[str, str]) -> RawRow:
    """Return the row, or a BadRow if a field holds NUL. Damaged files have NUL."""
    if name := next((name for name, text in row.items() if "\0" in text), None):
        return BadRow("NUL bytes", "the text holds NUL bytes", name, "The file is damaged: get it anew.")
    return row


def _read_csv(path: Path | RemoteFile, separator: str | None) -> Iterator[tuple[int, RawRow, int]]:
    """Yield each row with its line and length. All fields are strings: a column of digits stays text.

    The default `separator` is the most frequent one of the first line: Excel writes semicolons in half of Europe, and tabs.
    """
    csv.field_size_limit(sys.maxsize)
    with _open_text(path) as file:
        start = file.readline()
        separator = separator or max(",;\t", key=start.count)
        # strict: otherwise an open quote swallows the rest of the file
        reader = csv.reader(chain([start], file), delimiter=separator, strict=True)
        names = next((line for line in reader if line), list[str]())
        if repeated := [name for name in names if names.count(name) > 1]:
            fix = "Give each column its own name."
            what = f"two columns are called {repeated[0]!r}"
            raise UserError(what, where=f"{path}:{reader.line_num}", fix=fix, code="two-columns-alike")
        while True:
            line = reader.line_num + 1
            try:
                fields = next(reader, None)
            except csv.Error as error:
                yield line, BadRow("broken csv", f"broken csv: {error}"), 1
                continue
            if fields is None:
                return
            if len(fields) == len(names):
                yield line, _refuse_nul(dict(zip(names, fields, strict=True))), sum(map(len, fields)) + len(fields)
            elif fields:
                what = f"not as many fields as the header names: {', '.join(names)}"
                yield line, BadRow("broken csv", what), 1


def _rows_per_chunk(rows: int, size: int) -> int:
    """Return how many rows of a table make a chunk. The table has `rows` rows and `size` bytes.

    It is CHUNK_ROWS, or fewer for large rows, mostly with pictures.
    """
    return max(1, min(CHUNK_ROWS, _TABLE_CHUNK_BYTES * rows // max(size, 1)))


def _cut_table(
    path: Path | RemoteFile, batches: Iterator[pa.RecordBatch], first: int = 1, most: int | None = None
) -> Iterator[Chunk]:
    """Cut the batches into chunks of at most `most` rows; rows are numbered from `first`."""
    for batch in batches:
        step = most or _rows_per_chunk(batch.num_rows, batch.nbytes)
        for start in range(0, batch.num_rows, step):
            rows = range(start, min(start + step, batch.num_rows))
            part = batch.take(pa.array(rows))  # pickling a slice would include the whole batch
            yield Chunk(str(path), range(first, first + len(rows)), part, len(rows), by_line=False)
            first += len(rows)


def _read_parquet(path: Path | RemoteFile, first: int) -> Iterator[Chunk]:
    """Yield the chunks of each row group, from chunk number `first` on. Skips earlier groups without reading."""
    row = 1
    with _open_raw(path) as raw, pq.ParquetFile(raw) as file:
        for group in range(file.num_row_groups):
            rows, size = file.metadata.row_group(group).num_rows, file.metadata.row_group(group).total_byte_size
            most = _rows_per_chunk(rows, size)
            if (chunks := -(-rows // most)) > first:
                cut = _cut_table(path, file.iter_batches(most, row_groups=[group]), row, most)
                yield from islice(cut, first, None)
            first, row = max(first - chunks, 0), row + rows


def _read_arrow(path: Path | RemoteFile) -> Iterator[Chunk]:
    """Read an Arrow IPC file: a stream (as `datasets` writes) or an indexed file (Feather)."""
    opened = pa.memory_map(str(path)) if isinstance(path, Path) else pa.PythonFile(path.open(), mode="r")
    with opened as mapped:
        if mapped.read(6) == b"ARROW1":
            indexed = pa.ipc.open_file(mapped)
            yield from _cut_table(path, map(indexed.get_batch, range(indexed.num_record_batches)))
        else:
            mapped.seek(0)
            yield from _cut_table(path, iter(pa.ipc.open_stream(mapped)))


_WAITS_S = (1, 5, 25)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at a URL."""

    url: str

    @property
    def name(self) -> str:
        """Return the last part of the URL."""
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url

    def open(self) -> BinaryIO:
        """Open the file; its bytes are fetched while they are read."""
        return fsspec.open(self.url, "rb").open()


def list_remote(url: str, where: str) -> list[RemoteFile]:
    """List the file at `url`, or all files of a folder or glob. Sorted by name. UserError if it cannot be reached."""
    try:
        system, path = fsspec.core.url_to_fs(url)
        if any(sign in path for sign in "*?["):
            found = system.glob(path)
        else:
            found = [path] if system.isfile(path) else system.find(path)
            if not found:
                system.info(path)  # raises an error that says why
        seen = [name for name in sorted(map(str, found)) if "/." not in name.removeprefix(path)]  # none hidden
        return [RemoteFile(str(system.unstrip_protocol(name))) for name in seen]
    except ImportError as error:
        what = f"{url} cannot be read: {error}"
        raise UserError(what, where=where, fix="Install the package it names.", code="package-missing") from error
    except Exception as error:  # libraries of buckets may raise anything: no access, no such bucket, no network
        what = f"{url} cannot be read: {type(error).__name__}: {error}"
        raise UserError(what, where=where, fix="Check the URL and your access to it.", code="bad-url") from error


def read_patiently(name: str, read: Callable[[int], Iterator[Chunk]], first: int) -> Iterator[tuple[int, Chunk]]:
    """Yield a file's chunks from number `first` on, with their numbers. If reading a URL fails, wait and continue there."""
    for wait_s in (*_WAITS_S, None):
        try:
            for chunk in read(first):
                first += 1
                yield first - 1, chunk
            return
        except (UserError, PeerFailed):
            if wait_s is None or "://" not in name:
                raise
            time.sleep(wait_s)


def list_hub(source: DataSource, where: str) -> list[RemoteFile]:
    """List the files of a split of a hub data set. Raises UserError if it is not made of files."""
    import datasets

    with offline_unless_reachable() as online:
        try:
            files = datasets.load_dataset_builder(source.path, source.subset).config.data_files
        except Exception as error:  # the same errors as from load_dataset
            fix = "Check the spelling and the subset, and your access (hf auth login)." if online else OFFLINE_ADVICE
            what = f"the hub has no such data set: {error}"
            raise UserError(what, where=where, fix=fix, code="not-on-hub") from error
    if not files or source.split not in files:
        named = f"its splits are {', '.join(map(str, files))}" if files else "it is not made of files"
        fix = "Name a split, or its files as hf://datasets/OWNER/NAME/PATH."
        what = f"no files of the split {source.split!r} of {source.path}: {named}"
        raise UserError(what, where=where, fix=fix, code="no-such-split")
    return [RemoteFile(str(file)) for file in files[source.split]]
