"""What the GPU does in a step of training: torch's profile of some steps, as shares by the kind of work.

Kinds are told by the names of kernels; all that is launched inside of the output head's own function is `head`, its products
too. `waiting` is the time in which no kernel and no copy runs. A device of which torch's profiler sees no kernels (a CPU, a
stand-in) is described by operators of the CPU in place of them, by the time that each takes itself.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

STEPS = 2
"""Steps that are profiled."""
KINDS = {  # the first that fits
    "attention": r"flash|fmha|varlen|scaled_dot|segment_attention",
    "optimizer": r"adam|multi_tensor|_foreach|clip|lpnorm|norm_scalar",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|\bmm\b|addmm|bmm|linear|matmul|dot_kernel",
    "copies": r"memcpy|memset|copy|_to\b|catarray|\bcat\b|fill|index|gather|scatter|embedding",
}
"""Kind of work → names of kernels (of operators, on a CPU). All others are `elementwise`: norms, activations, RoPE, sums."""


HEAD = re.compile(r"logprob|log_?prob|cross_?entropy|lm_?head|nll_loss", re.IGNORECASE)
"""Names of the functions of output heads, forwards and backwards."""


def kind_of(kernel: str) -> str:
    """The kind of work that a kernel or operator does."""
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel, re.IGNORECASE)), "elementwise")


def start() -> tuple[Any, float]:
    """A profiler that runs, and when that began."""
    import torch
    from torch.profiler import ProfilerActivity, profile, supported_activities

    wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & supported_activities()
    profiler = profile(activities=wanted)
    profiler.start()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return profiler, time.perf_counter()


def stop(started: tuple[Any, float]) -> dict[str, Any]:
    """Ends a profile: the shares of the steps' time by kind, and the kernels that take most of it."""
    import torch
    from torch.autograd import DeviceType

    profiler, since = started
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wall_us = (time.perf_counter() - since) * 1e6
    profiler.stop()
    events = profiler.events()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    if spans:
        inside = [(one.name, one.duration) for event in events if in_head(event) for one in event.kernels]
        every = [(name, end - begin) for name, begin, end in spans]
        return {"of": "kernels", **shares(every, inside, wall_us, busy(spans))}
    every = [(event.name, event.self_cpu_time_total) for event in events]
    inside = [(event.name, event.self_cpu_time_total) for event in events if in_head(event)]
    spent = sum(own for _, own in every)
    return {"of": "operators of the CPU (the profiler saw no kernels)", **shares(every, inside, spent, spent)}


def in_head(event: Any) -> bool:
    """Whether an operator of the CPU runs inside of the output head's function."""
    while event is not None and not HEAD.search(event.name):
        event = event.cpu_parent
    return event is not None


def busy(spans: Iterable[tuple[str, float, float]]) -> float:
    """The time in which any of (name, begin, end) runs: streams overlap."""
    total, until = 0.0, float("-inf")
    for _, begin, end in sorted(spans, key=lambda span: span[1]):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def shares(
    times: Iterable[tuple[str, float]], in_head: Iterable[tuple[str, float]], whole: float, running: float
) -> dict[str, Any]:
    """Of (name, time) the `shares` of the `whole` by kind, and the `longest` names; some of them ran `in_head`.

    Kernels run for `running` of the whole. Those that overlap count by their part of that, so that all shares add up to 1.
    """
    by_name, of_head = totals(times), totals(in_head)
    scale = running / max(sum(by_name.values()), 1e-9) / whole
    by_kind = Counter({"head": sum(of_head.values()) * scale, "waiting": max(0.0, 1 - running / whole)})
    for name, one in by_name.items():
        by_kind[kind_of(name)] += (one - of_head[name]) * scale
    longest = [[name[:100], kind_of(name), one * scale] for name, one in by_name.most_common(12)]
    return {"shares": dict(by_kind.most_common()), "longest": longest}


def totals(times: Iterable[tuple[str, float]]) -> Counter[str]:
    """The sum of (name, time) by name."""
    by_name: Counter[str] = Counter()
    for name, one in times:
        by_name[name] += one
    return by_name
