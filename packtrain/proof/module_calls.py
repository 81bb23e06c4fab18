"""Record the tensors of each module call for one document of a row.

Two runs are compared. Where a module's arguments agree and its outputs do not, that module makes the difference: it mixes documents if other
documents were changed, or depends on the place in the row if the document stood alone the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

_LONGEST_FILTER = 16  # a convolution's output may exceed the row by its filter's length
_LEAST_NORM = 1e-2  # of a token, relative to the largest one: smaller tokens are mere rounding


@dataclass(frozen=True, slots=True)
class SeenTensor:
    """Tensor of a call.

    `along` are the axes along the row, if it has any. `is_integer` includes booleans. `sums` float64 [tokens, 2], on the CPU: the norm and
    Σ x·sin(1, 2, …) for each token of the document. `sums_at_start`: the same for the first tokens of the row. Both are None for booleans
    (masks, which follow from places) and for tensors without an axis along the row. Outputs that exceed the row by a filter have sums, but no
    axes `along`.
    """

    shape: tuple[int, ...]
    along: tuple[int, ...]
    is_integer: bool
    sums: torch.Tensor | None
    sums_at_start: torch.Tensor | None


class ModuleCall(NamedTuple):
    """Tensors of a module's first call, by their paths in arguments and output."""

    given: Mapping[str, SeenTensor]
    returned: Mapping[str, SeenTensor]


def record_calls(
    model: nn.Module, run: Callable[[], object], lengths: Sequence[int], document: int
) -> dict[str, ModuleCall]:
    """Run the model on a row, and record the calls by module names.

    The row has documents of these `lengths`; only one `document` is recorded. The first call to return comes first: a module stands after the modules in it.
    """
    calls: dict[str, ModuleCall] = {}
    start = sum(lengths[:document])
    see = partial(_see, tokens=sum(lengths), place=slice(start, start + lengths[document]))

    def note(name: str, _: nn.Module, args: object, kwargs: object, output: object) -> None:
        if name not in calls:
            calls[name] = ModuleCall(see((args, kwargs)), see(output))

    handles = [
        module.register_forward_hook(partial(note, name), with_kwargs=True) for name, module in model.named_modules()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def where_they_part(
    first: Mapping[str, ModuleCall], second: Mapping[str, ModuleCall], tolerance: float, *, at_start: bool = False
) -> Iterator[str]:
    """Yield modules whose arguments agree in both runs but not their outputs, inner ones first.

    `at_start`: an argument that counts places also agrees if it equals the start of the first run's row.
    """
    for name, call in first.items():
        other = second.get(name, call)
        off = paths_off(call.given, other.given, tolerance)
        off &= paths_off(call.given, other.given, tolerance, at_start=at_start)
        if not off and paths_off(call.returned, other.returned, tolerance):
            yield name


def paths_off(
    first: Mapping[str, SeenTensor], second: Mapping[str, SeenTensor], tolerance: float, *, at_start: bool = False
) -> set[str]:
    """Return the paths whose sums differ, relative to the norm of a token.

    `at_start`: take the first run's sums from the start of its row.
    """
    own = {path: tensor.sums_at_start if at_start else tensor.sums for path, tensor in first.items()}
    others = {path: tensor.sums for path, tensor in second.items()}
    return {path for path in own | others if _differ(own.get(path), others.get(path), tolerance)}


def _differ(one: torch.Tensor | None, other: torch.Tensor | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is not other
    norms = one[:, 0] + _LEAST_NORM * one[:, 0].max()
    return not bool(((one - other).abs() <= tolerance * norms[:, None]).all())


def _see(value: object, tokens: int, place: slice) -> dict[str, SeenTensor]:
    seen: dict[str, SeenTensor] = {}
    for path, leaf in tree_flatten_with_path(value)[0]:
        if isinstance(leaf, torch.Tensor):
            size = min((size for size in leaf.shape if tokens <= size < tokens + _LONGEST_FILTER), default=-1)
            axes = tuple(axis for axis, own in enumerate(leaf.shape) if own == size)
            places = [place, slice(0, place.stop - place.start)] if axes and leaf.dtype != torch.bool else []
            sums, at_start = [_sums(leaf, axes, own) for own in places] or (None, None)
            along = axes if size == tokens else ()
            seen[keystr(path)] = SeenTensor(tuple(leaf.shape), along, not leaf.is_floating_point(), sums, at_start)
    return seen


def _sums(value: torch.Tensor, along: tuple[int, ...], place: slice) -> torch.Tensor:
    part = value.movedim(along[0], 0)[place]
    if len(along) > 1 and along[1] == value.dim() - 1:  # a mask or scores [.., T, T]
        part = part[..., place]
    part = part.double().nan_to_num(0, 0, 0).reshape(len(part), -1)
    weights = torch.arange(1, part.shape[1] + 1, device=part.device, dtype=part.dtype).sin()
    return torch.stack([part.norm(dim=1), part @ weights], dim=1).cpu()
