"""How sources share a run: weights by temperature, and stages, in which each example is drawn from one of the sources.

A `Mixture` says from which source example m of a run comes, for any m: examples are drawn in blocks of BLOCK, in each of which every
source has its share to the last example, in an order by (seed, stage, block). Neither depends on the length of the run or on the number of
ranks, so a run goes on from any step, and may become longer. What is done with the choice (which example of the source is next) is the
business of packing/stages.py, or of the streams of streaming.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from packtrain.config.schema import Stage

BLOCK = 1 << 14


def temper(weights: np.ndarray, sizes: np.ndarray, temperature: float) -> np.ndarray:
    """float64 [sources]: how often each example of a source of `sizes` examples appears, in place of its weight.

    The sources' shares of an epoch become those by their weights to the power of 1 / temperature. The source that this repeats least
    keeps its weight, and the others are repeated to their shares: nothing is left out that the weights keep.
    """
    held = weights * sizes
    more = np.where(held > 0, held, 1.0) ** (1 / temperature - 1)
    return weights * more / more[held > 0].min(initial=np.inf) if held.any() else weights


@dataclass(frozen=True, slots=True)
class Mixture:
    """The `shares` of the sources in each stage (they add up to 1), and the number of the `first` example of each, 0 of the first."""

    first: tuple[int, ...]
    shares: tuple[tuple[float, ...], ...]
    seed: int

    def sources(self, first: int, end: int) -> np.ndarray:
        """int16 [end - first]: the source of each example from number `first` on."""
        parts = []
        while first < end:
            stage, block, within = self._place(first)
            drawn = self._draw(stage, block)[within:]
            last = min(end, self.first[stage + 1] if stage + 1 < len(self.first) else end)
            parts.append(drawn[: last - first])
            first += len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, np.int16)

    def counts(self, end: int) -> np.ndarray:
        """int64 [sources]: how many of the examples before number `end` come from each source."""
        total = np.zeros(len(self.shares[0]), np.int64)
        for stage, start in enumerate(self.first):
            stop = min(end, self.first[stage + 1]) if stage + 1 < len(self.first) else end
            if stop > start:
                blocks, rest = divmod(stop - start, BLOCK)
                total += blocks * _share_out(self.shares[stage])
                total += np.bincount(self._draw(stage, blocks)[:rest], minlength=len(total))
        return total

    def stage_of(self, example: int) -> int:
        """The number of the stage that an example is of."""
        return sum(start <= example for start in self.first) - 1

    def _place(self, example: int) -> tuple[int, int, int]:
        """Stage, block in it, and place in that."""
        stage = self.stage_of(example)
        return stage, *divmod(example - self.first[stage], BLOCK)

    def _draw(self, stage: int, block: int) -> np.ndarray:
        return _draw_block(self.shares[stage], self.seed, stage, block)


def make_mixture(stages: Sequence[Stage], weights: Mapping[str, float], examples_per_step: int, seed: int) -> Mixture:
    """The mixture of `stages` over sources by their names; with no stages, by their `weights` throughout."""
    given = [stage.weights for stage in stages] or [weights]
    rows = [[float(stage.get(name, 0)) for name in weights] for stage in given]
    ends = [stage.until * examples_per_step for stage in stages if stage.until is not None]
    shares = tuple(tuple(weight / sum(row) for weight in row) for row in rows)
    return Mixture((0, *ends), shares, seed)


def _share_out(shares: tuple[float, ...]) -> np.ndarray:
    """int64 [sources]: the examples of each source in a block, at least one where it has any share."""
    exact = BLOCK * np.array(shares)
    counts = np.maximum(np.floor(exact), exact > 0).astype(np.int64)
    by_rest = np.argsort(counts - exact, kind="stable")
    counts[by_rest[: max(BLOCK - int(counts.sum()), 0)]] += 1
    counts[counts.argmax()] += BLOCK - int(counts.sum())
    return counts


@lru_cache(maxsize=16)
def _draw_block(shares: tuple[float, ...], seed: int, stage: int, block: int) -> np.ndarray:
    counts = _share_out(shares)
    return np.random.default_rng([seed, 3, stage, block]).permutation(
        np.repeat(np.arange(len(counts), dtype=np.int16), counts)
    )
