"""Rows that data.leave_out drops from data.train.

The list is a text file with one FILE:LINE a line, as `packtrain inspect --ledger RUN --write FILE` makes it.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from packtrain.config.yaml_files import shown
from packtrain.data.sources.chunks import Chunk
from packtrain.data.sources.locate import Source
from packtrain.errors import UserError
from packtrain.wording import counted, listed, shortened

Places = dict[str, set[int]]
"""Lines, or rows of a table, by the real path of their file."""


def split_place(text: str) -> tuple[str, int] | None:
    """Split FILE:LINE, also written as `FILE, row LINE`. None for other texts."""
    found = re.fullmatch(r"([^\0\n]+?)(?::|, row )(\d{1,18})", text)
    return (found[1], int(found[2])) if found else None


def real_name(file: str) -> str:
    """Return a spelling that relative and absolute paths of a file share. Other names of sources have one, too."""
    return os.path.realpath(os.path.expanduser(file))


def read_places(path: str) -> Places:
    """Read a list of places. Blank lines do not count. UserError for an unreadable file, or a line that is no place."""
    places: Places = defaultdict(set)
    fix = "Write a FILE:LINE on each line, as packtrain inspect --ledger RUN --write FILE does."
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=path, fix=fix, code="bad-list-of-rows") from error
    for number, line in ((number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()):
        if (place := split_place(line)) is None:
            what = f"{shortened(line)} is not of the form FILE:LINE"
            raise UserError(what, where=f"{path}:{number}", fix=fix, code="not-file-and-line")
        places[real_name(place[0])].add(place[1])
    return places


class LeftOut:
    """The rows to leave out. `missing` are the listed places that were found in no source so far."""

    def __init__(self, path: str | None) -> None:
        """Read the list at `path`, if there is one."""
        self.path, self.listed = path or "", read_places(path) if path else Places()
        self.missing = {(file, line) for file, lines in self.listed.items() for line in lines}

    def mark(self, source: Source) -> Source:
        """Return the source with its listed rows in Chunk.left_out, and in its key."""
        own = [self.listed.get(real_name(name), set()) for name, _ in source.files]

        def marked(at: int, first: int) -> Iterator[Chunk]:
            chunks = source.files[at][1](first)
            return (replace(chunk, left_out=own[at].intersection(chunk.numbers)) for chunk in chunks)

        files = [(name, partial(marked, at)) for at, (name, _) in enumerate(source.files)]
        return replace(source, key=f"{source.key} without {[*map(sorted, own)]}", files=files) if any(own) else source

    def match(self, source: Source, rows: int | None) -> None:
        """Take the places of a marked source from `missing`.

        `rows` were left out of it. If that is not one for each place, it is read to find which. None: it was not read, and each place counts.
        """
        own = {real: read for name, read in source.files if (real := real_name(name)) in self.listed}
        found = {place for place in self.missing if place[0] in own}
        if rows not in (None, len(found)):
            found = {(real, line) for real, read in own.items() for chunk in read(0) for line in chunk.left_out}
        self.missing -= found

    def check(self) -> str:
        """Return a remark on listed places without a row, "" if all have one. Raises UserError if none has."""
        if not self.missing:
            return ""
        total = sum(map(len, self.listed.values()))
        names = listed([f"{shown(Path(file))}:{line}" for file, line in sorted(self.missing)])
        what = (
            f"{len(self.missing):,} of the {counted(total, 'places')} in {self.path} are no rows of data.train: {names}"
        )
        if len(self.missing) == total:
            fix = "Name files as packtrain inspect does. Lines count from 1, blank ones too; in a table, rows do."
            raise UserError(what, where="data.leave_out", fix=fix, code="no-such-row")
        return f"data.leave_out: {what}"
