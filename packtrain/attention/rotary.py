"""Rotary embeddings whose frequencies depend on how long the document is, computed for each document of a row by itself.

"longrope" (phi3 and others) uses other frequencies once the longest position exceeds the original context. In a flattened
row one long document would change them for all others, which the proof cannot detect, since its documents are short. The cost:
one wait for the device per forward pass of models with longrope.

"dynamic" frequencies change beyond `max_position_embeddings` only, where documents are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from packtrain.attention.segmented_modules import replace_forward
from packtrain.errors import CheckFailed


def rotates_by_length(model: PreTrainedModel) -> bool:
    """Whether `model` has rotary embeddings that depend on the longest document of a call."""
    return any(map(_by_length, model.modules()))


def rotate_by_document(model: PreTrainedModel) -> Callable[[], None]:
    """From now on such embeddings of a flattened row are each document's own; returns the undo function.

    A call raises CheckFailed if a document has a shared prefix, whose keys would need different frequencies per document.
    """
    undo = ExitStack()
    for module in filter(_by_length, model.modules()):
        undo.callback(replace_forward(module, _by_document(module)))
    return undo.close


def _by_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)  # a dict if kinds of layers differ
    return "longrope" in (kinds.values() if isinstance(kinds, dict) else [kinds])


def _by_document(module: nn.Module) -> Callable[..., Any]:
    inner = module.forward

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if position_ids.dim() != 2 or len(position_ids) != 1:
            return inner(x, position_ids, *args, **kwargs)
        borders = (position_ids[0].diff() != 1).nonzero()[:, 0] + 1
        documents = position_ids.tensor_split(borders.cpu(), dim=1)
        if len(documents) == 1:
            return inner(x, position_ids, *args, **kwargs)
        if position_ids[0, borders].any():
            raise CheckFailed(
                f"the rotary embeddings of {type(self).__name__} depend on a document's length, which cannot share a prefix",
                fix="set model.attention=per_document",
            )
        parts = [inner(x, positions, *args, **kwargs) for positions in documents]
        return tuple(torch.cat(part, dim=1) for part in zip(*parts, strict=True))

    return forward
