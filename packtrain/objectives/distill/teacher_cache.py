"""A teacher's records of targets (divergence.py::pick), made once and kept in data.cache_dir/teacher/KEY.bin.

The file is uint32 [targets, width + 1], in the order of the data. Each row ends in a hash of itself and its place. Every start reads the file, and
makes the rows that are missing: never written, cut off by a kill, or damaged.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from filelock import FileLock, Timeout

from packtrain.errors import CheckFailed, UserError, boundary
from packtrain.monitor.heartbeat import progress, waiting
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.objectives.training_objective import Start
from packtrain.wording import size

_BLOCK, _POLL_S = 1 << 14, 60.0


@dataclass(frozen=True)
class TeacherCache:
    """Rows of int32 [width], one for each target. `borders` int64 [documents + 1]: the first target of each document."""

    file: Path
    width: int
    borders: np.ndarray

    @property
    def _rows(self) -> np.ndarray:
        return np.asarray(np.memmap(self.file, "<u4", "r", shape=(int(self.borders[-1]), self.width + 1)))

    def number(self, documents: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the numbers of the targets of `documents`, in their order: int64 [n, 1]."""
        numbers = [np.arange(*self.borders[document : document + 2]) for document in documents]
        return np.concatenate([np.empty(0, np.int64), *numbers])[:, None]

    def read(self, documents: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the rows of the targets of `documents`, in their order: int32 [n, width]."""
        return self._rows[self.number(documents)[:, 0], :-1].view(np.int32)

    def write(self, targets: np.ndarray, rows: np.ndarray) -> None:
        """Write `rows` int32 [n, width] of `targets` int64 [n]."""
        order = np.argsort(targets)
        targets, rows = targets[order], rows[order].view(np.uint32)
        starts, hashed = (
            np.flatnonzero(np.diff(targets, prepend=-2) != 1),
            np.column_stack([rows, _hash(rows, targets)]),
        )
        with self.file.open("r+b") as file:
            for first, run in zip(targets[starts].tolist(), np.split(hashed, starts[1:]), strict=False):
                file.seek(first * hashed[0].nbytes)
                file.write(run.tobytes())

    def find(self) -> np.ndarray:
        """Return which documents have all of their rows: bool [documents]."""
        wrong = np.zeros(self.borders[-1] + 1, np.int64)
        for first in range(0, len(wrong) - 1, _BLOCK):
            rows = self._rows[first : first + _BLOCK]
            wrong[first + 1 :][: len(rows)] = rows[:, -1] != _hash(rows[:, :-1], first + np.arange(len(rows)))
        return np.diff(wrong.cumsum()[self.borders]) == 0


def _hash(rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Hash rows, uint32 [n, width], and their places: uint32 [n], never 0. Multilinear hashing, arXiv 1202.4961."""
    keys = np.frombuffer(hashlib.shake_128().digest(8 * rows.shape[1] + 16), np.uint64)
    hashed = rows.astype(np.uint64) @ keys[2:] + targets.astype(np.uint64) * keys[1] + keys[0]
    return (hashed >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


@dataclass(frozen=True)
class TaughtSteps(Steps):
    """Steps whose micro-batches bring `label_records`, a row for each target. `records` returns them for documents, in order."""

    records: Callable[[Sequence[int] | np.ndarray], np.ndarray] | None = field(default=None, kw_only=True)

    def collate(self, numbers: Sequence[int] | np.ndarray) -> MicroBatch:
        """See Steps."""
        batch = super().collate(numbers)
        if self.records is not None:
            rows = self.records(numbers)
            rows[np.argsort(batch.inputs["label_owners"], kind="stable")] = rows.copy()
            batch.inputs["label_records"] = torch.from_numpy(rows)
        return batch

    def with_records(
        self, start: Start, file: Path, width: int, teach: Callable[[MicroBatch], np.ndarray]
    ) -> TaughtSteps:
        """Return these steps with the records of all documents. `teach` makes the records of a micro-batch: int32 [n, width].

        One of several runs makes those that `file` lacks, and the others wait. Raises UserError if the disk has no space for them.
        """
        ranks, log, lock = start.ranks, start.log, FileLock(file.with_suffix(".lock"))
        cache = TeacherCache(file, width, np.append(0, np.cumsum(self.data.trained, dtype=np.int64)))
        row_bytes, where = 4 * (width + 1), f"data.cache_dir ({file.parent})"

        def writing() -> AbstractContextManager[None]:
            what, fix = "the teacher's log-probabilities cannot be written", "Free some space, or set data.cache_dir."
            return boundary(what, where, fix, code="teacher-cache-unwritable")

        def try_to_find() -> np.ndarray | None:
            with writing(), suppress(Timeout):
                file.parent.mkdir(parents=True, exist_ok=True)
                lock.acquire(timeout=_POLL_S)
                with file.open("ab") as opened:
                    opened.truncate(row_bytes * int(cache.borders[-1]))
                return cache.find()
            log.warn(f"another run makes the teacher's log-probabilities; waiting for it to release {lock.lock_file}")

        def find() -> np.ndarray:
            while True:
                progress()  # for the watchdog: another run takes its time
                with waiting("rank 0 to read the teacher's log-probabilities"):
                    (found,) = broadcast_object_list([try_to_find() if ranks.main else None])
                if found is not None:
                    return found

        found = find()
        lacking, free = row_bytes * int(self.data.trained[~found].sum()), shutil.disk_usage(file.parent).free
        log.fact(
            "cache", f"{size(lacking)} of the teacher's log-probabilities to make, {row_bytes} bytes a target; {where}"
        )
        if lacking > free:
            what = f"the teacher's log-probabilities take {size(lacking)}, and the disk has {size(free)} left"
            fix = "Free some space, set data.cache_dir, or lower objective.options.teacher_top_k."
            raise UserError(what, where=where, fix=fix, code="teacher-cache-space")
        for numbers, batch in replace(self, records=cache.number).first_pass(found):
            start.trainer.clock.enter("proof")
            if not found[numbers].all() or ranks.sharded:  # sharded, every rank makes the same number of calls
                made = teach(batch)
                with writing():
                    cache.write(batch.inputs["label_records"][:, 0].numpy(), made)
        with waiting("all ranks to write the teacher's log-probabilities"):
            gather_object([None])
        if lacking and not find().all():
            what, fix = "some of the teacher's log-probabilities are lost", "Name a disk that all machines share."
            raise CheckFailed(what, where=where, fix=fix, code="teacher-cache-lost")
        lock.release(force=True)
        return replace(self, records=cache.read)
