"""The share of the first update that rounding would lose, by the optimizer, learning rate and number formats of the run.

The optimizer steps over a copy of some numbers of each weight, so the model stays as it is and no memory is needed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer as TransformersTrainer
from transformers import TrainingArguments

from packtrain.config.schema import Optim
from packtrain.train.optim.float32_step import stepping_in_float32
from packtrain.train.optim.lost_updates import MOST_LOST, LostUpdates, advice, local, sampled


@dataclass(frozen=True, slots=True)
class Sampled:
    """Some numbers of a weight, their gradients, and how many numbers the weight has."""

    weight: torch.Tensor
    gradient: torch.Tensor
    size: int


def sample(weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> Iterator[Sampled]:
    """Some of each weight that has a gradient; of this process's part where they are spread."""
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is not None and (size := local(weight).numel()):
            yield Sampled(sampled(weight).clone(), sampled(gradient).clone(), size)


@dataclass(frozen=True, slots=True)
class Lost:
    """`share` of the weights with a gradient that an update leaves bit for bit as they were (None: there is no update), what is
    too much, and the `fix` for it, "" if it is not."""

    share: float | None
    most: float = MOST_LOST
    fix: str = ""


def lost_in_first_update(some: Sequence[Sampled], norm: float, optim: Optim, *, deepspeed: bool) -> Lost:
    """What of the first update is lost, by gradients whose norm is `norm`; with `deepspeed` it is of float32 copies of the weights."""
    rounds = any(one.weight.dtype == torch.bfloat16 for one in some) and not deepspeed
    make = _maker(optim, in_float32=rounds and optim.steps_in_float32)
    clipped = min(1.0, optim.max_grad_norm / (norm + 1e-6)) if optim.max_grad_norm else 1.0
    total = torch.zeros(2, dtype=torch.float64)
    for one in some:
        weight = torch.nn.Parameter(one.weight.float() if deepspeed else one.weight.clone())
        weight.grad = (one.gradient * clipped).to(weight.dtype)
        lost, optimizer = LostUpdates(), make([weight])
        lost.watch(optimizer)
        lost.open_step(1)
        optimizer.step()
        counts = lost.take(total.device)
        total += torch.zeros(2) if counts is None else counts * (one.size / len(weight))
    if not total[1]:
        return Lost(None)
    share = (total[0] / total[1]).item()
    return Lost(share, fix=advice(rounds_plainly=rounds and not optim.steps_in_float32) if share > MOST_LOST else "")


def _maker(optim: Optim, *, in_float32: bool) -> Callable[[Any], torch.optim.Optimizer]:
    """The run's optimizer, to be made of parameters."""
    arguments = TrainingArguments(
        output_dir="unused",
        optim=optim.name,
        learning_rate=optim.learning_rate,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    )
    kind, given = TransformersTrainer.get_optimizer_cls_and_kwargs(arguments)
    if in_float32:
        kind = stepping_in_float32(kind, masters=optim.keeps_masters, rounding=optim.bf16_rounding, seed=0)
    return lambda parameters: kind(parameters, **given)
