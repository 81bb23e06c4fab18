"""Whether a rank that stands still is at work, by what the system counts in windows of a few seconds.

At work is who computes or moves bytes, itself or by its children: from and to files, memory mapped from them, and TCP, which a
download comes by. Where nothing of that is to be seen something may still move for it: its main thread wakes up again and again
(it goes from file to file of a slow server, or asks for a lock), or the storage takes in what it has long handed over and now
waits for (fsync). That is the machine's, so that others who write can hide a rank whose write has stalled; they only defer its
diagnosis to the longer limit. A rank of which nothing of all this is to be seen for long does nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from packtrain.launch.processes import HAS_PROC, families, moved, sight, wakes
from packtrain.launch.traffic import received, stored
from packtrain.launch.waits import may_wait_for_storage
from packtrain.monitor.old.rank_state import BUSY_CORES

LOADS = 2**16
"""Bytes a second of a slow download."""
_STORES = 2**20
_WAKES = 1


@dataclass(frozen=True, slots=True)
class Counts:
    """Since a process began: seconds of CPU time and bytes moved, by it and its children; how often its main thread woke up;
    bytes that the storage of its machine took in. `writes`: whether one of them may be waiting for that just now; None where
    that is not told."""

    cpu: float
    moved: int
    wakes: int
    stored: int
    writes: bool | None = None


def count(roots: Iterable[int]) -> dict[int, Counts]:
    """By process, for those of `roots` that are there."""
    found = {root: (root, *family) for root, family in families(roots).items()}
    came, taken = received(found), stored()
    return {
        root: Counts(
            sum(sight(one).cpu for one in members),
            sum(map(moved, members)) + came[root],
            wakes(root),
            taken,
            _writes(members),
        )
        for root, members in found.items()
    }


def _writes(members: Iterable[int]) -> bool | None:
    told = [may_wait_for_storage(one) for one in members]
    return any(told) if any(told) or None not in told else None


@dataclass(slots=True)
class Effort:
    """What a rank does while it stands still. Seconds are those that its watchdog was awake."""

    idle_s: float = 0.0
    """Since it was last seen at work, or stands still."""
    calm_s: float = 0.0
    """Since anything moved for it."""
    _cores: float = 0.0
    _moved: bool = not HAS_PROC  # elsewhere nothing is told of bytes: it may be at work
    _before: Counts | None = None
    _window_s: float = 0.0

    def cores(self, lately_s: float) -> float:
        """That it used when it was seen at work in the last `lately_s`; 0 where it was not."""
        return self._cores if self.idle_s < lately_s else 0.0

    def moves(self, lately_s: float) -> bool:
        """Whether anything has moved for it in the last `lately_s`."""
        return self._moved and (self.calm_s < lately_s or not HAS_PROC)

    def due(self, window_s: float) -> bool:
        """Whether it is to be measured, in windows of so many seconds."""
        return self._before is None or self._window_s >= window_s

    def passes(self, seconds: float, *, runs: bool) -> None:
        """So much time is over, and it `runs` just now, or would if it had a core."""
        self.idle_s += seconds
        self.calm_s += seconds
        self._window_s += seconds
        if runs:
            self._at_work(1.0)

    def measure(self, now: Counts, *, writes: bool) -> None:
        """What was counted since the last time; `writes`: it may be waiting for the storage. The first look is the measure."""
        before, self._before = self._before, now
        over, self._window_s = self._window_s, 0.0
        if before is None or over <= 0:
            return
        cores = (now.cpu - before.cpu) / over
        if cores >= BUSY_CORES or now.moved - before.moved >= LOADS * over:
            self._at_work(cores if cores >= BUSY_CORES else 1.0)
        elif now.wakes - before.wakes >= _WAKES * over or (writes and now.stored - before.stored >= _STORES * over):
            self._moved, self.calm_s = True, 0.0

    def _at_work(self, cores: float) -> None:
        self._cores, self._moved = round(cores, 2), True
        self.idle_s = self.calm_s = 0.0
