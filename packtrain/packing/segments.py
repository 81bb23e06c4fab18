"""Description of a flattened row of several documents.

A segment is a document, or a piece that continues the end of an earlier piece. Its tokens attend causally to themselves
and to everything before them on the path to the root: a row holds the prompt of several answers once. The lengths are
plain Python integers: no backend waits for the device to read them.

A row may hold pictures. Its Segments say which part of the model's picture arguments belongs to each picture, and which
tokens see each other both ways.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class PlacedPicture(NamedTuple):
    """Picture in a row of tokens.

    `start`: place of its first token. `rows`: its entries along the first axis of each picture argument of the model.
    """

    start: int
    rows: dict[str, int]


class TwoWay(NamedTuple):
    """Layers where the tokens of a picture see each other both ways.

    These are the layers with a window; `in_global_layers`: also those without one. `beyond_window`: a token sees the whole
    picture there, else only the picture's tokens within its window.
    """

    in_global_layers: bool
    beyond_window: bool


_EVERYWHERE = TwoWay(in_global_layers=True, beyond_window=False)


@dataclass(frozen=True)
class Segments:
    """Row of `len(lengths)` segments in this order, with `sum(lengths)` tokens. Every length is at least 1.

    `prefixes[i]` is None or the number of an earlier segment that segment i continues. This prefix may have a prefix in turn: the
    tokens of i see all segments on this path in full, and their positions count on along it. `()`: no segment has a prefix.

    `pictures` are in the order of their tokens. `blocks`: (start, end) of tokens that see each other both ways, in the layers
    that `two_way` names. A block lies in one segment.

    >>> from packtrain import Segments
    >>> row = Segments((4, 2, 3, 5), (None, 0, 0, None))  # a prompt, its two answers, and another document
    >>> row.tokens, row.paths[2]
    (14, (0, 2))
    >>> row.position_ids().tolist()
    [[0, 1, 2, 3, 4, 5, 4, 5, 6, 0, 1, 2, 3, 4]]
    """

    lengths: tuple[int, ...]
    prefixes: tuple[int | None, ...] = ()
    blocks: tuple[tuple[int, int], ...] = ()
    two_way: TwoWay = _EVERYWHERE
    pictures: tuple[PlacedPicture, ...] = field(default=(), compare=False, repr=False)

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
        """Return the number of tokens in the row."""
        return sum(self.lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return the place of each segment's first token."""
        return tuple(accumulate(self.lengths[:-1], initial=0))

    @cached_property
    def shared(self) -> tuple[int | None, ...]:
        """Return the prefix of each segment, or None; as many entries as `lengths`."""
        return self.prefixes or (None,) * len(self.lengths)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Return for each segment the numbers of the segments from its root to itself."""
        paths: list[tuple[int, ...]] = []
        for number, prefix in enumerate(self.shared):
            paths.append((number,) if prefix is None else (*paths[prefix], number))
        return tuple(paths)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """Return the segments that no segment continues: the ends of the row's documents."""
        continued = set(self.prefixes)
        return tuple(number for number in range(len(self.lengths)) if number not in continued)

    @cached_property
    def prefix_lengths(self) -> tuple[int, ...]:
        """Return the number of tokens before each segment on its path, 0 without a prefix."""
        before: list[int] = []
        for prefix in self.shared:
            before.append(0 if prefix is None else before[prefix] + self.lengths[prefix])
        return tuple(before)

    @cached_property
    def own_blocks(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the blocks of each segment, as places in the segment."""
        own: list[list[tuple[int, int]]] = [[] for _ in self.lengths]
        for start, end in self.blocks:
            number = bisect_right(self.starts, start) - 1
            own[number].append((start - self.starts[number], end - self.starts[number]))
        return tuple(map(tuple, own))

    @cached_property
    def same_shape(self) -> tuple[tuple[int, ...], ...]:
        """Group the segments by length, number of tokens before them, and blocks."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for number, shape in enumerate(zip(self.lengths, self.prefix_lengths, self.own_blocks, strict=True)):
            groups.setdefault(shape, []).append(number)
        return tuple(map(tuple, groups.values()))

    def position_ids(self) -> torch.Tensor:
        """Return positions int64 [1, T]. They start at 0, or continue after the segment's prefix."""
        offsets = torch.tensor(self.prefix_lengths) - torch.tensor(self.starts)
        return (torch.arange(self.tokens) + offsets.repeat_interleave(torch.tensor(self.lengths)))[None]

    def cumulative_lengths(self) -> torch.Tensor:
        """Return int32 [segments + 1]: the `cu_seqlens` of flash attention's varlen kernels, for queries."""
        return torch.tensor((*self.starts, self.tokens), dtype=torch.int32)

    def segment_ids(self) -> torch.Tensor:
        """Return the segment number of each token, from 0: int32 [1, T]. State-space kernels call it `seq_idx`."""
        numbers = torch.arange(len(self.lengths), dtype=torch.int32)
        return numbers.repeat_interleave(torch.tensor(self.lengths))[None]

    def tokens_along(self, numbers: Iterable[int]) -> np.ndarray:
        """Return the places in the row of all tokens on each segment's path: int64. The segments `numbers` come in turn."""
        pieces = np.array([piece for number in numbers for piece in self.paths[number]])
        lengths: npt.NDArray[np.int64] = np.array(self.lengths)[pieces]
        ends = lengths.cumsum()
        return np.arange(int(ends[-1])) + np.repeat(np.array(self.starts)[pieces] - ends + lengths, lengths)

    def unrolled(self) -> Unrolled:
        """Return the documents without sharing: each leaf with a copy of everything before it."""
        tokens = self.tokens_along(self.leaves)
        lengths = tuple(self.prefix_lengths[leaf] + self.lengths[leaf] for leaf in self.leaves)
        return Unrolled(Segments(lengths), tokens, np.unique(tokens, return_index=True)[1])

    def repeated(self, times: int) -> Segments:
        """Return the same segments several times, one after the other."""
        number = len(self.lengths)
        prefixes = tuple(
            prefix if prefix is None else prefix + number * copy for copy in range(times) for prefix in self.prefixes
        )
        return Segments(self.lengths * times, prefixes)

    def visible(self, window: int | None = None) -> torch.Tensor:
        """Return bool [T, T], True where the query (row) may see the key (column). Backends are tested against this definition.

        With `window` a query sees only keys less than `window` positions before it. Blocks are two-way, as in a layer that
        `two_way` names.
        """
        ids, positions = self.segment_ids()[0], self.position_ids()[0]
        on_path = torch.zeros(len(self.lengths), len(self.lengths), dtype=torch.bool)
        for number, path in enumerate(self.paths):
            on_path[number, list(path)] = True
        seen = on_path[ids][:, ids] & (positions[:, None] >= positions[None, :])
        near = positions[:, None] - positions[None, :] < (self.tokens if window is None else window)
        block = torch.zeros_like(seen)
        for start, end in self.blocks:
            block[start:end, start:end] = True
        return seen & near | block if self.two_way.beyond_window else (seen | block) & near


@dataclass(frozen=True)
class SplitSegments(Segments):
    """Row split over `parts` ranks. This rank has the tokens `own`, part number `part`.

    All other values, such as `position_ids`, describe the whole row.
    """

    part: int = 0
    parts: int = 1

    @cached_property
    def whole(self) -> Segments:
        """Return the row without the split."""
        return Segments(self.lengths, self.prefixes)

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Return the first token of each part and the end of the last. Parts differ by at most one token."""
        return tuple(self.tokens * part // self.parts for part in range(self.parts + 1))

    @property
    def own(self) -> slice:
        """Return the tokens of this part."""
        return slice(*self.borders[self.part : self.part + 2])


def split_row(segments: Segments, part: int, parts: int) -> Segments:
    """Return part number `part` of the row, or the row itself if `parts` is 1."""
    return segments if parts == 1 else SplitSegments(segments.lengths, segments.prefixes, part=part, parts=parts)


def own_tokens(segments: Segments) -> slice:
    """Return the tokens of the row that this process has."""
    return segments.own if isinstance(segments, SplitSegments) else slice(None)


class Unrolled(NamedTuple):
    """Unshared documents of a row of T tokens: `segments` of T' tokens without prefixes.

    `tokens` int64 [T']: the place of each token in the shared row. `outputs` int64 [T]: where each token of the shared row has its output
    among the T' tokens; for a shared token, the output in the first document that contains it.
    """

    segments: Segments
    tokens: np.ndarray
    outputs: np.ndarray
