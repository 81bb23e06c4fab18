"""Any optimizer of torch, stepping in float32 over bfloat16 weights: with float32 masters, or by stochastic rounding.

A bfloat16 number has 8 significant bits, so an update of less than 2^-9 of its weight is rounded away: at a learning rate of
1e-5 nearly all are. As DeepSpeed does it (and Micikevicius et al. 2018, arXiv 1710.03740, section 3.1), a float32 copy of each
weight, its master, takes the updates, and the weight is the master rounded. Without masters, stochastic rounding (Gupta et al.
2015, arXiv 1502.02551) takes the upper or the lower neighbour by chance, so that the mean is right; moments are rounded so too.

Outside of `step` the optimizer is the plain one: its groups hold the weights themselves, so that clipping, schedules,
transformers' checkpoints and torch's distributed ones find what they know. A master is one more state of its weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from packtrain.plan.memory import STEPPED
from packtrain.train.optim.dither import Dither, dithered, own_part
from packtrain.train.optim.groups import AVERAGE
from packtrain.train.optim.seen_updates import SeenUpdates, local

MASTER, ROUNDINGS = "master", "roundings"
"""States of a weight beside those of its optimizer: its master, and how often it was rounded by chance."""
_WRAPPED = "__bnb_optimizer_quant_state__"
"""Where bitsandbytes has states of its own in a state dict."""


def loses_updates(weight: torch.Tensor) -> bool:
    """Whether the format of `weight` is too coarse for updates; float16 is not trained (model/load.py)."""
    return weight.requires_grad and weight.dtype == torch.bfloat16


def stepping_in_float32(
    optimizer: type[Optimizer], *, masters: bool, seed: int, names: Mapping[torch.Tensor, str], dither: Dither
) -> type[Optimizer]:
    """`optimizer` as a class whose step is made in float32; weights that are float32 already are stepped as ever.

    With `masters`, which begin as `dither` says, or by stochastic rounding, whose chance comes from `seed`, the weight's name and the
    number of its roundings: the same on any number of processes, and after a resume.
    """
    known = {"masters": masters, "seed": seed, "names": names, "dither": dither}
    return type(optimizer.__name__, (_Float32Step, optimizer), {"__module__": optimizer.__module__, **known})


class _Float32Step(Optimizer):
    """Stands before the class of an optimizer: gives it float32 tensors in place of its weights while it steps."""

    masters: ClassVar[bool]
    seed: ClassVar[int]
    names: ClassVar[Mapping[torch.Tensor, str]]
    dither: ClassVar[Dither]
    seen: SeenUpdates | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all weights that have a gradient, some at a time."""
        if not getattr(self, "initialized", True):  # bitsandbytes tells its exceptions by the weights themselves
            getattr(self, "check_overrides", lambda: None)()
        lists = [group["params"] for group in self.param_groups]
        weights = [(params, at, weight) for params in lists for at, weight in enumerate(params)]
        stepped = [one for one in weights if one[2].grad is not None]
        gradients = [weight.grad for _, _, weight in stepped]
        for _, _, weight in stepped:
            weight.grad = None  # so that the optimizer passes over those whose turn it is not
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
        for (_, _, weight), gradient in zip(stepped, gradients, strict=True):
            weight.grad = gradient

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the base class, which rounds every state to the format of its weight: those are put back as they were saved."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for number, weight in zip(numbers, weights, strict=True):
            saved = state_dict["state"].get(number, {})
            for name, value in (saved | saved.get(_WRAPPED, {})).items():
                if isinstance(value, torch.Tensor) and value.dtype != self.state[weight][name].dtype:
                    self.state[weight][name] = value.to(weight.device)

    def _open(self, weight: torch.Tensor) -> tuple[torch.Tensor, int]:
        """What the optimizer steps in place of `weight`, its states moved there, and how often it was rounded."""
        if not loses_updates(weight):
            return weight, 0
        state = self.state.pop(weight, {})
        exact, rounded = state.pop(MASTER, None), state.pop(ROUNDINGS, 0)
        if exact is None:
            exact = weight.detach().float()
            if self.masters:
                self.dither.move_master(self.names[weight], exact)
        moments = {name: state[name].float() for name in _moments(state, weight)}
        if state:  # optimizers take an empty one for the first step
            self.state[exact] = state | moments
        return exact, rounded

    def _close(self, weight: torch.Tensor, exact: torch.Tensor, rounded: int) -> None:
        """Rounds `exact` to `weight` and gives it its states back."""
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
    """float32 `exact` in bfloat16: one of its two neighbours, of which the further one is as likely as the nearer one is near."""
    rounded, (own, first) = exact.to(torch.bfloat16), own_part(exact)
    local(rounded).view(-1).copy_(dithered(own, seed, key, first))
    return rounded


def _moments(state: dict[str, Any], weight: torch.Tensor) -> list[str]:
    """The states that have a number for each of `weight`, in float32 or its own format; 8-bit ones are tensors of other kinds."""
    plain = (torch.Tensor, DTensor)
    return sorted(
        name
        for name, value in state.items()
        if name not in ("step", AVERAGE)
        and type(value) in plain
        and value.is_floating_point()
        and value.shape == weight.shape
    )


def _parts(sizes: Iterable[int]) -> Iterator[list[int]]:
    """The indices of `sizes` in order, in lists of at most STEPPED numbers together, or of one."""
    part, numbers = [], 0
    for index, size in enumerate(sizes):
        if part and numbers + size > STEPPED:
            yield part
            part, numbers = [], 0
        part.append(index)
        numbers += size
    if part:
        yield part
