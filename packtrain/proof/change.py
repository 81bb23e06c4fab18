"""Proof that a change to the loaded model's computation trains as before.

(A change is for example a fused kernel, or another number format inside.) We compute the loss of some rows and its gradients before and
after the change. The second time the NEGATIVE loss adds its gradients to the first ones: `.grad` then holds the difference, and no second
copy of the gradients takes memory. Gradients are compared as one vector, and weight by weight: a norm's gradients are so small a part of
the vector that errors in them would not show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from packtrain.proof.comparison import Tolerance
from packtrain.wording import first_line

PER_WEIGHT = 5
"""Tolerance of one weight's gradient, as a multiple of the tolerance of all: over all weights rounding errors even out."""
SMALLEST = 1e-3
"""Smallest share of the total gradient norm: smaller gradients (a key's bias, mere rounding) are measured against this share."""
MakeChange = Callable[[], Callable[[], object]]
"""Makes a change and returns the function that undoes it; if it raises an exception, nothing is changed."""


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
