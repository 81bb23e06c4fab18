"""Segments: the one value that describes a flattened row of several documents.

A segment is a document, or a piece of one that continues the end of an earlier piece: its tokens attend causally to themselves
and to all that is before it on the path to its root, so that a prompt with several answers is in the row once. The lengths are
plain Python integers: no backend waits for the device to read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch


@dataclass(frozen=True)
class Segments:
    """A row of `sum(lengths)` tokens made of `len(lengths)` segments, in this order; every length is at least 1.

    `prefixes[i]` is None or the number of an earlier segment that segment i continues, which may itself continue one: the
    tokens of i see all segments on this path in full, and their positions count on along it. `()`: no segment has one.

    >>> from packtrain import Segments
    >>> row = Segments((4, 2, 3, 5), (None, 0, 0, None))  # a prompt, its two answers, and another document
    >>> row.tokens, row.paths[2]
    (14, (0, 2))
    >>> row.position_ids().tolist()
    [[0, 1, 2, 3, 4, 5, 4, 5, 6, 0, 1, 2, 3, 4]]
    """

    lengths: tuple[int, ...]
    prefixes: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"a row needs documents of at least one token, got lengths {self.lengths}")
        if self.prefixes and len(self.prefixes) != len(self.lengths):
            raise ValueError(f"{len(self.lengths)} segments, but {len(self.prefixes)} prefixes")
        for segment, prefix in enumerate(self.prefixes):
            if prefix is not None and not 0 <= prefix < segment:
                raise ValueError(f"segment {segment} continues an earlier segment or None, got {prefix}")

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return sum(self.lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First token of each segment."""
        return tuple(accumulate(self.lengths[:-1], initial=0))

    @cached_property
    def shared(self) -> tuple[int | None, ...]:
        """The prefix of each segment, None where there is none; as long as `lengths`."""
        return self.prefixes or (None,) * len(self.lengths)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """For each segment the numbers of those from its root to itself."""
        paths: list[tuple[int, ...]] = []
        for number, prefix in enumerate(self.shared):
            paths.append((number,) if prefix is None else (*paths[prefix], number))
        return tuple(paths)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """The segments that none continues: the ends of the row's documents."""
        continued = set(self.prefixes)
        return tuple(number for number in range(len(self.lengths)) if number not in continued)

    @cached_property
    def prefix_lengths(self) -> tuple[int, ...]:
        """Tokens before each segment on its path, 0 where it continues none."""
        before: list[int] = []
        for prefix in self.shared:
            before.append(0 if prefix is None else before[prefix] + self.lengths[prefix])
        return tuple(before)

    @cached_property
    def same_shape(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the segments, those of equal length with as many tokens before them together."""
        groups: dict[tuple[int, int], list[int]] = {}
        for number, shape in enumerate(zip(self.lengths, self.prefix_lengths, strict=True)):
            groups.setdefault(shape, []).append(number)
        return tuple(map(tuple, groups.values()))

    def position_ids(self) -> torch.Tensor:
        """int64 [1, T], counting from 0 in every segment, or on from the one that it continues."""
        offsets = torch.tensor(self.prefix_lengths) - torch.tensor(self.starts)
        return (torch.arange(self.tokens) + offsets.repeat_interleave(torch.tensor(self.lengths)))[None]

    def cumulative_lengths(self) -> torch.Tensor:
        """int32 [segments + 1], the `cu_seqlens` of flash attention's varlen kernels, for queries."""
        return torch.tensor((*self.starts, self.tokens), dtype=torch.int32)

    def segment_ids(self) -> torch.Tensor:
        """int32 [1, T], the number of each token's segment, from 0 (the `seq_idx` of state-space kernels)."""
        numbers = torch.arange(len(self.lengths), dtype=torch.int32)
        return numbers.repeat_interleave(torch.tensor(self.lengths))[None]

    def tokens_along(self, numbers: Iterable[int]) -> np.ndarray:
        """int64: for each of the segments `numbers` in turn, where the tokens of its whole path are in the row."""
        pieces = np.array([piece for number in numbers for piece in self.paths[number]])
        lengths = np.array(self.lengths)[pieces]
        ends = lengths.cumsum()
        return np.arange(ends[-1]) + np.repeat(np.array(self.starts)[pieces] - ends + lengths, lengths)

    def unrolled(self) -> Unrolled:
        """The same documents without sharing: each of the `leaves` with a copy of all before it."""
        tokens = self.tokens_along(self.leaves)
        lengths = tuple(self.prefix_lengths[leaf] + self.lengths[leaf] for leaf in self.leaves)
        return Unrolled(Segments(lengths), tokens, np.unique(tokens, return_index=True)[1])

    def repeated(self, times: int) -> Segments:
        """The same segments several times, one after the other."""
        number = len(self.lengths)
        prefixes = tuple(
            prefix if prefix is None else prefix + number * copy for copy in range(times) for prefix in self.prefixes
        )
        return Segments(self.lengths * times, prefixes)

    def visible(self, window: int | None = None) -> torch.Tensor:
        """bool [T, T], True where the query (row) may see the key (column): the definition that backends are tested against.

        With `window` a query sees only keys less than `window` positions before it.
        """
        ids, positions = self.segment_ids()[0], self.position_ids()[0]
        on_path = torch.zeros(len(self.lengths), len(self.lengths), dtype=torch.bool)
        for number, path in enumerate(self.paths):
            on_path[number, list(path)] = True
        seen = on_path[ids][:, ids] & (positions[:, None] >= positions[None, :])
        return seen if window is None else seen & (positions[:, None] - positions[None, :] < window)


@dataclass(frozen=True)
class SplitSegments(Segments):
    """A row whose tokens are split over `parts` ranks, of which this one has those of number `part`, `own`.

    `position_ids` and all else are those of the whole row.
    """

    part: int = 0
    parts: int = 1

    @cached_property
    def whole(self) -> Segments:
        """The row as one process would have it."""
        return Segments(self.lengths, self.prefixes)

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """The first token of each part, and the end of the last: parts differ by one token at most."""
        return tuple(self.tokens * part // self.parts for part in range(self.parts + 1))

    @property
    def own(self) -> slice:
        """The tokens of this part."""
        return slice(*self.borders[self.part : self.part + 2])


def split_row(segments: Segments, part: int, parts: int) -> Segments:
    """Part number `part` of the row, which is itself if it has one part."""
    return segments if parts == 1 else SplitSegments(segments.lengths, segments.prefixes, part, parts)


def own_tokens(segments: Segments) -> slice:
    """The tokens of the row that this process has."""
    return segments.own if isinstance(segments, SplitSegments) else slice(None)


class Unrolled(NamedTuple):
    """The documents of a row of T tokens without sharing: `segments` of T' tokens, none of which continues another.

    `tokens` int64 [T']: which token of the shared row each of them is. `outputs` int64 [T]: where the output of each token of
    the shared row is among them, of a shared token in the first document that has it.
    """

    segments: Segments
    tokens: np.ndarray
    outputs: np.ndarray
