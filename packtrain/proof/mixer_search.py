"""Find by measurement the modules of a loaded model that must run per document. No name of a module or a model is known here.

A row of three documents runs twice, the second time with other tokens in the outer documents. The innermost module that moves the middle
document although its arguments did not move is a mixer. All modules of its class are, too. They are wrapped (attention/mixers.py), and the search
goes on until nothing moves. Then the row is compared with the middle document alone. A module that differs depends on the place in the row
(it counts positions itself), and is wrapped, too. In the end the row must have the outputs of each document alone.

Backends that attend by segments are tried first. Then the model's own attention stays and is treated as any other module. Each is tried
with positions that restart in every document, then without: some models count positions themselves, not always from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
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
    MIDDLE,
    logits_in_row,
    random_ids,
    rows_that_differ,
    run_each_alone,
    training_mode_without_dropout,
)
from packtrain.proof.module_calls import ModuleCall, SeenTensor, paths_off, record_calls, where_they_part

_FIX = "set model.attention=per_document"
_ROUNDS = 12
"""Most rounds of the search. A round wraps one class of modules, or changes how arguments are cut."""
_found: WeakKeyDictionary[PreTrainedModel, Mixing] = WeakKeyDictionary()


def mixing_of(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Mixing:
    """Return how rows of `model` run. The first call measures it.

    `dtype` is the layers' compute dtype, by default the format of the weights. Raises CheckFailed if there is no way.
    """
    if model not in _found:
        _found[model] = _find(model, dtype or model.dtype)
    return _found[model]


@torch.no_grad()
def _find(model: PreTrainedModel, dtype: torch.dtype) -> Mixing:
    refusal = ""
    for attention in [*_functions(model, dtype), ""]:
        # as in prove_backend: 16 bits only if the kernel takes nothing else, or FSDP2 gathers in them
        formats = BACKENDS[attention].formats if attention else ()
        autocast = dtype if dtype != model.dtype and (formats or isinstance(model, FSDPModule)) else None
        for positions in (True, False):
            # hooks do not run in compiled layers (trainer.torch_compile)
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
    """Wrap modules until nothing moves. Raises CheckFailed if outputs then differ from each document alone."""
    ids = random_ids(model, DOCUMENTS)[0]
    alone = torch.cat(run_each_alone(model, ids, DOCUMENTS))
    dtype = computed_in()  # accelerate's autocast around a reference is seen in a call
    tolerance = tolerance_of(dtype).outputs
    for _ in range(_ROUNDS):
        with ExitStack() as undo:
            undo.callback(install(model, mixing))
            more = _modules_to_wrap(model, {mixer.name: mixer for mixer in mixing.mixers}, tolerance)
        if not more:
            break
        prefixes = tuple(f"{name}." for name in more)
        kept = {mixer.name: mixer for mixer in mixing.mixers if not mixer.name.startswith(prefixes)}
        mixing = replace(mixing, mixers=tuple({**kept, **more}.values()))
    model.eval()
    with ExitStack() as undo:
        undo.callback(install(model, mixing, padding=1.0))  # the hardest case: all documents padded into one batch
        row = torch.cat(logits_in_row(model, ids, DOCUMENTS))
    if not difference(row, alone, statistic=torch.mean if dtype.itemsize < 4 else torch.max) <= tolerance:
        what = "outputs of documents in a row differ from each alone"
        raise CheckFailed(what, fix=_FIX, code="mixers-not-exact")
    return mixing


def _modules_to_wrap(model: PreTrainedModel, done: Mapping[str, Mixer], tolerance: float) -> dict[str, Mixer]:
    """Return the next modules to wrap, by name. Empty if the search is over.

    New ones are of one class. A mixer in `done` comes again with `from_start` set for arguments that count places in the row.
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
    middle = rows[0, MIDDLE]
    first, alone = record(rows[0]), record(middle, Segments((len(middle),)))
    suspects = list[str]()
    for name in where_they_part(first, alone, tolerance, at_start=True):
        along = {path for path, tensor in first[name].given.items() if len(tensor.along) == 1}
        if along and along <= paths_off(first[name].given, alone[name].given, tolerance):
            suspects.append(name.rpartition(".")[0])  # it gets nothing but places: better the module that counts them
        suspects.append(name)
    more = _wrappable(model, suspects, first, done)
    for name, mixer in (more or done).items():
        given, other = first[name].given, alone[name].given
        off = {path for path in paths_off(given, other, tolerance) if path in given and len(given[path].along) == 1}
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
    """Return the first suspect that can be wrapped, with all others of its class.

    If it cannot, the module around it is taken.
    """
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
    if isinstance(model.get_submodule(name), PreTrainedModel):
        return None
    given, returned = ({path: _axes(tensor) for path, tensor in side.items()} for side in call)
    if not all(any(len(axes.along) == 1 for axes in side.values()) for side in (given, returned)):
        return None
    return Mixer(name, given, returned)


def _axes(tensor: SeenTensor) -> Axes:
    """Return the axes. The batch axis is the first one, or for positions of M-RoPE, [3, 1, T], the second."""
    first = tensor.along[0] if tensor.along else 0
    candidates = [0, first - 1] if tensor.is_integer else [0]
    batch = [axis for axis in candidates if 0 <= axis < first and tensor.shape[axis] == 1]
    return Axes(tensor.along, batch[0] if batch else None)


def _gathers_inside(model: PreTrainedModel, name: str) -> bool:
    """Return whether a part of the module gathers its weights at its own calls. Then the number of documents decides how often."""
    module = model.get_submodule(name)
    parts = [part for part in module.modules() if part is not module]
    around = [model.get_submodule(outer) for outer in accumulate(name.split("."), "{}.{}".format)]
    is_leaf = any(getattr(one, "_z3_leaf", False) for one in around)  # of DeepSpeed
    by_zero3 = any(hasattr(weight, "ds_id") for part in parts for weight in part.parameters())
    return any(isinstance(part, FSDPModule) for part in parts) or (by_zero3 and not is_leaf)


class Mixers(Attention):
    """Backend that runs mixers per document and other modules on the whole row."""

    def serve(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> Service:
        """See Attention. In place of a kernel it names the modules."""
        try:
            words = mixing_of(model, dtype).words()
        except CheckFailed as refusal:
            return Service(None, refusal.problems[0].what)
        return Service(words, "", f"{words} run per document" if words else "")

    def inner_backend(self, model: PreTrainedModel) -> str:
        """See Attention."""
        return mixing_of(model).attention

    def gathers_unevenly(self, model: PreTrainedModel) -> bool:
        """See Attention."""
        return any(_gathers_inside(model, mixer.name) for mixer in mixing_of(model).mixers)

    def run_alike(self, other: PreTrainedModel, model: PreTrainedModel) -> None:
        """See Attention."""
        # names inside a backbone lack its prefix; a reference has the names of the model
        prefix = next((f"{name}." for name, part in model.named_modules() if part is other and name), "")
        mixing = mixing_of(model)
        mixers = [replace(mixer, name=mixer.name.removeprefix(prefix)) for mixer in mixing.mixers]
        _found[other] = replace(mixing, mixers=tuple(mixers))

    def install(self, model: PreTrainedModel) -> Undo:
        """See Attention."""
        return install(model, mixing_of(model))

    def install_when_packed(self, model: PreTrainedModel) -> Undo:
        """See Attention."""
        return install(model, mixing_of(model), when_packed=True)


ATTENTION = Mixers()
