"""Steps of data.stages: each example comes from the source that data/mixture.py says, and is the next one of that source.

A source is gone through in an order of its own, pass after pass, whatever the shares: nothing of it comes a second time before all of it
came once, over the borders of stages too. What a step holds is a pure function of its number, as in schedule.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from packtrain.data.mixture import Mixture
from packtrain.errors import UserError
from packtrain.packing.bins import Rows
from packtrain.packing.schedule import Schedule

_KEPT_PASSES = 2  # orders of each source: those of the pass at hand and of the next


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedSchedule(Schedule):
    """A schedule of examples_per_step whose epochs are none: a step is drawn by the `mixture`.

    `source_of` int16 [examples] is the source of each.
    """

    mixture: Mixture
    source_of: np.ndarray
    _orders: dict[int, dict[int, np.ndarray]] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_orders": {}}

    def steps_per_epoch(self, epoch: int) -> int:
        """All steps: there is no other order in them."""
        return self.total_steps

    def epoch_of(self, step: int) -> float:
        """How many times as many examples were trained on as there are."""
        return self.documents_before(step) / len(self.lengths)

    def documents_before(self, step: int) -> int:
        """See Schedule."""
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
        """The examples at these places of a source's order, which goes on from pass to pass."""
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
    """`schedule` by the `mixture`. Raises UserError where a stage takes from a source without examples."""
    held = np.bincount(source_of, minlength=len(names))
    for name, number, shares in zip(names, held, zip(*mixture.shares, strict=True), strict=True):
        if not number and any(shares):
            fix = "Take it out of the stages, or see data.eval and what was dropped of it."
            raise UserError(f"there is nothing to train on in {name}", where="data.stages", fix=fix)
    given = {item.name: getattr(schedule, item.name) for item in fields(schedule)}
    return StagedSchedule(**given, mixture=mixture, source_of=source_of)
