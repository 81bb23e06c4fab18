"""DeepSpeed's engine steps within the backward pass. Here it asks before an update, and forgets a try.

packtrain patches DeepSpeed nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from packtrain.system import holding


def ask_before_update(optimizer: Any, judge: Callable[[Callable[[], torch.Tensor]], bool | None]) -> None:
    """Make DeepSpeed's `optimizer` ask `judge` before each update.

    It gets a function for the norm of the gradients. If it returns True, the update is given up as if it were an overflow; None changes
    nothing.
    """
    if not hasattr(optimizer, "_update_scale"):  # ZeRO-1 of bfloat16 weights
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        step = optimizer.step

        def norm_of_all() -> torch.Tensor:
            gradients, _ = optimizer.get_grads_for_norm()
            return _valid(get_global_norm_of_tensors(gradients, mpu=optimizer.mpu, norm_type=optimizer.norm_type))

        def step_or_not(*given: Any, **named: Any) -> None:
            if judge(norm_of_all):
                optimizer.clear_hp_grads()
                optimizer.clear_lp_grads()
                return
            step(*given, **named)

        optimizer.step = step_or_not
        return

    def norm_of_parts() -> torch.Tensor:
        if hasattr(optimizer, "scaled_global_norm"):
            return _valid(optimizer.scaled_global_norm())
        groups = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in optimizer._get_norm_groups()])
        return torch.full((), torch.nan) if (groups < 0).any() else torch.linalg.vector_norm(groups)

    update_scale = optimizer._update_scale

    def ask(overflow: bool) -> None:
        """Called between the overflow check and the update. The scale of bfloat16 and float32 gradients never changes."""
        verdict = judge(norm_of_parts)
        if verdict is None:
            return update_scale(overflow)
        optimizer.overflow = verdict

    optimizer._update_scale = ask


def _valid(norm: Any) -> torch.Tensor:
    """Return DeepSpeed's norm, with NaN in place of its -1."""
    norm = torch.as_tensor(norm)
    return torch.where(norm >= 0, norm, torch.nan)


def counting_no_step(engine: Any) -> AbstractContextManager[None]:
    """Restore the counts of DeepSpeed's `engine` after the block. It counts a micro-batch that is tried as a step."""
    names = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
    return holding(engine, **{name: getattr(engine, name) for name in names})
