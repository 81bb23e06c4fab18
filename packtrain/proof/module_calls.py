"""What every module of a model gets and returns for one document of a row, token by token.

Two recordings are compared. Where a module's inputs agree and its outputs do not, that module itself makes the difference: it mixes documents
if other documents were changed, or depends on the place in the row if the document stood alone the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path

_LONGEST_FILTER = 16  # a convolution's output may exceed the row by its filter's length


@dataclass(frozen=True, slots=True)
class RowTensor:
    """A tensor of a call: its `shape`, the axes `along` the row if there are any, and whether it has integers."""

    shape: tuple[int, ...]
    along: tuple[int, ...]
    is_integer: bool


@dataclass(frozen=True, slots=True)
class Side:
    """Arguments or outputs of a call: all tensors by their paths, also those that do not run along the row.

    `sums` float64 [tokens, 2] on the CPU has for each token of the document Σ|x| and Σ x·sin(1, 2, …); `sums_at_start` for as many tokens at
    the start of the row. Masks of booleans have none.
    """

    tensors: Mapping[str, RowTensor]
    sums: Mapping[str, torch.Tensor]
    sums_at_start: Mapping[str, torch.Tensor]

    def paths_off(self, other: Side, tolerance: float, *, at_start: bool = False) -> list[str]:
        """Return the tensors whose sums differ, relative to the largest Σ|x| of a token. `at_start`: this side's at the start of the row."""
        own = self.sums_at_start if at_start else self.sums
        return [
            path
            for path in own.keys() & other.sums.keys()
            if not bool((own[path] - other.sums[path]).abs().max() <= tolerance * own[path][:, 0].max())
        ]


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """First call of a module in a run."""

    given: Side
    returned: Side


def record_calls(
    model: nn.Module, run: Callable[[], object], lengths: Sequence[int], document: int
) -> dict[str, ModuleCall]:
    """Run the model on a row of documents of these `lengths`, and record the calls for one `document` by the names of the modules.

    The first call to return comes first: a module stands after the modules in it.
    """
    calls: dict[str, ModuleCall] = {}
    start = sum(lengths[:document])
    place, tokens = slice(start, start + lengths[document]), sum(lengths)

    def note(name: str, _: nn.Module, args: object, kwargs: object, output: object) -> None:
        if name not in calls:
            calls[name] = ModuleCall(_side((args, kwargs), tokens, place), _side(output, tokens, place))

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
    """Yield the modules whose arguments agree in both recordings while their outputs differ, inner ones first.

    `at_start`: arguments agree as well if they do so at the start of the row.
    """
    for name, call in first.items():
        other = second.get(name, call)
        off = set(call.given.paths_off(other.given, tolerance))
        if at_start and off:
            off &= set(call.given.paths_off(other.given, tolerance, at_start=True))
        alike = not off and len(call.given.sums) == len(other.given.sums)
        lost = len(call.returned.sums) != len(other.returned.sums)
        if alike and (lost or call.returned.paths_off(other.returned, tolerance)):
            yield name


def _side(value: object, tokens: int, place: slice) -> Side:
    """Find the tensors with an axis of the row's size, or else of the next larger size that a convolution may give."""
    tensors: dict[str, RowTensor] = {}
    sums: dict[str, torch.Tensor] = {}
    at_start: dict[str, torch.Tensor] = {}
    for path, leaf in tree_flatten_with_path(value)[0]:
        if isinstance(leaf, torch.Tensor):
            sizes = [size for size in leaf.shape if tokens <= size < tokens + _LONGEST_FILTER]
            axes, name = (
                tuple(axis for axis, size in enumerate(leaf.shape) if sizes and size == min(sizes)),
                keystr(path),
            )
            tensors[name] = RowTensor(tuple(leaf.shape), axes, not leaf.is_floating_point())
            if axes and leaf.dtype != torch.bool:
                sums[name] = _sums(leaf, axes, place)
                at_start[name] = _sums(leaf, axes, slice(0, place.stop - place.start))
    return Side(tensors, sums, at_start)


def _sums(value: torch.Tensor, axes: tuple[int, ...], place: slice) -> torch.Tensor:
    part = value.movedim(axes[0], 0)[place]
    if len(axes) > 1 and axes[1] == value.dim() - 1:  # a mask or scores [.., T, T]
        part = part[..., place]
    part = part.double().nan_to_num(0, 0, 0).flatten(1) if value.dim() > 1 else part.double()[:, None]
    weights = torch.arange(1, part.shape[1] + 1, device=part.device, dtype=part.dtype).sin()
    return torch.stack([part.abs().sum(1), part @ weights], dim=1).cpu()
