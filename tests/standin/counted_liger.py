"""Count a layer with Liger's kernels, first with sums apart from norms, then in them.

    python -m tests.standin.counted_liger "sft 1.5B"     # bytes and launches forward, and backward, as JSON

Each of its kernels, written in Triton, is one launch that moves its arguments: once, and those that it reads and writes twice. It runs in a
process of its own, on stand-in GPUs, with TRITON_INTERPRET=1: only there are Triton and Liger importable.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from packtrain.changes import residual_norm
from packtrain.system import holding
from tests.standin import counted

_OVERWRITTEN = {"_swiglu_backward_kernel": ("a_ptr", "b_ptr"), "_triton_rope": ("q_ptr", "k_ptr")}
ghosts: list[counted.Ghosts] = []


class Seen(counted.Ghosts):
    """Ghosts that Liger's kernels find."""

    def __init__(self) -> None:
        super().__init__()
        ghosts[:] = [self]


def instead(kernel: Any, grid: object) -> Callable[..., None]:
    """Stands for `kernel[grid]`."""

    def launch(*given: object, **named: object) -> None:
        name, values = kernel.__name__, {**dict(zip(kernel.arg_names, given, strict=False)), **named}
        tensors = {key: one for key, one in values.items() if isinstance(one, torch.Tensor)}
        again = [tensors[key] for key in _OVERWRITTEN.get(name, ())]
        ghosts[0].note(name, [], [*tensors.values(), *again])

    return launch


if __name__ == "__main__":
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    with holding(counted, Ghosts=Seen), holding(interpreter.InterpretedFunction, __getitem__=instead):
        counted.count(sys.argv[1], 1)  # the first run of a process has one launch more
        apart = partial(holding, residual_norm, layers_with_sums=lambda model: iter(()))
        costs = [counted.costs_of(sys.argv[1], fault)["figures"] for fault in (apart, nullcontext)]
    ways = [f"layer {phase}: {figure}" for phase in ("forward", "backward") for figure in ("bytes", "launches")]
    print(json.dumps([[one[way] for way in ways] for one in costs]))
