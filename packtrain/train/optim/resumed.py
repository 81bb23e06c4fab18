"""The settings of an optimizer and its learning rate in a run that goes on: those of this run's config, at the step it goes on from."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each group of a new optimizer: learning rate, weight decay and all else but its weights."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in optimizer.param_groups
    ]


def go_on(optimizer: torch.optim.Optimizer, schedule: LambdaLR, settings: list[dict[str, Any]], steps: int) -> None:
    """Puts `settings` in place of what a checkpoint has brought, and a new `schedule` where it is after `steps`."""
    bases = [own["initial_lr"] for own in settings]
    rates = [base * share(steps) for base, share in zip(bases, schedule.lr_lambdas, strict=True)]
    for group, own, rate in zip(optimizer.param_groups, settings, rates, strict=True):
        group.update(own, lr=rate)
    schedule.base_lrs, schedule.last_epoch, schedule._step_count, schedule._last_lr = bases, steps, steps + 1, rates
