"""A teacher's records of targets (top_k.py), computed once and kept in the folder data.cache_dir/teacher/KEY.

Each process of an attempt writes two files of its own, since network disks lose data if machines write into one file:
    A-R.bin  int32 [n, width]  records, as they are made
    A-R.idx  INDEX [m]         runs of targets of one document, written after their records
Targets are numbered through the data set, document by document. A killed attempt leaves whole micro-batches; the next one computes the other
documents. A document counts if one attempt has all of its targets. Every reading compares the hashes of runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import xxhash

from packtrain.errors import CheckFailed

INDEX = np.dtype([("part", "<i8"), ("row", "<i8"), ("first", "<i8"), ("count", "<i8"), ("hash", "<u8")])
"""A run: its first target, their number, and the hash of their records. In files `part` and `row` are 0."""


def append(part: Path, borders: np.ndarray, targets: np.ndarray, records: np.ndarray) -> None:
    """Append the `records` int32 [n, width] of a micro-batch's `targets` int64 [n]. `borders` are each document's first target."""
    order = np.argsort(targets)
    targets, records = targets[order], records[order]
    begins = borders[np.searchsorted(borders, targets)] == targets
    starts = np.flatnonzero(begins | (np.diff(targets, prepend=-2) != 1))
    runs = zip(targets[starts].tolist(), np.split(records, starts[1:]), strict=False)
    index = np.array([(0, 0, first, len(run), _hash(run, first)) for first, run in runs], INDEX)
    for suffix, written in ((".bin", records), (".idx", index)):
        with open(f"{part}{suffix}", "ab") as file:
            file.write(written.tobytes())
            file.flush()
            os.fsync(file.fileno())


class TeacherCache:
    """Records of targets, mapped into memory. They pickle by the path.

    `trained` int [documents] counts each one's targets, `names` are those of parts. `found` bool [documents] says whose records are there; if
    `checked`, with the right hashes.
    """

    def __init__(
        self, folder: Path, width: int, trained: np.ndarray, names: Iterable[str], *, checked: bool = False
    ) -> None:
        self._given = (folder, width, trained, (names := sorted(names)))
        self.folder, self.borders = folder, np.append(0, np.cumsum(trained, dtype=np.int64))
        self.found: np.ndarray = trained == 0
        self._parts, kept = [np.empty((0, width), np.int32)], [np.empty(0, INDEX)]
        for _, attempt in groupby(names, lambda name: name.partition("-")[0]):
            runs = np.concatenate([self._open(str(folder / name)) for name in attempt])
            runs = runs[[self._read(run) is not None for run in runs]] if checked else runs
            documents = (np.searchsorted(self.borders, runs["first"], side="right") - 1).clip(0)
            whole = np.bincount(documents, runs["count"], len(trained) + 1)[: len(trained)] == trained
            kept.append(runs[np.append(whole & ~self.found, False)[documents]])
            self.found |= whole
        self._runs = np.sort(np.concatenate(kept), order="first")

    def __reduce__(self) -> tuple[type[TeacherCache], tuple[object, ...]]:
        return (TeacherCache, self._given)

    def _open(self, part: str) -> np.ndarray:
        """Map a part. Return the runs with all of their records: INDEX [m]."""
        width, whole = self._parts[0].shape[1], os.path.exists(f"{part}.bin") and os.path.exists(f"{part}.idx")
        if not (rows := os.path.getsize(f"{part}.bin") // (4 * width) if whole else 0):
            return np.empty(0, INDEX)
        self._parts.append(np.memmap(f"{part}.bin", np.int32, "r", shape=(rows, width)))
        runs = np.fromfile(f"{part}.idx", INDEX)
        runs["part"], runs["row"] = len(self._parts) - 1, np.cumsum(runs["count"]) - runs["count"]
        return runs[runs["row"] + runs["count"] <= rows]

    def _read(self, run: np.void) -> np.ndarray | None:
        """Return the records of a run. None if they are damaged."""
        records = self._parts[run["part"]][run["row"] :][: run["count"]]
        return records if _hash(records, int(run["first"])) == run["hash"] else None

    def read(self, documents: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the records of the targets of `documents`, in their order: int32 [n, width]. Raises CheckFailed if they are damaged."""
        taken = [self._parts[0]]
        for number in documents:
            for run in self._runs[slice(*np.searchsorted(self._runs["first"], self.borders[number : number + 2]))]:
                if (records := self._read(run)) is None:
                    what, fix = "the teacher's log-probabilities in this folder are damaged", "Remove it, and resume."
                    raise CheckFailed(what, where=str(self.folder), fix=fix, code="teacher-cache-damaged")
                taken.append(records)
        return np.concatenate(taken)

    def number(self, documents: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the numbers of the targets of `documents`, in their order: int64 [n, 1]."""
        numbers = [np.arange(*self.borders[number : number + 2]) for number in documents]
        return np.concatenate([np.empty(0, np.int64), *numbers])[:, None]


def _hash(records: np.ndarray, first: int) -> int:
    """Hash records, and their place in the data."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(records).data, first)
