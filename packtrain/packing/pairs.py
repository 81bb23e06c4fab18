"""Preference pairs → the padded batch that TRL's losses work on, and where its tokens are in a flattened row.

TRL's loss code reads `[2B, L]` tensors, all chosen answers first, then all rejected ones. These are cheap integers; the model
never sees them when there is a PairLayout: then it runs on the row, and what it says per token is put back (train/pairs.py).

With a shared prompt the row of a pair is three segments: the prompt without its last token, and twice that last token with
an answer, each seeing the first segment. (The last token predicts the first of both answers, so it is there twice.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from packtrain.data.dataset import Document
from packtrain.data.pairs import Preference
from packtrain.packing.collate import FILLER
from packtrain.packing.segments import Segments

Layout = Literal["padding", "flat", "shared"]
FILLER_PAIR = Preference(chosen=FILLER, rejected=FILLER, prompt=0)
"""Stands in for an empty micro-batch: it is run, and trains nothing."""


@dataclass(frozen=True, slots=True)
class PairLayout:
    """A flattened row of T tokens: token t of it is at `rows[t]`, `columns[t]` (int64 [T]) of the padded batch."""

    segments: Segments
    rows: torch.Tensor
    columns: torch.Tensor


def collate_pairs(pairs: Sequence[Preference], pad_token_id: int, layout: Layout) -> dict[str, Any]:
    """`input_ids`, `attention_mask`, `completion_mask` int64 [2B, L], and, unless padded, their `layout`."""
    pairs = pairs or [FILLER_PAIR]
    documents = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    shape = (len(documents), max(len(document.input_ids) for document in documents))
    input_ids = torch.full(shape, pad_token_id)
    attention_mask, completion_mask = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    for row, document in enumerate(documents):
        length = len(document.input_ids)
        input_ids[row, :length] = torch.from_numpy(document.input_ids.astype(np.int64))
        attention_mask[row, :length] = 1
        completion_mask[row, :length] = torch.from_numpy(document.loss_mask.astype(np.int64))
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "completion_mask": completion_mask}
    return batch if layout == "padding" else {**batch, "layout": _layout(pairs, shared=layout == "shared")}


def _layout(pairs: Sequence[Preference], *, shared: bool) -> PairLayout:
    lengths: list[int] = []
    prefixes: list[int | None] = []
    places: list[tuple[int, int, int]] = []  # padded row, first column, length

    def add(row: int, first: int, document: Document, prefix: int | None) -> None:
        places.append((row, first, len(document.input_ids) - first))
        lengths.append(len(document.input_ids) - first)
        prefixes.append(prefix)

    for number, pair in enumerate(pairs):
        chosen, rejected = number, number + len(pairs)
        if not (shared and pair.prompt > 1):
            add(chosen, 0, pair.chosen, None)
            add(rejected, 0, pair.rejected, None)
            continue
        prompt, common = len(lengths), pair.prompt - 1
        places.append((chosen, 0, common))
        lengths.append(common)
        prefixes.append(None)
        add(chosen, common, pair.chosen, prompt)
        add(rejected, common, pair.rejected, prompt)
    segments = Segments(tuple(lengths), tuple(prefixes) if any(p is not None for p in prefixes) else ())
    return PairLayout(
        segments,
        rows=torch.cat([torch.full((length,), row) for row, _, length in places]),
        columns=torch.cat([torch.arange(first, first + length) for _, first, length in places]),
    )
