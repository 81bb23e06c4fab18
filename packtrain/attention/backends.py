"""The attention backends for packed rows, and their installation on a model.

| name | rows | how | price |
|---|---|---|---|
| flash | flattened | varlen kernels, one call for all segments | needs a GPU |
| segmented | flattened | an ordinary attention function, once per length of segments | a call per length |
| per_document | taken apart | the model once per length of documents, with layers of any kind | kernels on fewer tokens |
| sdpa_mask | flattened | one dense mask | O(T²): the plain reference, for tests and small rows |

Models with their own attention code (bloom, mpt, falcon, remote code) do not look up their attention function in
transformers' AttentionInterface: for them there is only per_document. Padded batches keep the model's own attention under
per_document; a replaced attention function takes flattened rows only: see `attention_of`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedModel

from packtrain.attention import flash, segmented
from packtrain.attention.forwards import (
    kept_for_recomputation,
    replace_forward,
    rotate_by_document,
    uses_attention_interface,
)
from packtrain.attention.per_document import run_one_document_at_a_time
from packtrain.attention.segmented import as_mask, attention_function, registered
from packtrain.errors import CheckFailed
from packtrain.packing.segments import Segments

PER_DOCUMENT = "per_document"
_DENSE_MASK = "packtrain_dense_mask"
IMPLEMENTATIONS = {"flash": flash.NAME, "segmented": segmented.NAME, "sdpa_mask": _DENSE_MASK}
"""Names in transformers' AttentionInterface of the backends that are attention functions."""
OWN_CODE = "its attention function cannot be replaced"
"""Why a model that does not use the AttentionInterface has only per_document."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend: its `name` as in model.attention, and `why` it was chosen."""

    name: str
    why: str


def own_attention(model: PreTrainedModel) -> str:
    """Return the current attention implementation of `model`, by transformers' name."""
    return str(model.config._attn_implementation)


def attend_by(model: PreTrainedModel, name: str) -> Callable[[], None]:
    """Make the backend `name` serve flattened rows of `model`. Returns the undo function. Raises CheckFailed if it cannot serve
    this model."""
    if name == PER_DOCUMENT:
        return run_one_document_at_a_time(model)
    if not uses_attention_interface(model):
        raise CheckFailed(f"{type(model).__name__}: {OWN_CODE}", fix=f"set model.attention to {PER_DOCUMENT}")
    undo = ExitStack()
    undo.callback(_replace_attention_function(model, IMPLEMENTATIONS[name]))
    undo.callback(rotate_by_document(model))
    return undo.close


def attend_when_packed(model: PreTrainedModel, name: str) -> Callable[[], None]:
    """Do the same as `attend_by`, but only for packed rows. All other calls, padded ones and generation, keep the model's own attention."""
    if name == PER_DOCUMENT:
        return attend_by(model, name)
    inner = model.forward
    ours = _switch(model, IMPLEMENTATIONS[name])

    @functools.wraps(type(model).forward)
    def forward(_: PreTrainedModel, *args: Any, segments: Segments | None = None, **kwargs: Any) -> Any:
        if segments is None:
            return inner(*args, **kwargs)
        with ours(), kept_for_recomputation(model, ours):
            return inner(*args, segments=segments, **kwargs)

    undo = ExitStack()
    undo.callback(replace_forward(model, forward))
    undo.callback(rotate_by_document(model))
    return undo.close


def _switch(model: PreTrainedModel, implementation: str) -> Callable[[], Any]:
    """Return a fast `attention_of`: microseconds, not milliseconds. Recomputation needs it for every layer of every call."""
    configs: Any = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
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


def _replace_attention_function(model: PreTrainedModel, implementation: str) -> Callable[[], None]:
    own = own_attention(model)
    model.set_attn_implementation(implementation)
    return lambda: model.set_attn_implementation(own)


@contextmanager
def attending_by(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Use `attend_by` inside the block."""
    undo = attend_by(model, name)
    try:
        yield
    finally:
        undo()


@contextmanager
def attention_of(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Give `model` another attention implementation inside the block, by transformers' name."""
    undo = _replace_attention_function(model, implementation)
    try:
        yield
    finally:
        undo()


@registered(_DENSE_MASK)
def dense_mask_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    window: int | None,
    **kwargs,
) -> torch.Tensor:
    """Attend with sdpa under the mask `Segments.visible`, over one flattened row. It is the reference for the keys that a query may see."""
    attend = attention_function(module, kwargs)
    mask = as_mask(attend, _visible(segments, window, query.device), query.dtype)
    kwargs["is_causal"] = False  # causality is in the mask
    return attend(module, query, key, value, mask, sliding_window=window, **kwargs)[0]


@lru_cache(maxsize=2)  # a row has two kinds of layers at most; each takes T² bytes
def _visible(segments: Segments, window: int | None, device: torch.device) -> torch.Tensor:
    return segments.visible(window).to(device)


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
