"""`per_document`: the model runs once per document, for models that cannot be flattened exactly.

State-space layers, linear attention, convolutions along the row and unknown code carry state across a document's border.
Planner, collator and loss still see packed rows. Only the forward pass takes the row apart, documents of equal length in one
batch without padding. It is exact by construction for any model; the price is kernels on fewer tokens at a time. Documents with a shared
prefix each compute it, and only the first one counts it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from packtrain.attention.backends import Attention, Undo
from packtrain.attention.forwards import replace_forward
from packtrain.packing.collate import IGNORE, KERNEL_ARGUMENTS, to_device
from packtrain.packing.pictures import TYPES
from packtrain.packing.segments import PlacedPicture, Segments

_PER_TOKEN = ("input_ids", "shift_labels", "labels", *TYPES)
_ROW_KEYS = ("segments", "position_ids", "label_places", "label_owners", *KERNEL_ARGUMENTS)


def _batch(
    group: np.ndarray, counts: np.ndarray, row: dict[str, Any], pictures: tuple[PlacedPicture, ...]
) -> dict[str, Any]:
    """Return the arguments for documents of equal length. `group` int64 [count, length] are the numbers of their tokens in the row;
    `counts` bool [count, length] says which of them count. `pictures`: all pictures of the row."""
    tokens = to_device(torch.from_numpy(group), row["input_ids"].device)
    batch = {name: value for name, value in row.items() if name not in _ROW_KEYS}
    batch |= {name: row[name][0][tokens] for name in _PER_TOKEN if row.get(name) is not None}
    if pictures:
        batch |= _pictures_of(group, row, pictures)
    if "shift_labels" in batch and not counts.all():
        batch["shift_labels"].masked_fill_(to_device(torch.from_numpy(~counts), tokens.device), IGNORE)
    if row.get("label_places") is not None:  # packing/collate.py::label_positions
        labelled = np.zeros(row["input_ids"].shape[1], dtype=bool)
        labelled[row["label_places"]] = True
        batch["label_places"] = np.flatnonzero(labelled[group] & counts)
        if row.get("label_owners") is not None:
            owners = np.zeros(len(labelled), np.int64)
            owners[row["label_places"]] = row["label_owners"]
            batch["label_owners"] = owners[group].ravel()[batch["label_places"]]
    return batch | {"attention_mask": torch.ones_like(tokens)}


def _pictures_of(group: np.ndarray, row: dict[str, Any], pictures: tuple[PlacedPicture, ...]) -> dict[str, Any]:
    """Return the arguments for the pictures of these documents, None without any."""
    numbers = {picture.start: number for number, picture in enumerate(pictures)}
    own = [numbers[place] for place in group.ravel().tolist() if place in numbers]
    if not own:
        return dict.fromkeys([*pictures[0].rows, *(name for name in TYPES if name in row)])
    parts = {name: row[name].split([picture.rows[name] for picture in pictures]) for name in pictures[0].rows}
    return {name: torch.cat([values[number] for number in own]) for name, values in parts.items()}


def _joined(outputs: list[Any], sources: torch.Tensor) -> Any:
    """Join `outputs` to the row's. Scalars are summed; parts [count, length, …] become [1, T, …], taken at `sources` int64 [T]."""
    first = outputs[0]
    if not isinstance(first, torch.Tensor):
        names = [name for name, value in first.items() if isinstance(value, torch.Tensor)]
        return type(first)(**{name: _joined([output[name] for output in outputs], sources) for name in names})
    if first.dim() == 0:
        return torch.stack(outputs).sum()
    tokens = torch.cat([output.flatten(0, 1) for output in outputs])
    return tokens.index_select(0, to_device(sources, tokens.device))[None]


class PerDocument(Attention):
    """The backend, which changes calls with `segments` only."""

    def install(self, model: PreTrainedModel) -> Undo:
        """Make calls of `model` with `segments` run per document.

        The result is as for a flattened row: per-token outputs [1, T, …], and sums of scalars.
        """
        inner = model.forward

        @functools.wraps(type(model).forward)
        def forward(self: PreTrainedModel, *args: object, segments: Segments | None = None, **kwargs: object) -> object:
            if segments is None:
                return inner(*args, **kwargs)
            row = segments.unrolled()
            tokens = np.split(row.tokens, row.segments.starts[1:])
            groups = [np.stack([tokens[number] for number in numbers]) for numbers in row.segments.same_shape]
            # for each token of the row its first place in all groups: only this one counts
            sources = np.unique(np.concatenate([group.ravel() for group in groups]), return_index=True)[1]
            counts = np.zeros(row.segments.tokens, dtype=bool)
            counts[sources] = True
            counted = np.split(counts, np.cumsum([group.size for group in groups])[:-1])
            outputs = [
                inner(**_batch(group, own.reshape(group.shape), kwargs, segments.pictures))
                for group, own in zip(groups, counted, strict=True)
            ]
            return _joined(outputs, torch.from_numpy(sources))

        return replace_forward(model, forward)


ATTENTION = PerDocument()
