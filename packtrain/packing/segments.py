"""Segments: the one value that describes a flattened row of several documents.

Collators make it, attention backends consume it, the isolation proof perturbs it. A segment is a document (or a piece of
one) whose tokens attend causally to themselves and, if it has a prefix, to all of one earlier segment: so a prompt shared by
two answers is in the row once. The lengths are plain Python integers, so that no backend waits for the device to read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Segments:
    """A row of `sum(lengths)` tokens made of `len(lengths)` segments, in this order; every length is at least 1.

    `prefixes[i]` is None or the number of an earlier segment, itself without a prefix, that segment i continues: its
    tokens see that one in full, and their positions count on from it. `()` says that no segment has one.
    """

    lengths: tuple[int, ...]
    prefixes: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"a row needs documents of at least one token, got lengths {self.lengths}")
        if self.prefixes and len(self.prefixes) != len(self.lengths):
            raise ValueError(f"{len(self.lengths)} segments, but {len(self.prefixes)} prefixes")
        for segment, prefix in enumerate(self.prefixes):
            if prefix is not None and not (0 <= prefix < segment and self.prefixes[prefix] is None):
                raise ValueError(f"segment {segment} needs an earlier segment without a prefix, got {prefix}")

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return self.starts[-1] + self.lengths[-1]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First token of each segment."""
        return tuple(accumulate(self.lengths[:-1], initial=0))

    @cached_property
    def shared(self) -> tuple[int | None, ...]:
        """The prefix of each segment, None where there is none; as long as `lengths`."""
        return self.prefixes or (None,) * len(self.lengths)

    @cached_property
    def followers(self) -> dict[int, list[int]]:
        """The segments that continue each prefix."""
        found: dict[int, list[int]] = {}
        for number, prefix in enumerate(self.shared):
            if prefix is not None:
                found.setdefault(prefix, []).append(number)
        return found

    @cached_property
    def prefix_lengths(self) -> tuple[int, ...]:
        """Tokens of each segment's prefix, 0 where it has none."""
        return tuple(0 if prefix is None else self.lengths[prefix] for prefix in self.shared)

    @cached_property
    def same_shape(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the segments, those of equal length and equal length of prefix together."""
        groups: dict[tuple[int, int], list[int]] = {}
        for number, shape in enumerate(zip(self.lengths, self.prefix_lengths, strict=True)):
            groups.setdefault(shape, []).append(number)
        return tuple(map(tuple, groups.values()))

    def position_ids(self) -> torch.Tensor:
        """int64 [1, T], counting from 0 in every segment, or on from its prefix."""
        pairs = zip(self.lengths, self.prefix_lengths, strict=True)
        return torch.cat([torch.arange(before, before + length) for length, before in pairs])[None]

    def cumulative_lengths(self) -> torch.Tensor:
        """int32 [segments + 1], the `cu_seqlens` of flash attention's varlen kernels, for queries."""
        return torch.tensor((*self.starts, self.tokens), dtype=torch.int32)

    def segment_ids(self) -> torch.Tensor:
        """int32 [1, T], the number of each token's segment, from 0 (the `seq_idx` of state-space kernels)."""
        return torch.repeat_interleave(torch.arange(len(self.lengths), dtype=torch.int32), torch.tensor(self.lengths))[
            None
        ]

    def visible(self, window: int | None = None) -> torch.Tensor:
        """bool [T, T], True where the query (row) may see the key (column): the definition that backends are tested against.

        With `window` a query sees only keys less than `window` positions before it.
        """
        ids, positions = self.segment_ids()[0], self.position_ids()[0]
        seen = (ids[:, None] == ids[None, :]).tril()
        prefixes = torch.tensor([-1 if prefix is None else prefix for prefix in self.shared], dtype=ids.dtype)
        seen |= prefixes[ids][:, None] == ids[None, :]
        return seen if window is None else seen & (positions[:, None] - positions[None, :] < window)
