"""`segmented`: exact packed attention on any device, by an ordinary attention function per segment.

Queries, keys and values of the row are split by segment. Segments of equal length form a batch [count, heads, length, d], each
with the keys and values of the earlier segments on its path in front of its own. The attention function runs on each batch under
a causal mask. No T×T mask is built and nothing is computed between documents: O(Σ l²) instead of O(T²). The price is one call per
different length. The function is transformers' own: sdpa if it supports the layer, else the model's eager function
(soft-cap, attention sinks). On a CPU under autocast short segments use the eager one too: bfloat16 instructions speed up its
products, but not sdpa's kernel.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from packtrain.attention.backends import AttentionFunction
from packtrain.attention.flattened import AttentionOf, attention_function, mask_of, registered, two_way_mask
from packtrain.attention.varlen import Gathered, borders_of
from packtrain.packing.segments import Segments

NAME = "packtrain_segmented"
_BLOCKS, _LEAST_BLOCK = 4, 128
"""A segment of more blocks than this attends in blocks of at least its window."""
_SHORT = 512
"""Most keys for the eager function on a CPU: there it is twice as fast in bfloat16, and its scores take little memory."""


@registered(NAME)
def segmented_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    window: int | None,
    **kwargs,
) -> torch.Tensor:
    """Call an ordinary attention function once for all segments of one shape."""
    usual = attention_function(module, kwargs)
    eager = None
    if query.device.type == "cpu" and torch.is_autocast_enabled("cpu"):  # packtrain enables it only in bfloat16
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()  # autocast does so for sdpa
    kwargs["is_causal"] = True  # some modules leave causality to the mask
    # one split instead of a slice per segment: the backward of a slice fills a tensor of the whole row
    queries = query.split(segments.lengths, dim=2)
    keys, values = on_paths(key, segments), on_paths(value, segments)
    outputs: dict[int, torch.Tensor] = {}
    for numbers in segments.same_shape:
        length, before = segments.lengths[numbers[0]], segments.prefix_lengths[numbers[0]]
        q = joined([queries[number] for number in numbers])
        k, v = (joined([pieces[number] for number in numbers]) for pieces in (keys, values))
        attend = eager if eager and before + length <= _SHORT else usual
        run = functools.partial(attend, module, sliding_window=window, **kwargs)
        seen = attend, length, before + length, window, query.dtype, query.device
        if blocks := segments.own_blocks[numbers[0]]:
            output = run(q, k, v, _two_way_mask(segments, *seen, blocks))[0]
        elif window is not None and length > _BLOCKS * max(window, _LEAST_BLOCK):
            output = _attend_in_blocks(run, attend, q, k, v, max(window, _LEAST_BLOCK), window)
        else:
            output = run(q, k, v, mask_of(*seen))[0]
        outputs |= zip(numbers, output.unbind(0), strict=True)
    return torch.cat([outputs[number] for number in range(len(queries))])[None]


_two_way: WeakKeyDictionary[Segments, dict[object, torch.Tensor]] = WeakKeyDictionary()
"""Masks of segments with blocks: few are equal, so they live only as long as their row. All layers of a kind share them."""


def _two_way_mask(segments: Segments, *seen: Any) -> torch.Tensor:
    """Return the mask of a segment of the row with blocks. `seen`: the arguments of `two_way_mask`, without the last."""
    masks = _two_way.setdefault(segments, {})
    if seen not in masks:
        masks[seen] = two_way_mask(*seen, beyond_window=segments.two_way.beyond_window)
    return masks[seen]


def _attend_in_blocks(
    run: AttentionOf,
    attend: AttentionOf,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block: int,
    window: int,
) -> torch.Tensor:
    """Attend in blocks in segments much longer than their window: [count, length, heads, d].

    Each block of queries attends to its own keys and the `block` before them. This costs length × window; one mask would cost length².
    `query` [count, heads, length, d]; `key` and `value` may have more tokens, those before. `block` is at least `window`.
    """
    count, length = query.shape[0], query.shape[2]
    before = min(key.shape[2] - length, block)
    key, value = (tensor[:, :, -(before + length) :] for tensor in (key, value))

    def mask(keys: int) -> torch.Tensor | None:
        return mask_of(attend, block, keys, window, query.dtype, query.device)

    keys = before + block
    first = run(query[:, :, :block], key[:, :, :keys], value[:, :, :keys], mask(keys))[0]
    # all other blocks see the same number of keys: a shorter last block is padded at its end, where no query looks
    blocks = -(-length // block) - 1
    rest = F.pad(query[:, :, block:], (0, 0, 0, (blocks + 1) * block - length))
    rest = rest.unflatten(2, (blocks, block)).transpose(1, 2).flatten(0, 1)  # [count × blocks, heads, block, d]
    filled = (F.pad(tensor[:, :, before:], (0, 0, 0, (blocks + 1) * block - length)) for tensor in (key, value))
    key, value = (
        tensor.unfold(2, 2 * block, block).transpose(1, 2).flatten(0, 1).transpose(2, 3) for tensor in filled
    )  # [count × blocks, kv_heads, 2 × block, d]
    others = run(rest, key, value, mask(2 * block))[0]
    return torch.cat([first, others.reshape(count, blocks * block, *others.shape[2:])], dim=1)[:, :length]


def on_paths(tensor: torch.Tensor, row: Segments) -> Sequence[torch.Tensor]:
    """Split `tensor` [1, kv_heads, T, d]: for each segment all tokens on its path."""
    if not any(row.prefix_lengths):
        return tensor.split(row.lengths, dim=2)
    gather = borders_of(row, tensor.device).gather
    lengths = [own + before for own, before in zip(row.lengths, row.prefix_lengths, strict=True)]
    return cast(torch.Tensor, Gathered.apply(tensor, 2, gather)).split(lengths, dim=2)


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate the tensors. A single tensor is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


ATTENTION = AttentionFunction(NAME)
