"""The attention backends for packed rows, and their installation on a model.

| name | rows | how | price |
|---|---|---|---|
| flash | flattened | varlen kernels, one call for all segments | needs a GPU |
| segmented | flattened | an ordinary attention function, once per length of segments | a call per length |
| mixers | flattened | the modules that mix tokens once per batch of documents, everything else once | padding and calls in these modules |
| per_document | taken apart | the model once per length of documents, with layers of any kind | kernels on fewer tokens |
| sdpa_mask | flattened | one dense mask | O(T²): the plain reference, for tests and small rows |

Each is a file, or part of another package, and declared in spec.py. It ends in ATTENTION, an `Attention`.

Models with their own attention code (bloom, mpt, falcon, remote code) do not look up their attention function in
transformers' AttentionInterface: their attention is a mixer, or they run per_document. Padded batches keep the model's own attention under
per_document; a replaced attention function takes flattened rows only: see `attention_of`.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from packtrain.attention.forwards import (
    kept_for_recomputation,
    language_model,
    replace_forward,
    rotate_by_document,
    spare_towers,
    uses_attention_interface,
)
from packtrain.attention.spec import BACKENDS, Backend
from packtrain.errors import CheckFailed
from packtrain.packing.segments import Segments

_PER_DOCUMENT = "per_document"
OWN_CODE = "its attention function cannot be replaced"
"""Why flash and segmented cannot serve a model that does not use the AttentionInterface."""
Undo = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Service:
    """Answer of a backend to a model.

    `kernel`: the kernel's name, or the modules that `mixers` runs per document; "" if there is neither, None if the backend cannot serve the
    model. `why` and `detail` are lines for the log: the reason, and how it runs this model.
    """

    kernel: str | None
    why: str
    detail: str = ""


class Attention(ABC):
    """A backend at work.

    It is the constant ATTENTION of the module that the declaration names as `run`.
    """

    def why_not(self, model: PreTrainedModel) -> str:
        """Return why it serves no model of this type, "" if it does."""
        return ""

    def serve(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> Service:
        """Choose the kernel for `model`, whose layers compute in `dtype` on `device`. The declaration allows both."""
        return Service("", "it needs no kernel")

    def inner_backend(self, model: PreTrainedModel) -> str:
        """Return the backend whose attention function this one uses, "" without one. Its formats apply."""
        return ""

    def run_alike(self, other: PreTrainedModel, model: PreTrainedModel) -> None:  # noqa: B027
        """Use what was measured on `model` for `other`, too: its backbone, or its reference. Both then round alike."""

    def gathers_unevenly(self, model: PreTrainedModel) -> bool:
        """Return whether rows with more documents gather sharded weights of `model` more often."""
        return False

    @abstractmethod
    def install(self, model: PreTrainedModel) -> Undo:
        """Make it serve flattened rows of `model`. Return the undo function."""

    def install_when_packed(self, model: PreTrainedModel) -> Undo:
        """Do the same, and do not touch calls without `segments`: padded batches, and generation."""
        return self.install(model)


@dataclass(frozen=True)
class AttentionFunction(Attention):
    """A backend that replaces the attention function of every layer.

    `implementation` is its name in transformers' AttentionInterface (attention/flattened.py::registered).
    """

    implementation: str

    def why_not(self, model: PreTrainedModel) -> str:
        """See Attention."""
        return "" if uses_attention_interface(model) else OWN_CODE

    def install(self, model: PreTrainedModel) -> Undo:
        """See Attention."""
        undo = ExitStack()
        # no context manager: it would be undone when nobody keeps the undo function
        undo.callback(_set_attention, model, own_attention(model))
        _set_attention(model, self.implementation)
        undo.callback(rotate_by_document(model))
        undo.callback(spare_towers(model))
        return undo.close

    def install_when_packed(self, model: PreTrainedModel) -> Undo:
        """See Attention."""
        inner = model.forward
        ours = _switch(model, self.implementation)

        @functools.wraps(type(model).forward)
        def forward(_: PreTrainedModel, *args: object, segments: Segments | None = None, **kwargs: object) -> object:
            if segments is None:
                return inner(*args, **kwargs)
            with ours(), kept_for_recomputation(model, ours):
                return inner(*args, segments=segments, **kwargs)

        undo = ExitStack()
        undo.callback(replace_forward(model, forward))
        undo.callback(rotate_by_document(model))
        undo.callback(spare_towers(model))
        return undo.close


def attention_by(name: str) -> Attention:
    """Return what the backend `name` does. Raises UserError if another package's cannot be imported."""
    attention = BACKENDS.imported(name, BACKENDS[name].run, "ATTENTION")
    if not isinstance(attention, Attention):
        raise BACKENDS.refusal(
            name, f"cannot be used: ATTENTION of {BACKENDS[name].run} is no {Attention.__module__}.Attention"
        )
    return attention


def attention_functions(without: str = "") -> list[str]:
    """Return the names of backends' functions in transformers' AttentionInterface.

    `without`: only of backends that cannot compute in this number format."""
    lacking = [
        name for name, one in BACKENDS.all().items() if not without or (one.formats and without not in one.formats)
    ]
    every = map(attention_by, lacking)
    return [attention.implementation for attention in every if isinstance(attention, AttentionFunction)]


def serve(backend: Backend, model: PreTrainedModel, device: torch.device, dtype: torch.dtype | None = None) -> Service:
    """Return whether `backend` can serve `model` on `device`, before any proof.

    `dtype` is the compute dtype there: autocast's, by default the format of the weights.
    """
    attention, dtype = attention_by(backend.name), dtype or model.dtype
    if why := attention.why_not(model):
        return Service(None, why)
    if backend.devices and device.type not in backend.devices:
        return Service(None, f"the device is {device.type}")
    if backend.formats and str(dtype).removeprefix("torch.") not in backend.formats:
        return Service(None, f"the layers compute in {dtype}, the kernels in {' and '.join(backend.formats)}")
    return attention.serve(model, device, dtype)


def own_attention(model: PreTrainedModel) -> str:
    """Return the current attention implementation of `model`, by transformers' name. In a model that sees: of its language model."""
    return str(model.config.get_text_config()._attn_implementation)


def _set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Give `model` another attention implementation. Towers keep theirs."""
    if model.config.get_text_config() is model.config:
        model.set_attn_implementation(implementation)
    else:
        for config in _text_configs(model):
            config._attn_implementation_internal = implementation


def _text_configs(model: PreTrainedModel) -> list[Any]:
    """Return the configs that layers of text read: all configs of a model without towers."""
    parts = [part.config for part in language_model(model).modules() if isinstance(part, PreTrainedModel)]
    return [*{id(config): config for config in (model.config.get_text_config(), *parts)}.values()]


def attend_by(model: PreTrainedModel, name: str) -> Undo:
    """Make the backend `name` serve flattened rows of `model`. Returns the undo function. Raises CheckFailed if it cannot serve
    this model."""
    attention = attention_by(name)
    if why := attention.why_not(model):
        raise CheckFailed(
            f"{type(model).__name__}: {why}", fix="set model.attention=auto", code="attention-not-replaceable"
        )
    return attention.install(model)


def _switch(model: PreTrainedModel, implementation: str) -> Callable[[], Any]:
    """Return a fast `attention_of`: microseconds, not milliseconds. Recomputation needs it for every layer of every call."""
    configs: Any = {id(config): config for config in _text_configs(model)}
    with attention_of(model, implementation):
        ours = {key: config._attn_implementation_internal for key, config in configs.items()}

    @contextmanager
    def switched() -> Iterator[None]:
        before = {key: config._attn_implementation_internal for key, config in configs.items()}
        for key, config in configs.items():
            config._attn_implementation_internal = ours[key]
        try:
            yield
        finally:
            for key, config in configs.items():
                config._attn_implementation_internal = before[key]

    return switched


@contextmanager
def attending_by(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Use `attend_by` inside the block."""
    with ExitStack() as undo:
        undo.callback(attend_by(model, name))
        yield


def documents_alone(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Run each document of a row in a call without others inside the block."""
    return attending_by(model, _PER_DOCUMENT)


@contextmanager
def attention_of(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Give `model` another attention implementation inside the block, by transformers' name."""
    own = own_attention(model)
    _set_attention(model, implementation)
    try:
        yield
    finally:
        _set_attention(model, own)


NEEDED = "does not have a deterministic implementation"
"""torch's words for an operation without a deterministic implementation."""


@contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    """Make torch use only deterministic kernels inside the block, if `enabled` (trainer.deterministic). It raises RuntimeError for
    an operation that has none.

    Enter it before the first product of matrices on the GPU: cuBLAS reads its variable then.
    """
    if not enabled:
        yield
        return
    before, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the faster of the two deterministic settings
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it takes the algorithm that happens to be faster
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.benchmark = benchmark
