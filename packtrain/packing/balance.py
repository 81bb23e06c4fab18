"""Lay out the documents of one optimizer step over ranks and micro-batches of similar work.

All ranks wait for the slowest one. A document of l tokens costs `l + attention_cost · l²` (linear layers, and attention). So we

1. take the smallest number M of micro-batches per rank that keeps all of them within the limits of a device,
2. spread the documents over `world_size · M` parts of similar cost,
3. deal the parts out, costliest first, `world_size` at a time: micro-batch m costs about the same on all ranks, and
   the costliest of these parts goes to the rank with the least work so far.

Each document, longest first, goes into the cheapest part with room for it (Graham 1969: at most 4/3 of the best), or by best
fit if that needs fewer parts. With padding or kept order, we cut consecutive documents so that the costliest part is as cheap as possible.

Neighbouring ranks may split a document that exceeds one device, or that is more work than a rank's share of the step (and longer than a part
of a full row). These are placed first, costliest first, each in the group of neighbours with the least work. Whole documents follow, each on
the rank with the least work that has room for it. A rank's share of its group's split rows counts as work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, cast

import numpy as np

from packtrain.config.schema import PackingMode
from packtrain.packing.bins import best_fit

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Layout = list[list[np.ndarray]]
"""[rank][micro-batch]: int64 [documents]."""
TOLERANCE = 0.01  # the search stops within this relative gap to the smallest possible largest cost


class SplitLayout(list[list[np.ndarray]]):
    """Layout with split rows: the first `split` micro-batches of each group of ranks (SplitLayout).
    The group's first rank lists the rows, its other ranks list empty arrays."""

    split: int = 0
    ranks_per_row: int = 1


@dataclass(frozen=True, slots=True)
class MicroBatchLimits:
    """Limits of one micro-batch: at most `examples` documents and `tokens` token slots."""

    examples: float = math.inf
    tokens: float = math.inf


def costs(lengths: np.ndarray, attention_cost: float) -> np.ndarray:
    """Return the work of documents, in units of one token through the linear layers: float64[n]. `lengths` int[n] in tokens."""
    lengths = np.asarray(lengths, dtype=np.float64)
    return lengths + attention_cost * lengths**2


def cost_of_attention(config: PreTrainedConfig, parameters: int) -> float:
    """Return the `attention_cost` of a model with this transformers config. Forward and backward take 6 · parameters operations a token, and
    6 · layers · heads · head_dim · l for causal attention."""
    try:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_hidden_layers * config.num_attention_heads * width / max(parameters, 1)
    except (AttributeError, RuntimeError, TypeError):  # no attention, or heads that differ by layer: count tokens only
        return 0.0


def lay_out(
    lengths: np.ndarray,
    mode: PackingMode,
    world_size: int,
    limits: MicroBatchLimits,
    attention_cost: float,
    ranks_per_row: int = 1,
    *,
    keep_order: bool = False,
    cost: np.ndarray | None = None,
) -> Layout:
    """Spread the documents of one step: `[rank][micro_batch]` arrays of indices into `lengths` int[n].

    `cost` float[n] is the work of each (default: `costs`); it is ignored with kept order or padding. All ranks get equally many
    micro-batches, as few as possible; with fewer documents than ranks some are empty. Packed mode ignores `limits.examples`; in padding
    mode a document counts as many tokens as the longest of its micro-batch. `keep_order` keeps the order: by micro-batch, then by rank.
    `ranks_per_row` neighbours may split a row. ValueError if a document exceeds `limits.tokens` on each of them.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if mode == "packed":
        limits = MicroBatchLimits(tokens=limits.tokens)
    if lengths.max(initial=0) > limits.tokens * ranks_per_row:
        raise ValueError(f"a document has {lengths.max()} tokens, {ranks_per_row} ranks take {limits.tokens} each")
    work = costs(lengths, attention_cost) if cost is None else cost
    if ranks_per_row > 1:  # for a short document the exchanges would take longer than the work
        long = (work > work.sum() / world_size) & (lengths * ranks_per_row > max(limits.tokens, ranks_per_row**2))
        if (long := long | (lengths > limits.tokens)).any():
            return _lay_out_split(lengths, work, long, world_size, limits, ranks_per_row)
    if keep_order or mode == "padding":
        parts = _cut_evenly(lengths, mode == "padding", keep_order, world_size, limits, attention_cost)
        return deal(parts, part_costs(parts, lengths, mode, attention_cost), world_size, keep_order)
    parts = _fill_evenly(lengths, work, world_size, limits)
    return deal(parts, np.array([work[part].sum() for part in parts]), world_size)


def parts_of_rank(layout: Layout, rank: int) -> list[tuple[np.ndarray, bool]]:
    """Return the micro-batches of a rank. The flag is True for a row that it splits with its neighbours."""
    if not isinstance(layout, SplitLayout):
        return [(part, False) for part in layout[rank]]
    first = layout[rank - rank % layout.ranks_per_row][: layout.split]
    return [(row, bool(len(row))) for row in first] + [(part, False) for part in layout[rank][layout.split :]]


def deal(parts: list[np.ndarray], cost: np.ndarray, world_size: int, keep_order: bool = False) -> Layout:
    """Give each rank the same number of `parts`, arrays of documents. `cost` is float[parts]; empty parts complete the last round."""
    empty = -len(parts) % world_size
    parts, cost = [*parts, *[np.zeros(0, dtype=np.int64)] * empty], np.append(cost, np.zeros(empty))
    order = np.arange(len(parts)) if keep_order else np.argsort(-cost, kind="stable")
    work_of_rank = np.zeros(world_size)
    layout: Layout = [[] for _ in range(world_size)]
    for chosen in np.reshape(order, (-1, world_size)):
        ranks = np.arange(world_size) if keep_order else np.argsort(work_of_rank, kind="stable")
        for rank, part in zip(ranks, chosen, strict=True):
            layout[rank].append(parts[int(part)])
            work_of_rank[rank] += cost[part]
    return layout


def imbalance(layout: Layout, lengths: np.ndarray, attention_cost: float, mode: PackingMode = "packed") -> float:
    """Return the imbalance of ranks: largest cost of a rank / mean cost - 1. Ranks that split a row each have an equal share of its cost."""
    ranks = work_of_ranks(layout, lambda part: part_costs([part], np.asarray(lengths), mode, attention_cost)[0])
    return float(ranks.max() / ranks.mean() - 1) if ranks.any() else 0.0


def work_of_ranks(layout: Layout, cost_of: Callable[[np.ndarray], float]) -> np.ndarray:
    """Return the work of each rank: float64 [ranks]. `cost_of` gives the cost of a micro-batch's documents."""
    cost = np.array([[cost_of(part) for part in parts] for parts in layout], np.float64)
    if isinstance(layout, SplitLayout):
        split = np.reshape(cost[:, : layout.split], (-1, layout.ranks_per_row, layout.split)).mean(axis=1)
        cost[:, : layout.split] = np.repeat(split, layout.ranks_per_row, axis=0)
    return cost.sum(axis=1)


def part_costs(parts: list[np.ndarray], lengths: np.ndarray, mode: PackingMode, attention_cost: float) -> np.ndarray:
    """Return the cost of each part, padding included: float64[parts]."""
    if mode == "padding":
        longest = np.array([lengths[part].max(initial=0) for part in parts])
        return costs(longest, attention_cost) * [len(part) for part in parts]
    return np.array([costs(lengths[part], attention_cost).sum() for part in parts])


def _fill_evenly(lengths: np.ndarray, work: np.ndarray, world_size: int, limits: MicroBatchLimits) -> list[np.ndarray]:
    """Fill parts of similar cost within `limits`; use the smallest possible multiple of `world_size`."""
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
    """Put each document of `order` (longest first) into the cheapest part with room for it. Return None if one has no room.

    There are `part_count` parts; they may start with some `work`. A part without room is parked, ordered by free tokens, until the
    documents are short enough.
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
    """Cut the documents into consecutive parts with the smallest largest cost. The order is theirs, or longest first."""
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
    """Cut the fewest consecutive parts within `limits` and cost `most`; return their ends. None if they exceed `part_count`."""
    ends: list[int] = []
    start, longest, costliest = 0, 0, 0.0  # longest and costliest document of the current part
    tokens, work = 0, 0.0  # the current part as a whole; padded documents all count as the longest
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


def choose_ranks_per_row(asked: int | str, longest: int, tokens: float, world_size: int) -> int:
    """Return how many neighbouring ranks split a row; `asked` is strategy.sequence_parallel.
    `auto`: the fewest that hold the `longest` example with `tokens` each, or all ranks if no number is enough."""
    if asked != "auto":
        return int(asked)
    enough = (ranks for ranks in range(1, world_size + 1) if world_size % ranks == 0 and ranks * tokens >= longest)
    return next(enough, world_size)


def _lay_out_split(
    lengths: np.ndarray,
    cost: np.ndarray,
    long: np.ndarray,
    world_size: int,
    limits: MicroBatchLimits,
    ranks_per_row: int,
) -> Layout:
    """Lay out one step with `long` bool[n] documents split over `ranks_per_row` neighbours."""
    wide, groups = limits.tokens * ranks_per_row, world_size // ranks_per_row
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
