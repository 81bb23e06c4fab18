"""Find the modules of a loaded model that must run once per document, by measuring. No name of a module or a model is known here.

A row of three documents runs twice, the second time with other tokens in the outer ones. The innermost module that moves the middle document
although its input did not move is a mixer, and so are all modules of its class. It is wrapped (attention/mixers.py), and the search goes on until
nothing moves. The row is also compared with the middle document alone: a module that differs there depends on the place in the row
(positions that it counts itself), and is wrapped, too. In the end the row must have the outputs of each document alone.

Attention is tried by segments first, by the functions of other backends; then the model's own, as a mixer like others. Positions are given
first; some models count them themselves, and from another number than 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel

from packtrain.attention.backends import Attention, AttentionFunction, Service, Undo, attention_by, serve
from packtrain.attention.mixers import Axes, Mixer, Mixing, install
from packtrain.attention.spec import tried_by_auto
from packtrain.errors import CheckFailed
from packtrain.packing.segments import Segments
from packtrain.proof.comparison import difference, evaluating, tolerance_of
from packtrain.proof.isolation import (
    DOCUMENTS,
    LENGTHS,
    logits_in_row,
    random_ids,
    rows_that_differ,
    run_each_alone,
    training_mode_without_dropout,
)
from packtrain.proof.module_calls import ModuleCall, RowTensor, record_calls, where_they_part

_FIX = "set model.attention=per_document"
_ROUNDS = 12
"""Most kinds of modules to wrap."""
_found: WeakKeyDictionary[PreTrainedModel, Mixing] = WeakKeyDictionary()


def mixing_of(
    model: PreTrainedModel, *, autocast: torch.dtype | None = None, dtype: torch.dtype | None = None
) -> Mixing:
    """Return how rows of `model` run, measured at the first call. `dtype` is the compute dtype. Raises CheckFailed if there is no way."""
    if model not in _found:
        _found[model] = _find(model, autocast, dtype or model.dtype)
    return _found[model]


@torch.no_grad()
def _find(model: PreTrainedModel, autocast: torch.dtype | None, dtype: torch.dtype) -> Mixing:
    functions = [
        backend.name
        for backend in tried_by_auto()
        if isinstance(attention_by(backend.name), AttentionFunction)
        and serve(backend, model, model.device, dtype).kernel is not None
    ]
    refusals = list[str]()
    # compiled layers (trainer.torch_compile) do not see hooks
    with evaluating(model, autocast), torch.compiler.set_stance("force_eager"):
        alone = torch.cat(run_each_alone(model, random_ids(model, DOCUMENTS)[0], DOCUMENTS))
        for attention in (*functions, ""):
            for positions in (True, False):
                try:
                    return _search(model, Mixing(attention, positions), alone)
                except CheckFailed as refusal:
                    refusals.append(refusal.problems[0].what)
    raise CheckFailed(refusals[-1], fix=_FIX, code="no-mixers-found")


def _search(model: PreTrainedModel, mixing: Mixing, alone: torch.Tensor) -> Mixing:
    """Wrap modules until nothing moves. Raises CheckFailed if that does not give the outputs of documents `alone`."""
    for _ in range(_ROUNDS):
        if not (better := _improve(model, mixing)):
            break
        mixing = better
    model.eval()
    _check(model, mixing, alone, 0.0)
    try:
        padded = replace(mixing, padded=True)
        _check(model, padded, alone, 1.0)  # all documents in one batch
        return padded
    except CheckFailed:
        return mixing


def _check(model: PreTrainedModel, mixing: Mixing, alone: torch.Tensor, padding: float) -> None:
    undo = install(model, mixing, padding=padding)
    try:
        row = torch.cat(logits_in_row(model, random_ids(model, DOCUMENTS)[0], DOCUMENTS))
    finally:
        undo()
    statistic = torch.mean if model.dtype.itemsize < 4 else torch.max
    if not difference(row, alone, statistic=statistic) <= tolerance_of(model.dtype).outputs:
        what = "outputs of documents in a row differ from each alone"
        raise CheckFailed(what, fix=_FIX, code="mixers-not-exact")


def _improve(model: PreTrainedModel, mixing: Mixing) -> Mixing | None:
    """Wrap the next modules, all of one class. None if nothing moves."""
    done = {mixer.name: mixer for mixer in mixing.mixers}
    tolerance, rows = tolerance_of(model.dtype).outputs, rows_that_differ(model)
    undo = install(model, mixing)

    def record(row: np.ndarray, segments: Segments = DOCUMENTS) -> dict[str, ModuleCall]:
        run = partial(logits_in_row, model, row, segments)
        return record_calls(model, run, segments.lengths, len(segments.lengths) // 2)

    try:
        training_mode_without_dropout(model)  # like the proof
        first, second = map(record, rows)
        more = _wrappable(model, where_they_part(first, second, tolerance), first, done)
        if not more:
            model.eval()  # attention functions may have dropout, whose draws depend on the shape
            middle = rows[0, LENGTHS[0] : LENGTHS[0] + LENGTHS[1]]
            first, alone = record(rows[0]), record(middle, Segments((len(middle),)))
            more = _wrappable(model, where_they_part(first, alone, tolerance, at_start=True), first, done)
            placed = _take_from_start(more or [*done.values()], first, alone, tolerance)
            more = [*{mixer.name: mixer for mixer in (*more, *placed)}.values()]
    finally:
        undo()
    inside = tuple(f"{mixer.name}." for mixer in more)
    kept = {name: mixer for name, mixer in done.items() if not name.startswith(inside)}
    return replace(mixing, mixers=tuple({**kept, **{mixer.name: mixer for mixer in more}}.values())) if more else None


def _take_from_start(
    mixers: Sequence[Mixer], row: Mapping[str, ModuleCall], alone: Mapping[str, ModuleCall], tolerance: float
) -> list[Mixer]:
    """Return the mixers with arguments that tell of places in the row, now taken from its start.

    Raises CheckFailed if a mixer gets other arguments than for a document alone.
    """
    better = list[Mixer]()
    for mixer in mixers:
        given, other = row[mixer.name].given, alone[mixer.name].given
        off = given.paths_off(other, tolerance)
        if set(off) & set(given.paths_off(other, tolerance, at_start=True)):
            what = f"arguments of {mixer.name} depend on the place in the row"
            raise CheckFailed(what, fix=_FIX, code="arguments-by-place")
        if fresh := [path for path in off if not mixer.given[path].from_start]:
            axes = {path: replace(mixer.given[path], from_start=True) for path in fresh}
            better.append(replace(mixer, given={**mixer.given, **axes}))
    return better


def _wrappable(
    model: PreTrainedModel, suspects: Iterator[str], calls: Mapping[str, ModuleCall], done: Mapping[str, Mixer]
) -> list[Mixer]:
    """Return the first suspect that can be wrapped, or else the module around it, and all others of its class."""
    for name in suspects:
        while name and (name in done or name not in calls or not _mixer(model, name, calls[name])):
            name = name.rpartition(".")[0]
        if name:
            kind = type(model.get_submodule(name))
            others = [other for other in calls if other not in done and type(model.get_submodule(other)) is kind]
            return [mixer for other in others if (mixer := _mixer(model, other, calls[other]))]
    return []


def _mixer(model: PreTrainedModel, name: str, call: ModuleCall) -> Mixer | None:
    """Return the module as a mixer. None if it is a model, or does not take and give tensors along the row."""
    given, returned = call.given.tensors, call.returned.tensors
    row = [tensor for tensor in (*given.values(), *returned.values()) if tensor.along]
    is_row = all(tensor.shape[axis] == DOCUMENTS.tokens for tensor in row for axis in tensor.along)
    takes, gives = (any(len(tensor.along) == 1 for tensor in side.values()) for side in (given, returned))
    if not (is_row and takes and gives) or isinstance(model.get_submodule(name), PreTrainedModel):
        return None
    return Mixer(name, *({path: _axes(tensor) for path, tensor in side.items()} for side in (given, returned)))


def _axes(tensor: RowTensor) -> Axes:
    """Return the axes. The batch axis is the first one, or in positions of several kinds, [3, 1, T], the one before the row's."""
    first = tensor.along[0] if tensor.along else 0
    candidates = [0, first - 1] if tensor.is_integer else [0]
    batch = [axis for axis in candidates if 0 <= axis < first and tensor.shape[axis] == 1]
    return Axes(tensor.along, batch[0] if batch else None)


class Mixers(Attention):
    """The backend, which changes calls with `segments` only."""

    def serve(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> Service:
        """See Attention. The "kernel" names the modules."""
        try:
            mixing = mixing_of(model, dtype=dtype)
        except CheckFailed as refusal:
            return Service(None, refusal.problems[0].what)
        return Service(mixing.words(), f"{mixing.words()} run per document")

    def install(self, model: PreTrainedModel) -> Undo:
        """See Attention."""
        return install(model, mixing_of(model))

    def install_when_packed(self, model: PreTrainedModel) -> Undo:
        """See Attention."""
        return install(model, mixing_of(model), when_packed=True)


ATTENTION = Mixers()
