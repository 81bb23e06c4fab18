"""Lay out the documents of one step when neighbouring ranks may split some rows.

Two kinds of documents are split. Some exceed one device. Others are more work than a rank's share of the step (and longer than a part of a
full row): whole documents cannot be spread evenly then.
1. Place the split documents first, costliest first: each goes to the group of neighbours with the least work.
2. Then place the whole documents, costliest first: each goes to the rank with the least work that has room for it.
   A rank's share of its group's split rows counts as work.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from packtrain.packing.balance import Layout, MicroBatchLimits, SplitLayout, costs, fill_cheapest_first, lay_out


def choose_ranks_per_row(asked: int | str, longest: int, tokens: float, world_size: int) -> int:
    """Return how many neighbouring ranks split a row; `asked` is strategy.sequence_parallel.
    `auto`: the fewest that hold the `longest` example with `tokens` each, or all ranks if no number is enough."""
    if asked != "auto":
        return int(asked)
    enough = (ranks for ranks in range(1, world_size + 1) if world_size % ranks == 0 and ranks * tokens >= longest)
    return next(enough, world_size)


def lay_out_split(
    lengths: np.ndarray,
    *,
    world_size: int,
    limits: MicroBatchLimits,
    attention_cost: float,
    ranks_per_row: int,
    cost: np.ndarray | None = None,
    **how: Any,
) -> Layout:
    """Lay out one step as `lay_out` does, but let `ranks_per_row` neighbours split a row. ValueError if a document exceeds that room."""
    lengths = np.asarray(lengths, dtype=np.int64)
    given, cost = cost, costs(lengths, attention_cost) if cost is None else cost
    long = lengths > limits.tokens
    if ranks_per_row > 1:  # for a short document the exchanges would take longer than the work
        long |= (cost > cost.sum() / world_size) & (lengths * ranks_per_row > max(limits.tokens, ranks_per_row**2))
    if not long.any():
        return lay_out(lengths, world_size=world_size, limits=limits, attention_cost=attention_cost, cost=given, **how)
    wide, groups = limits.tokens * ranks_per_row, world_size // ranks_per_row
    if ranks_per_row == 1 or lengths.max() > wide:
        raise ValueError(f"a document has {lengths.max()} tokens, {ranks_per_row} ranks together take {wide}")
    order = np.argsort(-cost, kind="stable")
    rows, work = _split_rows(order[long[order]], lengths, cost, groups, wide)
    whole = order[~long[order]]
    parts = _fill_ranks(whole, lengths, cost, np.repeat(work / ranks_per_row, ranks_per_row), limits)
    layout, empty = SplitLayout(), np.zeros(0, dtype=np.int64)
    layout.split, layout.ranks_per_row = max(map(len, rows)), ranks_per_row
    for rank in range(world_size):
        own = rows[rank // ranks_per_row] if rank % ranks_per_row == 0 else []
        layout.append([*own, *[empty] * (layout.split - len(own)), *parts[rank]])
    return layout


def _split_rows(
    order: np.ndarray, lengths: np.ndarray, cost: np.ndarray, groups: int, tokens: float
) -> tuple[list[list[np.ndarray]], np.ndarray]:
    """Return the rows of each group, at most `tokens` each, and its work: float64 [groups]."""
    work = np.zeros(groups)
    rows: list[list[list[int]]] = [[] for _ in range(groups)]
    for document in order.tolist():
        group = int(work.argmin())
        work[group] += cost[document]
        fitting = (row for row in rows[group] if lengths[row].sum() + lengths[document] <= tokens)
        if (row := next(fitting, None)) is None:
            rows[group].append(row := [])
        row.append(document)
    return [[np.array(row, dtype=np.int64) for row in own] for own in rows], work


def _fill_ranks(
    order: np.ndarray, lengths: np.ndarray, cost: np.ndarray, work: np.ndarray, limits: MicroBatchLimits
) -> list[list[np.ndarray]]:
    """Return the micro-batches of each rank: as few as possible, costliest first. `work` counts the earlier work of each rank."""
    documents, sizes, costly = order.tolist(), lengths.tolist(), cost.tolist()
    ranks, tokens = len(work), int(lengths[order].sum())
    number = max(math.ceil(tokens / (limits.tokens * ranks)), math.ceil(len(order) / (limits.examples * ranks)))
    while len(order):
        room = MicroBatchLimits(limits.examples * number, limits.tokens * number)
        own = fill_cheapest_first(documents, sizes, costly, ranks, room, work.tolist())
        parts = [
            [part] if number == 1 else fill_cheapest_first(part, sizes, costly, number, limits) for part in own or ()
        ]
        if own is not None and None not in parts:
            made = [[np.array(part, dtype=np.int64) for part in of_rank or ()] for of_rank in parts]
            return [sorted(of_rank, key=lambda part: -cost[part].sum()) for of_rank in made]
        number += 1
    return [[] for _ in range(ranks)]
