"""Segments: the one value that describes a flattened row of several documents.

Collators make it, attention backends consume it, the isolation proof perturbs it. A segment is a document (or a piece of
one) whose tokens attend causally to themselves and to nothing else in the row. The lengths are plain Python integers, so
that no backend has to wait for the device to learn where a document ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Segments:
    """A row of `sum(lengths)` tokens made of `len(lengths)` documents, in this order; every length is at least 1."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"a row needs documents of at least one token, got lengths {self.lengths}")

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return self.starts[-1] + self.lengths[-1]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First token of each segment."""
        return tuple(accumulate(self.lengths[:-1], initial=0))

    def position_ids(self) -> torch.Tensor:
        """int64 [1, T], counting from 0 in every segment."""
        return torch.cat([torch.arange(length) for length in self.lengths])[None]

    def cumulative_lengths(self) -> torch.Tensor:
        """int32 [segments + 1], the `cu_seqlens` of flash attention's varlen kernels."""
        return torch.tensor((*self.starts, self.tokens), dtype=torch.int32)

    def segment_ids(self) -> torch.Tensor:
        """int32 [1, T], the number of each token's segment, from 0 (the `seq_idx` of state-space kernels)."""
        return torch.repeat_interleave(torch.arange(len(self.lengths), dtype=torch.int32), torch.tensor(self.lengths))[
            None
        ]

    def visible(self) -> torch.Tensor:
        """bool [T, T], True where the query (row) may see the key (column): the definition that backends are tested against."""
        ids = self.segment_ids()[0]
        return (ids[:, None] == ids[None, :]).tril()
