"""Find the modules of a loaded model that must run once per document, by measuring. No name of a module or a model is known here.

A row of three documents runs twice, the second time with other tokens in the outer ones. The innermost module that moves the middle document
although its arguments did not move is a mixer, and so are all modules of its class. It is wrapped (attention/mixers.py), and the search goes on
until nothing moves. Then the row is compared with the middle document alone: a module that differs depends on the place in the row (positions
that it counts itself), and is wrapped, too. In the end the row must have the outputs of each document alone.

Attention is tried by segments first, by the functions of other backends; then the model's own, as a mixer like others. Positions are given
first; some models count them themselves, and from another number than 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from packtrain.attention.backends import Attention, AttentionFunction, Service, Undo, attention_by, serve
from packtrain.attention.mixers import Axes, Mixer, Mixing, install
from packtrain.attention.spec import BACKENDS, tried_by_auto
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
from packtrain.proof.module_calls import ModuleCall, SeenTensor, paths_off, record_calls, where_they_part

_FIX = "set model.attention=per_document"
_ROUNDS = 12
"""Most classes of modules to wrap."""
_found: WeakKeyDictionary[PreTrainedModel, Mixing] = WeakKeyDictionary()


def mixing_of(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Mixing:
    """Return how rows of `model` run. Measured at the first call, where layers compute in `dtype`. Raises CheckFailed if there is no way."""
    if model not in _found:
        _found[model] = _find(model, dtype or model.dtype)
    return _found[model]


@torch.no_grad()
def _find(model: PreTrainedModel, dtype: torch.dtype) -> Mixing:
    refusal = ""
    for attention in [*_functions(model, dtype), ""]:
        formats = BACKENDS[attention].formats if attention else ()
        autocast = dtype if dtype != model.dtype and (formats or isinstance(model, FSDPModule)) else None
        for positions in (True, False):
            # compiled layers (trainer.torch_compile) do not see hooks
            with evaluating(model, autocast) as computed_in, torch.compiler.set_stance("force_eager"):
                try:
                    return _search(model, Mixing(attention, positions), computed_in)
                except CheckFailed as error:
                    refusal = error.problems[0].what
    raise CheckFailed(refusal, fix=_FIX, code="no-mixers-found")


def _functions(model: PreTrainedModel, dtype: torch.dtype) -> list[str]:
    """Return the backends that attend by segments on `model`, the best first."""
    functions = [backend for backend in tried_by_auto() if isinstance(attention_by(backend.name), AttentionFunction)]
    return [backend.name for backend in functions if serve(backend, model, model.device, dtype).kernel is not None]


def _search(model: PreTrainedModel, mixing: Mixing, computed_in: Callable[[], torch.dtype]) -> Mixing:
    """Wrap modules until nothing moves. Raises CheckFailed if that does not give the outputs of documents alone."""
    ids = random_ids(model, DOCUMENTS)[0]
    alone = torch.cat(run_each_alone(model, ids, DOCUMENTS))
    tolerance = tolerance_of(computed_in()).outputs
    for _ in range(_ROUNDS):
        undo = install(model, mixing)
        try:
            more = _modules_to_wrap(model, {mixer.name: mixer for mixer in mixing.mixers}, tolerance)
        finally:
            undo()
        if not more:
            break
        inside = tuple(f"{name}." for name in more)
        kept = {mixer.name: mixer for mixer in mixing.mixers if not mixer.name.startswith(inside)}
        mixing = replace(mixing, mixers=tuple({**kept, **more}.values()))
    model.eval()
    undo = install(model, mixing, padding=1.0)  # all documents of a mixer in one batch
    try:
        row = torch.cat(logits_in_row(model, ids, DOCUMENTS))
    finally:
        undo()
    if not difference(row, alone, statistic=torch.mean if tolerance > 1e-3 else torch.max) <= tolerance:
        what = "outputs of documents in a row differ from each alone"
        raise CheckFailed(what, fix=_FIX, code="mixers-not-exact")
    return mixing


def _modules_to_wrap(model: PreTrainedModel, done: Mapping[str, Mixer], tolerance: float) -> dict[str, Mixer]:
    """Return the next modules to wrap by name, all of one class. None if nothing moves.

    Those that are `done` come again if their arguments tell of places in the row, to be taken from its start.
    """

    def record(row: np.ndarray, segments: Segments = DOCUMENTS) -> dict[str, ModuleCall]:
        run = partial(logits_in_row, model, row, segments)
        return record_calls(model, run, segments.lengths, len(segments.lengths) // 2)

    training_mode_without_dropout(model)  # like the proof
    rows = rows_that_differ(model)
    first, second = map(record, rows)
    if more := _wrappable(model, where_they_part(first, second, tolerance), first, done):
        return more
    model.eval()  # attention functions may have dropout, whose draws depend on the shape
    middle = rows[0, LENGTHS[0] : LENGTHS[0] + LENGTHS[1]]
    first, alone = record(rows[0]), record(middle, Segments((len(middle),)))
    more = _wrappable(model, where_they_part(first, alone, tolerance, at_start=True), first, done)
    for name, mixer in (more or done).items():
        given, other = first[name].given, alone[name].given
        off = {path for path in paths_off(given, other, tolerance) if len(given[path].along) == 1}
        if off & paths_off(given, other, tolerance, at_start=True):
            what = f"arguments of {name} depend on the place in the row"
            raise CheckFailed(what, fix=_FIX, code="arguments-by-place")
        if off := {path for path in off if not mixer.given[path].from_start}:
            axes = {path: replace(mixer.given[path], from_start=True) for path in off}
            more[name] = replace(mixer, given={**mixer.given, **axes})
    return more


def _wrappable(
    model: PreTrainedModel, suspects: Iterable[str], calls: Mapping[str, ModuleCall], done: Mapping[str, Mixer]
) -> dict[str, Mixer]:
    """Return the first suspect that can be wrapped, or else the module around it, and all others of its class."""
    possible = {
        name: mixer for name, call in calls.items() if (mixer := _mixer(model, name, call)) and name not in done
    }
    for name in suspects:
        while name and name not in possible:
            name = name.rpartition(".")[0]
        if name:
            kind = type(model.get_submodule(name))
            return {other: mixer for other, mixer in possible.items() if type(model.get_submodule(other)) is kind}
    return {}


def _mixer(model: PreTrainedModel, name: str, call: ModuleCall) -> Mixer | None:
    """Return the module as a mixer. None if it is a model, or does not take and give tensors along the row."""
    takes, gives = (any(len(tensor.along) == 1 for tensor in side.values()) for side in call)
    if not (takes and gives) or isinstance(model.get_submodule(name), PreTrainedModel):
        return None
    return Mixer(name, *({path: _axes(tensor) for path, tensor in side.items()} for side in call))


def _axes(tensor: SeenTensor) -> Axes:
    """Return the axes. The batch axis is the first one, or in positions of several kinds, [3, 1, T], the one before the row's."""
    first = tensor.along[0] if tensor.along else 0
    candidates = [0, first - 1] if tensor.is_integer else [0]
    batch = [axis for axis in candidates if 0 <= axis < first and tensor.shape[axis] == 1]
    return Axes(tensor.along, batch[0] if batch else None)


def _gathers_inside(model: PreTrainedModel, name: str) -> bool:
    """Return whether weights in parts of the module are gathered when the part is called, and not the module or a layer around it."""
    module = model.get_submodule(name)
    parts = [part for part in module.modules() if part is not module]
    around = [model.get_submodule(outer) for outer in accumulate(name.split("."), "{}.{}".format)]
    is_leaf = any(getattr(one, "_z3_leaf", False) for one in around)  # of DeepSpeed
    by_zero3 = any(hasattr(weight, "ds_id") for part in parts for weight in part.parameters())
    return any(isinstance(part, FSDPModule) for part in parts) or (by_zero3 and not is_leaf)


class Mixers(Attention):
    """The backend, which changes calls with `segments` only."""

    def serve(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> Service:
        """See Attention. In place of a kernel it names the modules."""
        try:
            words = mixing_of(model, dtype).words()
        except CheckFailed as refusal:
            return Service(None, refusal.problems[0].what)
        return Service(
            words, "other backends do not keep documents apart in these modules", f"{words} run per document"
        )

    def inner(self, model: PreTrainedModel) -> str:
        """See Attention."""
        return mixing_of(model).attention

    def gathers_unevenly(self, model: PreTrainedModel) -> bool:
        """See Attention."""
        return any(_gathers_inside(model, mixer.name) for mixer in mixing_of(model).mixers)

    def run_alike(self, other: PreTrainedModel, model: PreTrainedModel) -> None:
        """See Attention."""
        inside = next((f"{name}." for name, part in model.named_modules() if part is other and name), "")
        mixing = mixing_of(model)
        mixers = [replace(mixer, name=mixer.name.removeprefix(inside)) for mixer in mixing.mixers]
        _found[other] = replace(mixing, mixers=tuple(mixers))

    def install(self, model: PreTrainedModel) -> Undo:
        """See Attention."""
        return install(model, mixing_of(model))

    def install_when_packed(self, model: PreTrainedModel) -> Undo:
        """See Attention."""
        return install(model, mixing_of(model), when_packed=True)


ATTENTION = Mixers()
