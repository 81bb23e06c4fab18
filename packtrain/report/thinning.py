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
    width = -(-len(inner) // max(most // 2 - 1, 1))
    parts = np.pad(inner, (0, -len(inner) % width), mode="edge").reshape(-1, width)
    starts = 1 + width * np.arange(len(parts))
    return np.unique(np.concatenate([[0], starts + parts.argmin(1), starts + parts.argmax(1), [len(values) - 1]]))
