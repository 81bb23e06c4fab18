"""Make any torch optimizer step in float32 over bfloat16 weights.

A bfloat16 number has 8 significant bits, so an update of less than 2^-9 of its weight is rounded away: at a learning rate of
1e-5 nearly all are. DeepSpeed's solution (and Micikevicius et al. 2018, arXiv 1710.03740, section 3.1) is a float32
master of each weight that takes the updates; the weight is the rounded master. Without masters, stochastic rounding (Gupta et al.
2015, arXiv 1502.02551) takes the upper or the lower neighbour by chance, so that the mean is right. Moments are rounded the same way.

Outside of `step` the optimizer is the plain one: its groups hold the weights themselves, so that clipping, schedules,
transformers' checkpoints and torch's distributed ones find the tensors that they expect. A master is one more state of its weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from packtrain.optimizers import STEPPED
from packtrain.train.optim.dither import Dither, SeenUpdates, dithered, local, own_part

if TYPE_CHECKING:
    from packtrain.train.optim.fused_adamw import FusedAdamW

MASTER, ROUNDINGS, AVERAGE = "master", "roundings", "average"
"""Extra states of a weight beside its optimizer's: its master, how often it was rounded by chance, its average over the steps (trainer.ema)."""
_WRAPPED = "__bnb_optimizer_quant_state__"
"""Key of bitsandbytes' own states in a state dict."""


def loses_updates(weight: torch.Tensor) -> bool:
    """Return whether the format of `weight` is too coarse for updates. float16 is not trained (model/load.py)."""
    return weight.requires_grad and weight.dtype == torch.bfloat16


def stepping_in_float32(
    optimizer: type[Optimizer], *, masters: bool, seed: int, names: Mapping[torch.Tensor, str], dither: Dither
) -> type[Optimizer]:
    """Subclass `optimizer` with a step in float32; float32 weights are stepped as before.

    With `masters`, `dither` moves them as they begin. Without, rounding is stochastic: its chance comes from `seed`, the weight's name and the
    number of its roundings, so it is the same on any number of processes and after a resume.
    """
    known = {"masters": masters, "seed": seed, "names": names, "dither": dither}
    return type(optimizer.__name__, (Float32Step, optimizer), {"__module__": optimizer.__module__, **known})


class Float32Step(Optimizer):
    """Mixin before an optimizer's class: swaps float32 tensors for its weights during a step.

    `kernel` makes the same step of the weights that it can.
    """

    masters: ClassVar[bool]
    seed: ClassVar[int]
    names: ClassVar[Mapping[torch.Tensor, str]]
    dither: ClassVar[Dither]
    seen: SeenUpdates | None = None
    kernel: FusedAdamW | None = None

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Update all weights that have a gradient, a part of them at a time."""
        if not getattr(self, "initialized", True):  # bitsandbytes finds its exceptions by the weights themselves
            getattr(self, "check_overrides", lambda: None)()
        by_kernel = [(weight, weight.grad) for weight in (self.kernel.step(self) if self.kernel else [])]
        for weight, _ in by_kernel:
            weight.grad = None
        lists = [group["params"] for group in self.param_groups]
        weights = [(params, at, weight) for params in lists for at, weight in enumerate(params)]
        stepped = [one for one in weights if one[2].grad is not None]
        gradients = [weight.grad for _, _, weight in stepped]
        for _, _, weight in stepped:
            weight.grad = None  # so that the optimizer passes over weights of other parts
        for part in _parts([weight.numel() for _, _, weight in stepped]):
            opened = []
            for index in part:
                params, at, weight = stepped[index]
                exact, rounded = self._open(weight)
                exact.grad, params[at] = gradients[index].to(exact.dtype), exact
                opened.append((params, at, weight, exact, rounded))
            if self.seen is not None:
                self.seen.before(self.param_groups)
            super().step()
            if self.seen is not None:
                self.seen.after()
            for params, at, weight, exact, rounded in opened:
                exact.grad, params[at] = None, weight
                self._close(weight, exact, rounded)
        for weight, gradient in (*by_kernel, *zip((one[2] for one in stepped), gradients, strict=True)):
            weight.grad = gradient

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load like the base class. It rounds each state to its weight's format: put the saved values back."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for number, weight in zip(numbers, weights, strict=True):
            saved = state_dict["state"].get(number, {})
            for name, value in (saved | saved.get(_WRAPPED, {})).items():
                if isinstance(value, torch.Tensor) and value.dtype != self.state[weight][name].dtype:
                    self.state[weight][name] = value.to(weight.device)

    def _open(self, weight: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the tensor to step in place of `weight`, and the count of its roundings. The states move to this tensor."""
        if not loses_updates(weight):
            return weight, 0
        state = self.state.pop(weight, {})
        exact, rounded = state.pop(MASTER, None), state.pop(ROUNDINGS, 0)
        if exact is None:
            exact = weight.detach().float()
            if self.masters:
                self.dither.move_master(self.names[weight], exact)
        moments = {name: state[name].float() for name in _moments(state, weight)}
        if state:  # an empty state means the first step to an optimizer
            self.state[exact] = state | moments
        return exact, rounded

    def _close(self, weight: torch.Tensor, exact: torch.Tensor, rounded: int) -> None:
        """Round `exact` into `weight` and move the states back."""
        if exact is weight:
            return
        state = self.state.pop(exact, {})
        if self.masters:
            weight.copy_(exact)
            state[MASTER] = exact
        else:
            key = f"{self.names[weight]} {rounded}"
            weight.copy_(round_by_chance(exact, self.seed, key))
            state |= {
                name: round_by_chance(state[name], self.seed, f"{key} {name}") for name in _moments(state, weight)
            }
            state[ROUNDINGS] = rounded + 1
        if state:
            self.state[weight] = state


def round_by_chance(exact: torch.Tensor, seed: int, key: str) -> torch.Tensor:
    """Round float32 `exact` to bfloat16 by chance: each neighbour's probability grows with its nearness."""
    rounded, (own, first) = exact.to(torch.bfloat16), own_part(exact)
    local(rounded).view(-1).copy_(dithered(own, seed, key, first))
    return rounded


def _moments(state: dict[str, Any], weight: torch.Tensor) -> list[str]:
    """Name the states with weight-shaped float32 or bfloat16 values. States in 8 bits are tensors of other kinds."""
    plain = (torch.Tensor, DTensor, type(weight.detach()))
    return sorted(
        name
        for name, value in state.items()
        if name not in ("step", AVERAGE)
        and type(value) in plain
        and value.is_floating_point()
        and value.shape == weight.shape
    )


def _parts(sizes: Iterable[int]) -> Iterator[list[int]]:
    """Split the indices of `sizes`, in order. A list has at most STEPPED numbers together, or one index."""
    part, numbers = [], 0
    for index, size in enumerate(sizes):
        if part and numbers + size > STEPPED:
            yield part
            part, numbers = [], 0
        part.append(index)
        numbers += size
    if part:
        yield part
