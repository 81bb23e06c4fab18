"""Ranks in words."""

from __future__ import annotations

from collections.abc import Iterable


def ranks_in_words(ranks: Iterable[int]) -> str:
    """ "rank 3"; "ranks 0 to 5 and 7"."""
    ranks = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    words = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"
