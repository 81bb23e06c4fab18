"""The backends that attend by Segments, and how one is put in place on a model.

| name | rows | how |
|---|---|---|
| flash | flattened | varlen kernels on a GPU |
| segmented | flattened | an ordinary attention function, or the model's attention module, once per segment, on any device |
| per_document | taken apart | the model once per document, whatever its layers do |
| sdpa_mask | flattened | one dense mask: the plain reference |

Padded batches keep the attention that the model came with under per_document, and under segmented where the module runs
per segment; an attention function that was replaced takes flattened rows only: see `attention_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from transformers import PreTrainedModel

from packtrain.attention import dense_mask, flash, segmented
from packtrain.attention.module_segments import run_attention_once_per_segment, uses_attention_interface
from packtrain.attention.per_document import run_one_document_at_a_time
from packtrain.attention.rotary import rotate_by_document
from packtrain.errors import CheckFailed

PER_DOCUMENT = "per_document"
SEGMENTED = "segmented"
IMPLEMENTATIONS = {"flash": flash.NAME, SEGMENTED: segmented.NAME, "sdpa_mask": dense_mask.NAME}
"""Names in transformers' AttentionInterface of the backends that are attention functions."""


@dataclass(frozen=True, slots=True)
class Backend:
    """`name` as in model.attention, and `why` it was taken."""

    name: str
    why: str


def own_attention(model: PreTrainedModel) -> str:
    """The attention implementation that `model` has now, by transformers' name."""
    return str(model.config._attn_implementation)


def attend_by(model: PreTrainedModel, name: str) -> Callable[[], None]:
    """Has flattened rows of `model` served by the backend `name` from now on; returns a function that takes it back.

    Raises CheckFailed where the backend cannot serve this model.
    """
    if name == PER_DOCUMENT:
        return run_one_document_at_a_time(model)
    if uses_attention_interface(model):
        undo = _replace_attention_function(model, IMPLEMENTATIONS[name])
    elif name == SEGMENTED:
        undo = run_attention_once_per_segment(model)
    else:
        raise CheckFailed(
            f"the attention of {type(model).__name__} is code of its own, which {name} cannot replace",
            fix=f"set model.attention to {SEGMENTED} or {PER_DOCUMENT}",
        )
    turn_as_before = rotate_by_document(model)

    def take_back() -> None:
        turn_as_before()
        undo()

    return take_back


def _replace_attention_function(model: PreTrainedModel, implementation: str) -> Callable[[], None]:
    own = own_attention(model)
    model.set_attn_implementation(implementation)
    return lambda: model.set_attn_implementation(own)


@contextmanager
def attending_by(model: PreTrainedModel, name: str) -> Iterator[None]:
    """`attend_by` inside the block."""
    undo = attend_by(model, name)
    try:
        yield
    finally:
        undo()


@contextmanager
def attention_of(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """The model with another attention implementation inside the block, by transformers' name."""
    own = own_attention(model)
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(own)
