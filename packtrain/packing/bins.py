"""Bin packing: choose which documents share a row, for millions of lengths.

**Best fit** is best-fit-decreasing: place the longest document first, and each document into the fullest row with room for it. Rows with
the same free space are interchangeable, like documents of the same length. We therefore place whole groups at once, using the HISTOGRAM of
lengths: "these 5,000 rows with 812 free tokens take one document of 810 each". The number of rows is exactly the number that plain
best-fit-decreasing makes. Ten million documents take a second instead of minutes.

The random generator decides which documents become neighbours. In a small data set most lengths are unique, so we also perturb the order
of placing (lengths are scaled by up to 15 %) if that costs no row. **In order** (next fit) keeps the given order.

Sources: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination" (arXiv 2107.02027: packing on the
histogram); Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830: best fit for training).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packtrain.data.dataset import list_members

PERTURBATIONS = (0.3, 0.1)  # ranges of the random scale factors; we use the first that costs no row
FEW_PER_LENGTH = 10  # above this many documents per length, shuffling documents of equal length is random enough


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Documents in rows: row r holds `documents[offsets[r]:offsets[r + 1]]`.
    `documents` int64[n] are indices into the planned lengths; `offsets` is int64[rows + 1]."""

    documents: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.documents[self.offsets[row] : self.offsets[row + 1]]

    def expand(self, chosen: Rows) -> Rows:
        """Return `chosen`, whose entries are numbers of these rows, as rows of the documents."""
        ends = np.append(0, np.cumsum(np.diff(self.offsets)[chosen.documents]))
        return Rows(self.documents[list_members(self.offsets, chosen.documents)], ends[chosen.offsets])


def best_fit(lengths: np.ndarray, capacity: int, rng: np.random.Generator) -> Rows:
    """Fill rows of at most `capacity` tokens by best-fit-decreasing, in random order.

    `lengths` int[n] in tokens. The number of rows does not depend on `rng`. ValueError if a length exceeds `capacity`.
    """
    lengths = _check_lengths(lengths, capacity)
    histogram = np.bincount(lengths)
    order, (first_row, rows, copies), row_count = _place_in_best_order(histogram, capacity, rng)
    # each placement fills consecutive rows first_row, first_row + 1, …; list these row numbers for all placements
    within = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows)
    filled = np.repeat(first_row, rows) + within
    shuffled = rng.permutation(row_count).astype(np.int32)[filled]
    row_of = np.repeat(shuffled, np.repeat(copies, rows))  # the row of each document, in order of placing
    rank = np.zeros(len(histogram), dtype=np.int32)
    rank[order] = np.arange(len(order))
    as_placed = _sort_by_group(rank[lengths], np.arange(len(lengths), dtype=np.int32), rng)
    offsets = np.concatenate(([0], np.cumsum(np.bincount(row_of, minlength=row_count))))
    return Rows(_sort_by_group(row_of, as_placed, rng), offsets)


def in_order(lengths: np.ndarray, capacity: int) -> Rows:
    """Fill rows by next fit: a document that does not fit starts a new row. Keeps the given order."""
    lengths = _check_lengths(lengths, capacity)
    ends = np.cumsum(lengths, dtype=np.int64)
    next_start = np.searchsorted(ends, ends - lengths + capacity, side="right").data  # for a row that starts here
    offsets = [0]
    while offsets[-1] < len(lengths):
        offsets.append(next_start[offsets[-1]])
    return Rows(np.arange(len(lengths)), np.array(offsets, dtype=np.int64))


def _check_lengths(lengths: np.ndarray, capacity: int) -> np.ndarray:
    lengths = np.asarray(lengths)
    if len(lengths) and lengths.max() > capacity:
        raise ValueError(f"document {lengths.argmax()} has {lengths.max()} tokens, a row takes {capacity}")
    return lengths.astype(np.int32, copy=False)


def _place_in_best_order(
    histogram: np.ndarray, capacity: int, rng: np.random.Generator
) -> tuple[np.ndarray, npt.NDArray[np.int64], int]:
    """Place the documents in a random order of lengths, if that costs no row.
    Return the order of lengths, the placements and the number of rows."""
    exact = np.flatnonzero(histogram)[::-1]  # descending
    placements, row_count = _place(histogram, exact, capacity)
    if histogram.sum() <= FEW_PER_LENGTH * len(exact):
        for disturbance in PERTURBATIONS:
            scale = 1 + disturbance * (rng.random(len(exact)) - 0.5)
            order = exact[np.argsort(-exact * scale, kind="stable")]
            disturbed, count = _place(histogram, order, capacity)
            if count == row_count:
                return order, disturbed, row_count
    return exact, placements, row_count


def _place(histogram: np.ndarray, order: np.ndarray, capacity: int) -> tuple[npt.NDArray[np.int64], int]:
    """Place `histogram[length]` documents of each length by best fit, taking lengths in `order`. Return the number of rows and
    int64[3, placements] (first_row, rows, copies): each of `rows` rows, starting at `first_row`, takes the next `copies` documents."""
    placements: list[tuple[int, int, int]] = []
    groups: dict[int, list[tuple[int, int]]] = {}  # free space: ranges (first row, rows) with that space
    spaces: list[int] = []  # the keys of groups, ascending
    row_count = 0
    for length in order.tolist():
        remaining = int(histogram[length])
        while remaining:
            fullest = bisect_left(spaces, length)
            space = spaces[fullest] if fullest < len(spaces) else capacity
            copies = min(space // length, remaining) if length else remaining
            wanted = remaining // copies
            if fullest == len(spaces):
                taken = [(row_count, wanted)]
                row_count += wanted
            else:
                taken = _take(groups[space], wanted)
                if not groups[space]:
                    del groups[space], spaces[fullest]
            placements.extend((first, rows, copies) for first, rows in taken)
            remaining -= copies * sum(rows for _, rows in taken)
            space_left = space - copies * length
            if space_left not in groups:
                insort(spaces, space_left)
            groups.setdefault(space_left, []).extend(taken)
    return np.transpose(np.reshape(np.array(placements, dtype=np.int64), (-1, 3))), row_count


def _take(ranges: list[tuple[int, int]], wanted: int) -> list[tuple[int, int]]:
    """Remove up to `wanted` rows from `ranges` and return them; split a range where needed."""
    taken = list[tuple[int, int]]()
    while wanted and ranges:
        first, rows = ranges.pop()
        if rows > wanted:
            ranges.append((first + wanted, rows - wanted))
            rows = wanted
        taken.append((first, rows))
        wanted -= rows
    return taken


def _sort_by_group(group: np.ndarray, members: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Sort `members` (a permutation of 0 … n-1) by `group`: int64[n]. The order inside a group is random.

    We sort group, random bits and member as ONE 64-bit integer, with the group in the highest bits. This is several times faster than an
    argsort. 10 M documents in 1 M rows leave 20 random bits; the member breaks ties.
    """
    count = len(members)
    member_bits, group_bits = count.bit_length(), int(group.max(initial=0)).bit_length()
    random_bits = 64 - group_bits - member_bits
    assert random_bits >= 0, f"{count} documents do not fit in 64-bit keys"
    keys = group.astype(np.uint64) << np.uint64(random_bits)
    keys |= rng.integers(0, 2**64, count, dtype=np.uint64) >> np.uint64(64 - random_bits)
    keys <<= np.uint64(member_bits)
    keys |= members.astype(np.uint64)
    keys.sort()
    keys &= np.uint64(2**member_bits - 1)
    return keys.astype(np.int64)
