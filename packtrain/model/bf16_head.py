"""The loss of a plain linear output head in bfloat16 on a CPU, with its gradients made in the forward pass.

TRL's head has float32 matrix products in its backward pass wherever there is no CUDA, and torch's `linear_cross_entropy`
rounds the loss to bfloat16: on a CPU the head took half of a step in bfloat16. Here logits exist for CHUNK tokens at a time;
all three products are bfloat16's, as those of the layers under autocast, and the softmax and the sums over tokens float32:
1.0 s in place of 3.5 s for 874 tokens of SmolLM2's vocabulary on one core. TRL's own head, which pairs and other losses need, only gets
its products replaced: 1.5 s in place of 4.5 s for 512 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from trl.kernels import chunked_logprob as trl_head

CHUNK = 512
"""Tokens whose logits exist at once."""
_ROWS = 16  # tokens whose softmax is made at once, in float32: they stay in the processor's cache


_add_product = trl_head._addmm_fp32


def multiply_in_bf16() -> None:
    """From now on TRL's head adds products of bfloat16 matrices to its float32 sums on a CPU, not those of float32 copies."""

    def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        if total.device.type == "cpu" and left.dtype == right.dtype == torch.bfloat16:
            total += left @ right
        else:
            _add_product(total, left, right)

    trl_head._addmm_fp32 = add_product


def computes_in_bf16(weight: torch.Tensor) -> bool:
    """Whether a head with this weight computes in bfloat16 on a CPU now: by autocast, or because its weight is bfloat16."""
    if weight.device.type != "cpu":
        return False
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") == torch.bfloat16
    return weight.dtype == torch.bfloat16


def nll_sum(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """float32 scalar Σ NLL of `hidden` [n, d] under `labels` [n], by the logits hidden · weightᵀ + bias [n, vocabulary].

    Its backward pass can run once.
    """
    return _NllSum.apply(hidden, weight, bias, labels)  # pyright: ignore[reportReturnType]


class _NllSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
    ) -> torch.Tensor:
        inputs, matrix = hidden.bfloat16(), weight.bfloat16()
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        total = torch.zeros(())
        grads: list[torch.Tensor | None] = [
            torch.empty_like(hidden) if for_hidden else None,
            torch.zeros(weight.shape) if for_weight else None,  # float32, also for bfloat16 weights
            torch.zeros(weight.shape[0]) if for_bias else None,
        ]
        buffer = inputs.new_empty(min(CHUNK, len(inputs)), len(matrix))
        for first in range(0, len(inputs), CHUNK):
            chunk, own = inputs[first : first + CHUNK], labels[first : first + CHUNK]
            logits = torch.mm(chunk, matrix.t(), out=buffer[: len(chunk)])
            if bias is not None:
                logits += bias.bfloat16()
            for rows, targets in zip(logits.split(_ROWS), own[:, None].split(_ROWS), strict=True):
                log_probs = rows.log_softmax(1, dtype=torch.float32)
                target_log_probs = log_probs.gather(1, targets)
                total -= target_log_probs.sum()
                # the logits' gradient takes their place: the probabilities, minus 1 at the target
                rows.copy_(log_probs.exp_().scatter_(1, targets, target_log_probs.exp() - 1))
            if grads[0] is not None:
                grads[0][first : first + CHUNK] = logits @ matrix
            if grads[1] is not None:
                grads[1] += logits.t() @ chunk
            if grads[2] is not None:
                grads[2] += logits.sum(0, dtype=torch.float32)
        ctx.grads, ctx.dtypes = grads, (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None  # freed as they are used
        scaled = (
            None if one is None else one.mul_(upstream[0]).to(dtype)
            for one, dtype in zip(grads, ctx.dtypes, strict=True)
        )
        return (*scaled, None)
