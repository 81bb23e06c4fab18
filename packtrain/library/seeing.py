"""Pictures in the padded calls that `attach` packs.

The row takes the pixels unchanged, since documents keep their order. The marks of picture tokens move with the tokens.
Positions in time, height and width are the model's own for the padded batch. `attach` does not know the pixels of each document,
so a backend that runs documents one by one cannot serve these calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from packtrain.errors import CheckFailed
from packtrain.packing.collate import row_arguments, to_device
from packtrain.packing.pictures import TYPES, rotary_part, runs_of, two_way_of
from packtrain.packing.segments import Segments
from packtrain.proof.comparison import difference, tolerance_of

_PARTS_OF_NAMES = ("pixel", "image", "spatial_shapes")
"""Arguments with pictures have one of these in their names."""


def picture_arguments(call: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the arguments of a call with pictures. They are empty without pixels."""
    found = {
        name: value
        for name, value in call.items()
        if isinstance(value, torch.Tensor) and (name in TYPES or any(part in name for part in _PARTS_OF_NAMES))
    }
    return found if any("pixel" in name for name in found) else {}


def row_with_pictures(
    model: PreTrainedModel, call: Mapping[str, Any], segments: Segments, places: np.ndarray
) -> dict[str, Any]:
    """Return the arguments of the row for a padded call with pictures.

    `places`, int64 [T]: where the row's tokens are in the flattened batch.
    """
    given = picture_arguments(call)
    at = to_device(torch.from_numpy(places), call["input_ids"].device)
    types = {name: given.pop(name).flatten()[at][None] for name in TYPES if name in given}
    if types and (two_way := two_way_of(model)):
        marks = (next(iter(types.values()))[0] == 1).cpu().numpy()
        # a run of marks may go on in the next document, if one ends and the other begins with a picture
        cuts = [[start, *(cut for cut in segments.starts if start < cut < end), end] for start, end in runs_of(marks)]
        segments = replace(segments, blocks=tuple(block for cut in cuts for block in pairwise(cut)), two_way=two_way)
    arguments = {**row_arguments(segments), **types, **given}
    part: Any = rotary_part(model)
    if part is not None:
        takes = inspect.signature(part.get_rope_index).parameters
        positions = part.get_rope_index(**{name: call[name] for name in call if name in takes})[0]  # [axes, B, L]
        arguments["position_ids"] = positions.flatten(1)[:, at][:, None]
    return arguments


def check_row_with_pictures(model: PreTrainedModel, row: torch.Tensor, padded: torch.Tensor, slots: np.ndarray) -> None:
    """Raise CheckFailed if hidden states of a row differ from the padded call's.

    `row` [T, d], `padded` [B · L, d]. `slots`, int64 [B · L]: the place of each padded token in the row, T for padding.
    """
    real, device = np.flatnonzero(slots < len(row)), row.device
    alone = padded[to_device(torch.from_numpy(real), device)]
    found = row[to_device(torch.from_numpy(slots[real]), device)]
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.dtype
    off = difference(found, alone, statistic=torch.mean if dtype.itemsize < 4 else torch.max)
    if not off <= (tolerance := tolerance_of(dtype).outputs):
        name = type(model).__name__
        what = f"{name}: a row with pictures differs from the padded call by {off:.2g} (tolerance {tolerance:.1g})"
        raise CheckFailed(what, fix="do not attach it to batches with pictures", code="attached-pictures-differ")
