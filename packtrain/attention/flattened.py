"""Attention functions of flattened rows, in transformers' AttentionInterface.

A function is registered in `AttentionInterface` only: for a name that `AttentionMaskInterface` does not have, transformers builds no mask.
So the model's own mask, whose builder may ignore `position_ids`, is not used. The row's Segments arrive as the keyword argument
`segments` of the model's forward; a model that does not pass it down to its layers fails here at once instead of leaking.

Most local layers pass `sliding_window` to their attention function. Others rely on the mask that the model builds: the window of their config
is applied here instead. If the config is ambiguous the layer is refused, even if all documents of the row are shorter than the window (as in
the isolation proof).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from packtrain.attention.over_ranks import attend_over_ranks
from packtrain.errors import CheckFailed
from packtrain.packing.segments import Segments, SplitSegments

AttentionOf = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""A function of transformers' AttentionInterface: outputs [count, T, heads, d_v] come first."""
_UNSURE = "its attention cannot be replaced exactly: set model.attention=auto"
_EAGER_ONLY = ("softcap", "s_aux")  # features that sdpa lacks


def registered(name: str) -> Callable[[Callable[..., torch.Tensor]], Callable[..., tuple[torch.Tensor, None]]]:
    """Register the attention of a flattened row under `name` in `AttentionInterface`, with transformers' signature.

    It is called as attend(module, query, key, value, segments, window, **kwargs): `query` [1, heads, T, d], `key`
    [1, kv_heads, T, d], `value` [1, kv_heads, T, d_v] → [1, T, heads, d_v]; T is `segments.tokens`. For a row that is split over ranks it gets
    all tokens and some heads (over_ranks.py). The name must not hold the word "flash": transformers would take it for one of its own
    implementations and look for that package. Raises CheckFailed if the layer does not get the segments of its row, or its window is
    unknown.
    """

    def register(attend: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, None]]:
        @functools.wraps(attend)
        def attention(module, query, key, value, attention_mask, *, segments=None, sliding_window=None, **kwargs):
            if not isinstance(segments, SplitSegments):
                segments, window = row_of(module, query, key, attention_mask, segments, sliding_window, kwargs)
                return attend(module, query, key, value, segments, window, **kwargs), None

            def on_whole_row(module, query, key, value, sinks):
                row, window = row_of(module, query, key, attention_mask, segments.whole, sliding_window, kwargs)
                given = kwargs if sinks is None else {**kwargs, "s_aux": sinks}
                return attend(module, query, key, value, row, window, **given)

            sinks = kwargs.get("s_aux")
            return attend_over_ranks(on_whole_row, module, query, key, value, segments, sinks), None

        AttentionInterface.register(name, attention)
        return attention

    return register


def row_of(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    segments: Segments | None,
    sliding_window: int | None,
    kwargs: Mapping[str, object],
) -> tuple[Segments, int | None]:
    """Return the segments of the row `query` as this layer sees them, and its window.

    Refuses keys of other tokens than the row's (deepseek_v4 compresses them), and a layer's own mask or bias of the whole row (doge has one).
    """
    if segments is None or segments.tokens != query.shape[2] or query.shape[0] != 1:
        code = "segments-not-passed-on"
        what = "ran on a flattened row without knowing its documents (does its model pass on keyword arguments?)"
    elif key.shape[2] != query.shape[2]:
        code, what = "keys-of-other-tokens", "attends to keys of other tokens"
    elif attention_mask is not None:
        code, what = "layer-has-mask", "brings a mask of its own"
    elif any(name.endswith("indices") and value is not None for name, value in kwargs.items()):
        code, what = "layer-chooses-keys", "chooses its keys"
    elif kwargs.get("position_bias") is not None:
        code, what = "layer-has-bias", "adds a bias by position in the row"
    else:
        row, window = local_segments(module, segments, sliding_window)
        sees_ahead = window is not None or row.two_way.in_global_layers
        return (row if sees_ahead or not row.blocks else one_way(row)), window
    raise CheckFailed(f"{type(module).__name__} {what}", fix="set model.attention=auto", code=code)


def attention_function(module: torch.nn.Module, kwargs: Mapping[str, object]) -> AttentionOf:
    """Return the attention function of this layer: sdpa, or the model's own eager one."""
    if all(kwargs.get(name) is None for name in _EAGER_ONLY):
        return sdpa_attention_forward
    return sys.modules[type(module).__module__].eager_attention_forward


@lru_cache(maxsize=16)
def mask_of(
    attend: AttentionOf, queries: int, keys: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Return the causal mask of one segment, [1, 1, queries, keys]. Its `queries` are the last of its `keys`.

    Boolean (True = visible) for sdpa, additive for eager functions; None if sdpa's `is_causal` is enough.
    """
    if attend is sdpa_attention_forward and queries == keys and (window is None or window >= keys):
        return None
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return as_mask(attend, _within(window, visible), dtype)


def two_way_mask(
    attend: AttentionOf,
    queries: int,
    keys: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    blocks: Sequence[tuple[int, int]],
    beyond_window: bool,
) -> torch.Tensor:
    """Return the mask of one segment as `mask_of` does, two-way in `blocks` of its queries."""
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    visible = _within(window if beyond_window else None, visible)
    for start, end in blocks:
        visible[start:end, keys - queries + start : keys - queries + end] = True
    return as_mask(attend, visible if beyond_window else _within(window, visible), dtype)


def _within(window: int | None, visible: torch.Tensor) -> torch.Tensor:
    """Hide the keys that are `window` or more places before their query."""
    queries, keys = visible.shape
    return visible if window is None else visible.triu(keys - queries + 1 - window)


def as_mask(attend: AttentionOf, visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `visible` [queries, keys] as `attend` takes it, [1, 1, queries, keys]. It is boolean for sdpa, additive for eager functions."""
    if attend is sdpa_attention_forward:
        return visible[None, None]
    return torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype)[None, None]


def local_segments(
    module: torch.nn.Module, segments: Segments, sliding_window: int | None
) -> tuple[Segments, int | None]:
    """Return the segments of the row as this layer sees them, and its window. It is in tokens (itself included) or None.

    Chunked attention is plain attention over smaller segments. Raises CheckFailed if the layer's window is unknown.
    """
    if sliding_window is not None:
        return segments, sliding_window
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds and layer is not None and layer < len(kinds) else None
    sizes = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    window, chunk = (size if isinstance(size, int) and size > 0 else None for size in sizes)
    if kind == "sliding_attention" and window:
        return segments, window
    if kind == "chunked_attention" and chunk:
        return chunks(segments, chunk), None
    if kind is None and (window or chunk):
        what = f"{type(module).__name__} may see only {window or chunk} tokens back by its config, but does not say so"
        raise CheckFailed(what, fix=_UNSURE, code="window-unknown")
    return segments, None


@lru_cache(maxsize=16)
def one_way(segments: Segments) -> Segments:
    """Return the row without blocks."""
    return Segments(segments.lengths, segments.prefixes)


@lru_cache(maxsize=64)
def chunks(segments: Segments, size: int) -> Segments:
    """Cut the row where positions pass a multiple of `size`: the chunks of chunked attention.

    A segment that begins inside a chunk continues it: the last chunk of the segment before it on its path.
    """
    lengths: list[int] = []
    prefixes: list[int | None] = []
    last: list[int] = []  # chunk of each segment
    for length, before, prefix in zip(segments.lengths, segments.prefix_lengths, segments.shared, strict=True):
        inside = None if prefix is None or before % size == 0 else last[prefix]
        cuts = [before, *range((before // size + 1) * size, before + length, size), before + length]
        lengths += [end - start for start, end in pairwise(cuts)]
        prefixes += [inside, *[None] * (len(cuts) - 2)]
        last.append(len(lengths) - 1)
    return Segments(tuple(lengths), tuple(prefixes))
