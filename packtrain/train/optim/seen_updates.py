"""Measure `updates_seen`: the share of the masters' updates that a model in bfloat16 sees.

It says how far the rounded weights follow their masters in a step: 0 if masters move within their rounding cells, 1 in the mean
if they begin off the middle (dither.py). A seeded sample of each tensor is measured. Only the logged line waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from packtrain.monitor.heartbeat import waiting
from packtrain.train.optim.dither import Dither, dither_, own_part

FIRST, EVERY = 3, 100
"""Measure the first FIRST steps, then one step in EVERY."""
FEW = 0.5
"""Share of seen updates below which the run warns."""
_MIN_RATE = 0.1  # of the peak: lower rates, at the ends of a schedule, are meant to move nothing
_SAMPLE = 2**14  # numbers of a tensor


class SeenUpdates:
    """Measurement of an optimizer's steps, on this process's part of the weights. `step`: the current one, from 1. `warned`: a warning was
    given, with its `advice`. `measured`: number of measured steps, also before a resume."""

    def __init__(self) -> None:
        self.warned, self.measured, self.advice = False, 0, ""
        self.step = self._opened = 0
        self._sums: torch.Tensor | None = None
        self._sampled: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = []
        self._measuring = self._has_measured = self._untaken = False
        self._masters_of: Callable[[torch.Tensor], list[torch.Tensor]] = lambda stepped: []

    def watch(self, optimizer: Optimizer, masters_of: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        """Measure the steps of torch's `optimizer`. `masters_of` maps a stepped tensor to its parts that are masters of weights computed in
        bfloat16."""
        self._masters_of = masters_of
        if hasattr(optimizer, "seen"):  # float32_step.py: its groups hold float32 tensors during a step
            setattr(optimizer, "seen", self)  # noqa: B010
            return
        optimizer.register_step_pre_hook(lambda stepping, *_: self.before(stepping.param_groups))
        optimizer.register_step_post_hook(lambda *_: self.after())

    def before(self, groups: list[dict[str, Any]]) -> None:
        """Keep a sample of the tensors before they are stepped. DeepSpeed steps some groups at a time."""
        self._sampled = []
        if self.step != self._opened:
            self._opened, self.measured = self.step, self.measured + self._has_measured
            self._measuring, self._has_measured = self.measured < FIRST or self.step % EVERY == 0, False
        if not self._measuring:
            return
        for group in groups:
            rate = float(group["lr"])
            if rate == 0 or rate < _MIN_RATE * float(group.get("initial_lr", rate)):
                continue
            stepped = (one for one in group["params"] if one.grad is not None)
            for master in itertools.chain.from_iterable(map(self._masters_of, stepped)):
                self._has_measured = self._untaken = True
                if (here := _flat(master)).numel():
                    at = _sample(here)
                    self._sampled.append((master, at, _at(here, at).clone()))

    def after(self) -> None:
        """Add up how far the sample was moved."""
        for master, at, before in self._sampled:
            after = _at(here := _flat(master), at)
            sums = _seen_and_made(before, after, here.numel())
            self._sums = sums if self._sums is None else self._sums + sums
        self._sampled = []

    def pop(self, device: torch.device) -> torch.Tensor | None:
        """Return float64 [Σ seen × made, Σ made²] since the last call, on `device`. None, on all processes, if no step was measured."""
        if not self._untaken:
            return None
        sums, self._sums, self._untaken = self._sums, None, False
        return torch.zeros(2, dtype=torch.float64, device=device) if sums is None else sums.to(device)


@torch.no_grad()
def expected_share(dither: Dither, rate: float) -> float | None:
    """Return the expected `updates_seen` of a first step; None if no master is rounded. The step moves every weight by `rate`, one up and the
    next down. Only the first numbers of each tensor count. All processes call it together."""
    if not (dither.rounded and rate):
        return None
    sums = torch.zeros(2, dtype=torch.float64, device=next(iter(dither.rounded.values())).device)
    for name, weight in dither.rounded.items():
        own, first = own_part(weight)
        if count := len(own):
            before = own[:_SAMPLE].float().clone()
            if name in dither.moved:
                dither_(before, dither.seed, name, first)
            after = before.clone()
            after[::2] += rate
            after[1::2] -= rate
            sums += _seen_and_made(before, after, count)
    if torch.distributed.is_initialized():
        with waiting("the seen updates of all ranks"):
            torch.distributed.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def _seen_and_made(before: torch.Tensor, after: torch.Tensor, of: int) -> torch.Tensor:
    """Return float64 [Σ seen × made, Σ made²] of float32 samples, scaled to `of` numbers."""
    made, seen = after - before, after.bfloat16().float() - before.bfloat16().float()
    return torch.stack([(seen * made).sum(), made.square().sum()]).double() * (of / len(before))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor that may be spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor.detach()).reshape(-1)


def _sample(flat: torch.Tensor) -> torch.Tensor | None:
    """Choose the indices of `flat` to measure, the same in every step; None for all."""
    if len(flat) <= _SAMPLE:
        return None
    generator = torch.Generator(flat.device).manual_seed(len(flat))
    return torch.randint(0, len(flat), (_SAMPLE,), device=flat.device, generator=generator)


def _at(flat: torch.Tensor, at: torch.Tensor | None) -> torch.Tensor:
    return flat if at is None else flat[at]
