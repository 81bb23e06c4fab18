"""Long curves thinned out to what a screen can show."""

from __future__ import annotations

import numpy as np


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """int64 [≤ most]: which of `values` (finite, float64 [points]) to draw, in order.

    Of each of `most` / 2 - 1 parts of the curve the lowest and the highest point, and its two ends: peaks stay exactly what and
    where they are.
    """
    if len(values) <= most:
        return np.arange(len(values))
    inner = values[1:-1]
    parts = max(most // 2 - 1, 1)
    starts = np.linspace(0, len(inner), parts + 1).astype(np.int64)[:-1]
    part_of = np.repeat(np.arange(parts), np.diff(starts, append=len(inner)))
    by_value = np.lexsort((inner, part_of))  # within a part from the lowest to the highest
    ends = np.append(starts[1:], len(inner)) - 1
    chosen = np.concatenate([[0], 1 + by_value[starts], 1 + by_value[ends], [len(values) - 1]])
    return np.unique(chosen)
