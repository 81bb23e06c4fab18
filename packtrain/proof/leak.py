"""Finds a leak: the innermost module whose output depends on another document although its input does not.

The row of the proof runs twice, the second time with other tokens in its first and last document. The inputs and outputs of
every module for the middle document are compared by two sums each, so that no large tensor is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from packtrain.attention.backends import attending_by
from packtrain.proof.isolation import (
    DOCUMENTS,
    LENGTHS,
    evaluating,
    logits_in_row,
    random_ids,
    tolerance_of,
    train_without_dropout,
)

_ROW = sum(LENGTHS)
_MIDDLE = slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
_LONGEST_FILTER = 16  # a convolution's output may be longer than the row by its filter
_STATES = ("mamba", "ssm", "rwkv", "recurrent", "rglru", "lstm", "delta", "linearattention", "lightning", "state")


@dataclass(frozen=True, slots=True)
class Leak:
    """`module` by its dotted name in the model, and the kind of mixing in words."""

    module: str
    kind: str

    def sentence(self) -> str:
        """`layers.0.mixer: causal convolution across the row`."""
        return f"{self.module}: {self.kind}"


@torch.no_grad()
def find_leak(
    model: PreTrainedModel, backend: str | None, run: Callable[[np.ndarray], object] | None = None
) -> Leak | None:
    """The first module that mixes documents of a row under `backend` (None: as the model is); None if none does.

    `run` has the model run a row of the documents, int64 [T], in a way of its own.
    """
    run = run or (lambda row: logits_in_row(model, row, DOCUMENTS))
    attention = nullcontext() if backend is None else attending_by(model, backend)
    rows = random_ids(model, DOCUMENTS)
    rows[1, _MIDDLE] = rows[0, _MIDDLE]
    # compiled layers (trainer.torch_compile) do not see hooks
    with evaluating(model), attention, torch.compiler.set_stance("force_eager"):
        train_without_dropout(model)  # as the proof does
        first, second = (_sums_by_module(model, run, row) for row in rows)
    tolerance = tolerance_of(model.dtype)
    for name, (taken, given) in first.items():  # in the order in which their calls returned: innermost first
        taken_then, given_then = second.get(name, (taken, given))
        if not _moved(taken, taken_then, tolerance) and _moved(given, given_then, tolerance):
            return Leak(name or type(model).__name__, _kind(model.get_submodule(name)))
    return None


def _sums_by_module(
    model: PreTrainedModel, run: Callable[[np.ndarray], object], row: np.ndarray
) -> dict[str, tuple[list[float], list[float]]]:
    """For each module, in the order in which their calls return: `_sums` of its inputs and of its outputs."""
    sums: dict[str, tuple[list[float], list[float]]] = {}
    taken: dict[str, list[float]] = {}
    handles = []
    for name, module in model.named_modules():

        def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            taken[name] = _sums([args, kwargs])

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            sums[name] = (taken[name], _sums(output))

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        run(row)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def _sums(value: Any) -> list[float]:
    """Σ|x| and Σ x·sin(1, 2, …) over the middle document, for every floating-point tensor in `value` along the row."""
    if isinstance(value, torch.Tensor):
        along = _along_the_row(value.shape)
        if not value.is_floating_point() or not along:
            return []
        part = value.narrow(along[0], _MIDDLE.start, LENGTHS[1]).double()
        if len(along) > 1 and along[1] == value.dim() - 1:  # a mask or scores [.., T, T]
            part = part.narrow(along[1], _MIDDLE.start, LENGTHS[1])
        part = part.nan_to_num(0, 0, 0)
        weights = torch.arange(1, part.numel() + 1, device=part.device, dtype=part.dtype).reshape(part.shape).sin()
        return [part.abs().sum().item(), (part * weights).sum().item()]
    if isinstance(value, dict):
        return [total for part in value.values() for total in _sums(part)]
    if isinstance(value, (list, tuple)):
        return [total for part in value for total in _sums(part)]
    return []


def _along_the_row(shape: torch.Size) -> list[int]:
    """The dimensions that run along the row: those of its size, else of the nearest that a convolution may give it."""
    sizes = [size for size in shape if _ROW <= size < _ROW + _LONGEST_FILTER]
    return [dim for dim, size in enumerate(shape) if sizes and size == min(sizes)]


def _moved(first: list[float], second: list[float], tolerance: float) -> bool:
    if len(first) != len(second):
        return True
    scale = max((abs(total) for total in first), default=0.0)
    return any(abs(a - b) > tolerance * scale for a, b in zip(first, second, strict=True))


def _kind(module: nn.Module) -> str:
    """How `module` mixes tokens, guessed from its type."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return "causal convolution across the row"
    name = type(module).__name__.lower()
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) or any(state in name for state in _STATES):
        return "a state carried along the row"
    if "attention" in name or "attn" in name:
        return "attention that does not keep the documents apart"
    return f"{type(module).__name__} mixes tokens of the row"
