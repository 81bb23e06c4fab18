"""Float32 masters at random places of their rounding cells. A model that computes in bfloat16 then sees every update.

A cell holds the float32 numbers that round to one bfloat16 number. A weight from a bfloat16 file is in the middle of its cell: the forward
pass sees no update until updates add up to half a cell, some 50 steps of AdamW at 1e-5 for a weight of 0.15. At a random place of its cell the
master is the same bfloat16 weight, but an update of a hundredth of a cell takes one weight in a hundred over a border. The model then sees
each update in the mean, and the weight keeps what it learned when it is rounded at the end. (Signal processing calls this dither: Roberts
1962, doi 10.1109/TIT.1962.1057702; Gray and Stockham 1993, doi 10.1109/18.256489.)

Places are uniform in the bits that rounding cuts off. At powers of two the cell is half as wide on the side of zero; both sides then hold
equally many places, so that the model sees updates in both directions at their true size. A place is a function of the seed, the weight's name
and the index in the weight: it is the same on any number of processes and under any strategy.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer
from transformers.pytorch_utils import Conv1D

from packtrain.errors import CheckFailed, UserError
from packtrain.model.spread import layers_of
from packtrain.monitor.heartbeat import waiting

_AT_ONCE = 2**20
"""Numbers that a CPU moves at a time (a GPU: four times as many), to avoid a second copy of a weight."""
_LAST = 0x7F7F8000  # float32 bits from here on round to infinity, or are no number
FIRST, EVERY = 3, 100
"""Measure the first FIRST steps, then one step in EVERY."""
FEW = 0.5
"""Share of seen updates below which the run warns."""
_MIN_RATE = 0.1  # of the peak: lower rates, at the ends of a schedule, are meant to move nothing
_SAMPLE = 2**14  # numbers of a tensor


@torch.no_grad()
def dither_(masters: torch.Tensor, seed: int, name: str, first: int = 0) -> None:
    """Move float32 `masters` to random places of their cells, in place. They must be exact in bfloat16.

    `masters` are the contiguous numbers of weight `name` from flat index `first` on. Zeros stay. Raises CheckFailed if a master no longer
    rounds to its old value.
    """
    wrong = torch.zeros((), dtype=torch.bool, device=masters.device)
    for part, start in _parts(masters):
        before = part.bfloat16()
        _add_places(part, seed, name, first + start)
        wrong |= (part.bfloat16().view(torch.int16) != before.view(torch.int16)).any()
    if wrong:
        what = f"dithered masters of {name} do not round to its weights"
        raise CheckFailed(what, where="optim.bf16_rounding", code="dither-inexact")


@torch.no_grad()
def dithered(trained: torch.Tensor, seed: int, name: str, first: int = 0) -> torch.Tensor:
    """Return a copy that rounds at random to a bfloat16 neighbour of each number. The nearer neighbour is the likelier."""
    copy = trained.detach().clone(memory_format=torch.contiguous_format)
    for part, start in _parts(copy):
        _add_places(part, seed, name, first + start)
    return copy


@torch.no_grad()
def undithered(masters: torch.Tensor, seed: int, name: str, first: int = 0) -> torch.Tensor:
    """Return a copy of trained `masters` without their dither. The offset is scaled to the width of their present cells."""
    copy = masters.detach().clone(memory_format=torch.contiguous_format)
    for part, start in _parts(copy):
        moved = (middle := part.bfloat16().float()).clone()
        _add_places(moved, seed, name, first + start)
        part.sub_(moved.sub_(middle).nan_to_num_(0.0, 0.0, 0.0))
    return copy


@dataclass(frozen=True, slots=True)
class Dither:
    """Trained weights by name. `rounded`: computed in bfloat16 from float32 masters. `moved`: their masters start off the middle of their
    cells, by `seed`. Both hold the same weights, unless the run began under another strategy."""

    rounded: Mapping[str, torch.Tensor] = field(default_factory=dict)
    moved: Mapping[str, torch.Tensor] = field(default_factory=dict)
    seed: int = 0

    def move_weights(self) -> None:
        """Move the weights that are float32 themselves. Call it before an optimizer is made. Each process moves its own part of a sharded
        weight."""
        for name, weight in self.moved.items():
            if weight.dtype == torch.float32:
                own, first = own_part(weight)
                dither_(own, self.seed, name, first)

    def move_master(self, name: str, master: torch.Tensor, first: int | None = None) -> None:
        """Move a new master of a 16-bit weight. It begins at flat index `first`; None: at the start of this process's part of a sharded
        weight."""
        if name in self.moved:
            own, start = own_part(master)
            dither_(own, self.seed, name, start if first is None else first)

    def in_format(self, name: str, whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Convert a whole trained float32 weight to the saved format `dtype`. In float32: without its offset. Rounded: with its offset, which
        gives the weight that the model computed with. A weight without offset is rounded at random, to keep its updates in the mean."""
        if dtype == torch.float32:
            return undithered(whole, self.seed, name) if name in self.moved else whole
        moved = name in self.moved or not self.moved or dtype != torch.bfloat16
        return (whole if moved else dithered(whole, self.seed, name)).to(dtype)


def dither_weights(model: nn.Module, *, seed: int = 0) -> Dither:
    """Move the float32 weights of `model`, for any training loop under autocast to bfloat16. Call it on one process, or on each process of
    DDP, before an optimizer is made and a trainer sees the model.

    Save a trained weight as `in_format(name, weight, dtype)` of the returned Dither. Raises UserError if the layers of `model` are not known.
    """
    if not layers_of(model):
        what = f"the layers of a {type(model).__name__} are not known"
        fix = "Give the transformers model itself, not wrapped."
        raise UserError(what, where="dither_weights", fix=fix, code="unknown-layers")
    rounded = rounded_weights(model, torch.bfloat16, sharded=False)
    dither = Dither(rounded, exact_in_bfloat16(rounded), seed)
    dither.move_weights()
    return dither


def rounded_weights(model: nn.Module, autocast: torch.dtype | None, *, sharded: bool) -> dict[str, torch.Tensor]:
    """Return the trained weights that the model computes in bfloat16 from float32 masters.

    16-bit weights have separate masters. float32 weights count if FSDP2 gathers them in bfloat16 (`autocast` and `sharded`); otherwise only
    those in linear modules of layers count, which autocast always casts. It leaves embeddings, norms, experts in one tensor and the output
    head alone. Adapters are float32, but begin as numbers in the format of their base.
    """
    parts = (module for layer in layers_of(model) for module in layer.modules())
    inside = {id(module.weight) for module in parts if isinstance(module, (nn.Linear, Conv1D))}
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return {
        name: weight
        for name, weight in trained.items()
        if weight.dtype == torch.bfloat16
        or (weight.dtype == torch.float32 and autocast == torch.bfloat16 and (sharded or id(weight) in inside))
    }


def exact_in_bfloat16(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the `weights` that are exact in bfloat16. All weights from a bfloat16 file are. Leave out float32 weights of only zeros, as half
    of an adapter's are at first: zeros do not move, and final/ would subtract an offset that was never added. Collective."""
    if not weights:
        return {}
    device = next(iter(weights.values())).device
    found = [
        (not _is_exact(weight), weight.dtype == torch.bfloat16 or own_part(weight)[0].any().item())
        for weight in weights.values()
    ]
    counts = torch.tensor(found, dtype=torch.int32, device=device)
    if any(isinstance(weight, DTensor) or hasattr(weight, "ds_tensor") for weight in weights.values()):
        with waiting("the formats of all ranks"):
            torch.distributed.all_reduce(counts)
    moved = [filled and not inexact for inexact, filled in counts.tolist()]
    return dict(itertools.compress(weights.items(), moved))


def own_part(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this process's part of a weight, in place, and its first flat index."""
    if (part := getattr(weight, "ds_tensor", None)) is not None:  # of ZeRO-3, padded at the end
        first = torch.distributed.get_rank() * part.numel()
        return part.data.view(-1)[: max(0, weight.ds_numel - first)], first  # type: ignore[attr-defined]
    if isinstance(weight, DTensor):
        _, start = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
        return weight.to_local().detach().view(-1), start[0] * math.prod(weight.shape[1:])
    return weight.detach().view(-1), 0


def _is_exact(weight: torch.Tensor) -> bool:
    own, _ = own_part(weight)
    return weight.dtype == torch.bfloat16 or all(
        torch.equal(part.bfloat16().float(), part) for part in own.split(_AT_ONCE)
    )


def _parts(whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    flat = whole.view(-1)
    at_once = _AT_ONCE if whole.device.type == "cpu" else 4 * _AT_ONCE
    for start in range(0, len(flat), at_once):
        yield flat[start : start + at_once], start


def _add_places(numbers: torch.Tensor, seed: int, name: str, first: int) -> None:
    """Add odd random numbers between -2^15 and 2^15 to the bits of float32 [n]. `first` is their first flat index. No number crosses zero.
    Zeros and numbers without a neighbour above stay."""
    bits = numbers.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF  # so that numbers of either sign move the same way
    places = _random_bits(seed, name, first, len(numbers), numbers.device).to(torch.int32)
    # on a GPU always mask: reading the range would wait for the device
    if numbers.device.type != "cpu" or not 0 < (range_ := torch.aminmax(magnitude)).min <= range_.max < _LAST:
        places.masked_fill_((magnitude == 0) | (magnitude >= _LAST), 0)
    magnitude.add_(places).clamp_(min=0)
    torch.copysign(magnitude.view(torch.float32), numbers, out=numbers)


def stream_of(seed: int, name: str) -> int:
    """Return the signed 32-bit number of a stream of random numbers."""
    return (zlib.crc32(f"{seed} {name}".encode()) + 2**31) % 2**32 - 2**31


def _random_bits(seed: int, name: str, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return odd int16 [count] for the flat indices from `first` on. One 64-bit number serves four indices in a row; it comes from the mixing
    function of SplitMix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195) in wrapping arithmetic."""
    begin = first // 4
    mixed = torch.arange(begin, (first + count + 3) // 4, device=device) + (stream_of(seed, name) << 32)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= (mixed >> shift) & ((1 << 64 - shift) - 1)
        mixed *= _int64(factor)
    mixed ^= (mixed >> 31) & ((1 << 33) - 1)
    mixed |= 0x0001000100010001
    return mixed.view(torch.int16)[first - 4 * begin :][:count]


def _int64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


class SeenUpdates:
    """Measurement of `updates_seen`: the share of the masters' updates that a model in bfloat16 sees.

    It says how far the rounded weights follow their masters in a step: 0 if masters move within their cells, 1 in the mean if they begin off the
    middle. A seeded sample of each tensor is measured, on this process's part of the weights. Only the logged line waits for the device.
    `step`: the current one, from 1. `warned`: a warning was given, with its `advice`. `measured`: number of measured steps, also before a resume.
    """

    def __init__(self) -> None:
        self.warned, self.measured, self.advice = False, 0, ""
        self.step = self._opened = 0
        self._sums: torch.Tensor | None = None
        self._sampled: list[tuple[torch.Tensor, torch.Tensor | slice, torch.Tensor]] = []
        self._measuring = self._has_measured = self._untaken = False
        self._masters_of: Callable[[torch.Tensor], list[torch.Tensor]] = lambda stepped: []

    def watch(self, optimizer: Optimizer, masters_of: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        """Measure the steps of torch's `optimizer`. `masters_of` maps a stepped tensor to its parts that are masters of weights computed in
        bfloat16."""
        self._masters_of = masters_of
        if hasattr(optimizer, "seen"):  # float32_step.py: its groups hold float32 tensors during a step
            setattr(optimizer, "seen", self)  # noqa: B010
            return
        optimizer.register_step_pre_hook(lambda stepping, *_: self.before(stepping.param_groups))
        optimizer.register_step_post_hook(lambda *_: self.after())

    def before(self, groups: list[dict[str, Any]], *, by_kernel: bool = False) -> None:
        """Keep a sample of the tensors before they are stepped. DeepSpeed steps some groups at a time.

        A kernel steps all of them; otherwise those with a gradient are stepped."""
        self._sampled = []
        if self.step != self._opened:
            self._opened, self.measured = self.step, self.measured + self._has_measured
            self._measuring, self._has_measured = self.measured < FIRST or self.step % EVERY == 0, False
        if not self._measuring:
            return
        for group in groups:
            rate = float(group["lr"])
            if rate == 0 or rate < _MIN_RATE * float(group.get("initial_lr", rate)):
                continue
            stepped = (one for one in group["params"] if by_kernel or one.grad is not None)
            for master in itertools.chain.from_iterable(map(self._masters_of, stepped)):
                self._has_measured = self._untaken = True
                if (here := _flat(master)).numel():
                    at = _sample(here)
                    self._sampled.append((master, at, here[at].clone()))

    def after(self) -> None:
        """Add up how far the sample was moved."""
        for master, at, before in self._sampled:
            after = (here := _flat(master))[at]
            sums = _seen_and_made(before, after, here.numel())
            self._sums = sums if self._sums is None else self._sums + sums
        self._sampled = []

    def pop(self, device: torch.device) -> torch.Tensor | None:
        """Return float64 [Σ seen × made, Σ made²] since the last call, on `device`. None, on all processes, if no step was measured."""
        if not self._untaken:
            return None
        sums, self._sums, self._untaken = self._sums, None, False
        return torch.zeros(2, dtype=torch.float64, device=device) if sums is None else sums.to(device)


@torch.no_grad()
def expected_share(dither: Dither, rate: float) -> float | None:
    """Return the expected `updates_seen` of a first step; None if no master is rounded. The step moves every weight by `rate`, one up and the
    next down. Only the first numbers of each tensor count. All processes call it together."""
    if not (dither.rounded and rate):
        return None
    sums = torch.zeros(2, dtype=torch.float64, device=next(iter(dither.rounded.values())).device)
    for name, weight in dither.rounded.items():
        own, first = own_part(weight)
        if count := len(own):
            before = own[:_SAMPLE].float().clone()
            if name in dither.moved:
                dither_(before, dither.seed, name, first)
            after = before.clone()
            after[::2] += rate
            after[1::2] -= rate
            sums += _seen_and_made(before, after, count)
    if torch.distributed.is_initialized():
        with waiting("the seen updates of all ranks"):
            torch.distributed.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def _seen_and_made(before: torch.Tensor, after: torch.Tensor, of: int) -> torch.Tensor:
    """Return float64 [Σ seen × made, Σ made²] of float32 samples, scaled to `of` numbers."""
    made, seen = after - before, after.bfloat16().float() - before.bfloat16().float()
    return torch.stack([(seen * made).sum(), made.square().sum()]).double() * (of / len(before))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor that may be spread."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor.detach()).reshape(-1)


def _sample(flat: torch.Tensor) -> torch.Tensor | slice:
    """Choose the indices of `flat` to measure, the same in every step."""
    if len(flat) <= _SAMPLE:
        return slice(None)
    generator = torch.Generator(flat.device).manual_seed(len(flat))
    return torch.randint(0, len(flat), (_SAMPLE,), device=flat.device, generator=generator)
