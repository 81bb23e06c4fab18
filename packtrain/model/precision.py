"""The number formats of a run's weights and computation: decided once, when the model is loaded."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from torch import nn
from transformers import PreTrainedModel

from packtrain.model.load import base_model


@dataclass(frozen=True, slots=True)
class Precision:
    """`weights` is the format of the loaded weights, `autocast` the one that mixed precision computes in (None: no mixed precision)."""

    weights: torch.dtype
    autocast: torch.dtype | None = None


def autocast_of(mixed_precision: str) -> torch.dtype | None:
    """The format of `trainer.mixed_precision` (no | bf16)."""
    return torch.bfloat16 if mixed_precision == "bf16" else None


def precision_of(model: nn.Module, mixed_precision: str) -> Precision:
    """The formats of the loaded `model`, adapters included."""
    return Precision(base_model(model).dtype, autocast_of(mixed_precision))


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Has every forward pass of `model` run under autocast, with float32 outputs, as accelerate does it for DDP."""
    base: Any = base_model(model)
    inner = base.forward

    @functools.wraps(inner)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device.type, dtype=dtype):
            return inner(*args, **kwargs)

    base.forward = types.MethodType(convert_outputs_to_fp32(forward), base)


@contextmanager
def weights_cast_once() -> Iterator[None]:
    """Inside the block autocast keeps its copies of trained weights from one forward pass to the next: one cast a step, not one
    for each micro-batch. Nothing may change the weights inside it, or run them for training after a pass without gradients."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
