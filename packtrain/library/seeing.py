"""Pictures in the padded calls that `attach` packs.

Pixels go to the row as they are: documents keep their order. Marks of picture tokens move with the tokens. Positions in time, height and width are
those that the model itself gives the padded batch. Models that do without pixels of single documents serve them (not `per_document`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from packtrain.packing.collate import row_arguments, to_device
from packtrain.packing.pictures import TYPES, two_way_of
from packtrain.packing.segments import Segments

_PICTURES = ("pixel", "image", "spatial_shapes")


def picture_arguments(call: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the arguments of a call with pictures. They are empty without pixels."""
    found = {
        name: value
        for name, value in call.items()
        if isinstance(value, torch.Tensor) and (name in TYPES or any(word in name for word in _PICTURES))
    }
    return found if any("pixel" in name for name in found) else {}


def row_with_pictures(
    model: PreTrainedModel, call: Mapping[str, Any], segments: Segments, places: np.ndarray
) -> dict[str, Any]:
    """Return the arguments of the row of a padded call with pictures.

    `places`, int64 [T]: where the row's tokens are in the flattened batch.
    """
    given = picture_arguments(call)
    at = to_device(torch.from_numpy(places), call["input_ids"].device)
    types = {name: given.pop(name).flatten()[at][None] for name in TYPES if name in given}
    if types and (two_way := two_way_of(model)):
        marked = np.concatenate([[0], (next(iter(types.values()))[0] == 1).cpu().numpy().astype(np.int8), [0]])
        borders = np.flatnonzero(np.diff(marked)).reshape(-1, 2).tolist()
        cuts = [[start, *(cut for cut in segments.starts if start < cut < end), end] for start, end in borders]
        blocks = tuple(pair for cut in cuts for pair in pairwise(cut))
        segments = replace(segments, blocks=blocks, two_way=two_way)
    arguments = {**row_arguments(segments), **types, **given}
    if (seer := next((part for part in model.modules() if hasattr(part, "get_rope_index")), None)) is not None:
        arguments["position_ids"] = _positions(seer, call).flatten(1)[:, at][:, None]
    return arguments


def _positions(seer: nn.Module, call: Mapping[str, Any]) -> torch.Tensor:
    """Return the positions of the padded batch, int64 [axes, B, L]."""
    takes = inspect.signature(seer.get_rope_index).parameters  # type: ignore[arg-type]
    return seer.get_rope_index(**{name: value for name, value in call.items() if name in takes})[0]  # type: ignore[operator]
