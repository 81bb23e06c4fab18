"""`segmented`: exact packed attention on any device, by running an ordinary attention function once per segment.

No dense T×T mask is built and nothing is computed between documents, so the cost is O(Σ l²) in place of O(T²). The
function that is run is one of transformers' own: sdpa where it can express the layer, else the model's eager function
(soft-cap, attention sinks). Grouped queries and sliding windows are served by both. Segments of equal length go through in
one call.

It is registered under NAME in `AttentionInterface` only: a name that `AttentionMaskInterface` does not know makes
transformers build no mask at all, so a model's mask builder, which may or may not look at `position_ids`, is out of the
game. The row's Segments arrive as the keyword argument `segments` of the model's forward; a model that does not hand it
down to its layers fails here at once instead of leaking.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from packtrain.errors import CheckFailed
from packtrain.packing.segments import Segments

NAME = "packtrain_segmented"
_EAGER_ONLY = ("softcap", "s_aux")  # what a layer may ask for that sdpa has not


def segmented_attention(
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
    """Attention of one flattened row, with transformers' signature.

    Shapes: `query` [1, heads, T, d], `key` and `value` [1, kv_heads, T, d], result [1, T, heads, d]; T is
    `segments.tokens`. Raises CheckFailed where the layer is not told the segments of its row.
    """
    if segments is None or segments.tokens != query.shape[2] or query.shape[0] != 1:
        raise CheckFailed(
            f"{type(module).__name__} ran on a flattened row without knowing its documents",
            fix="this model does not pass keyword arguments to its attention: set packing.mode=padding",
        )
    if sliding_window is None:
        _refuse_hidden_window(module, max(segments.lengths))
    attend = _attention_function(module, kwargs)
    runs = [(length, sum(1 for _ in group)) for length, group in groupby(segments.lengths)]
    # one split in place of a slice per segment: the backward of a slice fills a tensor of the whole row
    sizes = [length * count for length, count in runs]
    pieces = zip(*(tensor.split(sizes, dim=2) for tensor in (query, key, value)), strict=True)
    outputs: list[torch.Tensor] = []
    for (length, count), piece in zip(runs, pieces, strict=True):
        # [1, heads, count · length, d] → [count, heads, length, d]
        folded = (tensor[0].unflatten(1, (count, length)).transpose(0, 1) for tensor in piece)
        mask = _window_mask(attend, length, sliding_window, query.dtype, query.device)
        # [count, length, heads, d] → [1, count · length, heads, d]
        outputs.append(attend(module, *folded, mask, sliding_window=sliding_window, **kwargs)[0].flatten(0, 1)[None])
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)), None


def _refuse_hidden_window(module: torch.nn.Module, longest: int) -> None:
    """Raises CheckFailed where a layer that is local by its config leaves that to the mask, which there is none of here.

    Documents within the window or chunk are exact all the same, those of the isolation proof among them: it is the
    longer ones (`longest` tokens of a document) that would silently see too much.
    """
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds and layer is not None else None
    for local, name in (("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size")):
        reach = getattr(config, name, None) if kind in (None, local) else None
        if isinstance(reach, int) and longest > reach:
            raise CheckFailed(
                f"{type(module).__name__} sees {reach} tokens back by its config, but does not tell its attention function",
                fix=f"set packing.mode=padding, or data.max_length={reach} at most",
            )


def _attention_function(module: torch.nn.Module, kwargs: dict) -> Callable[..., Any]:
    """The function that one segment of this layer goes through: sdpa, or the model's own eager one."""
    if all(kwargs.get(name) is None for name in _EAGER_ONLY):
        return sdpa_attention_forward
    return sys.modules[type(module).__module__].eager_attention_forward


@lru_cache(maxsize=16)
def _window_mask(
    attend: Callable, length: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """The causal mask of a lone segment: None where sdpa's `is_causal` says it all, else [1, 1, length, length].

    Boolean (True = visible) for sdpa, additive for eager functions.
    """
    narrow = window if window is not None and window < length else None
    if attend is sdpa_attention_forward and narrow is None:
        return None
    visible = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    if narrow is not None:
        visible = visible.triu(1 - narrow)  # a query sees itself and the window - 1 keys before it
    if attend is sdpa_attention_forward:
        return visible[None, None]
    return torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype)[None, None]


AttentionInterface.register(NAME, segmented_attention)
