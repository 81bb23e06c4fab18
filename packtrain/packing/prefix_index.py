"""Index of documents that begin alike: a step computes their common prefix once.

With `data.shuffle=by_prefix`, families of similar documents are drawn into the same step.
Documents share a token if all tokens before it, the token and the token it predicts are equal. A shared token therefore has one label in
all its documents. The documents are sorted by their tokens once. The common length of any two is the smallest common length between
neighbours from one to the other, so planning a step reads no tokens.
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

_BLOCK = 32  # number of tokens in the first sort key
_DIVISIONS = (math.inf, 1.0, 0.5, 0.25)  # most work of a tree, relative to the mean work of a rank
_GAIN = 0.02  # prefer fewer divisions if the last rank then finishes at most this much later


@dataclass(frozen=True, eq=False)
class PrefixIndex:
    """Documents of `lengths` int[n], with the `order` int[n] that sorts them by tokens.
    `common` int[n] counts the tokens that each sorted document shares with the one before it."""

    lengths: np.ndarray
    order: np.ndarray
    common: np.ndarray

    @cached_property
    def _places(self) -> np.ndarray:
        places = np.empty_like(self.order)
        places[self.order] = np.arange(len(places), dtype=places.dtype)
        return places

    def forest(self, numbers: np.ndarray) -> tuple[Segments, list[int]]:
        """Return the segments of these documents and each document's last segment; see packing/prefixes.py."""
        places = self._places[numbers]
        order = np.argsort(places, kind="stable")
        here = places[order]
        common = np.minimum.reduceat(self.common[: here[-1] + 1], here[:-1] + 1) if len(here) > 1 else here[:0]
        return build_forest(self.lengths[numbers], order, common)

    def row(self, numbers: np.ndarray) -> SharedRow:
        """Return the row of these documents. In the row they are numbered from 0."""
        return join_row(*self.forest(numbers), self.lengths[numbers], range(len(numbers)))

    def repeated(self, numbers: np.ndarray) -> np.ndarray:
        """Return the length of each prefix that need not be computed again: int64."""
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
        """Return a family number for each document: int64[n]. A step should draw a family as a whole.

        Neighbours in the sorted order are a family if they share half of the shorter one. A family of more than `most` documents is cut
        again, without counting the tokens that all its members share. It stays whole only if its documents are prefixes of one another.
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
    """Build the index of a data set of Documents. Reads all of them; documents that begin alike are read further."""
    lengths = np.asarray(documents.lengths)
    order: list[int] = []
    todo = [(list(range(len(lengths))), 0, False)]
    while todo:
        members, start, are_equal = todo.pop()
        if are_equal or len(members) == 1:
            order += members
            continue
        end = 2 * start + _BLOCK
        # compared as big-endian bytes, tokens sort like their sequence
        keys = {number: documents[number].input_ids[start:end].astype(">u4").tobytes() for number in members}
        groups = groupby(sorted(members, key=keys.__getitem__), key=keys.__getitem__)
        todo += reversed([(list(group), end, len(key) < 4 * (end - start)) for key, group in groups])
    common = [0]
    for before, after in pairwise(order):
        ids, others = documents[before].input_ids, documents[after].input_ids
        alike = count_common(ids, others)
        # the last common token predicts different tokens, unless one of the documents ends there
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
    """Lay out the documents `numbers` of one step, like `lay_out`. A micro-batch counts a common prefix once.

    Trees larger than `limits.tokens` are divided. Trees that would keep one rank busy while the others wait are divided too.
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
    """Return the work of one micro-batch of these documents, in tokens through the linear layers."""
    return float(_work(index.forest(numbers)[0], attention_cost).sum()) if len(numbers) else 0.0


def _work(segments: Segments, attention_cost: float) -> np.ndarray:
    """Return the work of each segment, like `costs`: float64 [segments]. Tokens also attend to all tokens before their segment."""
    tokens, before = np.array(segments.lengths, np.float64), np.array(segments.prefix_lengths)
    return tokens + attention_cost * tokens * (tokens + 2 * before)
