"""Stand-ins for the varlen kernels: the same signatures, computed one sequence at a time, on any device."""

from __future__ import annotations

from typing import Any

import torch

MODULES = {
    "FlashAttention 4": "flash_attn.cute",
    "FlashAttention 3": "flash_attn_interface",
    "FlashAttention 2": "flash_attn",
}


def attend(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, left, softcap=None, sinks=None, causal=True
) -> Any:
    """Return outputs and log-sums of each sequence, causal from the bottom right.

    A query without keys has the output 0 and the log-sum inf, as in FlashAttention 2. In half precision the scores are float32 and the weights are rounded, as in the kernels.
    """
    outputs, logsums, dtype = [], [], q.dtype
    q, k, v = (tensor.float() if dtype.itemsize < 4 else tensor for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    for i in range(len(cu_seqlens_q) - 1):
        rows, columns = slice(*cu_seqlens_q[i : i + 2].tolist()), slice(*cu_seqlens_k[i : i + 2].tolist())
        queries, keys = rows.stop - rows.start, columns.stop - columns.start
        assert queries <= max_seqlen_q and keys <= max_seqlen_k
        scores = torch.einsum("qhd,khd->hqk", q[rows], k[columns]) * scale
        scores = scores if softcap is None else softcap * (scores / softcap).tanh()
        places = [torch.arange(number, device=q.device) for number in (queries, keys)]
        ahead = places[1][None] - (places[0][:, None] + keys - queries)
        scores = scores.masked_fill(causal & (ahead > 0) | ((left >= 0) & (ahead < -left)), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, queries, 1)], dim=2)
        logsums.append(scores.logsumexp(-1) if keys else scores.new_full(scores.shape[:2], torch.inf))
        weights = (scores - logsums[-1][..., None]).exp()[..., :keys]
        outputs.append(torch.einsum("hqk,khd->qhd", weights.to(dtype).to(v.dtype), v[columns]))
    return torch.cat(outputs).to(dtype), torch.cat(logsums, dim=1)


def flash_attention_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    assert causal and q.shape[-1] == k.shape[-1] == v.shape[-1], "heads of one width"
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend(q, k, v, *lengths, softmax_scale, window_size[0], softcap or None)[0]


def flash_attention_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
    causal=False, qv=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False,
):  # fmt: skip
    assert causal and q.shape[-1] % 8 == 0
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend(q, k, v, *lengths, softmax_scale, window_size[0], softcap or None)[0]


def flash_attention_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
    causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, deterministic=False, return_lse=False,
):  # fmt: skip
    assert causal and q.shape[-1] % 8 == 0
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    left = -1 if window_size[0] is None else window_size[0]
    return attend(q, k, v, *lengths, softmax_scale, left, softcap or None, learnable_sink)


KERNELS = {
    "FlashAttention 4": flash_attention_4,
    "FlashAttention 3": flash_attention_3,
    "FlashAttention 2": flash_attention_2,
}
