"""A kernel that is two operators, forward and backward, and attention sinks for one that has none, exactly, through the log of the
sum of each query's scores.

A sink is a logit s per head that takes part in the softmax and has no value. If a kernel returns its output O and the
log-sum L = log Σ exp(scores), the softmax with the sink has the log-sum L' = log(exp L + exp s), and the output is
O' = O · exp(L - L'). The backward of such kernels rebuilds the probabilities as exp(scores - L) and needs Σ dO·O per query:
given L' and O' instead of L and O it computes the gradients of the softmax with the sink, without further changes.
The sink's own gradient is -Σ exp(s - L') · (dO'·O') over the queries. Source: the derivation is that of FlashAttention's
backward with one more column whose value is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(query, key, value) → output [T, heads, d], log-sum float32 [heads, T]."""
Backward = Callable[..., tuple[torch.Tensor, ...]]
"""(gradient of the output, query, key, value, output, log-sum) → gradients of query, key and value."""


def attend_by_passes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    forward: Forward,
    backward: Backward,
) -> torch.Tensor:
    """The output [T, heads, d] of the kernel that `forward` and `backward` are, with `sinks` [heads], if any, in its softmax."""
    return _Passes.apply(query, key, value, sinks, forward, backward)  # type: ignore[no-any-return]


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value, sinks, forward: Forward, backward: Backward) -> torch.Tensor:
        output, logsum = forward(query, key, value)
        if sinks is not None:
            without, logsum = logsum, torch.logaddexp(logsum, sinks.to(logsum.dtype)[:, None])
            output = (output * torch.exp(without - logsum).T[..., None]).to(output.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, logsum)
        ctx.backward_pass = backward
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        query, key, value, sinks, output, logsum = ctx.saved_tensors
        passed = ctx.backward_pass(gradient, query, key, value, output, logsum)
        if sinks is None:
            return (*passed, None, None, None)
        taken = torch.exp(sinks.to(logsum.dtype)[:, None] - logsum)  # [heads, T], the sink's probability
        product = (gradient.to(logsum.dtype) * output.to(logsum.dtype)).sum(-1).T
        return (*passed, -(taken * product).sum(1).to(sinks.dtype), None, None)
