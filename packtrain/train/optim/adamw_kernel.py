"""AdamW for bfloat16 weights as one Triton kernel.

It reads and writes each number of a weight and its states once. The result has the bits of float32_step.py with torch's fused AdamW on a CPU
with FMA, and the order of operations of torch's vector code: in both moments a product is fused into the sum, and nowhere else. Roots and
quotients are rounded as IEEE 754 says, numbers near zero are kept, and the compiler may fuse nothing more. So the bits of GPUs should be the
same; fused_adamw.py compares them on each one. One exception: torch's CPU code fuses differently in the last (size modulo 16) second moments
of a weight. torch's own fused AdamW for GPUs rounds in another order.
"""

from __future__ import annotations

import math
from typing import Any

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_FOURS = tl.constexpr(256)
"""Groups of four numbers that a program steps. One random number of SplitMix64 rounds four."""


def adamw_(tensors: list[Tensor], group: dict[str, Any], count: float, streams: list[int], first: int) -> None:
    """Make update number `count`, from 1, in place.

    `tensors`: weight, exp_avg, exp_avg_sq, master, gradient [n each], and the optimizer's step. Without masters, pass the bfloat16 weight as
    its master: `streams` (dither.py::stream_of) then round weight, exp_avg and exp_avg_sq, from flat index `first` of the whole weight on.
    """
    (beta1, beta2), rate, size, offset = group["betas"], group["lr"], len(tensors[0]), first % 4
    rates = (1 - rate * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, -(rate / (1 - beta1**count)))
    rates += (math.sqrt(1 - beta2**count), group["eps"], count)
    kernel: Any = _adamw
    grid = (max(1, triton.cdiv(size + offset, 4 * _FOURS.value)),)
    kernel[grid](*tensors, size, offset, rates, first // 4, *streams, enable_fp_fusion=False)


@triton.jit(do_not_specialize=["first_four", "stream", "mean_stream", "square_stream"])
def _adamw(
    weights,
    means,
    squares,
    masters,
    gradients,
    steps,
    size,
    offset,
    rates,
    first_four,
    stream,
    mean_stream,
    square_stream,
):
    kept, mean_rest, square_share, square_rest, negative_rate, correction, eps, count = rates
    fours, place = tl.program_id(0).to(tl.int64) * _FOURS + tl.arange(0, _FOURS)[:, None], tl.arange(0, 4)[None, :]
    at = fours * 4 + place - offset
    inside = (at >= 0) & (at < size)
    gradient, weight = _exact(tl.load(gradients + at, inside, 0)), _exact(tl.load(masters + at, inside, 0))
    mean, square = _exact(tl.load(means + at, inside, 0)), _exact(tl.load(squares + at, inside, 0))

    mean = tl.fma(mean_rest, gradient - mean, mean)
    square = tl.fma(square_rest * gradient, gradient, square * square_share)
    below = tl.div_rn(tl.sqrt_rn(square), correction) + eps
    weight = weight * kept + tl.div_rn(negative_rate * mean, below)

    if masters.dtype.element_ty == tl.float32:
        tl.store(masters + at, weight, inside)
    else:
        fours += first_four
        weight = _moved(weight, stream, fours, place)
        mean = _bfloat16(_moved(mean, mean_stream, fours, place))
        square = _bfloat16(_moved(square, square_stream, fours, place))
    tl.store(weights + at, _bfloat16(weight), inside)
    tl.store(means + at, mean, inside)
    tl.store(squares + at, square, inside)
    tl.store(steps, count)


@triton.jit
def _moved(number, stream, fours, place):
    """Move float32 numbers to random places, as dither.py::_add_places does with the bits of dither.py::_random_bits."""
    mixed = (fours + (stream.to(tl.int64) << 32)).to(tl.uint64)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed = mixed ^ (mixed >> 31)
    random = ((mixed >> (16 * place).to(tl.uint64)) | 1).to(tl.int16).to(tl.int32)
    bits = number.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    moved = tl.maximum(magnitude + random, 0)
    moved = tl.where((magnitude == 0) | (magnitude >= 0x7F7F8000), magnitude, moved)
    return (moved | (bits ^ magnitude)).to(tl.float32, bitcast=True)


@triton.jit
def _exact(number):
    """Return bfloat16 or float32 numbers in float32. Triton's interpreter casts the smallest bfloat16 numbers wrongly."""
    if number.dtype == tl.bfloat16:
        number = (number.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return number


@triton.jit
def _bfloat16(number):
    """Round float32 numbers to the nearest bfloat16 number, ties to even. Triton's interpreter cuts them off."""
    bits = number.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(number != number, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
