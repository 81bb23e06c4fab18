"""Which of several kernels that are right is taken: the first in the order of preference, unless another one is measured to be faster.

FlashAttention 4 is ahead of 3 on one kind of GPU and behind it on another, and lengths matter. So before step 1 each takes a few
turns, forward and backward, at the run's own shapes. Times differ a little each time: a difference within the margin decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from packtrain.attention.kernels.selection import LayerFeatures, check_alive
from packtrain.attention.kernels.varlen import Kernel, Scoring, attend_by_segments
from packtrain.packing.segments import Segments

MARGIN = 0.05
"""The part of its time that another kernel must save to be taken in place of the preferred one."""


def fastest(times: Mapping[str, float]) -> str:
    """The kernel to take, by the seconds of each, the preferred one first."""
    preferred, best = next(iter(times)), min(times, key=lambda name: times[name])
    return best if times[best] < (1 - MARGIN) * times[preferred] else preferred


def agreed_times(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The times that all ranks decide by: those of rank 0, of the kernels that every rank has measured."""
    return {name: seconds for name, seconds in of_ranks[0].items() if all(name in times for times in of_ranks)}


def best_times(
    calls: Mapping[str, Callable[[], object]], wait: Callable[[], object], *, turns: int = 5, limit_s: float = 0.6
) -> dict[str, float]:
    """Seconds of the fastest of up to `turns` turns of each call, after one that may compile; `wait` waits for the device.

    They take turns, so that a slow moment meets all. No round begins after `limit_s` seconds, but for the first.
    """
    for call in calls.values():
        call()
    wait()
    best = dict.fromkeys(calls, float("inf"))
    until = time.perf_counter() + limit_s
    for turn in range(turns):
        if turn and time.perf_counter() > until:
            break
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            wait()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def kernel_times(
    kernels: Sequence[Kernel], layer: LayerFeatures, kv_heads: int, lengths: Sequence[int], device: torch.device
) -> dict[str, float]:
    """Seconds that a layer's attention takes by each kernel, forward and backward, over a row of documents of `lengths`.

    A kernel that was right for the small row of selection.py and fails at this one has none.
    """
    segments, scoring = Segments(tuple(lengths)), Scoring(layer.head_dim**-0.5)
    random = torch.Generator(device).manual_seed(0)

    def drawn(heads: int, width: int) -> torch.Tensor:
        shape = segments.tokens, heads, width
        return torch.randn(shape, generator=random, device=device, dtype=layer.dtype).requires_grad_()

    heads = layer.group * kv_heads
    inputs = drawn(heads, layer.head_dim), drawn(kv_heads, layer.head_dim), drawn(kv_heads, layer.value_dim)
    gradient = drawn(heads, layer.value_dim).detach()

    def step_of(kernel: Kernel) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend_by_segments(kernel, *inputs, segments, scoring), inputs, gradient)

    def runs(kernel: Kernel) -> bool:
        try:
            step_of(kernel)()
        except Exception as failure:  # kernels raise exceptions of every type
            check_alive(kernel.name, str(failure), device)
            return False
        return True

    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    return best_times({kernel.name: step_of(kernel) for kernel in kernels if runs(kernel)}, wait)
