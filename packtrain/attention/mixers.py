"""Run mixers on each document of a row, other modules on the whole row.

Linear attention, convolutions and state spaces carry a state from token to token, and would carry it into the next document. Such a module, a
mixer, gets the documents as a batch: its arguments are cut by document, and its outputs are joined to the row again. A document with a shared
prefix goes through a mixer in full, prefix included; shared tokens keep the outputs of the first document that has them.
proof/mixer_search.py measures which modules are mixers.

A causal mixer ignores tokens behind a document. So documents of similar lengths are padded to the longest and run together: fewer calls.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path, tree_unflatten
from transformers import Cache, PreTrainedModel

from packtrain.attention.backends import Undo, attention_by
from packtrain.attention.forwards import kept_for_recomputation, replace_forward, rotate_by_document, rotates_by_length
from packtrain.attention.varlen import Gathered
from packtrain.errors import CheckFailed
from packtrain.packing.collate import KERNEL_ARGUMENTS, to_device
from packtrain.packing.segments import Segments

PADDING = 0.1
"""Largest share of padding in a call of a mixer. Measured on a CPU: up to 5 % faster than 0.25, up to 11 % than none."""


@dataclass(frozen=True, slots=True)
class Axes:
    """Axes of one tensor. `along`: those that run along the row: none, one, or two (a mask). `batch`: an axis of size 1 for documents, or None.

    `from_start`: the tensor counts places, not tokens. Each document gets its beginning, as if it stood alone; masks always do.
    """

    along: tuple[int, ...]
    batch: int | None
    from_start: bool = False


_WHOLE = Axes((), None)


@dataclass(frozen=True, slots=True)
class Mixer:
    """Module that runs per document. `given` and `returned`: axes of its tensors, by their paths in arguments and outputs."""

    name: str
    given: Mapping[str, Axes]
    returned: Mapping[str, Axes]

    @property
    def is_batched(self) -> bool:
        """Return whether several documents can run in one call."""
        return all(axes.batch is not None for axes in (*self.given.values(), *self.returned.values()) if axes.along)


@dataclass(frozen=True, slots=True)
class Mixing:
    """How rows of a model run. `attention`: the backend that attends by segments, "" for the model's own attention.

    Its own attention gets a mask of ones. Without one, transformers finds borders in the positions, but not the borders of shared prefixes.
    `positions`: whether the model gets positions that restart in each document; else it counts them itself.
    """

    attention: str
    positions: bool
    mixers: tuple[Mixer, ...] = ()

    def words(self) -> str:
        """Return the mixers in words: `linear_attn of 36 layers`."""
        counts = Counter(re.sub(r"\.\d+$", "", mixer.name).rpartition(".")[2] for mixer in self.mixers)
        return ", ".join(f"{name} of {count} layers" if count > 1 else name for name, count in counts.items())


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Batches of a row's documents.

    `shapes`: documents and padded length of each batch. `order` int64 [Σ documents × length]: the token of the row in each slot; `positions`:
    the place of each slot in its document. `sources` int64 [T]: the slot with the output of each token of the row.
    """

    shapes: list[tuple[int, int]]
    order: torch.Tensor
    positions: torch.Tensor
    sources: torch.Tensor

    @property
    def sizes(self) -> list[int]:
        """Return the number of tokens of each batch, padding included."""
        return [count * length for count, length in self.shapes]


@lru_cache(maxsize=32)  # the same for every layer, also when gradient checkpointing runs it again
def group_documents(row: Segments, batched: bool, padding: float, device: torch.device) -> Groups:
    """Group the documents of `row` by length. `batched`: several in a batch. `padding`: the largest share of a batch that may be padding.

    Padding repeats the last token of its document.
    """
    documents = row.unrolled()
    tokens = np.split(documents.tokens, documents.segments.starts[1:])
    batches: list[list[int]] = []
    slots = real = 0
    for number in sorted(range(len(tokens)), key=lambda number: -len(tokens[number])):
        longest = len(tokens[batches[-1][0]]) if batches else 0
        slots, real = slots + longest, real + len(tokens[number])
        if not batches or not batched or slots - real > padding * slots:
            batches.append([])
            slots = real = len(tokens[number])
        batches[-1].append(number)
    order, places = list[np.ndarray](), np.empty(len(documents.tokens), np.int64)
    shapes, end = list[tuple[int, int]](), 0
    for batch in batches:
        length = len(tokens[batch[0]])
        shapes.append((len(batch), length))
        for number in batch:
            own, start = tokens[number], documents.segments.starts[number]
            order.append(np.pad(own, (0, length - len(own)), mode="edge"))
            places[start : start + len(own)] = np.arange(end, end + len(own))
            end += length
    with torch.inference_mode(False):  # an evaluation's cached tensors are used again in training
        return Groups(
            shapes,
            to_device(torch.from_numpy(np.concatenate(order)), device),
            to_device(torch.cat([torch.arange(length).repeat(count) for count, length in shapes]), device),
            to_device(torch.from_numpy(places[documents.outputs]), device),
        )


Running = Segments | Literal["no row", "documents apart"]
_running: ContextVar[Running] = ContextVar("row that the model is running", default="no row")


@contextmanager
def running(row: Running) -> Iterator[None]:
    """Run mixers on the documents of `row` inside the block."""
    token = _running.set(row)
    try:
        yield
    finally:
        _running.reset(token)


def install(model: PreTrainedModel, mixing: Mixing, *, padding: float = PADDING, when_packed: bool = False) -> Undo:
    """Run calls of `model` with `segments` as `mixing` says. Return the undo function.

    `padding` is the largest share of a batch. `when_packed`: leave all other calls alone.
    """
    undo, was_packed = ExitStack(), [False]
    if rotates_by_length(model):
        padding = 0.0  # rotations would follow the longest document of a batch
    if mixing.attention:
        attention = attention_by(mixing.attention)
        undo.callback((attention.install_when_packed if when_packed else attention.install)(model))
    else:
        undo.callback(rotate_by_document(model))
    for mixer in mixing.mixers:
        module = model.get_submodule(mixer.name)
        undo.callback(replace_forward(module, functools.partial(_mix, mixer, padding, was_packed, module.forward)))
    inner = model.forward

    @functools.wraps(type(model).forward)
    def forward(_: PreTrainedModel, *args: object, segments: Segments | None = None, **kwargs: object) -> object:
        was_packed[0] = segments is not None
        if segments is None:
            with running("documents apart"), kept_for_recomputation(model, lambda: running("documents apart")):
                return inner(*args, **kwargs)
        # a mixer gets documents already: kernels must not cut them again at the borders of the row
        unused = KERNEL_ARGUMENTS if mixing.positions else (*KERNEL_ARGUMENTS, "position_ids")
        call = {name: value for name, value in kwargs.items() if name not in unused}
        if mixing.attention:
            call["segments"] = segments
        else:
            device = next(value.device for value in (*args, *call.values()) if isinstance(value, torch.Tensor))
            call["attention_mask"] = torch.ones(1, segments.tokens, dtype=torch.int64, device=device)
        with running(segments), kept_for_recomputation(model, functools.partial(running, segments)):
            return inner(*args, **call)

    undo.callback(replace_forward(model, forward))
    return undo.close


@torch.compiler.disable
def _mix(
    mixer: Mixer,
    padding: float,
    was_packed: list[bool],
    inner: Callable[..., object],
    _: nn.Module,
    *args: object,
    **kwargs: object,
) -> object:
    """Run `inner`, the forward of a mixer, on each batch of documents."""
    row = _running.get()
    if not isinstance(row, Segments):
        if row == "no row" and was_packed[0] and torch._C._current_graph_task_id() != -1:
            # the documents are kept for transformers' checkpoints alone (forwards.py::kept_for_recomputation)
            what = f"the backward pass runs {mixer.name} again without the documents of its row, for a checkpoint of the model's own"
            fix = "set trainer.gradient_checkpointing=none, or model.attention=per_document"
            raise CheckFailed(what, fix=fix, code="foreign-checkpoint")
        return inner(*args, **kwargs)
    given, structure = tree_flatten_with_path((args, kwargs))
    device = next(value.device for _, value in given if isinstance(value, torch.Tensor))
    groups = group_documents(row, mixer.is_batched, padding, device)
    cut = [_cut(value, _axes_of(mixer, keystr(path), value, row.tokens), groups) for path, value in given]
    outputs = []
    with running("documents apart"):  # mixers inside of this one get its documents already
        for call in zip(*cut, strict=True):
            positional, named = tree_unflatten(call, structure)
            outputs.append(inner(*positional, **named))
    return tree_map_with_path(
        lambda path, *pieces: _join(pieces, mixer.returned.get(keystr(path), _WHOLE), groups), *outputs
    )


def _axes_of(mixer: Mixer, path: str, value: object, tokens: int) -> Axes:
    """Return the axes of an argument in a row of `tokens`. Raises CheckFailed if it is not of the row's size."""
    if not isinstance(value, torch.Tensor):
        return _WHOLE
    axes = mixer.given.get(path) or _usual_axes(value, tokens)
    if axes is None or any(value.shape[axis] != tokens for axis in axes.along):
        what = f"{mixer.name} got an argument {path} of shape {tuple(value.shape)} for a row of {tokens} tokens"
        raise CheckFailed(what, fix="set model.attention=per_document", code="mixer-call-changed")
    return axes


def _usual_axes(value: torch.Tensor, tokens: int) -> Axes | None:
    """Guess the axes of an argument that the search did not see. None: unclear.

    Masks appear when rows are longer than a window, and some calls pass more on than others.
    """
    last = value.dim() - 1
    if last == 3 and value.shape[2:] == (tokens, tokens):
        return Axes((2, 3), 0)
    if value.shape[:2] == (1, tokens) and tokens not in value.shape[2:]:
        return Axes((1,), 0)
    if value.shape[-2:] == (1, tokens) and not value.is_floating_point():  # positions of M-RoPE, [3, 1, T]
        return Axes((last,), last - 1)
    return None if tokens in value.shape else _WHOLE


def _cut(value: Any, axes: Axes, groups: Groups) -> list[Any]:
    """Return the part of an argument for each batch. Values that do not run along the row stay whole.

    Caches and Segments become None: a cache would carry states to the next batch, and Segments describe the whole row.
    """
    if not axes.along:
        return [None if isinstance(value, Segments | Cache) else value] * len(groups.shapes)
    if len(axes.along) == 2:
        return [_start_of_mask(value, axes, *shape) for shape in groups.shapes]
    (axis,) = axes.along
    places = groups.positions if axes.from_start else groups.order
    pieces = Gathered.apply(value, axis, places).split(groups.sizes, dim=axis)  # type: ignore[union-attr]
    if axes.batch is None:
        return list(pieces)
    return [
        piece.unflatten(axis, shape).movedim(axis, axes.batch).squeeze(axes.batch + 1)
        for piece, shape in zip(pieces, groups.shapes, strict=True)
    ]


def _start_of_mask(mask: torch.Tensor, axes: Axes, count: int, length: int) -> torch.Tensor:
    """Return the top left of a mask, as documents alone have it.

    `mask` [.., T, .., T, ..]; the result is for `count` documents of `length` tokens.
    """
    for axis in axes.along:
        mask = mask.narrow(axis, 0, length)
    return mask.expand([count if axis == axes.batch else -1 for axis in range(mask.dim())])


def _join(pieces: Sequence[Any], axes: Axes, groups: Groups) -> Any:
    """Join the parts of an output. Values that do not run along the row, such as a last state, come from the first batch.

    Attention weights, which have two axes along the row, are None: no model computes with them.
    """
    if not axes.along or not isinstance(pieces[0], torch.Tensor):
        return pieces[0]
    if len(axes.along) == 2:
        return None
    (axis,) = axes.along
    if axes.batch is not None:
        pieces = [piece.unsqueeze(axes.batch + 1).movedim(axes.batch, axis).flatten(axis, axis + 1) for piece in pieces]
    return Gathered.apply(torch.cat([*pieces], dim=axis), axis, groups.sources)
