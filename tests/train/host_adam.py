"""packtrain where DeepSpeed does not compile its optimizer for the host, which takes longer than many tests.

What offloads weights, gradients and optimizer is DeepSpeed's; torch computes the step that its compiled code would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adamw import adamw

from tests.train import forked


class HostAdam:
    """What DeepSpeedCPUAdam calls of the compiled module."""

    def create_adam(self, *_: Any) -> None:
        """Nothing is kept here."""

    destroy_adam = create_adam

    def adam_update(self, _, step, lr, beta1, beta2, eps, decay, __, *tensors) -> None:
        """A step of AdamW on weights, gradients, first and second moments, in place."""
        weights, gradients, first, second = ([one] for one in tensors)
        steps = [torch.tensor(step - 1.0)]
        given = {"beta1": beta1, "beta2": beta2, "lr": lr, "weight_decay": decay, "eps": eps}
        adamw(weights, gradients, first, second, [], steps, amsgrad=False, maximize=False, **given)


def run(*given: Any) -> None:
    """`forked.run` with HostAdam."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder.load = lambda *_, **__: HostAdam()
    forked.run(*given)
