"""Steps of data.stages: data/mixture.py chooses each example's source; the source's next example is taken.

Each source has its own order and is read pass after pass, independently of the shares. No example repeats before every example of its
source was used once, also across stages. The content of a step is a pure function of its number, as in schedule.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from packtrain.data.mixture import Mixture
from packtrain.errors import UserError
from packtrain.packing.bins import Rows
from packtrain.packing.schedule import Schedule

_KEPT_PASSES = 2  # orders kept for each source: the current pass and the next


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedSchedule(Schedule):
    """Schedule without epochs: the `mixture` draws the examples of each step.

    It requires examples_per_step. `source_of` int16 [examples] is the source number of each example.
    """

    mixture: Mixture
    source_of: np.ndarray
    _orders: dict[int, dict[int, np.ndarray]] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_orders": {}}

    def steps_per_epoch(self, epoch: int) -> int:
        """Return the number of all steps: a mixture has no epochs."""
        return self.total_steps

    def epoch_of(self, step: int) -> float:
        """Return the number of trained examples divided by the size of the data set."""
        return self.documents_before(step) / len(self.lengths)

    def documents_before(self, step: int) -> int:
        """Return the number of examples trained before `step`."""
        return step * (self.examples_per_step or 0)

    def _rows_of(self, step: int) -> tuple[Rows, int, int]:
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} of {self.total_steps}")
        first, end = self.documents_before(step), self.documents_before(step + 1)
        sources, seen = self.mixture.sources(first, end), self.mixture.counts(first)
        documents = np.empty(len(sources), np.int64)
        for source in np.unique(sources).tolist():
            here = np.flatnonzero(sources == source)
            documents[here] = self._take(source, seen[source] + np.arange(len(here)))
        return Rows(documents, np.array([0, len(documents)])), 0, 1

    def _take(self, source: int, places: np.ndarray) -> np.ndarray:
        """Return the examples at these places of a source's order. The order continues from pass to pass."""
        own = np.flatnonzero(self.source_of == source)
        passes, within = np.divmod(places, len(own))
        taken = np.empty(len(places), np.int64)
        for number in np.unique(passes).tolist():
            taken[passes == number] = own[self._order(source, number, len(own))[within[passes == number]]]
        return taken

    def _order(self, source: int, number: int, length: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(length)
        kept = self._orders.setdefault(source, {})
        if number not in kept:
            while len(kept) >= _KEPT_PASSES:
                del kept[min(kept)]
            kept[number] = np.random.default_rng((self.seed, 4, source, number)).permutation(length)
        return kept[number]


def stage(schedule: Schedule, mixture: Mixture, source_of: np.ndarray, names: tuple[str, ...]) -> StagedSchedule:
    """Return `schedule` with its examples drawn by `mixture`. Raises UserError if a stage uses a source without examples."""
    held = np.bincount(source_of, minlength=len(names))
    for name, number, shares in zip(names, held, zip(*mixture.shares, strict=True), strict=True):
        if not number and any(shares):
            fix = "Take it out of the stages, or see data.eval and what was dropped of it."
            raise UserError(f"there is nothing to train on in {name}", where="data.stages", fix=fix)
    given = {item.name: getattr(schedule, item.name) for item in fields(schedule)}
    return StagedSchedule(**given, mixture=mixture, source_of=source_of)
