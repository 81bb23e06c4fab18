"""Flash attention's two operators of torch, forward and backward, computed plainly: a segment at a time, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from standin_gpus.device import report
from standin_gpus.tensor import GpuTensor, replaced


def install() -> None:
    """`varlen_attn` reaches them through operators of its own, which need no place of theirs on the device."""
    from torch.nn.attention import varlen

    replaced[torch.ops.aten._flash_attention_forward.default] = _forward
    replaced[torch.ops.aten._flash_attention_backward.default] = _backward
    for operator in (varlen._varlen_attn, varlen._varlen_attn_backward):
        replaced[operator._opoverload] = operator._init_fn


def _forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask=False,
    *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    q, k, v = query.inner, key.inner, value.inner
    causal = _check(q, k, v, dropout_p, is_causal, window_size_left, window_size_right)
    report(flash="forward", segments=len(cum_seq_q) - 1)
    out, logsum = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for rows, columns in _segments(cum_seq_q, cum_seq_k, max_q, max_k):
        scores, _, values = _scores(q[rows], k[columns], v[columns], scale, window_size_left, causal)
        logsum[:, rows] = (
            scores.logsumexp(-1) if scores.numel() else torch.inf
        )  # as the kernel, for queries without keys
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    random = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), torch.empty(0)
    return tuple(GpuTensor(one, query.index) for one in (out, logsum, *random))


def _backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused,
    *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """By hand, with the output and log-sum that are given: a caller may have changed both, to add sinks."""
    q, k, v, output, gradient = (one.inner.detach() for one in (query, key, value, out, grad_out))
    causal = _check(q, k, v, dropout_p, is_causal, window_size_left, window_size_right)
    report(flash="backward", segments=len(cum_seq_q) - 1)
    of_q, of_k, of_v = (torch.zeros_like(one, dtype=torch.float32) for one in (q, k, v))
    group, factor = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale

    def over_group(one: torch.Tensor) -> torch.Tensor:
        return one.unflatten(1, (-1, group)).sum(2)

    for rows, columns in _segments(cum_seq_q, cum_seq_k, max_q, max_k):
        scores, keys, values = _scores(q[rows], k[columns], v[columns], scale, window_size_left, causal)
        weights, above = (scores - logsumexp.inner[:, rows, None]).exp(), gradient[rows].float()
        of_weights = torch.einsum("qhd,khd->hqk", above, values)
        mean = (above * output[rows].float()).sum(-1).T[..., None]
        of_scores = weights * (of_weights - mean) * factor
        of_q[rows] += torch.einsum("hqk,khd->qhd", of_scores, keys)
        of_k[columns] += over_group(torch.einsum("hqk,qhd->khd", of_scores, q[rows].float()))
        of_v[columns] += over_group(torch.einsum("hqk,qhd->khd", weights, above))
    return tuple(GpuTensor(one.to(like.dtype), query.index) for one, like in ((of_q, q), (of_k, k), (of_v, v)))


def _check(q, k, v, dropout_p, is_causal, left, right) -> bool:
    """Refuse the kernel's own refusals, and features that this file lacks. Return whether queries see no later keys."""
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if q.shape[-1] % 8 or q.shape[-1] > 256 or not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        raise RuntimeError(f"head_size should be a multiple of 8, at most 256, and one for all: {q.shape}, {v.shape}")
    if q.shape[1] % k.shape[1]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    windowed = left is not None and left >= 0
    assert dropout_p == 0 and (is_causal or (windowed and right == 0) or left == right == -1), (
        "no dropout, no keys ahead"
    )
    return is_causal or right == 0


def _segments(cum_seq_q, cum_seq_k, max_q: int, max_k: int) -> Iterator[tuple[slice, slice]]:
    """Of each segment its queries and its keys in the row."""
    if not cum_seq_q.dtype == cum_seq_k.dtype == torch.int32:
        raise RuntimeError("cu_seqlens_q must have dtype torch.int32")
    queries, keys = (pairwise(one.inner.tolist()) for one in (cum_seq_q, cum_seq_k))
    for rows, columns in zip(queries, keys, strict=True):
        if rows[1] - rows[0] > max_q or columns[1] - columns[0] > max_k:  # the kernel would leave the rest out
            raise RuntimeError(f"a segment is longer than max_q or max_k: {rows}, {columns}, {max_q}, {max_k}")
        yield slice(*rows), slice(*columns)


def _scores(
    q, k, v, scale: float | None, left: int | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return causal scores [heads, queries, keys], and keys and values of every head."""
    keys, values = (one.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
    behind = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))[None]
    hidden = (behind < 0) & causal
    if left is not None and left >= 0:
        hidden |= behind > left
    return scores.masked_fill(hidden, float("-inf")), keys, values
