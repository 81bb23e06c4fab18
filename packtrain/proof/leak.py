"""Find a leak: the innermost module that mixes documents.

Its output depends on another document although its input does not. The proof's row runs twice, the second time with other tokens in its
outer documents. Every module's inputs and outputs for the middle document are compared by two sums each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from packtrain.attention.backends import attending_by
from packtrain.proof.comparison import evaluating, tolerance_of
from packtrain.proof.isolation import DOCUMENTS, LENGTHS, logits_in_row, random_ids, training_mode_without_dropout

_ROW = sum(LENGTHS)
_MIDDLE = slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
_LONGEST_FILTER = 16  # a convolution's output may exceed the row by its filter's length


class Leak(NamedTuple):
    """Module that mixes documents: `module` is its dotted name in the model, `kind` its class."""

    module: str
    kind: str


@torch.no_grad()
def find_leak(
    model: PreTrainedModel, backend: str | None, run: Callable[[np.ndarray], object] | None = None
) -> Leak | None:
    """Find the first module that mixes documents of a row under `backend`. Returns None if no module does.

    `backend` None keeps the model's attention. `run` is the caller's way to run the model on a row of the documents, int64 [T].
    """
    run = run or (lambda row: logits_in_row(model, row, DOCUMENTS))
    attention = nullcontext() if backend is None else attending_by(model, backend)
    rows = random_ids(model, DOCUMENTS)
    rows[1, _MIDDLE] = rows[0, _MIDDLE]
    # compiled layers (trainer.torch_compile) do not see hooks
    with evaluating(model) as computed_in, attention, torch.compiler.set_stance("force_eager"):
        training_mode_without_dropout(model)  # like the proof
        first, second = (_sums_by_module(model, run, row) for row in rows)
    tolerance = tolerance_of(computed_in()).outputs
    for name, (inputs, outputs) in first.items():  # in the order of returning calls: innermost first
        inputs_then, outputs_then = second.get(name, (inputs, outputs))
        if not _moved(inputs, inputs_then, tolerance) and _moved(outputs, outputs_then, tolerance):
            kind = type(model.get_submodule(name)).__name__
            return Leak(name or kind, kind)
    return None


def _sums_by_module(
    model: PreTrainedModel, run: Callable[[np.ndarray], object], row: np.ndarray
) -> dict[str, tuple[list[float], list[float]]]:
    """Return `_sums` of each module's inputs and outputs; the first call to return comes first."""
    sums: dict[str, tuple[list[float], list[float]]] = {}

    def note(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        sums[name] = (_sums([args, kwargs]), _sums(output))

    handles = [
        module.register_forward_hook(partial(note, name), with_kwargs=True) for name, module in model.named_modules()
    ]
    try:
        run(row)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def _sums(value: Any) -> list[float]:
    """Return Σ|x| and Σ x·sin(1, 2, …) over the middle document. Covers every floating-point tensor in `value` along the row."""
    if isinstance(value, dict | list | tuple):
        return [total for part in (value.values() if isinstance(value, dict) else value) for total in _sums(part)]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return []
    # dimensions of the row's size, or else of the next larger size that a convolution may give
    size = min((size for size in value.shape if _ROW <= size < _ROW + _LONGEST_FILTER), default=0)
    along = [dim for dim, length in enumerate(value.shape) if length == size]
    if not size:
        return []
    part = value.narrow(along[0], _MIDDLE.start, LENGTHS[1]).double()
    if len(along) > 1 and along[1] == value.dim() - 1:  # a mask or scores [.., T, T]
        part = part.narrow(along[1], _MIDDLE.start, LENGTHS[1])
    part = part.nan_to_num(0, 0, 0)
    weights = torch.arange(1, part.numel() + 1, device=part.device, dtype=part.dtype).reshape(part.shape).sin()
    return [part.abs().sum().item(), (part * weights).sum().item()]


def _moved(first: list[float], second: list[float], tolerance: float) -> bool:
    if len(first) != len(second):
        return True
    scale = max((abs(total) for total in first), default=0.0)
    return any(abs(a - b) > tolerance * scale for a, b in zip(first, second, strict=True))
