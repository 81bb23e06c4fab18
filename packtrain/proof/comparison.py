"""The engine of all proofs: compare a candidate with its definition, up to rounding.

The candidate is the computation of training. The definition is the model's own computation: one document or padded batch at a time, or the
model before a change. proof/isolation.py changes one document: the others must not move. A control that leaks on purpose must move
them: else the proof sees nothing. Both run inside `evaluating`; `model_refusals` reports calls that the model refuses there. Outputs are compared by
`difference`, losses and gradients of a change (a fused kernel, another number format) by `prove_change`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from packtrain.attention.backends import NEEDED
from packtrain.errors import CheckFailed, PacktrainError
from packtrain.wording import first_line

CONTROL_FACTOR = 5
"""A control leaks on purpose: it must differ by this many times what rounding may cause."""


PER_WEIGHT = 5
"""Tolerance of one weight's gradient, as a multiple of the tolerance of all: over all weights rounding errors even out."""
SMALLEST = 1e-3
"""Smallest share of the total gradient norm: smaller gradients (a key's bias, mere rounding) are measured against this share."""
MakeChange = Callable[[], Callable[[], object]]
"""Makes a change and returns the function that undoes it; if it raises an exception, nothing is changed."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Relative differences through a whole model that rounding alone may cause. `outputs`: single outputs. `loss`: a loss or an answer's
    log-probability (errors of many tokens cancel). `gradients`: all gradients as one vector."""

    outputs: float
    loss: float
    gradients: float


def tolerance_of(dtype: torch.dtype, *, routed: bool = False) -> Tolerance:
    """Return the tolerance of a model that computes in `dtype`. `routed`: a router chooses its experts.

    Each operation is off by up to half a unit in the last place (2^-24 in float32, 2^-11 in float16, 2^-8 in bfloat16), and a deep
    stack adds up some units of its largest output; a leak moves outputs by the order of 1. The largest differences of loss and
    gradients measured over tiny models of nine families and SmolLM2-135M (30 layers) are 1e-7 and 4e-6 in float32, 6e-6 and 1.3e-3 in
    float16, 9e-5 and 1.5e-2 in bfloat16. In 16 bits a router may choose another expert where two are nearly even; gradients then
    differ by up to 0.25 without any leak.
    """
    coarse = Tolerance(5e-2, 5e-3, 5e-2)
    known = {
        torch.float64: Tolerance(1e-8, 1e-9, 1e-8),
        torch.float32: Tolerance(2e-4, 1e-5, 1e-4),
        torch.float16: Tolerance(1e-2, 1e-3, 1e-2),
    }
    tolerance = known.get(dtype, coarse)
    return Tolerance(tolerance.outputs, 2e-2, 0.3) if routed and dtype.itemsize < 4 else tolerance


def difference(
    candidate: torch.Tensor,
    definition: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    statistic: Callable[[torch.Tensor], torch.Tensor] = torch.max,
) -> float:
    """Return the `statistic` over tokens [T, …] of the largest |candidate - definition| / `scale`. NaN counts as infinite.

    `scale` is a scalar, or one value for each token; the largest |definition| if None.
    """
    by_token = (candidate - definition).abs().reshape(len(definition), -1).amax(dim=-1)
    by_token = by_token / (definition.abs().max().clamp(min=1e-8) if scale is None else scale)
    return statistic(by_token).nan_to_num(torch.inf).item()


def has_routers(model: PreTrainedModel) -> bool:
    """Return whether the model's config has experts to choose from."""
    settings = model.config.get_text_config().to_dict()
    return any("expert" in name and type(value) is int and value > 1 for name, value in settings.items())


def check_equal(
    candidate: torch.Tensor,
    definition: torch.Tensor,
    tolerance: float,
    what: str,
    *,
    fix: str,
    code: str,
    scale: torch.Tensor | None = None,
) -> float:
    """Return the `difference` of values [n]. Raises CheckFailed above `tolerance`, naming the value that is furthest off.

    `what` is a format string with the fields `number` (from 1), `candidate` and `definition`.
    """
    off = difference(candidate, definition, scale=scale)
    if not off <= tolerance:
        by_value = (candidate - definition).abs() / (1 if scale is None else scale)
        worst = int(by_value.nan_to_num(torch.inf).argmax())
        ours, theirs = candidate[worst].item(), definition[worst].item()
        raise CheckFailed(what.format(number=worst + 1, candidate=ours, definition=theirs), fix=fix, code=code)
    return off


@contextmanager
def evaluating(model: PreTrainedModel, autocast: torch.dtype | None = None) -> Iterator[Callable[[], torch.dtype]]:
    """Set eval mode and `autocast` in the block, and restore the random state afterwards.

    Float32 products have full precision inside, even if training uses TF32: its 10 bits (of 23) would look like a leak. Yields a
    function that returns the number format of the last call: accelerate wraps the forward of a trainer's models in its own autocast.
    """
    formats, kind = [autocast or model.dtype], model.device.type

    def note(*_: object) -> None:
        if torch.is_autocast_enabled(kind):
            formats.append(torch.get_autocast_dtype(kind))

    training, tf32 = model.training, (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    model.eval()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices),
            torch.autocast(kind, autocast, enabled=autocast is not None),
            cast(torch.nn.Module, model.get_input_embeddings()).register_forward_pre_hook(note),
        ):
            yield lambda: formats[-1]
    finally:
        model.train(training)
        torch.set_float32_matmul_precision(tf32[0])
        torch.backends.cudnn.allow_tf32 = tf32[1]


@contextmanager
def model_refusals(what: str, *, fix: str) -> Iterator[None]:
    """Turn exceptions of the model's own code into CheckFailed: `what`, and the exception's first line.

    Models refuse unsupported calls with exceptions of every type. Running out of memory is not a refusal.
    """
    try:
        yield
    except (PacktrainError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if NEEDED in str(error):  # refused by trainer.deterministic, not by the model
            raise
        raise CheckFailed(f"{what}: {first_line(error)}", fix=fix, code="model-refuses-call") from error


@dataclass(frozen=True, slots=True)
class ChangeProof:
    """Relative errors of `loss` and `gradients` after the change, and of the `worst` weight's gradient. `refusal`: the reason for undoing the
    change, "" if it stays."""

    refusal: str = ""
    loss: float = math.inf
    gradients: float = math.inf
    worst: str = ""
    worst_gradient: float = math.inf

    def figures(self) -> str:
        """Return the figures in words."""
        return f"loss off by {self.loss:.1g}, gradients by {self.gradients:.1g}, of {self.worst} by {self.worst_gradient:.1g}"


def prove_change(
    change: MakeChange,
    loss: Callable[[], torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    tolerance: Tolerance,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> ChangeProof:
    """Make the change. Undo it on all ranks unless all find the `loss` and its gradients within `tolerance`.

    The second time the NEGATIVE loss adds its gradients to the first ones: `.grad` then holds the difference, and no second copy of the
    gradients takes memory. Gradients are compared as one vector, and weight by weight: a norm's gradients are so small a part of the vector that
    errors in them would not show.

    `loss` computes the same scalar each time, with its graph. `weights` are the trained ones by name; they keep no gradients.
    `sum_over_ranks` takes float64 [n] on their device. All ranks call this together. An exception is a refusal on all ranks. If `change`
    raises it, no rank computes with the change: under FSDP2 the other ranks would wait for this rank's weights.
    """
    device, failures = next(iter(weights.values())).device, list[str]()
    before = after = torch.zeros(1 + len(weights), dtype=torch.float64, device=device)

    def failed() -> torch.Tensor:
        return torch.tensor([float(bool(failures))], dtype=torch.float64, device=device)

    undo: Callable[[], object] | None = None
    try:
        with _noting(failures, "the loss cannot be computed even without it"):
            before = _backward(loss(), weights)
        with _noting(failures, ""):
            undo = change()
        if not sum_over_ranks(failed()).item():
            with _noting(failures, "the model cannot compute by it"):
                after = _backward(-loss(), weights)
    finally:
        for weight in weights.values():
            weight.grad = None
    total = sum_over_ranks(torch.cat([before, after, failed()])).tolist()
    proof = _compare(total[: len(before)], total[len(before) : -1], [*weights], tolerance)
    if total[-1]:
        proof = ChangeProof(failures[0] if failures else "another process cannot compute by it")
    if proof.refusal and undo is not None:
        undo()
    return proof


@contextmanager
def _noting(failures: list[str], what: str) -> Iterator[None]:
    """Add an exception of the block to `failures`. Kernels and compilers raise any type."""
    try:
        yield
    except Exception as error:
        failures.append(": ".join(filter(None, [what, first_line(error)])))


def _backward(loss: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Add gradients by a backward pass. Return float64 [1 + weights]: the loss, and each weight's Σ x² over this rank's `.grad`."""
    loss.backward()
    squares = [loss.detach().new_zeros((), dtype=torch.float64) for _ in weights]
    for number, weight in enumerate(weights.values()):
        if weight.grad is not None:
            own = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
            squares[number] = torch.linalg.vector_norm(own, dtype=torch.float32).double().square()
    return torch.stack([loss.detach().double(), *squares])


def _compare(before: list[float], after: list[float], names: list[str], tolerance: Tolerance) -> ChangeProof:
    """Compare two results of `_backward`. The second has the negative loss, and gradients added to the first ones."""
    whole = math.sqrt(sum(before[1:]))
    if not (0 < abs(before[0]) < math.inf and 0 < whole < math.inf):
        return ChangeProof("the first rows have no loss to compare, or one that is not finite")
    loss, gradients = abs(before[0] + after[0]) / abs(before[0]), math.sqrt(sum(after[1:])) / whole
    off = [
        math.sqrt(moved) / max(math.sqrt(own), SMALLEST * whole)
        for own, moved in zip(before[1:], after[1:], strict=True)
    ]
    worst = max(range(len(off)), key=lambda number: math.inf if math.isnan(off[number]) else off[number])
    single, refusal = PER_WEIGHT * tolerance.gradients, ""
    if not loss <= tolerance.loss:
        refusal = f"the loss of the first rows is off by {loss:.2g} (tolerance {tolerance.loss:.1g})"
    elif not (gradients <= tolerance.gradients and off[worst] <= single):
        which = f"{gradients:.2g}, those of {names[worst]} by {off[worst]:.2g}"
        refusal = f"its gradients are off by {which} (tolerances {tolerance.gradients:.1g} and {single:.1g})"
    return ChangeProof(refusal, loss, gradients, names[worst], off[worst])
