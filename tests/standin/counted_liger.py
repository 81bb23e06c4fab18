"""Count the costs of a layer with Liger's kernels, before a change and after it.

The change takes sums into norms, or fuses the grouped experts.

    python -m tests.standin.counted_liger "sft 1.5B"     # bytes and launches forward, and backward, as JSON
    python -m tests.standin.counted_liger "experts 30B" fused     # the same, bytes of the products, and bytes kept

Each of its kernels, written in Triton, is one launch that moves its arguments: once, and those that it reads and writes twice. It runs in a
process of its own, on stand-in GPUs, with TRITON_INTERPRET=1: only there are Triton and Liger importable.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from packtrain.changes import residual_norm
from packtrain.system import holding
from tests.standin import counted

_OVERWRITTEN = {"_swiglu_backward_kernel": ("a_ptr", "b_ptr"), "_triton_rope": ("q_ptr", "k_ptr")}
_PRODUCT = re.compile("_proj_|_dW|_dX")
ghosts: list[counted.Ghosts] = []


class Seen(counted.Ghosts):
    """Ghosts that Liger's kernels find."""

    def __init__(self) -> None:
        super().__init__()
        ghosts[:] = [self]


def instead(kernel: Any, grid: object) -> Callable[..., None]:
    """Stands for `kernel[grid]`."""

    def launch(*given: object, **named: object) -> None:
        name, values = (
            getattr(kernel, "base_fn", kernel).__name__,
            {**dict(zip(kernel.arg_names, given, strict=False)), **named},
        )
        tensors = {key: one for key, one in values.items() if isinstance(one, torch.Tensor)}
        again = [tensors[key] for key in _OVERWRITTEN.get(name, ())]
        ghosts[0].note("_grouped_mm" if _PRODUCT.search(name) else name, [], [*tensors.values(), *again])
        kept = [one.untyped_storage() for one in tensors.values() if not isinstance(one, torch.nn.Parameter)]
        if ghosts[0].phase:
            ghosts[0]._made |= {one._cdata: (StorageWeakRef(one), one.nbytes()) for one in kept}

    return launch


@contextmanager
def experts_by(way: str) -> Iterator[None]:
    """Run the shapes with `model.experts` of this value."""
    with holding(
        counted,
        SHAPES={name: (*given, (*more, f"model.experts={way}")) for name, (*given, more) in counted.SHAPES.items()},
    ):
        yield


if __name__ == "__main__":
    from triton.runtime import autotuner, interpreter  # pyright: ignore[reportMissingImports]

    shape, of_experts = sys.argv[1], sys.argv[2:] == ["fused"]
    with ExitStack() as stack:
        stack.enter_context(holding(counted, Ghosts=Seen))
        for kind in (interpreter.InterpretedFunction, autotuner.Autotuner):
            stack.enter_context(holding(kind, __getitem__=instead))
        counted.count(shape, 1)  # the first run of a process has one launch more
        apart = partial(holding, residual_norm, layers_with_sums=lambda model: iter(()))
        ways = [nullcontext, nullcontext] if of_experts else [apart, nullcontext]
        found = []
        for way, fault in zip(("grouped", "fused") if of_experts else ("auto", "auto"), ways, strict=True):
            with experts_by(way):
                found.append(counted.costs_of(shape, fault))
    wanted = [f"layer {phase}: {figure}" for phase in ("forward", "backward") for figure in ("bytes", "launches")]
    print(json.dumps([[one["figures"][name] for name in wanted] for one in found]))
    if of_experts:
        products = [
            sum(one["bytes"][f"layer {phase}: _grouped_mm"] for phase in ("forward", "backward")) for one in found
        ]
        print(json.dumps([products, [one["figures"]["layer: bytes kept"] for one in found]]))
