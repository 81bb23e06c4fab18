"""Tokenised documents on disk: an Arrow file that is mapped into memory, small index arrays beside it, a manifest.

    tokens.arrow   record batches of input_ids list<int32>, loss_mask list<bool> (one bit a token)
    lengths.npy    int32[n]   tokens of each document
    trained.npy    int32[n]   trained targets of each document
    fates.npy      FATES[rows]  what became of each row of the source, in its order (report.py)
    manifest.json  sizes and hash of the above, and the counts of how it came about

Documents are read through numpy views of the mapped buffers (a few microseconds each, no pyarrow objects), so all
processes of a machine share the pages. A folder whose files do not match the manifest is damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packtrain.data.report import FATES, Counts, Fate, count
from packtrain.data.sources.hashing import hash_bytes
from packtrain.data.tokens.tokenise import Documents

SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.bool_()))])
TOKENS, MANIFEST = "tokens.arrow", "manifest.json"
ARRAYS = ("lengths", "trained", "fates")


class DamagedStore(Exception):
    """The folder is not what its manifest says."""


@dataclass(frozen=True, slots=True)
class Document:
    """input_ids int32[n] and loss_mask bool[n]; loss_mask[t]: token t is a trained target. input_ids is read-only."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


class StoreWriter:
    """Writes a store into an empty folder, batch by batch; nothing is a store before `finish`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = pa.OSFile(str(folder / TOKENS), "wb")
        self._writer = pa.ipc.new_file(self._file, SCHEMA)
        self._ids, self._mask = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
        self._lengths: list[np.ndarray] = []
        self._trained: list[np.ndarray] = []
        self._fates: list[np.ndarray] = []
        self._reasons = {"": 0}

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if not self._file.closed:
            self._writer.close()
            self._file.close()

    def add(self, documents: Documents, fates: list[Fate]) -> None:
        """Append documents, as one record batch, and the fates of the rows they came from."""
        self._fates.append(np.array([self._record(fate) for fate in fates], FATES))
        if not len(documents.lengths):
            return
        borders = np.concatenate([[0], np.cumsum(documents.lengths, dtype=np.int64)]).astype(np.int32)
        ids = pa.ListArray.from_arrays(pa.array(borders), pa.array(documents.ids))
        mask = pa.ListArray.from_arrays(pa.array(borders), pa.array(documents.mask))
        self._writer.write_batch(pa.record_batch([ids, mask], schema=SCHEMA))
        self._ids.update(documents.ids.tobytes())
        self._mask.update(documents.mask.tobytes())
        self._lengths.append(documents.lengths)
        self._trained.append(np.add.reduceat(documents.mask, borders[:-1], dtype=np.int32))

    def _record(self, fate: Fate) -> tuple[int, ...]:
        values = {**fate._asdict(), "dropped": self._reasons.setdefault(fate.dropped, len(self._reasons))}
        return tuple(values[name] for name in FATES.fields or ())

    @property
    def counts(self) -> Counts:
        """The counts of all rows so far."""
        return count(np.concatenate(self._fates or [np.empty(0, FATES)]), list(self._reasons))

    def finish(self, format: str, seconds: float) -> None:
        """Write the index arrays and, last, the manifest."""
        self.close()
        lengths = np.concatenate(self._lengths)
        np.save(self.folder / "lengths.npy", lengths)
        np.save(self.folder / "trained.npy", np.concatenate(self._trained))
        np.save(self.folder / "fates.npy", np.concatenate(self._fates))
        whole = hashlib.blake2b(lengths.tobytes() + self._ids.digest() + self._mask.digest(), digest_size=16)
        files = [self.folder / TOKENS, *(self.folder / f"{name}.npy" for name in ARRAYS)]
        manifest = {
            "files": {path.name: {**_stamp(path), "hash": hash_bytes(path)} for path in files},
            "fingerprint": whole.hexdigest(),
            "format": format,
            "seconds": round(seconds, 3),
            "reasons": list(self._reasons),
            "counts": asdict(self.counts),
        }
        with open(self.folder / MANIFEST, "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())


class Store:
    """A finished store, mapped into memory; picklable by its path. Raises DamagedStore when it is not whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest = _verified(folder)
        self.fingerprint: str = manifest["fingerprint"]
        self.format: str = manifest["format"]
        self.seconds: float = manifest["seconds"]
        self.counts = Counts(**manifest["counts"])
        self.reasons: list[str] = manifest["reasons"]
        self.lengths, self.trained = (np.load(folder / f"{name}.npy") for name in ("lengths", "trained"))
        self.fates: np.ndarray = np.load(folder / "fates.npy", mmap_mode="r")  # hardly ever read
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(str(folder / TOKENS)))
            sizes = [self._reader.get_batch(k).num_rows for k in range(self._reader.num_record_batches)]
        except (OSError, pa.ArrowException) as error:
            raise DamagedStore(str(error)) from error
        self._first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        if self._first[-1] != len(self.lengths):
            raise DamagedStore(f"{self._first[-1]} documents, but {len(self.lengths)} lengths")
        self._views: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def __reduce__(self) -> tuple[type[Store], tuple[Path]]:
        return (Store, (self.folder,))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Document:
        """Document number `index`, from 0."""
        batch = int(np.searchsorted(self._first, index, side="right")) - 1
        borders, ids, bits = self._views.get(batch) or self._view(batch)
        row = index - self._first[batch]
        start, end = int(borders[row]), int(borders[row + 1])
        packed = bits[start >> 3 : (end + 7) >> 3]
        mask = np.unpackbits(packed, bitorder="little")[start & 7 : (start & 7) + end - start]
        return Document(ids[start:end], mask.view(bool))

    def _view(self, batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        columns = self._reader.get_batch(batch).columns
        borders = columns[0].offsets.to_numpy()
        ids = columns[0].values.to_numpy()
        bits = np.frombuffer(columns[1].values.buffers()[1], dtype=np.uint8)
        self._views[batch] = (borders, ids, bits)
        return self._views[batch]


def _stamp(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _verified(folder: Path) -> dict[str, Any]:
    """The manifest. Files are hashed again only if their time is not the manifest's (copied, or tampered with)."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, stamp in manifest["files"].items():
            found = _stamp(folder / name)
            if found["size"] != stamp["size"]:
                raise DamagedStore(f"{name} has {found['size']} bytes, the manifest says {stamp['size']}")
            if found["mtime_ns"] != stamp["mtime_ns"] and hash_bytes(folder / name) != stamp["hash"]:
                raise DamagedStore(f"{name} was changed")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedStore(f"{type(error).__name__}: {error}") from error
    return manifest
