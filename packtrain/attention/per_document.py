"""`per_document`: the row is taken apart and the model runs once per document, for models that cannot be flattened exactly.

State-space layers, linear attention, convolutions along the row and unknown code carry state across a document's border.
Planner, collator and loss still see packed rows; only the forward pass runs per document, documents of equal length in one
batch, so there is no padding. It is exact by construction for any model; the price is kernels on fewer tokens at a time. A
segment with a prefix runs with its own copy of the prefix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from packtrain.attention.segmented_modules import replace_forward
from packtrain.packing.collate import IGNORE, to_device
from packtrain.packing.segments import Segments

_PER_TOKEN = ("input_ids", "shift_labels", "labels")
_KERNEL_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_ROW_KEYS = ("segments", "position_ids", "label_places", *_KERNEL_KEYS)


def run_one_document_at_a_time(model: PreTrainedModel) -> Callable[[], None]:
    """From now on a call of `model` with `segments` runs per document; returns the undo function.

    The result is as for a flattened row: per-token outputs [1, T, …], and sums of scalars. Other calls are unchanged.
    """
    inner = model.forward

    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, segments: Segments | None = None, **kwargs: Any) -> Any:
        if segments is None:
            return inner(*args, **kwargs)
        groups = _groups(segments)
        return _joined(groups, [inner(**_batch(group, kwargs)) for group in groups], segments)

    return replace_forward(model, forward)


@dataclass(frozen=True, slots=True)
class _Group:
    """Documents of equal length: their tokens' numbers in the row [count, length], the first `before` of them a prefix."""

    segments: tuple[int, ...]
    tokens: torch.Tensor
    before: int


def _groups(segments: Segments) -> list[_Group]:
    return [
        _Group(
            numbers, torch.stack([_tokens(segments, number) for number in numbers]), segments.prefix_lengths[numbers[0]]
        )
        for numbers in segments.same_shape
    ]


def _tokens(segments: Segments, number: int) -> torch.Tensor:
    """int64, where the tokens of a segment and of its prefix before it are in the row."""
    start, length, prefix = segments.starts[number], segments.lengths[number], segments.shared[number]
    own = torch.arange(start, start + length)
    return own if prefix is None else torch.cat([_tokens(segments, prefix), own])


def _batch(group: _Group, row: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a row for one group: [count, before + length] tokens, nothing padded, all of them visible."""
    tokens = to_device(group.tokens, row["input_ids"].device)
    batch = {name: value for name, value in row.items() if name not in _ROW_KEYS}
    batch |= {name: row[name][0][tokens] for name in _PER_TOKEN if row.get(name) is not None}
    if group.before and "shift_labels" in batch:
        batch["shift_labels"][:, : group.before] = IGNORE  # the prefix's labels are trained in its own segment
    if row.get("label_places") is not None:
        batch["label_places"] = _label_places(group, row["label_places"], row["input_ids"].shape[1])
    return batch | {"attention_mask": torch.ones_like(tokens)}


def _label_places(group: _Group, places: np.ndarray, tokens: int) -> np.ndarray:
    """Those of the group (packing/collate.py::places_of), from those of a row of so many `tokens`."""
    labelled = np.zeros(tokens, dtype=bool)
    labelled[places] = True
    of_group = labelled[group.tokens.numpy()]
    of_group[:, : group.before] = False
    return np.flatnonzero(of_group)


def _joined(groups: list[_Group], outputs: list[Any], segments: Segments) -> Any:
    """The output of the row, from those of the groups."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return _joined_tensor(groups, outputs, segments)
    joined = {
        name: _joined_tensor(groups, [output[name] for output in outputs], segments)
        for name, value in first.items()
        if isinstance(value, torch.Tensor)
    }
    return type(first)(**joined)


def _joined_tensor(groups: list[_Group], parts: list[torch.Tensor], segments: Segments) -> torch.Tensor:
    """The sum of scalars; [1, T, …] of per-token parts [count, before + length, …]."""
    if parts[0].dim() == 0:
        return torch.stack(parts).sum()
    own = [part[:, group.before :].unbind(0) for group, part in zip(groups, parts, strict=True)]
    place = {
        number: row
        for group, rows in zip(groups, own, strict=True)
        for number, row in zip(group.segments, rows, strict=True)
    }
    return torch.cat([place[number] for number in range(len(segments.lengths))])[None]
