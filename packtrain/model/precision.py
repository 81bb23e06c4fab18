"""The number formats of a run's weights and computation, chosen when the model is loaded."""

from __future__ import annotations

import functools
import os
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from accelerate.utils.operations import convert_outputs_to_fp32
from torch import nn
from transformers import PreTrainedModel

from packtrain.model.load import base_model
from packtrain.model.spread import Ranks
from packtrain.monitor.heartbeat import waiting
from packtrain.plan.known_model import choose_precision


@dataclass(frozen=True, slots=True)
class Precision:
    """The number formats of a model's loaded `weights` and of `autocast` (None: no mixed precision).
    `why` is the reason. `fp8`: products of layers are computed in 8 bits (changes/float8.py), over autocast."""

    weights: torch.dtype
    autocast: torch.dtype | None = None
    why: str = ""
    fp8: bool = False

    @property
    def mixed(self) -> str:
        """Return the value of trainer.mixed_precision: no | bf16 | fp8."""
        return "fp8" if self.fp8 else "bf16" if self.autocast else "no"


def decide_precision(model: nn.Module, asked: str, ranks: Ranks, recorded: str | None = None) -> Precision:
    """Choose the formats of the loaded `model`. `asked`: trainer.mixed_precision; `recorded`: the choice of the resumed run.

    A rank that cannot compute in bfloat16, or is not faster in it, decides for all.
    """
    weights, gpu = base_model(model).dtype, ranks.device.type == "cuda"
    formats = {"no": None, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
    goes_on = recorded in formats and asked in ("auto", "fast")
    asked = str(recorded) if goes_on else asked
    if goes_on:
        return Precision(weights, formats[asked], "as before the checkpoint", fp8=asked == "fp8")
    own = choose_precision(
        asked,
        weights=str(weights).removeprefix("torch."),
        adapters=base_model(model) is not model,
        gpu=gpu,
        has_bf16=gpu and torch.cuda.is_bf16_supported(including_emulation=False),
        speed=bf16_speed,
    )
    with waiting("the number formats of all ranks"):
        choices = gather_object([own]) if ranks.world_size > 1 else [own]
    value, why = min(choices, key=lambda choice: choice[0] != "no")
    return Precision(weights, formats[value], why, fp8=value == "fp8")


def bf16_speed(limit_s: float = 0.2) -> float:
    """Measure how much faster this CPU multiplies in bfloat16 than in float32. It is the best of several products, in `limit_s` seconds."""
    best: dict[torch.dtype, float] = {}
    begun = time.perf_counter()
    while not best or time.perf_counter() - begun < 0.7 * limit_s:
        for dtype in (torch.float32, torch.bfloat16):
            rows, matrix = torch.ones(256, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
            started = time.perf_counter()
            torch.mm(rows, matrix)
            best[dtype] = min(best.get(dtype, float("inf")), time.perf_counter() - started)
    return best[torch.float32] / best[torch.bfloat16]


def settle_kernels() -> None:
    """Set the kernels of this process: float32 in IEEE precision, sdpa without cuDNN.

    The environment may ask for TF32. cuDNN, which torch 2.11 prefers on H100, builds a plan for each new length of a document: 0.1 to 1 s.
    """
    if os.environ.get("NVIDIA_TF32_OVERRIDE", "0") != "0":  # torch cannot overrule it
        del os.environ["NVIDIA_TF32_OVERRIDE"]
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.enable_cudnn_sdp(False)


_COPIES: list[dict[torch.Tensor, torch.Tensor]] = []
"""Copies of weights by `cast_weight`, for each `weights_cast_once` that is open. Backward passes on GPUs read it in threads of their own."""


@contextmanager
def weights_cast_once() -> Iterator[None]:
    """Keep copies of trained weights in autocast's format in the block. Each is cast once a step, not once for each micro-batch.

    Inside it nothing may change the weights, or run linear layers for training after a pass without gradients.
    """
    torch.autocast_increment_nesting()
    _COPIES.append({})
    try:
        yield
    finally:
        _COPIES.pop()
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `weight` in `dtype`, for operators without autocast. Its copies serve a whole step, as autocast's do."""
    if not (_COPIES and torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf):
        return weight.to(dtype)
    if weight not in _COPIES[-1]:
        _COPIES[-1][weight] = weight.to(dtype)
    return _COPIES[-1][weight]


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Run every forward pass of `model` under autocast. Outputs are float32, as accelerate does for DDP."""
    base = base_model(model)
    inner = base.forward

    @functools.wraps(inner)
    def forward(self: PreTrainedModel, *args: object, **kwargs: object) -> object:
        with torch.autocast(self.device.type, dtype=dtype):
            return inner(*args, **kwargs)

    vars(base)["forward"] = types.MethodType(convert_outputs_to_fp32(forward), base)
