"""Run the modules that mix tokens once per document, and everything else once on the whole row.

Linear attention, convolutions and state spaces carry a state from token to token, and would carry it into the next document.
So such a module, a mixer, gets its documents as a batch: its arguments are cut by document, and its outputs are joined to the row again.
Embeddings, experts, norms and the head run on the row. A document with a shared prefix goes through a mixer whole, from the root; the
outputs of shared tokens are those in the first document. proof/mixer_search.py measures which modules are mixers.

A causal mixer ignores what stands behind a document, so documents of similar lengths are padded to the longest and run together: fewer calls.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten
from transformers import Cache, PreTrainedModel

from packtrain.attention.backends import Undo, attention_by
from packtrain.attention.forwards import kept_for_recomputation, replace_forward, rotate_by_document
from packtrain.attention.varlen import Gathered
from packtrain.errors import CheckFailed
from packtrain.packing.collate import KERNEL_ARGUMENTS, to_device
from packtrain.packing.segments import Segments

PADDING = 0.1
"""Largest share of padding in a call of a mixer. On a CPU 2 to 5 % faster than 0.25, for short documents 7 to 11 % than none."""


@dataclass(frozen=True, slots=True)
class Axes:
    """Axes of a tensor that run `along` the row: none, one, or two (a mask). `batch` is the axis of size 1 for documents, None if it has none.

    `from_start`: the tensor tells of places in the row, not of tokens. Every document gets its beginning, as if it stood alone. Masks always do.
    """

    along: tuple[int, ...]
    batch: int | None
    from_start: bool = False


_WHOLE = Axes((), None)


@dataclass(frozen=True, slots=True)
class Mixer:
    """A module by its dotted `name`. `given` and `returned`: axes of all tensors, by their paths in arguments and outputs."""

    name: str
    given: Mapping[str, Axes]
    returned: Mapping[str, Axes]

    @property
    def is_batched(self) -> bool:
        """Return whether it takes documents of one length as a batch."""
        return all(axes.batch is not None for axes in (*self.given.values(), *self.returned.values()) if axes.along)


@dataclass(frozen=True, slots=True)
class Mixing:
    """How rows of a model run. `attention`: the backend that attends by segments, "" for the model's own attention.

    Its own attention gets a mask of ones: without one, transformers finds borders in the positions, but not those of shared prefixes.
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
    """Documents of a row as batches, given as numbers of tokens. Else, if not `batched`, one after the other.

    `shapes`: documents and length of each batch. `order` int64 [Σ documents × length]: the place in the row of each batched token, batch after
    batch; `counted`: its place in its document. `sources` int64 [T]: where among them each token of the row has its output.
    """

    batched: bool
    shapes: list[tuple[int, int]]
    order: torch.Tensor
    counted: torch.Tensor
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
            batched,
            shapes,
            to_device(torch.from_numpy(np.concatenate(order)), device),
            to_device(torch.cat([torch.arange(length).repeat(count) for count, length in shapes]), device),
            to_device(torch.from_numpy(places[documents.outputs]), device),
        )


_running: ContextVar[Segments | None] = ContextVar("row that the model is running", default=None)


@contextmanager
def running(row: Segments | None) -> Iterator[None]:
    """Run mixers on the documents of `row` inside the block. None: they take their arguments as they are."""
    token = _running.set(row)
    try:
        yield
    finally:
        _running.reset(token)


def install(model: PreTrainedModel, mixing: Mixing, *, padding: float = PADDING, when_packed: bool = False) -> Undo:
    """Make calls of `model` with `segments` run as `mixing` says. Return the undo function. `when_packed`: see Attention."""
    undo = ExitStack()
    if mixing.attention:
        attention = attention_by(mixing.attention)
        undo.callback((attention.install_when_packed if when_packed else attention.install)(model))
    else:
        undo.callback(rotate_by_document(model))
    for mixer in mixing.mixers:
        module = model.get_submodule(mixer.name)
        undo.callback(replace_forward(module, functools.partial(_mix, mixer, padding, module.forward)))
    inner = model.forward

    @functools.wraps(type(model).forward)
    def forward(_: PreTrainedModel, *args: object, segments: Segments | None = None, **kwargs: object) -> object:
        if segments is None:
            return inner(*args, **kwargs)
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
    mixer: Mixer, padding: float, inner: Callable[..., object], _: nn.Module, *args: object, **kwargs: object
) -> object:
    """Run `inner`, the forward of a mixer, on each batch of documents of the running row."""
    if (row := _running.get()) is None:
        return inner(*args, **kwargs)
    given, structure = tree_flatten_with_path((args, kwargs))
    device = next(value.device for _, value in given if isinstance(value, torch.Tensor))
    groups = group_documents(row, mixer.is_batched, padding, device)
    cut = [_cut(value, _axes_of(mixer, keystr(path), value, row.tokens), groups) for path, value in given]
    outputs = []
    with running(None):  # mixers inside of this one get one document already
        for number in range(len(groups.shapes)):
            positional, named = tree_unflatten([pieces[number] for pieces in cut], structure)
            outputs.append(tree_flatten_with_path(inner(*positional, **named)))
    paths = [keystr(path) for path, _ in outputs[0][0]]
    by_path = zip(*([value for _, value in batch] for batch, _ in outputs), strict=True)
    joined = [
        _join(list(pieces), mixer.returned.get(path, _WHOLE), groups)
        for path, pieces in zip(paths, by_path, strict=True)
    ]
    return tree_unflatten(joined, outputs[0][1])


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
    """Return the axes of an argument that was not there when the mixer was found. None if they are not clear.

    Masks appear when rows are longer than a window, and some calls pass more on than others.
    """
    last = value.dim() - 1
    if last == 3 and value.shape[2:] == (tokens, tokens):
        return Axes((2, 3), 0)
    if value.shape[:2] == (1, tokens):
        return Axes((1,), 0)
    if value.shape[-2:] == (1, tokens) and not value.is_floating_point():  # positions of several kinds
        return Axes((last,), last - 1)
    return None if tokens in value.shape else _WHOLE


def _cut(value: Any, axes: Axes, groups: Groups) -> list[Any]:
    """Return the part of an argument for each batch. Values that do not run along the row stay whole.

    A cache is left out: it would carry states from one batch to the next.
    """
    if not axes.along:
        return [None if isinstance(value, Segments | Cache) else value] * len(groups.shapes)
    if len(axes.along) == 2:
        return [_start_of_mask(value, axes, *shape) for shape in groups.shapes]
    (axis,) = axes.along
    places = groups.counted if axes.from_start else groups.order
    pieces = Gathered.apply(value, axis, places).split(groups.sizes, dim=axis)  # type: ignore[union-attr]
    if axes.batch is None or not groups.batched:
        return list(pieces)
    return [
        piece.unflatten(axis, shape).movedim(axis, axes.batch).squeeze(axes.batch + 1)
        for piece, shape in zip(pieces, groups.shapes, strict=True)
    ]


def _start_of_mask(mask: torch.Tensor, axes: Axes, count: int, length: int) -> torch.Tensor:
    """Return the beginning of a mask [.., T, .., T, ..] for `count` documents of `length` tokens: what each would have alone."""
    for axis in axes.along:
        mask = mask.narrow(axis, 0, length)
    return mask if count == 1 else mask.expand([count if axis == axes.batch else -1 for axis in range(mask.dim())])


def _join(pieces: list[Any], axes: Axes, groups: Groups) -> Any:
    """Join the parts of an output to the row's. Of values that do not run along the row, such as a last state, the first stands.

    Attention weights, which have two axes along the row, are None: no model computes with them.
    """
    if not axes.along or not isinstance(pieces[0], torch.Tensor):
        return pieces[0]
    if len(axes.along) == 2:
        return None
    (axis,) = axes.along
    if axes.batch is not None and groups.batched:
        pieces = [piece.unsqueeze(axes.batch + 1).movedim(axes.batch, axis).flatten(axis, axis + 1) for piece in pieces]
    return Gathered.apply(torch.cat(pieces, dim=axis), axis, groups.sources)
