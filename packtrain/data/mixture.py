"""Shares of sources in a run: weights by temperature, and stages with drawn examples.

A `Mixture` gives the source of example m of a run, for any m. Examples are drawn in blocks of BLOCK. In each block every
source has exactly its share, in an order by (seed, stage, block). This depends neither on the length of the run nor on the number of
ranks, so a run can resume from any step, and may become longer. packing/stages.py, or the streams of streaming.py, then choose
the source's next example.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from packtrain.config.schema import Stage

BLOCK = 1 << 14


def temper(weights: np.ndarray, sizes: np.ndarray, temperature: float) -> np.ndarray:
    """Return how often each example of a source appears, instead of its weight: float64 [sources].

    `sizes` are the examples of the sources. The new shares of an epoch are proportional to the old shares to the power of 1 / temperature.
    The source with the smallest increase keeps its weight; the others are repeated to match. No example kept by the weights is lost.
    """
    held = weights * sizes
    more = np.where(held > 0, held, 1.0) ** (1 / temperature - 1)
    return weights * more / more[held > 0].min(initial=np.inf) if held.any() else weights


@dataclass(frozen=True, slots=True)
class Mixture:
    """Shares of the sources in each stage. The `shares` of a stage add up to 1. `first` has the number of each stage's first example, from 0."""

    first: tuple[int, ...]
    shares: tuple[tuple[float, ...], ...]
    seed: int

    def sources(self, first: int, end: int) -> np.ndarray:
        """Return the source of each example from `first` to before `end`: int16 [end - first]."""
        parts = []
        while first < end:
            stage, block, within = self._place(first)
            drawn = self._draw(stage, block)[within:]
            last = min(end, self.first[stage + 1] if stage + 1 < len(self.first) else end)
            parts.append(drawn[: last - first])
            first += len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, np.int16)

    def counts(self, end: int) -> np.ndarray:
        """Return how many examples before number `end` come from each source: int64 [sources]."""
        total = np.zeros(len(self.shares[0]), np.int64)
        for stage, start in enumerate(self.first):
            stop = min(end, self.first[stage + 1]) if stage + 1 < len(self.first) else end
            if stop > start:
                blocks, rest = divmod(stop - start, BLOCK)
                total += blocks * _share_out(self.shares[stage])
                total += np.bincount(self._draw(stage, blocks)[:rest], minlength=len(total))
        return total

    def stage_of(self, example: int) -> int:
        """Return the number of an example's stage."""
        return sum(start <= example for start in self.first) - 1

    def _place(self, example: int) -> tuple[int, int, int]:
        """Return the stage of an example, the block in the stage, and the place there."""
        stage = self.stage_of(example)
        return stage, *divmod(example - self.first[stage], BLOCK)

    def _draw(self, stage: int, block: int) -> np.ndarray:
        return _draw_block(self.shares[stage], self.seed, stage, block)


def make_mixture(stages: Sequence[Stage], weights: Mapping[str, float], examples_per_step: int, seed: int) -> Mixture:
    """Make the mixture of `stages` over the sources' names. Without stages, `weights` hold for the whole run."""
    given = [stage.weights for stage in stages] or [weights]
    rows = [[float(stage.get(name, 0)) for name in weights] for stage in given]
    ends = [stage.until * examples_per_step for stage in stages if stage.until is not None]
    shares = tuple(tuple(weight / sum(row) for weight in row) for row in rows)
    return Mixture((0, *ends), shares, seed)


def _share_out(shares: tuple[float, ...]) -> np.ndarray:
    """Return the examples of each source in a block: int64 [sources]. Any positive share gives at least one."""
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
