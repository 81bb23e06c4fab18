"""The share of updates that are lost in rounding: weights that are bit for bit what they were, though their gradient is not zero.

It is measured on what the optimizer keeps: on masters where there are some (DeepSpeed's own too), and before a stochastic
rounding, which loses nothing in the mean. Of each tensor a seeded sample is looked at. Nothing waits for the device but the
logged line.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

FIRST, EVERY = 3, 100
"""The first steps that are measured, and one of how many after that."""
MAX_LOST = 0.1
"""The share of lost updates above which a run is warned."""
_MIN_RATE = 0.1  # of the peak: what is below, at the ends of a schedule, is meant to move nothing
_SAMPLE = 2**14  # numbers of a tensor


def advice(*, rounds_plainly: bool) -> str:
    """What to do about lost updates; `rounds_plainly`: the optimizer rounds bfloat16 weights after each of its steps."""
    if rounds_plainly:
        return "set optim.bf16_rounding to auto or stochastic, or model.dtype=float32 (docs/precision.md)"
    return "even float32 is too coarse for optim.learning_rate, raise it"


class LostUpdates:
    """Counts lost updates in the steps of an optimizer, of this process's part of the weights.

    `advice` is for their warning, and `warned` whether it was given; `measured` steps were measured, those before a resume too.
    """

    def __init__(self) -> None:
        self.advice, self.warned = "", False
        self._counts: torch.Tensor | None = None
        self._sampled: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]] = []
        self._measuring, self.measured = False, 0
        self._has_measured = self._untaken = False

    def watch(self, optimizer: Any) -> None:
        """Measures the steps of the optimizer that accelerate's or DeepSpeed's wrapper holds."""
        optimizer = optimizer_inside(optimizer)
        if hasattr(optimizer, "lost"):  # float32_step.py, which has float32 tensors in the groups while it steps
            optimizer.lost = self
            return
        optimizer.register_step_pre_hook(lambda stepping, *_: self.before(stepping.param_groups))
        optimizer.register_step_post_hook(lambda *_: self.after())

    def open_step(self, step: int) -> None:
        """Decides whether `step`, counted from 1, is measured."""
        self.measured += self._has_measured
        self._measuring, self._has_measured = self.measured < FIRST or step % EVERY == 0, False

    def ignore_step(self) -> None:
        """Says that the step makes no update: it is not measured."""
        self._measuring = False

    def before(self, groups: list[dict[str, Any]]) -> None:
        """Keeps a sample of what is about to be stepped; DeepSpeed steps some groups at a time."""
        self._sampled = []
        if not self._measuring:
            return
        for group in groups:
            rate = float(group["lr"])
            if rate == 0 or rate < _MIN_RATE * float(group.get("initial_lr", rate)):
                continue
            self._has_measured = self._untaken = True
            for weight in group["params"]:
                if weight.grad is not None and (here := _flat(weight)).numel():
                    at = _sample(here)
                    self._sampled.append((weight, at, _at(here, at).clone(), _at(_flat(weight.grad), at) != 0))

    def after(self) -> None:
        """Counts those of the sample that were not moved."""
        for weight, at, before, updated in self._sampled:
            here = _flat(weight)
            lost = (_at(here, at) == before) & updated
            counts = torch.stack([lost.sum(), updated.sum()]).double() * (here.numel() / len(before))
            self._counts = counts if self._counts is None else self._counts + counts
        self._sampled = []

    def pop(self, device: torch.device) -> torch.Tensor | None:
        """float64 [lost updates, updates] since the last call, on `device`; None, on all processes, if no step was measured."""
        if not self._untaken:
            return None
        counts, self._counts, self._untaken = self._counts, None, False
        return torch.zeros(2, dtype=torch.float64, device=device) if counts is None else counts.to(device)


def optimizer_inside(optimizer: Any) -> Any:
    """torch's optimizer inside accelerate's and DeepSpeed's."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor that may be spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor.detach()).reshape(-1)


def _sample(flat: torch.Tensor) -> torch.Tensor | None:
    """The indices of `flat` to look at, the same in every step; None for all."""
    if len(flat) <= _SAMPLE:
        return None
    generator = torch.Generator(flat.device).manual_seed(len(flat))
    return torch.randint(0, len(flat), (_SAMPLE,), device=flat.device, generator=generator)


def _at(flat: torch.Tensor, at: torch.Tensor | None) -> torch.Tensor:
    return flat if at is None else flat[at]
