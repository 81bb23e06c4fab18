"""Any optimizer of torch, stepping in float32 over bfloat16 weights: with float32 masters, or by stochastic rounding.

A bfloat16 number has 8 significant bits, so an update of less than 2^-9 of its weight is rounded away: at a learning rate of
1e-5 nearly all are. As DeepSpeed does it (and Micikevicius et al. 2018, arXiv 1710.03740, section 3.1), a float32 copy of each
weight, its master, takes the updates, and the weight is the master rounded. Without masters, stochastic rounding (Gupta et al.
2015, arXiv 1502.02551) takes the upper or the lower neighbour by chance, so that the mean is right; moments are rounded so too.

Outside of `step` the optimizer is the plain one: its groups hold the weights themselves, so that clipping, schedules,
transformers' checkpoints and torch's distributed ones find what they know. A master is one more state of its weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from packtrain.config.schema import Rounding
from packtrain.plan.memory import STEPPED
from packtrain.train.optim.lost_updates import LostUpdates, local

MASTER, ROUNDINGS = "master", "roundings"
"""States of a weight beside those of its optimizer: its master, and how often it was rounded by chance."""


def loses_updates(weight: torch.Tensor) -> bool:
    """Whether the format of `weight` is too coarse for updates; float16 is not trained (model/load.py)."""
    return weight.requires_grad and weight.dtype == torch.bfloat16


def stepping_in_float32(optimizer: type[Optimizer], *, masters: bool, rounding: Rounding, seed: int) -> type[Optimizer]:
    """`optimizer` as a class whose step is made in float32; weights that are float32 already are stepped as ever.

    `rounding` takes float32 results to the weights' format. Chance comes from `seed`, the weight and the number of its
    roundings: the same on every rank that has the whole weight, and after a resume.
    """
    known = {"masters": masters, "stochastic": rounding == "stochastic", "seed": seed}
    return type(optimizer.__name__, (_Float32Step, optimizer), {"__module__": optimizer.__module__, **known})


class _Float32Step(Optimizer):
    """Stands before the class of an optimizer: gives it float32 tensors in place of its weights while it steps."""

    masters: ClassVar[bool]
    stochastic: ClassVar[bool]
    seed: ClassVar[int]
    lost: LostUpdates | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of all weights that have a gradient, some at a time."""
        if not getattr(self, "initialized", True):  # bitsandbytes tells its exceptions by the weights themselves
            getattr(self, "check_overrides", lambda: None)()
        lists = [group["params"] for group in self.param_groups]
        weights = [(params, at, weight) for params in lists for at, weight in enumerate(params)]
        stepped = [(*weight, number) for number, weight in enumerate(weights) if weight[2].grad is not None]
        gradients = [weight.grad for _, _, weight, _ in stepped]
        for _, _, weight, _ in stepped:
            weight.grad = None  # so that the optimizer passes over those whose turn it is not
        for part in _parts([weight.numel() for _, _, weight, _ in stepped]):
            opened = []
            for index in part:
                params, at, weight, number = stepped[index]
                exact, rounded = self._open(weight)
                exact.grad, params[at] = gradients[index].to(exact.dtype), exact
                opened.append((params, at, weight, number, exact, rounded))
            if self.lost is not None:
                self.lost.before(self.param_groups)
            super().step()
            if self.lost is not None:
                self.lost.after()
            for params, at, weight, number, exact, rounded in opened:
                exact.grad, params[at] = None, weight
                self._close(weight, exact, number, rounded)
        for (_, _, weight, _), gradient in zip(stepped, gradients, strict=True):
            weight.grad = gradient

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the base class, which rounds every state to the format of its weight: those are put back as they were saved."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for number, weight in zip(numbers, weights, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                loaded = self.state[weight][name]
                if isinstance(value, torch.Tensor) and value.dtype != loaded.dtype:
                    self.state[weight][name] = value.to(weight.device)

    def _open(self, weight: torch.Tensor) -> tuple[torch.Tensor, int]:
        """What the optimizer steps in place of `weight`, its states moved there, and how often it was rounded."""
        if not loses_updates(weight):
            return weight, 0
        state = self.state.pop(weight, {})
        exact, rounded = state.pop(MASTER, None), state.pop(ROUNDINGS, 0)
        exact = weight.detach().float() if exact is None else exact
        moments = {} if self.masters else {name: state[name].float() for name in _moments(state, weight)}
        if state:  # optimizers take an empty one for the first step
            self.state[exact] = state | moments
        return exact, rounded

    def _close(self, weight: torch.Tensor, exact: torch.Tensor, number: int, rounded: int) -> None:
        """Rounds `exact` to `weight`, the one of that `number`, and gives it its states back."""
        if exact is weight:
            return
        state = self.state.pop(exact, {})
        generator = None
        if self.stochastic:
            generator = _generator(weight, self.seed, number, rounded)
            state[ROUNDINGS] = rounded + 1
        weight.copy_(round_to(exact, weight.dtype, generator))
        if self.masters:
            state[MASTER] = exact
        else:
            state |= {name: round_to(state[name], weight.dtype, generator) for name in _moments(state, weight)}
        if state:
            self.state[weight] = state


def round_to(exact: torch.Tensor, dtype: torch.dtype, generator: torch.Generator | None = None) -> torch.Tensor:
    """float32 `exact` in `dtype`: its nearest number, or with a `generator` one of its two neighbours in bfloat16.

    The further one is as likely as the nearer one is near: 16 random bits are added to the 16 that are cut off.
    """
    rounded = exact.to(dtype)
    if generator is not None and dtype == torch.bfloat16:
        whole = local(exact)
        noise = torch.randint(0, 1 << 16, whole.shape, dtype=torch.int32, device=whole.device, generator=generator)
        bits = (whole.view(torch.int32) + noise) & -(1 << 16)
        local(rounded).copy_(torch.where(whole.isfinite(), bits.view(torch.float32), whole))
    return rounded


def _generator(weight: torch.Tensor, seed: int, number: int, rounded: int) -> torch.Generator:
    """Chance for one rounding of one weight; processes that have different parts of it draw differently."""
    part = torch.distributed.get_rank() if isinstance(weight, DTensor) else 0
    drawn = hashlib.blake2b(f"{seed} {number} {rounded} {part}".encode(), digest_size=7).digest()
    return torch.Generator(local(weight).device).manual_seed(int.from_bytes(drawn, "big"))


def _moments(state: dict[str, Any], weight: torch.Tensor) -> list[str]:
    """The states that have a number for each of `weight`, in float32 or its own format; 8-bit ones are tensors of other kinds."""
    plain = (torch.Tensor, DTensor)
    return sorted(
        name
        for name, value in state.items()
        if name != "step" and type(value) in plain and value.is_floating_point() and value.shape == weight.shape
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
