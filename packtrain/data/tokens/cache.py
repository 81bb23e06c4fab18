"""Tokenised sources on disk: one folder each, complete or absent.

The folder's name is a hash of everything that determines its content. Its files:
    tokens.bin     int32[T]     the documents' ids, end to end
    mask.bin       bool[T]      True for trained targets
    lengths.npy    int32[n]     tokens of each document
    trained.npy    int32[n]     trained targets of each document
    fates.npy      FATES[rows]  the fate of each row of the source, in its order
    pictures.*     only with pictures: see data/pictures/album.py
    manifest.json  sizes of these files, a hash of their content, and the reasons why rows were dropped

Documents are numpy views of the mapped files (reading takes a microsecond), so all processes of a machine share the pages.
A store is built in a folder `*.building` and renamed when complete. A lock protects the build; the system releases it when its holder
dies. Processes that start together therefore build a store once, and an interrupted build is never mistaken for a result. Complete
stores are only read (the disk may be read-only) and never removed: another process may be training from them. A store is rebuilt if its
files do not have the manifest's sizes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from packtrain.data.formats.columns import merge_uses
from packtrain.data.pictures.album import Album, AlbumWriter
from packtrain.data.pictures.encoded import Picture
from packtrain.errors import PeerFailed, Problem, UserError
from packtrain.monitor.heartbeat import progress
from packtrain.system import hash_of, publish, write_text

TOKENS, MASK, MANIFEST = "tokens.bin", "mask.bin", "manifest.json"
ARRAYS = ("lengths", "trained", "fates")
POLL_S, STALLED_S = 0.5, 900.0
SETTLED_S = 2.0
"""A file changed this recently (in seconds) might change again within the file system's clock tick: its hash is not remembered."""


class DamagedStore(Exception):
    """The folder's files do not match its manifest."""


@dataclass(frozen=True, slots=True)
class Document:
    """Document with input_ids int32[n] and loss_mask bool[n], read-only. loss_mask[t]: token t is a trained target.

    `pictures` are in the order of their tokens.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    pictures: tuple[Picture, ...] = ()

    @property
    def keys(self) -> np.ndarray:
        """Return the ids, with negative hashes in place of pictures' tokens: int32[n].

        So documents with different pictures differ from the first token of the picture on.
        """
        if not self.pictures:
            return self.input_ids
        keys = self.input_ids.copy()
        for picture in self.pictures:
            halves = np.array([picture.hash, picture.hash >> 32], np.uint64).astype(np.uint32) | np.uint32(1 << 31)
            keys[picture.start : picture.end] = np.resize(halves.view(np.int32), picture.end - picture.start)
        return keys


REASONS = (
    "",
    "data.render=turns",
    "the chat template leaves out the thoughts of earlier answers (data.render)",
    "the chat template writes a prompt or an answer differently once others follow it (data.render)",
)
"""Why a row has a document for each answer, by the number in Fate.turns."""
BY_REQUEST, WITHOUT_THOUGHTS, REWRITTEN = 1, 2, 3


class Fate(NamedTuple):
    """Fate of one row: it gave `documents` documents, or was `dropped` for a reason.

    `content` is a hash of the row itself (formats/columns.py), independent of its documents. DataReport explains the fields up to
    `two_bos`. `packtrain inspect` shows the faults `marker` (the text has control tokens of the template) and `drops_system` (the
    template leaves the system prompt out). `margin` is the chosen answer's lead (reward only). `desirable` is the label of the row's first
    document (kto only); the second one of a pair is not desirable. `cut_pictures` were lost to data.max_length. `turns`: not 0 if
    the row gave a document for each trained answer, which are one example; the number says why (REASONS).
    """

    content: int
    cut_tokens: int = 0
    documents: int = 0
    dropped_chunks: int = 0
    dropped: str = ""
    truncated: bool = False
    split: bool = False
    apart: bool = False
    retold: bool = False
    tools_in_system: bool = False
    two_bos: bool = False
    marker: bool = False
    drops_system: bool = False
    margin: float = 0.0
    desirable: bool = False
    cut_pictures: int = 0
    turns: int = 0


FATES = np.dtype("u8,i8,i4,i4,i2,?,?,?,?,?,?,?,?,f4,?,i4,i1", align=True)
FATES.names = Fate._fields
"""A Fate on disk; its `dropped` is the number of the reason, 0 if the row is kept."""


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """Documents of a chunk end to end, with the fate of each row.

    ids int32[T], mask bool[T], lengths int32[n]. Any `problems` must stop the run. `unread` has the columns from `Row.unread`.
    `pictures`: the pictures of each document, `()` if no document has one.
    """

    ids: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    fates: list[Fate]
    problems: list[Problem]
    unread: dict[str, str]
    pictures: list[tuple[Picture, ...]] = field(default_factory=list[tuple[Picture, ...]])


class StoreWriter:
    """Writer of a store, chunk by chunk. The folder, empty at first, is a store only after `finish`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dropped = Counter[str]()
        self._unread: dict[str, str] = {}
        self._lengths: list[np.ndarray] = []
        self._trained: list[np.ndarray] = []
        self._fates: list[np.ndarray] = []
        self._reasons = {"": 0}
        self._album = AlbumWriter(folder)

    def add(self, chunk: EncodedChunk) -> None:
        """Append documents, and the fates of their rows; a reason is stored as its number."""
        fates = chunk.fates
        self.dropped.update(fate.dropped for fate in fates if fate.dropped)
        merge_uses(self._unread, chunk.unread)
        self._fates.append(_as_array(fates, self._reasons))
        self._album.add(chunk.pictures, len(chunk.lengths))
        if len(chunk.lengths):
            for name, values in ((TOKENS, chunk.ids), (MASK, chunk.mask)):
                with open(self.folder / name, "ab") as file:
                    file.write(values.data)
            starts = np.cumsum(chunk.lengths, dtype=np.int64) - chunk.lengths
            self._lengths.append(chunk.lengths)
            self._trained.append(np.add.reduceat(chunk.mask, starts, dtype=np.int32))

    def finish(self, format: str, seconds: float) -> None:
        """Write the index arrays and, last, the manifest."""
        for name, parts in zip(ARRAYS, (self._lengths, self._trained, self._fates), strict=True):
            np.save(self.folder / f"{name}.npy", np.concatenate(parts))
        content = "".join(hash_of(self.folder / name, 16) for name in (TOKENS, MASK, "lengths.npy"))
        content += self._album.finish()
        manifest = {
            "sizes": {path.name: path.stat().st_size for path in sorted(self.folder.iterdir())},
            "fingerprint": hashlib.blake2b(content.encode(), digest_size=16).hexdigest(),
            "format": format,
            "seconds": round(seconds, 3),
            "reasons": list(self._reasons),
            "unread": self._unread,
        }
        (self.folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _as_array(fates: list[Fate], reasons: dict[str, int]) -> np.ndarray:
    """Return fates as FATES[rows]. A reason is stored as its number in `reasons`, which grows."""
    numbers: list[Any] = [reasons.setdefault(fate.dropped, len(reasons)) for fate in fates]
    return np.array([tuple(fate._replace(dropped=at)) for fate, at in zip(fates, numbers, strict=True)], FATES)


class Store:
    """Finished store, mapped into memory; pickled by its path. Raises DamagedStore if files are missing or cut."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            for name, size in manifest["sizes"].items():
                if (actual := (folder / name).stat().st_size) != size:
                    raise ValueError(f"{name} has {actual} bytes, the manifest says {size}")
            self.fingerprint: str = manifest["fingerprint"]
            self.format: str = manifest["format"]
            self.seconds: float = manifest["seconds"]
            self.reasons: list[str] = manifest["reasons"]
            self.unread: dict[str, str] = manifest["unread"]
            self.lengths, self.trained = (np.load(folder / f"{name}.npy") for name in ("lengths", "trained"))
            self.fates: np.ndarray = np.load(folder / "fates.npy", mmap_mode="r")
            self.pictures: Sequence[tuple[Picture, ...]] = Album(folder, len(self.lengths)) or ()
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedStore(f"{type(error).__name__}: {error}") from error
        self._ids = np.asarray(np.memmap(folder / TOKENS, np.int32, "r"))
        self._mask = np.asarray(np.memmap(folder / MASK, bool, "r"))
        self._borders = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def __reduce__(self) -> tuple[type[Store], tuple[Path]]:
        return (Store, (self.folder,))

    def __len__(self) -> int:
        return len(self.lengths)

    def labels(self) -> np.ndarray:
        """Return whether each document is a desirable answer: bool[n]. Only for stores of packtrain kto."""
        row = np.repeat(np.arange(len(self.fates)), self.fates["documents"])
        labels = self.fates["desirable"][row]
        labels[1:] &= row[1:] != row[:-1]  # the second document of a row is a rejected answer
        return labels

    def read(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Read documents `first` to `end` - 1, end to end: ids int32[T], mask bool[T]. No page stays mapped."""
        start, count = int(self._borders[first]), int(self._borders[end] - self._borders[first])
        ids = np.fromfile(self.folder / TOKENS, np.int32, count, offset=4 * start)
        return ids, np.fromfile(self.folder / MASK, bool, count, offset=start)

    def __getitem__(self, index: int) -> Document:
        """Return document number `index`, from 0."""
        inside = slice(self._borders[index], self._borders[index + 1])
        return Document(self._ids[inside], self._mask[inside], self.pictures[index] if self.pictures else ())


class MemoryStore(Store):
    """Store in memory. Documents have ids int32[T], mask bool[T] and lengths int32[n]; their rows have FATES.

    `pictures`: the pictures of each document, `()` if no document has one.
    """

    def __init__(
        self,
        ids: np.ndarray,
        mask: np.ndarray,
        lengths: np.ndarray,
        fates: np.ndarray,
        format: str,
        reasons: Sequence[str] = ("",),
        pictures: Sequence[tuple[Picture, ...]] = (),
    ) -> None:
        self._ids, self._mask, self.lengths, self.fates = ids, mask, lengths, fates
        self.format, self.reasons, self.seconds, self.unread = format, [*reasons], 0.0, dict[str, str]()
        self._borders = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.trained = np.add.reduceat(mask, self._borders[:-1], dtype=np.int32) if len(lengths) else lengths
        self.pictures = pictures if any(pictures) else ()
        seen = repr([[picture.hash for picture in own] for own in self.pictures]).encode() if self.pictures else b""
        self.fingerprint = hashlib.blake2b(ids.tobytes() + mask.tobytes() + seen, digest_size=16).hexdigest()

    @classmethod
    def of(cls, chunk: EncodedChunk, format: str) -> MemoryStore:
        """Make the store of one chunk."""
        reasons = {"": 0}
        fates = _as_array(chunk.fates, reasons)
        store = cls(chunk.ids, chunk.mask, chunk.lengths, fates, format, [*reasons], chunk.pictures)
        store.unread = chunk.unread
        return store

    def read(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and mask of documents `first` to `end` - 1, as in Store."""
        inside = slice(self._borders[first], self._borders[end])
        return self._ids[inside], self._mask[inside]


def hash_file(path: Path, memory: Path) -> str:
    """Hash the file's bytes. The folder `memory` remembers hashes by (path, size, time of last change)."""
    stat = path.stat()
    key = f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}"
    note = memory / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    with suppress(OSError):
        if len(known := note.read_text(encoding="utf-8")) == 32:
            return known
    digest = hash_of(path, 16)
    if time.time() - stat.st_mtime > SETTLED_S:
        with suppress(OSError):  # the disk is read-only or full, or another process has just written it
            memory.mkdir(parents=True, exist_ok=True)
            write_text(note, digest)
    return digest


def cache_folder(configured: str | None) -> Path:
    """Return data.cache_dir, else $PACKTRAIN_CACHE, else ~/.cache/packtrain. Creates it, or raises UserError.

    A read-only folder is fine as long as it holds the data.
    """
    folder = Path(os.path.expanduser(configured or os.environ.get("PACKTRAIN_CACHE") or "~/.cache/packtrain"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot make the cache folder: {error}"
        raise UserError(what, where="data.cache_dir", fix="Set data.cache_dir.", code="cache-not-writable") from error
    return folder


def open_or_build(
    folder: Path, key: str, build: Callable[[Path], None], say: Callable[[str], None]
) -> tuple[Store, bool]:
    """Return the store of `key` and whether it was built now. `build(empty folder)` makes a missing store.

    Raises UserError on a full disk, PeerFailed if another process makes it and writes nothing for STALLED_S seconds.
    """
    final, building = folder / key, folder / f"{key}.building"
    if (store := _open_whole(final, say)) is not None:
        return store, False
    if not os.access(folder, os.W_OK):
        what = f"this data is not in {folder} yet, and nothing can be written there"
        fix = "Set data.cache_dir to another folder."
        raise UserError(what, where="data.cache_dir", fix=fix, code="cache-not-writable")
    with _acquire(folder / f"{key}.lock", building, say):
        if (store := _open_whole(final, say)) is not None:
            return store, False
        for remains in (building, final):
            shutil.rmtree(remains, ignore_errors=True)
        building.mkdir()
        try:
            build(building)
            publish(building, final)
        except BaseException as error:  # Ctrl-C too: an interrupted build leaves nothing
            shutil.rmtree(building, ignore_errors=True)
            if isinstance(error, OSError):
                what = f"the tokenised data cannot be kept: {error}"
                fix = "Make space there, or set data.cache_dir."
                raise UserError(what, where=str(folder), fix=fix, code="cache-not-kept") from error
            raise
    return Store(final), True


def _open_whole(folder: Path, say: Callable[[str], None]) -> Store | None:
    try:
        return Store(folder) if folder.is_dir() else None
    except DamagedStore as error:
        say(f"the tokenised data in {folder} is damaged ({error}) and will be rebuilt")
        return None


def _acquire(path: Path, building: Path, say: Callable[[str], None]) -> AbstractContextManager[object]:
    """Acquire the lock once its holder is done or has died; release it by `with`. Raises PeerFailed if the holder stalls."""
    lock, written = FileLock(path), 0.0
    while True:
        with suppress(Timeout):
            return lock.acquire(timeout=POLL_S)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        progress()  # for the watchdog: this wait has its own limit
        if not written:
            say("another process is tokenising this data; waiting for it")
            written = time.time()
        with suppress(OSError):  # the folder does not exist yet, or is complete
            written = max([written, *(file.stat().st_mtime for file in building.iterdir())])
        if time.time() - written > STALLED_S:
            what = f"another process is tokenising this data and has written nothing for {STALLED_S:.0f} s"
            fix = "See whether it hangs, end it, and start again."
            raise PeerFailed(what, where=str(building), fix=fix, code="tokenising-stalled")
