"""Rows of a source by their number or by their file and line, read again from the source."""

from __future__ import annotations

import os
from collections.abc import Collection

from packtrain.data.sources.chunks import Chunk, LineChunk, ParsedChunk, RawRow
from packtrain.data.sources.locate import Source
from packtrain.errors import UserError
from packtrain.inspect.corpus import Corpus
from packtrain.wording import shortened, whole


def rows_at(source: Source, numbers: Collection[int]) -> dict[int, tuple[str, RawRow]]:
    """The place (file:line) and content of the rows of these numbers, from 0; it stops reading after the last one."""
    wanted, found, first = sorted(set(numbers)), dict[int, tuple[str, RawRow]](), 0
    if not wanted:
        return found
    for chunk in source.chunks():
        end = first + chunk.number_of_rows
        if inside := {number - first for number in wanted if first <= number < end}:
            found |= {first + at: row for at, row in enumerate(chunk.rows()) if at in inside}
        first = end
        if wanted[-1] < end:
            break
    return found


def rows_of(corpus: Corpus, rows: Collection[int]) -> dict[int, tuple[str, RawRow]]:
    """The place and content of each of these rows of a corpus."""
    found: dict[int, tuple[str, RawRow]] = {}
    for store, first in enumerate(corpus.first_rows[:-1].tolist()):
        if numbers := [row - first for row in rows if first <= row < corpus.first_rows[store + 1]]:
            found |= {first + at: row for at, row in rows_at(corpus.source(store), numbers).items()}
    return found


def row_at(corpus: Corpus, place: str) -> tuple[int, int, RawRow]:
    """The store, the number in it and the content of the row at `place` (FILE:LINE). Raises UserError if there is none."""
    file, colon, line = place.rpartition(":")
    if not colon or whole(line) is None or not file:
        what = f"{shortened(place)} is no place of a row"
        raise UserError(what, where="--source", fix="Write FILE:LINE, as in chats.jsonl:12 (of a table FILE:ROW).")
    seen = list[str]()
    for store in range(len(corpus.stores)):
        source, first = corpus.source(store), 0
        for chunk in source.chunks():
            seen += [] if chunk.origin in seen else [chunk.origin]
            if _is(chunk.origin, file) and _may_hold(chunk, int(line)):
                for at, (found, row) in enumerate(chunk.rows()):
                    if found in (f"{chunk.origin}:{line}", f"{chunk.origin}, row {line}"):
                        return store, first + at, row
            first += chunk.number_of_rows
    names = [one for one in seen if _is(one, file)]
    if not names:
        fix = f"Files of the data: {', '.join(seen[:4])}{' …' if len(seen) > 4 else ''}."
        raise UserError(f"the data has no file {file!r}", where="--source", fix=fix)
    what = f"{names[0]} has no row on line {line}"
    raise UserError(
        what, where="--source", fix="Lines count from 1, blank ones too; a .json list has a row where it begins."
    )


def _is(origin: str, file: str) -> bool:
    """Whether the user's name of a file is that of a chunk's origin: its path, its end, or its bare name."""
    return (
        origin == file
        or origin.endswith(f"/{file}")
        or os.path.realpath(origin) == os.path.realpath(os.path.expanduser(file))
    )


def _may_hold(chunk: Chunk, line: int) -> bool:
    if isinstance(chunk, ParsedChunk):
        return line in chunk.numbers
    size = len(chunk.lines) if isinstance(chunk, LineChunk) else len(chunk)
    return chunk.first <= line < chunk.first + size
