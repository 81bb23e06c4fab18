"""The documents of one optimizer step over ranks and micro-batches, each doing about the same work.

All ranks wait for the slowest one. A document of l tokens costs `l + attention_cost · l²` (linear layers, and attention). So we

1. take the smallest number M of micro-batches per rank that holds the documents within the limits of a device,
2. spread the documents over `world_size · M` parts of similar cost,
3. deal the parts out, costliest first, `world_size` at a time: micro-batch m of all ranks costs about the same, and
   within it the costliest part goes to the rank that has done least.

Documents are placed longest first, each into the cheapest part that it fits into (Graham 1969: at most 4/3 of the best), or by best
fit where that needs fewer parts. With padding or kept order, consecutive documents are cut so that the costliest part is cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import Any, cast

import numpy as np

from packtrain.config.schema import PackingMode
from packtrain.packing.bins import best_fit

Layout = list[list[np.ndarray]]
"""[rank][micro-batch]: int64 [documents]."""
TOLERANCE = 0.01  # by which the largest cost of consecutive parts may be above the smallest possible one


class SplitLayout(list[list[np.ndarray]]):
    """A Layout whose first `split` micro-batches of each group of ranks are rows that it splits (split_rows.py): the first
    rank has them, the others none."""

    split: int = 0
    ranks_per_row: int = 1


@dataclass(frozen=True, slots=True)
class MicroBatchLimits:
    """What one device takes at once: at most `examples` documents and `tokens` token slots."""

    examples: float = math.inf
    tokens: float = math.inf


def costs(lengths: np.ndarray, attention_cost: float) -> np.ndarray:
    """Work of documents of `lengths` int[n] tokens, in units of one token through the linear layers: float64[n]."""
    lengths = np.asarray(lengths, dtype=np.float64)
    return lengths + attention_cost * lengths**2


def cost_of_attention(config: Any, parameters: int) -> float:
    """The `attention_cost` of a model of this transformers config: forward and backward take 6 · parameters operations a token, and
    6 · layers · heads · head_dim · l for causal attention."""
    try:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_hidden_layers * config.num_attention_heads * width / max(parameters, 1)
    except (AttributeError, RuntimeError, TypeError):  # no attention, or heads that differ by layer: count tokens only
        return 0.0


def lay_out(
    lengths: np.ndarray,
    *,
    mode: PackingMode,
    world_size: int,
    limits: MicroBatchLimits,
    attention_cost: float,
    keep_order: bool = False,
    cost: np.ndarray | None = None,
) -> Layout:
    """Spreads the documents of one step: `[rank][micro_batch]` arrays of indices into `lengths` int[n]. `cost` float[n] is their work, by
    default that of documents which share nothing; without order and padding only.

    Every rank gets the same, smallest number of micro-batches; where there are fewer documents than ranks some are
    empty. In packed mode `limits.examples` is ignored; in padding mode a document counts as many tokens as the longest of its
    micro-batch. With `keep_order`, micro-batch by micro-batch and rank by rank within it, the documents are in their order.
    ValueError where a document alone is above `limits.tokens`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if mode == "packed":
        limits = MicroBatchLimits(tokens=limits.tokens)
    if lengths.max(initial=0) > limits.tokens:
        raise ValueError(f"a document has {lengths.max()} tokens, a micro-batch takes {limits.tokens}")
    if keep_order or mode == "padding":
        parts = _cut_evenly(lengths, mode == "padding", keep_order, world_size, limits, attention_cost)
    else:
        cost = costs(lengths, attention_cost) if cost is None else cost
        parts = _fill_evenly(lengths, cost, world_size, limits)
        return deal(parts, np.array([cost[part].sum() for part in parts]), world_size)
    return deal(parts, part_costs(parts, lengths, mode, attention_cost), world_size, keep_order)


def parts_of_rank(layout: Layout, rank: int) -> list[tuple[np.ndarray, bool]]:
    """The micro-batches of a rank, and whether each is a row that it splits with its neighbours."""
    if not isinstance(layout, SplitLayout):
        return [(part, False) for part in layout[rank]]
    first = layout[rank - rank % layout.ranks_per_row][: layout.split]
    return [(row, bool(len(row))) for row in first] + [(part, False) for part in layout[rank][layout.split :]]


def deal(parts: list[np.ndarray], cost: np.ndarray, world_size: int, keep_order: bool = False) -> Layout:
    """Gives each rank the same number of `parts` (arrays of documents) of `cost` float[parts]; empty parts complete the last round."""
    empty = -len(parts) % world_size
    parts, cost = [*parts, *[np.zeros(0, dtype=np.int64)] * empty], np.append(cost, np.zeros(empty))
    order = np.arange(len(parts)) if keep_order else np.argsort(-cost, kind="stable")
    work_of_rank = np.zeros(world_size)
    layout: Layout = [[] for _ in range(world_size)]
    for chosen in order.reshape(-1, world_size):
        ranks = np.arange(world_size) if keep_order else np.argsort(work_of_rank, kind="stable")
        for rank, part in zip(ranks, chosen, strict=True):
            layout[rank].append(parts[part])
            work_of_rank[rank] += cost[part]
    return layout


def imbalance(layout: Layout, lengths: np.ndarray, attention_cost: float, mode: PackingMode = "packed") -> float:
    """How much longer than the average rank the busiest one works: largest cost of a rank / mean cost - 1. Ranks that split a row have equal
    shares of its cost."""
    ranks = work_of_ranks(layout, lambda part: part_costs([part], np.asarray(lengths), mode, attention_cost)[0])
    return float(ranks.max() / ranks.mean() - 1) if ranks.any() else 0.0


def work_of_ranks(layout: Layout, cost_of: Callable[[np.ndarray], float]) -> np.ndarray:
    """float64 [ranks]: the work of each, its micro-batches having `cost_of` their documents."""
    cost = np.array([[cost_of(part) for part in parts] for parts in layout])
    if isinstance(layout, SplitLayout):
        split = cost[:, : layout.split].reshape(-1, layout.ranks_per_row, layout.split).mean(axis=1)
        cost[:, : layout.split] = np.repeat(split, layout.ranks_per_row, axis=0)
    return cost.sum(axis=1)


def part_costs(parts: list[np.ndarray], lengths: np.ndarray, mode: PackingMode, attention_cost: float) -> np.ndarray:
    """The cost of each part, padding included: float64[parts]."""
    if mode == "padding":
        longest = np.array([lengths[part].max(initial=0) for part in parts])
        return costs(longest, attention_cost) * [len(part) for part in parts]
    return np.array([costs(lengths[part], attention_cost).sum() for part in parts])


def _fill_evenly(lengths: np.ndarray, work: np.ndarray, world_size: int, limits: MicroBatchLimits) -> list[np.ndarray]:
    """Parts of similar cost within `limits`: the smallest multiple of `world_size` that holds the documents."""
    order, sizes = np.argsort(-lengths, kind="stable").tolist(), lengths.tolist()
    cost = work.tolist()
    fewest = max(min(1, len(sizes)), math.ceil(sum(sizes) / limits.tokens), math.ceil(len(sizes) / limits.examples))
    part_count = math.ceil(fewest / world_size) * world_size
    while (parts := fill_cheapest_first(order, sizes, cost, part_count, limits)) is None:
        if limits.examples == math.inf:
            rows = best_fit(lengths, int(limits.tokens), np.random.default_rng(0))
            if len(rows) <= part_count:
                return [rows[row] for row in range(len(rows))] + [rows.documents[:0]] * (part_count - len(rows))
        part_count += world_size
    return [np.array(part, dtype=np.int64) for part in parts]


def fill_cheapest_first(
    order: list[int],
    lengths: list[int],
    cost: list[float],
    part_count: int,
    limits: MicroBatchLimits,
    work: list[float] | None = None,
) -> list[list[int]] | None:
    """Each document of `order` (longest first) into the cheapest of `part_count` parts that it fits into; None if one fits nowhere.
    Parts may begin with some `work`.

    A part that a document does not fit into is parked, by its free tokens, until documents are short enough.
    """
    parts: list[list[int]] = [[] for _ in range(part_count)]
    free = [limits.tokens] * part_count
    load = work or [0.0] * part_count
    cheapest = sorted(zip(load, range(part_count), strict=True))
    parked: list[tuple[float, int]] = []  # (-free tokens, part)
    for document in order:
        length = lengths[document]
        while parked and -parked[0][0] >= length:
            part = heappop(parked)[1]
            heappush(cheapest, (load[part], part))
        while cheapest and free[cheapest[0][1]] < length:
            part = heappop(cheapest)[1]
            heappush(parked, (-free[part], part))
        if not cheapest:
            return None
        part = cheapest[0][1]
        parts[part].append(document)
        free[part] -= length
        load[part] += cost[document]
        if len(parts[part]) == limits.examples:
            heappop(cheapest)
        else:
            heapreplace(cheapest, (load[part], part))
    return parts


def _cut_evenly(
    lengths: np.ndarray,
    padded: bool,
    keep_order: bool,
    world_size: int,
    limits: MicroBatchLimits,
    attention_cost: float,
) -> list[np.ndarray]:
    """Consecutive parts, of the documents in their order or longest first, whose largest cost is as small as possible."""
    if len(lengths) == 0:
        return []
    order = np.arange(len(lengths)) if keep_order else np.argsort(-lengths, kind="stable")
    ordered = lengths[order].tolist()
    cost = costs(lengths[order], attention_cost).tolist()
    # one document per part always fits
    ends = cast(list[int], _cut_by_cost(ordered, cost, padded, limits, math.inf, len(lengths)))
    part_count = math.ceil(len(ends) / world_size) * world_size
    least = max(max(cost), sum(cost) / part_count)
    most = part_costs(np.split(order, ends[:-1]), lengths, "padding" if padded else "packed", attention_cost).max()
    while most > least * (1 + TOLERANCE):
        middle = (least + most) / 2
        tried = _cut_by_cost(ordered, cost, padded, limits, middle, part_count)
        if tried is None:
            least = middle
        else:
            ends, most = tried, middle
    return np.split(order, ends[:-1])


def _cut_by_cost(
    lengths: list[int], cost: list[float], padded: bool, limits: MicroBatchLimits, most: float, part_count: int
) -> list[int] | None:
    """Ends of the fewest consecutive parts within `limits` that cost at most `most`; None if that takes more than `part_count`."""
    ends: list[int] = []
    start, longest, costliest = 0, 0, 0.0  # of the documents of the current part
    tokens, work = 0, 0.0  # of the whole part; padded documents all count as its longest
    for index, (length, document_cost) in enumerate(zip(lengths, cost, strict=True)):
        count = index - start + 1
        longest, costliest = max(longest, length), max(costliest, document_cost)
        tokens = count * longest if padded else tokens + length
        work = count * costliest if padded else work + document_cost
        if count > 1 and (count > limits.examples or tokens > limits.tokens or work > most):
            ends.append(index)
            if len(ends) == part_count:
                return None
            start, longest, costliest = index, length, document_cost
            tokens, work = length, document_cost
    return [*ends, len(lengths)]
