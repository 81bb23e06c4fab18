"""Common parts of all proofs: compare a candidate with a definition, within rounding.

The candidate is the computation of training. The definition is the model's own computation, one document or padded batch at a time. Both
run inside `evaluating`; `model_refusals` reports calls that the model refuses there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from packtrain.attention.backends import NEEDED
from packtrain.errors import CheckFailed, PacktrainError
from packtrain.wording import first_line

CONTROL_FACTOR = 5
"""A control leaks on purpose: it must differ by this many times the difference measured without a leak."""


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
    code: str = "outputs-differ",
    scale: torch.Tensor | None = None,
) -> float:
    """Return the `difference` of values [n]. Raises CheckFailed above `tolerance`, naming the value that is furthest off.

    `what` is a format string with the fields `number` (from 1), `candidate` and `definition`.
    """
    off = difference(candidate, definition, scale=scale)
    if not off <= tolerance:
        by_value = (candidate - definition).abs() / (1 if scale is None else scale)
        worst = int(by_value.nan_to_num(torch.inf).argmax())
        values = {"candidate": candidate[worst].item(), "definition": definition[worst].item()}
        raise CheckFailed(what.format(number=worst + 1, **values), fix=fix, code=code)
    return off


@contextmanager
def evaluating(model: PreTrainedModel, autocast: torch.dtype | None = None) -> Iterator[Callable[[], torch.dtype]]:
    """Set eval mode and `autocast` in the block, and restore the random state afterwards.

    Float32 products have full precision inside, even if training uses TF32: its 10 bits (of 23) would look like a leak. Yields a
    function that returns the number format of the last call: accelerate wraps the forward of a trainer's models in its own autocast.
    """
    formats, kind = [autocast or model.dtype], model.device.type

    def note(*_: Any) -> None:
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
