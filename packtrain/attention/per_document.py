"""`per_document`: the row is taken apart and the model runs once per document, for models that cannot be flattened exactly.

State-space layers, linear attention, convolutions along the row and unknown code carry state across a document's border.
Planner, collator and loss still see packed rows; only the forward pass runs per document, documents of equal length in one
batch without padding. It is exact by construction for any model; the price is kernels on fewer tokens at a time. What documents
share is computed by each of them, and counts in the first only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from packtrain.attention.segmented_modules import in_row, replace_forward
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
    """Documents of equal length, by their last segments: the numbers of their tokens in the row, int64 [count, length], and
    which of these count here and not in another document, bool [count, length]."""

    leaves: tuple[int, ...]
    tokens: torch.Tensor
    counts: np.ndarray


def _groups(segments: Segments) -> list[_Group]:
    row = segments.unrolled()
    counted = np.zeros(row.segments.tokens, dtype=bool)
    counted[row.outputs] = True
    tokens = torch.from_numpy(row.tokens).split(row.segments.lengths)
    counts = np.split(counted, row.segments.starts[1:])
    return [
        _Group(
            tuple(segments.leaves[number] for number in numbers),
            torch.stack([tokens[number] for number in numbers]),
            np.stack([counts[number] for number in numbers]),
        )
        for numbers in row.segments.same_shape
    ]


def _batch(group: _Group, row: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a row for one group: [count, length] tokens, nothing padded, all of them visible."""
    tokens = to_device(group.tokens, row["input_ids"].device)
    batch = {name: value for name, value in row.items() if name not in _ROW_KEYS}
    batch |= {name: row[name][0][tokens] for name in _PER_TOKEN if row.get(name) is not None}
    if "shift_labels" in batch and not group.counts.all():
        batch["shift_labels"].masked_fill_(to_device(torch.from_numpy(~group.counts), tokens.device), IGNORE)
    if row.get("label_places") is not None:  # packing/collate.py::places_of
        labelled = np.zeros(row["input_ids"].shape[1], dtype=bool)
        labelled[row["label_places"]] = True
        batch["label_places"] = np.flatnonzero(labelled[group.tokens.numpy()] & group.counts)
    return batch | {"attention_mask": torch.ones_like(tokens)}


def _joined(groups: list[_Group], outputs: list[Any], segments: Segments) -> Any:
    """The output of the row, from those of the groups: the sum of scalars, [1, T, …] of per-token parts [count, length, …]."""
    first = outputs[0]
    if not isinstance(first, torch.Tensor):
        names = [name for name, value in first.items() if isinstance(value, torch.Tensor)]
        return type(first)(**{name: _joined(groups, [output[name] for output in outputs], segments) for name in names})
    if first.dim() == 0:
        return torch.stack(outputs).sum()
    documents: dict[int, torch.Tensor] = {}
    for group, part in zip(groups, outputs, strict=True):
        documents |= zip(group.leaves, part.unbind(0), strict=True)
    return in_row(documents, segments)
