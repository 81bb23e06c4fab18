"""How long documents are, who says what part of them, and what a limit on their length would cut."""

from __future__ import annotations

from typing import Any

import numpy as np

from packtrain.inspect.corpus import Corpus
from packtrain.inspect.scan.token_scan import TokenScan

PERCENTILES = (0, 5, 25, 50, 75, 90, 95, 99, 100)
BINS = 24
LIMITS = tuple(512 * 2**power for power in range(12))


def histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Documents by length: bins of equal, round width from `first` to `last` tokens; the last one holds all that are longer."""
    most = int(np.percentile(lengths, 99.5))
    width = _round_up(max(1, -(-(most + 1) // BINS)))
    last = most // width
    counts = np.bincount(np.minimum(lengths // width, last), minlength=last + 1).tolist()
    bins = [
        {"first": at * width, "last": (at + 1) * width - 1, "documents": number} for at, number in enumerate(counts)
    ]
    bins[-1]["last"] = max(bins[-1]["last"], int(lengths.max()))
    return bins


def _round_up(width: int) -> int:
    """The next number of one digit that is 1, 2 or 5, and zeros."""
    step = 10 ** (len(str(width)) - 1)
    return next(one * step for one in (1, 2, 5, 10) if one * step >= width)


def percentiles(lengths: np.ndarray) -> dict[str, int]:
    """Tokens of the document that this many percent of the documents do not exceed."""
    return {str(one): int(value) for one, value in zip(PERCENTILES, np.percentile(lengths, PERCENTILES), strict=True)}


def by_role(scan: TokenScan) -> list[dict[str, Any]]:
    """Tokens, trained tokens and turns of each role, and their shares of all."""
    total = sum(int(figures[0]) for figures in scan.roles.values())
    trained = sum(int(figures[1]) for figures in scan.roles.values())
    return [
        {
            "role": name,
            "turns": int(figures[2]),
            "tokens": int(figures[0]),
            "share": round(int(figures[0]) / max(1, total), 4),
            "trained": int(figures[1]),
            "trained_share": round(int(figures[1]) / max(1, trained), 4),
        }
        for name, figures in scan.roles.items()
    ]


def full_lengths(corpus: Corpus) -> np.ndarray:
    """int64: tokens of the documents of data.train before data.max_length cut them; those of a row that was split together."""
    fates, row_of, lengths = corpus.fates, corpus.row_of, corpus.lengths.astype(np.int64)
    chosen = corpus.in_train
    rows = row_of[chosen]
    split = fates["split"][rows]
    # a row's loss is that of its documents that are as long as can be, or of both answers' prompts
    lost = fates["truncated"][rows] & (
        (lengths[chosen] == corpus.data.max_length) | (corpus.data.overlong == "keep_end")
    )
    losers = np.bincount(rows[lost], minlength=len(fates))
    whole = lengths[chosen] + np.where(lost, fates["cut_tokens"][rows] // np.maximum(losers[rows], 1), 0)
    if not split.any():
        return whole
    parts = np.bincount(rows[split], weights=lengths[chosen][split], minlength=len(fates))
    together = parts[parts > 0].astype(np.int64) + fates["cut_tokens"][parts > 0]
    return np.concatenate([whole[~split], together])


def cuts(lengths: np.ndarray, current: int | None, dropped: int = 0) -> list[dict[str, Any]]:
    """What data.max_length would cut, for lengths of 512 tokens and more up to the first that cuts nothing.

    Of documents that were `dropped` for being longer than `current` no more is known: there are no larger limits then, and no tokens.
    """
    longest = int(lengths.max())
    wanted = [limit for limit in LIMITS if limit < 2 * longest] or [LIMITS[0]]
    if dropped and current:
        wanted = [limit for limit in wanted if limit < current]
    total = int(lengths.sum())
    found = []
    for limit in sorted({*wanted, *([current] if current else [])}):
        longer = lengths[lengths > limit]
        lost = int((longer - limit).sum())
        documents = len(longer) + dropped
        found.append(
            {
                "max_length": limit,
                "documents": documents,
                "share": round(documents / (len(lengths) + dropped), 4),
                "tokens": None if dropped else lost,
                "tokens_share": None if dropped else round(lost / total, 4),
                "current": limit == current,
            }
        )
    return found
