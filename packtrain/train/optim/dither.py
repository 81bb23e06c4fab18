"""Float32 masters that start off the middle of their rounding cells, so that a model that computes in bfloat16 sees every update.

A weight from a bfloat16 file is in the middle of its cell, the float32 numbers that round to it: the forward pass sees no update before
they add up to half the width of the cell, some 50 steps of AdamW at 1e-5 for a weight of 0.15. At a random place of its cell the
master is the same bfloat16 weight, and an update of a hundredth of a cell takes one weight in a hundred over a border: the model sees
each update in the mean, and rounded at the end it has what was learned. (In signal processing this is dither: Roberts 1962, doi 10.1109/
TIT.1962.1057702; Gray and Stockham 1993, doi 10.1109/18.256489.)

Places are uniform in the bits that are cut off. At powers of two, whose cell is half as wide on the side of zero, both sides then hold
as many, and updates to either side are seen as large as they are. A place is a function of the seed, the weight's name and the index in
it: the same on any number of processes and under any strategy.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.pytorch_utils import Conv1D

from packtrain.errors import CheckFailed, UserError
from packtrain.model.spread import layers_of
from packtrain.monitor.heartbeat import waiting

_AT_ONCE = 2**20
"""Numbers that are moved at a time, by a GPU four times as many: no second copy of a weight is made."""
_LAST = 0x7F7F8000  # the bits of a float32 from which on it rounds to infinity, or is no number


@torch.no_grad()
def dither_(masters: torch.Tensor, seed: int, name: str, first: int = 0) -> None:
    """Moves float32 `masters`, exact in bfloat16, to random places in their cells, in place.

    They are the numbers of the weight of that `name` from flat index `first` on, contiguous. Zeros stay. Raises CheckFailed if one does
    not round to what it was.
    """
    wrong = torch.zeros((), dtype=torch.bool, device=masters.device)
    for part, start in _parts(masters):
        before = part.bfloat16()
        _add_places(part, seed, name, first + start)
        wrong |= (part.bfloat16().view(torch.int16) != before.view(torch.int16)).any()
    if wrong:
        raise CheckFailed(f"dithered masters of {name} do not round to its weights", where="optim.dither")


@torch.no_grad()
def dithered(trained: torch.Tensor, seed: int, name: str, first: int = 0) -> torch.Tensor:
    """A copy of any float32 numbers that round to one of their two neighbours in bfloat16, the nearer one the likelier."""
    copy = trained.detach().clone(memory_format=torch.contiguous_format)
    for part, start in _parts(copy):
        _add_places(part, seed, name, first + start)
    return copy


@torch.no_grad()
def undithered(masters: torch.Tensor, seed: int, name: str, first: int = 0) -> torch.Tensor:
    """A copy of trained `masters` without what `dither_` added, of which the width is that of the cells that they are in now."""
    copy = masters.detach().clone(memory_format=torch.contiguous_format)
    for part, start in _parts(copy):
        moved = (middle := part.bfloat16().float()).clone()
        _add_places(moved, seed, name, first + start)
        part.sub_(moved.sub_(middle).nan_to_num_(0.0, 0.0, 0.0))
    return copy


@dataclass(frozen=True, slots=True)
class Dither:
    """The trained weights of a run, by name, that are computed in bfloat16 from float32 masters (`rounded`), and those whose masters start
    off the middle of their cells (`moved`), by `seed`: the same, unless the run has begun under another strategy."""

    rounded: Mapping[str, torch.Tensor] = field(default_factory=dict)
    moved: Mapping[str, torch.Tensor] = field(default_factory=dict)
    seed: int = 0

    def move_weights(self) -> None:
        """Moves weights that are float32 themselves, before an optimizer is made; of sharded ones this process's part."""
        for name, weight in self.moved.items():
            if weight.dtype == torch.float32:
                own, first = own_part(weight)
                dither_(own, self.seed, name, first)

    def move_master(self, name: str, master: torch.Tensor, first: int | None = None) -> None:
        """Moves a new master of a 16-bit weight: from flat index `first` on, or that of its part in a sharded weight."""
        if name in self.moved:
            own, start = own_part(master)
            dither_(own, self.seed, name, start if first is None else first)

    def in_format(self, name: str, whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The whole trained float32 weight of that `name` as it is saved in `dtype`: in float32 without its offset; rounded with it, which
        is the weight that was computed with. One that was not moved is rounded by chance, so that it keeps its updates in the mean."""
        if dtype == torch.float32:
            return undithered(whole, self.seed, name) if name in self.moved else whole
        moved = name in self.moved or not self.moved or dtype != torch.bfloat16
        return (whole if moved else dithered(whole, self.seed, name)).to(dtype)


def dither_weights(model: nn.Module, *, seed: int = 0) -> Dither:
    """For anyone's training loop under autocast to bfloat16: moves the float32 weights of `model`, on one process or each process of
    DDP, before its optimizer is made and its trainer sees it.

    Save a trained weight as `in_format(name, weight, dtype)` of what this returns has it. Raises UserError if it has no layers that are known.
    """
    if not layers_of(model):
        what = f"the layers of a {type(model).__name__} are not known"
        raise UserError(what, where="dither_weights", fix="Give the transformers model itself, not wrapped.")
    rounded = rounded_weights(model, torch.bfloat16, sharded=False)
    dither = Dither(rounded, exact_in_bfloat16(rounded), seed)
    dither.move_weights()
    return dither


def rounded_weights(model: nn.Module, autocast: torch.dtype | None, *, sharded: bool) -> dict[str, torch.Tensor]:
    """The trained weights that are computed in bfloat16 from float32 masters.

    16-bit weights have masters of their own. float32 weights are computed in bfloat16 where they are gathered in it (`autocast`,
    `sharded` by FSDP2), else in the linear modules of layers, which autocast casts in any case; embeddings, norms, experts in one tensor and
    the output head are left alone there. Adapters are float32, but begin as numbers in the format of their base.
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
    """Those of `weights` that are exact in bfloat16, as all from such a file are, but for float32 ones that are zero as a whole, as half of
    the adapters begin: zeros are not moved, and final/ would take off what was not added. Called by all processes that share weights."""
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
    """This process's numbers of a weight, in place, and the flat index of the first."""
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
    """Adds to the bits of float32 [n], which come at flat index `first`, odd random numbers below 2^15 either way, not beyond zero; zeros
    and what has no neighbour above stay."""
    bits = numbers.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF  # moved the same way in numbers that change their sign
    places = _random_bits(seed, name, first, len(numbers), numbers.device).to(torch.int32)
    # to ask a GPU would be to wait for it
    if numbers.device.type != "cpu" or not 0 < (range_ := torch.aminmax(magnitude)).min <= range_.max < _LAST:
        places.masked_fill_((magnitude == 0) | (magnitude >= _LAST), 0)
    magnitude.add_(places).clamp_(min=0)
    torch.copysign(magnitude.view(torch.float32), numbers, out=numbers)


def _random_bits(seed: int, name: str, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd int16 [count], those of the flat indices from `first` on: a 64-bit number each for four in a row, by the mixing function of
    SplitMix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195) in wrapping arithmetic."""
    begin = first // 4
    mixed = torch.arange(begin, (first + count + 3) // 4, device=device) + _int64(
        zlib.crc32(f"{seed} {name}".encode()) << 32
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= (mixed >> shift) & ((1 << 64 - shift) - 1)
        mixed *= _int64(factor)
    mixed ^= (mixed >> 31) & ((1 << 33) - 1)
    mixed |= 0x0001000100010001
    return mixed.view(torch.int16)[first - 4 * begin :][:count]


def _int64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
