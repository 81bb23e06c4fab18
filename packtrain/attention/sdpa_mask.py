"""`sdpa_mask`: sdpa under one dense mask, O(T²). It is the reference for the keys that a query may see."""

from __future__ import annotations

from functools import lru_cache

import torch

from packtrain.attention.backends import AttentionFunction
from packtrain.attention.flattened import as_mask, attention_function, registered
from packtrain.packing.segments import Segments

NAME = "packtrain_dense_mask"


@registered(NAME)
def dense_mask_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    window: int | None,
    **kwargs,
) -> torch.Tensor:
    """Attend with sdpa under the mask `Segments.visible`, over one flattened row. It is the reference for the keys that a query may see."""
    attend = attention_function(module, kwargs)
    mask = as_mask(attend, _visible(segments, window, query.device), query.dtype)
    kwargs["is_causal"] = False  # causality is in the mask
    return attend(module, query, key, value, mask, sliding_window=window, **kwargs)[0]


@lru_cache(maxsize=2)  # a row has two kinds of layers at most; each takes T² bytes
def _visible(segments: Segments, window: int | None, device: torch.device) -> torch.Tensor:
    return segments.visible(window).to(device)


ATTENTION = AttentionFunction(NAME)
