"""Which documents of a data set begin alike: what those of a step have in common is computed once, and families of them may be drawn
into the same step.

Documents share a token where all tokens before it, itself and the one that it predicts are the same: so a shared token has one label,
whatever the documents that are trained on it. They are sorted by their tokens once; what any two have in common is then the least of
what neighbours between them have, and a step is planned without reading a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from packtrain.packing.balance import Layout, MicroBatchLimits, work_of_ranks
from packtrain.packing.prefixes import SharedRow, build_forest, count_common, divide_trees, join_row
from packtrain.packing.segments import Segments
from packtrain.packing.split_rows import lay_out_split

_BLOCK = 32  # tokens by which documents are sorted at first
_DIVISIONS = (math.inf, 1.0, 0.5, 0.25)  # most work of a tree, as a part of what a rank has on average
_GAIN = 0.02  # by which ranks must be done earlier for trees to be divided further


@dataclass(frozen=True, eq=False)
class PrefixIndex:
    """Documents of `lengths` int[n], in the `order` int[n] of their tokens; each has `common` int[n] tokens in common with the one before
    it there."""

    lengths: np.ndarray
    order: np.ndarray
    common: np.ndarray

    @cached_property
    def _places(self) -> np.ndarray:
        places = np.empty_like(self.order)
        places[self.order] = np.arange(len(places), dtype=places.dtype)
        return places

    def forest(self, numbers: np.ndarray) -> tuple[Segments, list[int]]:
        """The segments of these documents, and for each the last one of it; see packing/prefixes.py."""
        places = self._places[numbers]
        order = np.argsort(places, kind="stable")
        here = places[order]
        common = np.minimum.reduceat(self.common[: here[-1] + 1], here[:-1] + 1) if len(here) > 1 else here[:0]
        return build_forest(self.lengths[numbers], order, common)

    def row(self, numbers: np.ndarray) -> SharedRow:
        """The row of these documents, which are counted from 0 in it."""
        return join_row(*self.forest(numbers), self.lengths[numbers], range(len(numbers)))

    def repeated(self, numbers: np.ndarray) -> np.ndarray:
        """int64: the lengths of the beginnings of these documents that are computed with another one."""
        segments, ends = self.forest(numbers)
        lengths, longest, continued, repeated = self.lengths[numbers], {}, set(), []
        for prefix, tokens in zip(segments.shared, segments.prefix_lengths, strict=True):
            if prefix in continued:
                repeated.append(tokens)
            continued |= set() if prefix is None else {prefix}
        for number in np.argsort(-lengths, kind="stable").tolist():
            if longest.setdefault(ends[number], number) != number:
                repeated.append(int(lengths[number]))
        return np.array(repeated, dtype=np.int64)

    def families(self, most: int) -> np.ndarray:
        """int64[n], a number for each family of documents that are worth one step: neighbours that have half of the shorter one in common,
        but for what all of too large a family have. Above `most` documents they are beginnings of one and the same.
        """
        lengths, numbers, found = self.lengths[self.order].astype(np.int64), np.zeros(len(self.order), np.int64), 0
        todo = [(0, len(lengths), 0)]
        while todo:
            first, last, base = todo.pop()
            shorter = np.minimum(lengths[first : last - 1], lengths[first + 1 : last]) - base
            apart = 2 * (self.common[first + 1 : last] - base) < shorter
            for start, end in pairwise([first, *(first + 1 + np.flatnonzero(apart)).tolist(), last]):
                shared = int(self.common[start + 1 : end].min(initial=np.iinfo(np.int32).max))
                if end - start > most and (shared > base or (start, end) != (first, last)):
                    todo.append((start, end, max(shared, base)))
                else:
                    numbers[self.order[start:end]], found = found, found + 1
        return numbers


def index_prefixes(documents: Any) -> PrefixIndex:
    """The index of a data set of Documents, of which it reads each once, and more of those that begin alike."""
    lengths = np.asarray(documents.lengths)
    order: list[int] = []
    todo = [(list(range(len(lengths))), 0, False)]
    while todo:
        members, start, are_equal = todo.pop()
        if are_equal or len(members) == 1:
            order += members
            continue
        end = 2 * start + _BLOCK
        # as bytes, the highest first, tokens compare like their sequence
        keys = {number: documents[number].input_ids[start:end].astype(">u4").tobytes() for number in members}
        groups = groupby(sorted(members, key=keys.__getitem__), key=keys.__getitem__)
        todo += reversed([(list(group), end, len(key) < 4 * (end - start)) for key, group in groups])
    common = [0]
    for before, after in pairwise(order):
        ids, others = documents[before].input_ids, documents[after].input_ids
        alike = count_common(ids, others)
        # the last of them predicts different tokens, unless one of the documents ends there
        common.append(alike if alike == min(len(ids), len(others)) else max(alike - 1, 0))
    return PrefixIndex(lengths, np.array(order, dtype=np.int32), np.array(common, dtype=np.int32))


def lay_out_shared(
    index: PrefixIndex,
    numbers: np.ndarray,
    *,
    world_size: int,
    limits: MicroBatchLimits,
    attention_cost: float,
    ranks_per_row: int = 1,
) -> Layout:
    """As `lay_out`, of the documents `numbers` of one step, whose common beginnings count once in each micro-batch.

    Trees larger than `limits.tokens` are divided, and so are those that would keep one rank at work while the others wait.
    """
    segments, ends = index.forest(numbers)
    tokens, work = np.array(segments.lengths), _work(segments, attention_cost)
    layouts: list[Layout] = []
    done = []
    for division in _DIVISIONS if world_size > 1 else _DIVISIONS[:1]:
        most = limits.tokens, division * work.sum() / world_size
        trees = divide_trees(segments, ends, np.stack([tokens, work]), most)
        sizes, cost = np.array([size for size, _ in trees]).T
        layout = lay_out_split(
            sizes.astype(np.int64),
            mode="packed",
            world_size=world_size,
            limits=limits,
            attention_cost=attention_cost,
            ranks_per_row=ranks_per_row,
            cost=cost,
        )
        done.append(float(work_of_ranks(layout, lambda part, cost=cost: cost[part].sum()).max()))
        for parts in layout:
            parts[:] = [
                np.array([number for tree in part for number in trees[tree][1]], dtype=np.int64) for part in parts
            ]
        layouts.append(layout)
    return next(layout for layout, end in zip(layouts, done, strict=True) if end <= min(done) * (1 + _GAIN))


def work_of(index: PrefixIndex, numbers: np.ndarray, *, attention_cost: float) -> float:
    """The work of one micro-batch of these documents, in units of a token through the linear layers."""
    return float(_work(index.forest(numbers)[0], attention_cost).sum()) if len(numbers) else 0.0


def _work(segments: Segments, attention_cost: float) -> np.ndarray:
    """float64 [segments]: as `costs`, of segments whose tokens also see those before them."""
    tokens, before = np.array(segments.lengths, np.float64), np.array(segments.prefix_lengths)
    return tokens + attention_cost * tokens * (tokens + 2 * before)
