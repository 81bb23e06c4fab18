"""`sdpa_mask`: ordinary attention under a dense block-diagonal mask, the plain reference for tests and small rows.

It costs O(T²) time and memory however short the documents are; what it has is that anyone can see that it is right: the
mask is `Segments.visible`, the definition.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from transformers import AttentionInterface

from packtrain.attention.segmented import as_mask, attention_function, row_of
from packtrain.packing.segments import Segments

NAME = "packtrain_dense_mask"


def dense_mask_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of one flattened row, with transformers' signature; shapes and errors as `segmented_attention`."""
    segments, window = row_of(module, query, attention_mask, segments, sliding_window, kwargs)
    attend = attention_function(module, kwargs)
    mask = as_mask(attend, _visible(segments, window, query.device), query.dtype)
    kwargs["is_causal"] = False  # the mask says it all
    return attend(module, query, key, value, mask, sliding_window=window, **kwargs)[0], None


@lru_cache(maxsize=2)  # as many as a row has kinds of layers; each takes T² bytes
def _visible(segments: Segments, window: int | None, device: torch.device) -> torch.Tensor:
    return segments.visible(window).to(device)


AttentionInterface.register(NAME, dense_mask_attention)
