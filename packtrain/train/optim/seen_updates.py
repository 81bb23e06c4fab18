"""`updates_seen`: the share of the updates that a model sees which computes in bfloat16 while float32 masters take them.

It is how far the rounded weights go along with their masters in a step: 0 where masters move within their rounding cells, 1 in the mean
where they begin off the middle (dither.py). Of each tensor a seeded sample is looked at. Nothing waits for the device but the logged line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from packtrain.monitor.heartbeat import waiting
from packtrain.train.optim.dither import Dither, dither_, own_part

FIRST, EVERY = 3, 100
"""The first steps that are measured, and one of how many after that."""
FEW = 0.5
"""The share of seen updates below which a run is warned."""
_MIN_RATE = 0.1  # of the peak: what is below, at the ends of a schedule, is meant to move nothing
_SAMPLE = 2**14  # numbers of a tensor


class SeenUpdates:
    """Measures the steps of an optimizer, of this process's part of the weights.

    `warned`: whether a warning was given, and its `advice`; `measured` steps were measured, those before a resume too.
    """

    def __init__(self) -> None:
        self.warned, self.measured, self.advice = False, 0, ""
        self._sums: torch.Tensor | None = None
        self._sampled: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = []
        self._measuring = self._has_measured = self._untaken = False
        self._masters_of: Callable[[torch.Tensor], list[torch.Tensor]] = lambda stepped: []

    def watch(self, optimizer: Any, masters_of: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        """Measures the steps of the optimizer that accelerate's or DeepSpeed's wrapper holds; `masters_of` says which parts of what it
        steps are masters of weights that are computed in bfloat16."""
        optimizer, self._masters_of = optimizer_inside(optimizer), masters_of
        if hasattr(optimizer, "seen"):  # float32_step.py, which has float32 tensors in the groups while it steps
            optimizer.seen = self
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
            stepped = (one for one in group["params"] if one.grad is not None)
            for master in itertools.chain.from_iterable(map(self._masters_of, stepped)):
                self._has_measured = self._untaken = True
                if (here := _flat(master)).numel():
                    at = _sample(here)
                    self._sampled.append((master, at, _at(here, at).clone()))

    def after(self) -> None:
        """Adds up how far those of the sample were moved."""
        for master, at, before in self._sampled:
            after = _at(here := _flat(master), at)
            sums = _seen_and_made(before, after, here.numel())
            self._sums = sums if self._sums is None else self._sums + sums
        self._sampled = []

    def pop(self, device: torch.device) -> torch.Tensor | None:
        """float64 [Σ seen × made, Σ made²] since the last call, on `device`; None, on all processes, if no step was measured."""
        if not self._untaken:
            return None
        sums, self._sums, self._untaken = self._sums, None, False
        return torch.zeros(2, dtype=torch.float64, device=device) if sums is None else sums.to(device)


@torch.no_grad()
def expected_share(dither: Dither, rate: float) -> float | None:
    """`updates_seen` of a first step that moves every weight by `rate`, one up and the next down, by the first numbers of each tensor; None
    where no master is rounded. Called by all processes together.
    """
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
    """float64 [Σ seen × made, Σ made²] of float32 numbers that stand for so many."""
    made, seen = after - before, after.bfloat16().float() - before.bfloat16().float()
    return torch.stack([(seen * made).sum(), made.square().sum()]).double() * (of / len(before))


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
