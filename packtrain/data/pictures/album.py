"""Pictures of a token store on disk: references to files, and encoded bytes.

pictures.npy   PICTURES[n]  the pictures of all documents, in the order of their tokens
pictures.txt   UTF-8        names of files, end to end
pictures.bin   bytes        encoded pictures that rows or URLs held, each once
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from packtrain.data.pictures.encoded import Picture

INDEX, NAMES, BYTES = "pictures.npy", "pictures.txt", "pictures.bin"
_FIELDS = ("offset", "size", "height", "width", "start", "end", "hash")
PICTURES = np.dtype([("document", "i8"), ("name", "i8"), ("name_size", "i4"), ("height", "i4"), ("width", "i4"), ("start", "i4"),
                     ("end", "i4"), ("offset", "i8"), ("size", "i8"), ("hash", "u8")])  # fmt: skip
"""A Picture on disk. Its file is named at byte `name` of the names, by `name_size` bytes; 0 for the store's own."""


class AlbumWriter:
    """Writer of a store's pictures; without pictures it writes nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._documents = folder, 0
        self._rows: list[tuple[int, ...]] = []
        self._names: dict[str, int] = {}
        self._offsets: dict[tuple[int, int], int] = {}
        self._written = {NAMES: 0, BYTES: 0}

    def add(self, pictures: Sequence[tuple[Picture, ...]], documents: int) -> None:
        """Append the pictures of the next `documents`; `pictures` is empty if they have none."""
        for number, own in enumerate(pictures, self._documents):
            for picture in own:
                name = picture.file.encode()
                at, offset = 0, picture.offset
                if name:
                    at = self._names.setdefault(picture.file, self._written[NAMES])
                    self._write(NAMES, name, at)
                else:
                    offset = self._offsets.setdefault((picture.hash, picture.size), self._written[BYTES])
                    self._write(BYTES, picture.content, offset)
                place = (picture.height, picture.width, picture.start, picture.end, offset, picture.size, picture.hash)
                self._rows.append((number, at, len(name), *place))
        self._documents += documents

    def _write(self, name: str, content: bytes, at: int) -> None:
        if at == self._written[name]:  # not there yet
            with open(self._folder / name, "ab") as file:
                file.write(content)
            self._written[name] += len(content)

    def finish(self) -> str:
        """Write the index. Return a hash of all pictures, "" without any; it does not depend on the names of files."""
        if not self._rows:
            return ""
        index = np.array(self._rows, PICTURES)
        np.save(self._folder / INDEX, index)
        kept = [np.ascontiguousarray(index[name]) for name in ("document", "start", "end", "hash")]
        return hashlib.blake2b(b"".join(part.tobytes() for part in kept), digest_size=16).hexdigest()


class Album(Sequence[tuple[Picture, ...]]):
    """Pictures of each document of a store; false without pictures. Raises OSError or ValueError for damaged files.

    `index` has all of them, PICTURES[n].
    """

    def __init__(self, folder: Path, documents: int) -> None:
        self._folder, self._documents = folder, documents
        has = (folder / INDEX).exists()
        self.index: np.ndarray = np.load(folder / INDEX, mmap_mode="r") if has else np.empty(0, PICTURES)
        self._owners = np.ascontiguousarray(self.index["document"])
        named = has and (folder / NAMES).exists()
        self._names = np.memmap(folder / NAMES, np.uint8, "r") if named else np.empty(0, np.uint8)

    def __bool__(self) -> bool:
        return len(self.index) > 0

    def __len__(self) -> int:
        return self._documents

    def __getitem__(self, document: int) -> tuple[Picture, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        first, end = np.searchsorted(self._owners, [document, document + 1])
        return tuple(self._picture(row) for row in self.index[first:end])

    def _picture(self, row: np.void) -> Picture:
        name = self._names[row["name"] : row["name"] + row["name_size"]].tobytes().decode()
        offset, size, height, width, start, end, hashed = (int(row[field]) for field in _FIELDS)
        return Picture(name or str(self._folder / BYTES), offset, size, height, width, start, end, hashed)


def tabulate_pictures(parts: Iterable[tuple[Sequence[tuple[Picture, ...]], int]]) -> np.ndarray:
    """Return the pictures of several stores as PICTURES[n], documents counted through all. A part is (pictures, documents of the store).

    Without an album names of files are left out.
    """
    tables, first = [np.empty(0, PICTURES)], 0
    for pictures, documents in parts:
        if isinstance(pictures, Album):
            table = np.array(pictures.index)
        else:
            placed = [(number, picture) for number, own in enumerate(pictures) for picture in own]
            table = np.zeros(len(placed), PICTURES)
            table["document"] = [number for number, _ in placed]
            for field in _FIELDS:
                table[field] = [getattr(picture, field) for _, picture in placed]
        table["document"] += first
        tables.append(table)
        first += documents
    return np.concatenate(tables)
