"""`scaled_dot_product_attention` by the kernel that torch takes on a GPU, as one operator: what it keeps is what that one keeps.

On a CPU build torch knows no kernel of a GPU, and would keep all scores. Flash serves 16 bits without a mask, the memory-efficient
kernel takes masks and float32 but as many heads of keys as of queries; else torch computes in steps there, too
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
"""

from __future__ import annotations

from typing import Any

import torch

from standin_gpus.tensor import GpuTensor, replaced

_library: Any = None
_ROUNDED = 32
"""The memory-efficient kernel keeps a log-sum for so many queries or a multiple."""


def install() -> None:
    global _library
    aten = torch.ops.aten
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("scaled_dot_product_attention", _attend, "AutogradCUDA")
    replaced[aten._scaled_dot_product_flash_attention.default] = _flash
    replaced[aten._scaled_dot_product_flash_attention_backward.default] = _flash_backward
    replaced[aten._scaled_dot_product_efficient_attention.default] = _efficient
    replaced[aten._scaled_dot_product_efficient_attention_backward.default] = _efficient_backward


def _attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    aten, like = torch.ops.aten, query.shape[-1] == value.shape[-1] and not dropout_p
    if like and attn_mask is None and query.dtype != torch.float32 and query.shape[-1] % 8 == 0:
        return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]
    if like and query.shape[1] == key.shape[1] and query.dtype != torch.float64:
        bias = attn_mask
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        if bias is not None:
            bias = bias.expand(*query.shape[:-1], key.shape[-2])
        grows = any(one.requires_grad for one in (query, key, value))
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, grows, 0.0, is_causal, scale=scale
        )[0]
    result = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return result[0]


def _weights(q, k, bias, is_causal: bool, factor: float) -> torch.Tensor:
    """float32 [batch, heads, queries, keys], 0 for a query that sees nothing (padding)."""
    scores = q.float() @ k.float().mT * factor
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    if bias is not None:
        scores = scores + bias
    return scores.softmax(-1).nan_to_num(0.0)


def _inner(query, key, value, bias, scale: float | None) -> tuple[Any, ...]:
    """Inner tensors, keys and values for every head, and the factor of scores."""
    group = query.shape[1] // key.shape[1]
    k, v = (one.inner.repeat_interleave(group, dim=1) for one in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return query.inner, k, v, None if bias is None else bias.inner, factor, group


def _out(query, key, value, bias, is_causal, scale) -> GpuTensor:
    q, k, v, mask, factor, _ = _inner(query, key, value, bias, scale)
    made = _weights(q, k, mask, is_causal, factor) @ v.float()
    rows = made.to(query.dtype).transpose(1, 2).contiguous()  # as kernels lay it out
    return GpuTensor(rows.transpose(1, 2), query.index)


def _gradients(grad, query, key, value, bias, is_causal, scale) -> list[GpuTensor]:
    q, k, v, mask, factor, group = _inner(query, key, value, bias, scale)
    weights, above = _weights(q, k, mask, is_causal, factor), grad.inner.float()
    of_weights = above @ v.float().mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * factor
    of_k, of_v = (one.unflatten(1, (-1, group)).sum(2) for one in (of_scores.mT @ q.float(), weights.mT @ above))
    return [GpuTensor(one.to(query.dtype), query.index) for one in (of_scores @ k.float(), of_k, of_v)]


def _flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    empty = GpuTensor(torch.zeros(2, dtype=torch.uint64), query.index)
    sums = GpuTensor(torch.zeros(query.shape[:-1]), query.index)
    out = _out(query, key, value, None, is_causal, scale)
    return out, sums, None, None, query.shape[2], key.shape[2], empty, empty, empty


def _flash_backward(
    grad, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, seed, offset,
    *, scale=None,
):  # fmt: skip
    return tuple(_gradients(grad, query, key, value, None, is_causal, scale))


def _efficient(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    queries = -(-query.shape[2] // _ROUNDED) * _ROUNDED if compute_log_sumexp else 0
    sums = GpuTensor(torch.zeros(*query.shape[:2], queries), query.index)
    empty = GpuTensor(torch.zeros((), dtype=torch.int64), query.index)
    return _out(query, key, value, attn_bias, is_causal, scale), sums, empty, empty


def _efficient_backward(
    grad, query, key, value, attn_bias, out, logsumexp, seed, offset, dropout_p, grad_input_mask, is_causal=False,
    *, scale=None,
):  # fmt: skip
    return (*_gradients(grad, query, key, value, attn_bias, is_causal, scale), None)
