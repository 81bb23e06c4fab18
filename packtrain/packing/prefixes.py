"""Find common beginnings of documents, and lay rows out that hold each beginning once.

We sort the documents and compare neighbours. A row is cut where documents branch: its segments (packing/segments.py) are a
trie of the documents. A document that equals another one, or is a prefix of it, adds no tokens.

A PrefixIndex sorts the documents of a run once. The common length of any two is the smallest common length between neighbours from one to
the other, so planning a step reads no tokens. In its rows documents share a token if all tokens before it, the token and the token it predicts
are equal: a shared token has one label. With `data.shuffle=by_prefix`, families of similar documents are drawn into the same step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Protocol

import numpy as np

from packtrain.data.dataset import Document
from packtrain.packing.balance import Layout, MicroBatchLimits, lay_out, work_of_ranks
from packtrain.packing.bins import Rows, best_fit
from packtrain.packing.segments import Segments

MIN_SHARED = 8
"""Fewest common tokens worth a segment: each segment costs every layer an attention call."""


@dataclass(frozen=True, eq=False)
class SharedRow:
    """Row of `documents` (their numbers). `places`, int64 [length] for each document, says where its tokens are in the row.
    Documents that share a token have the same place for it."""

    segments: Segments
    documents: tuple[int, ...]
    places: tuple[np.ndarray, ...]

    @cached_property
    def sources(self) -> np.ndarray:
        """Return each row token's index in the concatenated documents: int64 [T]. A shared token has its index in the first one."""
        return np.unique(np.concatenate(self.places), return_index=True)[1]


def rows_of(
    documents: Sequence[np.ndarray], tokens_per_row: int, *, share: bool = True, least: int = MIN_SHARED
) -> list[SharedRow]:
    """Pack `documents` into rows of at most `tokens_per_row` tokens by best fit.

    Documents are integer token ids [length], at least one token each. A row holds a common beginning once. Beginnings that save fewer than
    `least` tokens are repeated; without `share` all are. A tree larger than a row is divided between documents, and each part repeats the
    shared tokens. A document larger than a row has its own row. A row is ordered by the first document of each branch.

    >>> (row,) = rows_of([np.array([5, 6, 7]), np.array([9]), np.array([5, 6, 8, 8])], 100, least=2)
    >>> row.segments.lengths, row.segments.prefixes
    ((2, 1, 2, 1), (None, 0, 0, None))
    >>> [place.tolist() for place in row.places]
    [[0, 1, 2], [5], [0, 1, 3, 4]]
    """
    lengths = np.array([len(document) for document in documents])
    segments, ends = Segments(tuple(lengths.tolist())), list(range(len(documents)))
    if share:
        # compared as big-endian bytes, tokens sort like their sequence
        order = sorted(ends, key=lambda number: np.asarray(documents[number]).astype(">u4").tobytes())
        common = [count_common(documents[one], documents[next]) for one, next in pairwise(order)]
        segments, ends = build_forest(lengths, np.array(order), np.array(common, dtype=np.int64), least)
    parts = divide_trees(segments, ends, np.array([segments.lengths]), [tokens_per_row])
    sizes = np.array([size for (size,), _ in parts])
    small = np.flatnonzero(sizes <= tokens_per_row)
    fitted = best_fit(sizes[small], tokens_per_row, np.random.default_rng(0))
    rows = [[number] for number in np.flatnonzero(sizes > tokens_per_row)]
    rows += [small[fitted[row]].tolist() for row in range(len(fitted))]
    together = sorted(sorted(document for part in row for document in parts[part][1]) for row in rows)
    return [join_row(segments, ends, lengths, numbers) for numbers in together]


def build_forest(
    tokens: np.ndarray, order: np.ndarray, common: np.ndarray, least: int = MIN_SHARED
) -> tuple[Segments, list[int]]:
    """Build the segments of documents of `tokens` int[n], depth first. Return them and the leaf of each document.

    `order` int[n] sorts the documents by their tokens. `common` int[n - 1] counts the tokens shared by neighbours in this order. A document
    lies on the path to its leaf.
    """
    count, sorted_lengths = len(tokens), tokens[order].tolist()
    # a document that is a prefix of any other is a prefix of the next one in this order
    ends = [at for at in range(count) if at == count - 1 or common[at] < sorted_lengths[at]]
    leaf_of = np.searchsorted(ends, np.arange(count))  # the leaf, counted from 0, of each sorted document
    branching = np.array([common[at] for at in ends[:-1]], dtype=np.int64)  # tokens that a leaf shares with the next
    first_seen = np.full(len(ends), count)
    np.minimum.at(first_seen, leaf_of, order)
    lengths: list[int] = []
    prefixes: list[int | None] = []
    segment_of = [0] * len(ends)
    todo: list[tuple[int, int, int, int | None]] = [(0, len(ends), 0, None)]
    while todo:  # leaves `first` to `last` - 1, whose tokens up to `start` are in segments, the last of them `prefix`
        first, last, start, prefix = todo.pop()
        leaf = last - first == 1
        depth = sorted_lengths[ends[first]] if leaf else int(branching[first : last - 1].min())
        if leaf:
            segment_of[first] = len(lengths)
        if leaf or depth - start >= max(least, 1):
            lengths.append(depth - start)
            prefixes.append(prefix)
            start, prefix = depth, len(lengths) - 1
        if not leaf:
            cuts = first + 1 + np.flatnonzero(branching[first : last - 1] == depth)
            branches = pairwise([first, *cuts.tolist(), last])
            latest_first = sorted(branches, key=lambda branch: -first_seen[slice(*branch)].min())
            todo += [(*branch, start, prefix) for branch in latest_first]
    leaves = [0] * count
    for number, leaf in zip(order.tolist(), leaf_of, strict=True):
        leaves[number] = segment_of[leaf]
    return Segments(tuple(lengths), tuple(prefixes)), leaves


def count_common(first: np.ndarray, second: np.ndarray) -> int:
    """Return how many tokens two documents have in common at their beginning."""
    shorter = min(len(first), len(second))
    return int(np.append(first[:shorter] != second[:shorter], True).argmax())


def divide_trees(
    segments: Segments, ends: Sequence[int], sizes: np.ndarray, most: Sequence[float]
) -> list[tuple[np.ndarray, list[int]]]:
    """Divide the trees of `segments` that exceed `most` float[k]. Return the sizes [k] and the documents of each part.

    `sizes` [k, segments] are the sizes of the segments in k measures. Each part repeats the tokens that its documents share.
    """
    ending: dict[int, list[int]] = {}
    for document, leaf in enumerate(ends):
        ending.setdefault(leaf, []).append(document)
    parts: list[tuple[np.ndarray, list[int]]] = []
    inside: set[int] = set()  # the segments of the last part
    for leaf in segments.leaves:
        path = segments.paths[leaf]
        size, documents = parts[-1] if path[0] in inside else (np.zeros(len(sizes)), [])
        larger = size + sizes[:, [number for number in path if number not in inside]].sum(axis=1)
        if not documents or (larger > most).any():
            inside = set()
            parts.append((sizes[:, list(path)].sum(axis=1), ending[leaf]))
        else:
            parts[-1] = (larger, documents + ending[leaf])
        inside.update(path)
    return parts


def join_row(segments: Segments, ends: Sequence[int], tokens: np.ndarray, numbers: Sequence[int]) -> SharedRow:
    """Build the row of the documents `numbers` from the segments on their paths. Joins segments without a branch. `tokens` int[n]: lengths."""
    taken = sorted({segment for number in numbers for segment in segments.paths[ends[number]]})
    branches = Counter(segments.shared[old] for old in taken)
    lengths: list[int] = []
    prefixes: list[int | None] = []
    new: dict[int, int] = {}
    for old in taken:
        prefix = segments.shared[old]
        if prefix is not None and branches[prefix] == 1:  # the next one of the row
            new[old] = new[prefix]
            lengths[new[old]] += segments.lengths[old]
        else:
            new[old] = len(lengths)
            lengths.append(segments.lengths[old])
            prefixes.append(None if prefix is None else new[prefix])
    row = Segments(tuple(lengths), tuple(prefixes))
    leaves = [new[ends[number]] for number in numbers]
    whole = np.array([row.prefix_lengths[leaf] + row.lengths[leaf] for leaf in leaves])
    paths = np.split(row.tokens_along(leaves), whole.cumsum()[:-1])
    places = tuple(path[: int(tokens[number])] for path, number in zip(paths, numbers, strict=True))
    return SharedRow(row, tuple(numbers), places)


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

    def of(self, numbers: np.ndarray) -> PrefixIndex:
        """Return the index of these documents alone, numbered from 0."""
        places = self._places[numbers]
        order = np.argsort(places, kind="stable")
        here = places[order]
        common = np.minimum.reduceat(self.common[: here[-1] + 1], here[:-1] + 1) if len(here) > 1 else here[:0]
        return PrefixIndex(self.lengths[numbers], order, np.append(0, common))

    def forest(self, numbers: np.ndarray) -> tuple[Segments, list[int]]:
        """Return the segments of these documents and each document's last segment; see packing/prefixes.py."""
        own = self.of(numbers)
        return build_forest(own.lengths, own.order, own.common[1:])

    def row(self, numbers: np.ndarray) -> SharedRow:
        """Return the row of these documents. In the row they are numbered from 0."""
        return join_row(*self.forest(numbers), self.lengths[numbers], range(len(numbers)))

    def repeated(self, numbers: np.ndarray) -> np.ndarray:
        """Return the length of each prefix that need not be computed again: int64."""
        segments, ends = self.forest(numbers)
        lengths, longest, continued, repeated = self.lengths[numbers], dict[int, int](), set[int](), list[int]()
        for prefix, tokens in zip(segments.shared, segments.prefix_lengths, strict=True):
            if prefix in continued:
                repeated.append(tokens)
            elif prefix is not None:
                continued.add(prefix)
        for number in map(int, np.argsort(-lengths, kind="stable")):
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


class IndexedDocuments(Protocol):
    """Documents by number, and their `lengths` int[n]."""

    lengths: np.ndarray

    def __getitem__(self, number: int, /) -> Document: ...


def index_prefixes(documents: IndexedDocuments, examples: np.ndarray | None = None) -> PrefixIndex:
    """Build the index of a data set of Documents. Reads all of them; documents that begin alike are read further.

    With `examples` int64[m + 1], the borders of groups, only documents of a group have a beginning in common. Others are not read.
    """
    lengths = np.asarray(documents.lengths)
    order: list[int] = []
    borders = [0, len(lengths)] if examples is None else examples.tolist()
    todo = [([*range(*group)], 0, False) for group in reversed([*pairwise(borders)])]
    while todo:
        members, start, are_equal = todo.pop()
        if are_equal or len(members) == 1:
            order += members
            continue
        end = 2 * start + _BLOCK
        # compared as big-endian bytes, tokens sort like their sequence
        keys = {number: documents[number].keys[start:end].astype(">u4").tobytes() for number in members}
        groups = groupby(sorted(members, key=keys.__getitem__), key=keys.__getitem__)
        todo += reversed([(list(group), end, len(key) < 4 * (end - start)) for key, group in groups])
    apart, common = {*borders}, [0]  # each group has its own places in the order
    for place, (before, after) in enumerate(pairwise(order), 1):
        common.append(0 if place in apart else count_shareable(documents[before], documents[after]))
    return PrefixIndex(lengths, np.array(order, dtype=np.int32), np.array(common, dtype=np.int32))


def cut_examples(index: PrefixIndex, examples: np.ndarray, tokens: float) -> tuple[Rows, np.ndarray]:
    """Return the documents of each example, and its size in tokens. Above `tokens` its trees are divided.

    `examples` int64[m + 1] are the borders of the examples. In `index` only documents of an example have a beginning in common.
    """
    parts, sizes = list[np.ndarray](), list[int]()
    borders: list[int] = examples.tolist()
    for first, end in pairwise(borders):
        numbers = np.arange(first, end)
        alone = Segments((int(index.lengths[first]),)), [0]
        segments, ends = index.forest(numbers) if end - first > 1 else alone
        if segments.tokens <= tokens:
            trees = [(np.array([segments.tokens]), [*range(len(numbers))])]
        else:
            trees = divide_trees(segments, ends, np.array([segments.lengths]), [tokens])
        parts += [numbers[members] for _, members in trees]
        sizes += [int(size[0]) for size, _ in trees]
    return Rows(np.concatenate(parts), np.cumsum([0, *map(len, parts)])), np.array(sizes)


def count_shareable(before: Document, after: Document) -> int:
    """Return how many tokens at their beginning two documents can share."""
    ids, others = before.keys, after.keys
    alike = count_common(ids, others)
    # the last common token predicts different tokens, unless one of the documents ends there
    return alike if alike == min(len(ids), len(others)) else outside_pictures(after, alike - 1)


def outside_pictures(document: Document, end: int) -> int:
    """Return the last place up to `end`, at least 0, that cuts no picture."""
    return next((picture.start for picture in document.pictures if picture.start < end < picture.end), max(end, 0))


def lay_out_shared(
    index: PrefixIndex,
    numbers: np.ndarray,
    world_size: int,
    limits: MicroBatchLimits,
    attention_cost: float,
    ranks_per_row: int = 1,
    *,
    keep_order: bool = False,
) -> Layout:
    """Lay out the documents `numbers` of one step, like `lay_out`. A micro-batch counts a common prefix once.

    Trees larger than `limits.tokens` are divided. Trees that would keep one rank busy while the others wait are divided too.
    """
    segments, ends = index.forest(numbers)
    tokens, work = np.array(segments.lengths), _work(segments, attention_cost)
    layouts: list[Layout] = []
    done = list[float]()
    for division in _DIVISIONS if world_size > 1 else _DIVISIONS[:1]:
        most = limits.tokens, division * work.sum() / world_size
        trees = divide_trees(segments, ends, np.stack([tokens, work]), most)
        sizes, cost = np.transpose([size for size, _ in trees])
        how = (world_size, limits, attention_cost, ranks_per_row)
        layout = lay_out(sizes, "packed", *how, keep_order=keep_order, cost=cost)
        done.append(float(work_of_ranks(layout, lambda part, cost=cost: cost[part].sum()).max()))
        for parts in layout:
            parts[:] = [
                np.array([number for tree in part for number in trees[int(tree)][1]], dtype=np.int64) for part in parts
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
