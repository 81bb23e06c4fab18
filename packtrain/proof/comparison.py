"""The engine of all proofs: compare a candidate with its definition, up to rounding.

The candidate is the computation of training. The definition is the model's own computation: one document or padded batch at a time, or the
model before a change. proof/isolation.py changes one document: the others must not move. A control that leaks on purpose must move
them: else the proof sees nothing. Both run inside `evaluating`; `model_refusals` reports calls that the model refuses there. Outputs are compared by
`difference`, losses and gradients of a change (a fused kernel, another number format) by `prove_change`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from packtrain.attention.backends import NEEDED
from packtrain.errors import CheckFailed, PacktrainError
from packtrain.proof.replaced import CANNOT, capturing, judge, kinds_of, measure_own, states_of
from packtrain.proof.upcast import in_float32
from packtrain.wording import first_line

CONTROL_FACTOR = 5
"""A control leaks on purpose: it must differ by this many times what rounding may cause."""
PER_WEIGHT = 5
"""Tolerance of one weight's gradient, as a multiple of the tolerance of all: over all weights rounding errors even out."""
SMALLEST = 1e-3
"""Smallest share of the total gradient norm: smaller gradients (a key's bias, mere rounding) are measured against this share."""
SLACK = 1.6
"""A changed model may be this many times as far from float32 as the unchanged one, plus BESIDE_FLOAT32."""
BESIDE_FLOAT32 = 0.2
"""Share of the tolerance of gradients (1e-2 in bfloat16): float32 does not round, so less is needed than between two rounded results."""
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
    """Relative errors of `loss` and `gradients` after the change, and of the `worst` weight's gradient.

    `refusal`: the reason for undoing the change, "" if it stays. Beside float32, `own` are the errors of loss and gradients without the
    change, and `module` names the worst replaced module and its error.
    """

    refusal: str = ""
    loss: float = math.inf
    gradients: float = math.inf
    worst: str = ""
    worst_gradient: float = math.inf
    own: tuple[float, float] | None = None
    module: str = ""

    def figures(self) -> str:
        """Return the figures in words."""
        single = f", of {self.worst} by {self.worst_gradient:.1g}"
        if self.own is None:
            return f"loss off by {self.loss:.1g}, gradients by {self.gradients:.1g}{single}"
        loss, gradients = (f"{own:.2g} without it" for own in self.own)
        words = f"loss off by {self.loss:.2g} from float32 ({loss}), gradients by {self.gradients:.2g} ({gradients}){single}"
        return "; ".join(filter(None, [words, self.module]))


def prove_change(
    change: MakeChange,
    loss: Callable[[], torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    tolerance: Tolerance,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
    model: PreTrainedModel | None = None,
    dtype: torch.dtype = torch.float32,
) -> ChangeProof:
    """Make the change. Undo it on all ranks unless all find the `loss` and its gradients within `tolerance`.

    A `model` that computes in 16 bits (`dtype`) is compared with its own float32 results, before and after the change. Without `model`, or
    if its code cannot compute in float32 (quantised in 8 bits), the changed results are compared with the unchanged ones.

    To compare, the second pass uses the NEGATIVE loss: `.grad` then holds the difference, and no second copy of the gradients takes
    memory. Gradients are compared as one vector, and weight by weight: a norm's gradients are so small a part of the vector that
    errors in them would not show.

    `loss` computes the same scalar each time, with its graph. `weights` are the trained ones by name; they keep no gradients.
    `sum_over_ranks` takes float64 [n] on their device. All ranks call this together. An exception is a refusal on all ranks. If `change`
    raises it, no rank computes with the change: under FSDP2 the other ranks would wait for this rank's weights. `change` is called twice at
    most, and undone in between.
    """
    trial, proof = _Trial(change, loss, weights, sum_over_ranks), None
    try:
        if model is not None and dtype.itemsize < 4:
            proof = _beside_float32(trial, tolerance, model, dtype)
        proof = proof or _beside_own(trial, tolerance)
    except _Failed as failure:
        proof = ChangeProof(str(failure))
    finally:
        trial.clear_gradients()
    if proof.refusal:
        trial.made.close()
    return proof


_WITHOUT = "the loss cannot be computed even without it"


class _Failed(Exception):
    """A rank has failed. All ranks raise it together."""


@dataclass(slots=True)
class _Trial:
    """Arguments of `prove_change`, and failures of this rank. Closing `made` undoes the change, if it is made."""

    change: MakeChange
    loss: Callable[[], torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]
    failures: list[str] = field(default_factory=list)
    made: ExitStack = field(default_factory=ExitStack)

    @contextmanager
    def noting(self, what: str = "") -> Iterator[None]:
        """Add an exception of the block to the failures. Kernels and compilers raise any type."""
        try:
            yield
        except Exception as error:
            self.failures.append(": ".join(filter(None, [what, first_line(error)])))

    def make(self) -> None:
        with self.noting():
            self.made.callback(self.change())

    def clear_gradients(self) -> None:
        for weight in self.weights.values():
            weight.grad = None

    def zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.float64, device=next(iter(self.weights.values())).device)

    def sum(self, *results: torch.Tensor) -> list[list[float]]:
        """Return the sums of `results` of `backward` over all ranks. Raises _Failed if any rank has failures."""
        total = self.sum_over_ranks(torch.cat([*results, self.zeros(1) + bool(self.failures)])).tolist()
        if total.pop():
            raise _Failed(self.failures[0] if self.failures else "another process cannot compute by it")
        size = 1 + len(self.weights)
        return [total[start : start + size] for start in range(0, len(total), size)]

    def backward(self, sign: int, failing: str) -> torch.Tensor:
        """Add the gradients of `sign` times the loss. Return that loss and each weight's Σ x² over this rank's `.grad`, float64 [1 + weights].

        An exception is noted as `failing`; numbers that it left out are zeros.
        """
        results = self.zeros(1 + len(self.weights))
        with self.noting(failing):
            loss = sign * self.loss()
            loss.backward()
            results[0] = loss.detach()
            for number, weight in enumerate(self.weights.values(), 1):
                if weight.grad is not None:
                    own = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
                    results[number] = torch.linalg.vector_norm(own, dtype=torch.float32).double().square()
        return results


def _beside_own(trial: _Trial, tolerance: Tolerance) -> ChangeProof:
    """Compare the loss and its gradients with the unchanged model's."""
    before = trial.backward(1, _WITHOUT)
    trial.make()
    trial.sum()
    unchanged, moved = trial.sum(before, trial.backward(-1, CANNOT))
    if not _has_gradients(unchanged):
        return ChangeProof("the first rows have no loss to compare, or one that is not finite")
    errors = _Errors.of(unchanged, unchanged[0] + moved[0], moved)
    single = [PER_WEIGHT * tolerance.gradients] * len(trial.weights)
    return _judge_all(errors, _Errors(tolerance.loss, tolerance.gradients, single), [*trial.weights])


def _beside_float32(
    trial: _Trial, tolerance: Tolerance, model: PreTrainedModel, dtype: torch.dtype
) -> ChangeProof | None:
    """Compare distances from float32, before and after. None: the model cannot compute in float32, or lacks memory for it."""
    states = states_of(model)
    trial.make()
    trial.sum()
    kinds = kinds_of(model, states)
    trial.made.close()
    with capturing(kinds):
        results = trial.backward(1, _WITHOUT)
    exact = torch.zeros_like(results)
    with trial.noting(), in_float32(model, dtype):
        exact = trial.backward(-1, _WITHOUT)
    trial.backward(-1, _WITHOUT)  # leaves minus float32's gradients; beside what was kept it may lack memory
    own = apart = [math.inf]
    with suppress(_Failed):
        own, apart = trial.sum(results, exact)
    if not (_has_gradients(own) and math.isfinite(sum(apart))):
        trial.failures.clear()
        trial.clear_gradients()
        return None
    measure_own(model, kinds, dtype)
    trial.make()
    refusals, module = judge(kinds, dtype)
    trial.failures += refusals
    trial.sum()
    (after,) = trial.sum(trial.backward(1, CANNOT))
    without, single = _Errors.of(own, own[0] + apart[0], apart), PER_WEIGHT * tolerance.gradients
    allowed = _Errors(
        SLACK * without.loss + tolerance.loss,
        SLACK * without.gradients + BESIDE_FLOAT32 * tolerance.gradients,
        [SLACK * own + single for own in without.single],
    )
    proof = _judge_all(_Errors.of(own, after[0] + apart[0], after), allowed, [*trial.weights])
    return replace(proof, own=(without.loss, without.gradients), module=module)


@dataclass(frozen=True, slots=True)
class _Errors:
    """Errors relative to the loss, to all gradients as one vector, and to each weight's."""

    loss: float
    gradients: float
    single: list[float]

    @classmethod
    def of(cls, unchanged: list[float], loss: float, moved: list[float]) -> _Errors:
        """Divide errors by the `unchanged` results. `loss` is a difference of losses, `moved` has the squares of `backward`."""
        whole, pairs = math.sqrt(sum(unchanged[1:])), zip(unchanged[1:], moved[1:], strict=True)
        single = [math.sqrt(off) / max(math.sqrt(own), SMALLEST * whole) for own, off in pairs]
        return cls(abs(loss) / abs(unchanged[0]), math.sqrt(sum(moved[1:])) / whole, single)


def _has_gradients(results: list[float]) -> bool:
    return 0 < abs(results[0]) < math.inf and 0 < sum(results[1:]) < math.inf


def _judge_all(errors: _Errors, allowed: _Errors, names: list[str]) -> ChangeProof:
    shares = [off / most for off, most in zip(errors.single, allowed.single, strict=True)]
    worst = max(range(len(shares)), key=lambda number: math.inf if math.isnan(shares[number]) else shares[number])
    single, most, refusal = errors.single[worst], allowed.single[worst], ""
    if not errors.loss <= allowed.loss:
        refusal = f"the loss of the first rows is off by {errors.loss:.2g} (tolerance {allowed.loss:.1g})"
    elif not (errors.gradients <= allowed.gradients and single <= most):
        which = f"{errors.gradients:.2g}, those of {names[worst]} by {single:.2g}"
        refusal = f"its gradients are off by {which} (tolerances {allowed.gradients:.1g} and {most:.1g})"
    return ChangeProof(refusal, errors.loss, errors.gradients, names[worst], single)
