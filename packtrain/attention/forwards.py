"""Replacements of forwards: of whole models, and of rotary embeddings that depend on length.

"longrope" (phi3 and others) uses other frequencies once the longest position exceeds the original context. In a flattened
row one long document would change them for all others. The proof cannot detect that, since its documents are short. So the
embeddings are computed document by document, at the cost of one wait for the device per forward pass.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from itertools import chain

import torch
from torch import nn
from transformers import PreTrainedModel

from packtrain.errors import CheckFailed
from packtrain.packing.collate import KERNEL_ARGUMENTS

_CHECKPOINT_ATTRIBUTES = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes of layers that hold their recomputing function: transformers' own, and torch's wrapper, which FSDP puts around layers."""


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the language part of `model`; the whole model if it has no towers."""
    decoder = model if model.config.get_text_config() is model.config else model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) else model


def uses_attention_interface(model: PreTrainedModel) -> bool:
    """Return whether transformers' `set_attn_implementation` can replace the attention function of `model`."""
    return language_model(model)._can_set_attn_implementation()


def replace_forward(module: nn.Module, forward: Callable[..., object]) -> Callable[[], None]:
    """Send calls of `module` to `forward(module, ...)`. Returns the undo function. Deep copies of it run their class's own forward."""
    own = module.__dict__.get("forward")

    @functools.wraps(forward)
    def ours(self: nn.Module, *args: object, **kwargs: object) -> object:
        if self is module:
            return forward(self, *args, **kwargs)
        # a deep copy takes this method along, but `forward` runs the weights of the original
        if kwargs.get("segments") is not None:
            what = f"a copy of {type(self).__name__} does not keep the documents of a row apart"
            raise CheckFailed(
                what, fix="copy the model before packtrain changes its forward", code="copy-with-segments"
            )
        return type(self).forward(self, *args, **kwargs)

    def undo() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own

    module.forward = types.MethodType(ours, module)
    return undo


@contextmanager
def kept_for_recomputation(model: nn.Module, around: Callable[[], ContextDecorator]) -> Iterator[None]:
    """Make checkpointed layers remember `around` for their second forward, in the backward pass.

    By then another row may have run, so the context that `around` makes is bound to the checkpointed function.
    """

    def within(
        checkpoint: Callable[..., object], function: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        return checkpoint(around()(function), *args, **kwargs)

    own = [
        (module, name, module.__dict__[name])
        for module in model.modules()
        for name in _CHECKPOINT_ATTRIBUTES
        if name in module.__dict__
    ]
    for module, name, checkpoint in own:
        setattr(module, name, functools.partial(within, checkpoint))
    try:
        yield
    finally:
        for module, name, checkpoint in own:
            setattr(module, name, checkpoint)


def spare_towers(model: PreTrainedModel) -> Callable[[], None]:
    """Keep the arguments of a row from the towers of `model`, whose tokens are patches. Returns the undo function."""
    text, undo = language_model(model), ExitStack()
    beside = [part.children() for part in model.modules() if any(child is text for child in part.children())]
    for tower in chain.from_iterable(beside):
        if tower is not text:
            undo.callback(tower.register_forward_pre_hook(_without_row, with_kwargs=True).remove)
    return undo.close


def _without_row(
    _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    return args, {name: value for name, value in kwargs.items() if name not in ("segments", *KERNEL_ARGUMENTS)}


def rotates_by_length(module: nn.Module) -> bool:
    """Return whether `module` has rotary embeddings that depend on the longest document of a call."""
    return any(map(_is_longrope, module.modules()))


def rotate_by_document(model: PreTrainedModel) -> Callable[[], None]:
    """Compute such embeddings of a flattened row separately for each document. Returns the undo function.

    A call raises CheckFailed if a document has a shared prefix, whose keys would need different frequencies per document.
    """
    undo = ExitStack()
    for module in filter(_is_longrope, model.modules()):
        undo.callback(replace_forward(module, functools.partial(_rotate_by_document, module.forward)))
    return undo.close


def _is_longrope(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)  # a dict if kinds of layers differ
    return "longrope" in (kinds.values() if isinstance(kinds, dict) else [kinds])


def _rotate_by_document(
    inner: Callable[..., tuple[torch.Tensor, ...]],
    module: nn.Module,
    x: torch.Tensor,
    position_ids: torch.Tensor,
    *args: object,
    **kwargs: object,
) -> tuple[torch.Tensor, ...]:
    if position_ids.dim() != 2 or len(position_ids) != 1:
        return inner(x, position_ids, *args, **kwargs)
    borders = (position_ids[0].diff() != 1).nonzero()[:, 0] + 1
    if not len(borders):
        return inner(x, position_ids, *args, **kwargs)
    if position_ids[0, borders].any():
        raise CheckFailed(
            f"the rotary embeddings of {type(module).__name__} depend on a document's length, which cannot share a prefix",
            fix="set model.attention=auto",
            code="rotary-by-length",
        )
    documents = position_ids.tensor_split(borders.cpu(), dim=1)
    parts = [inner(x, positions, *args, **kwargs) for positions in documents]
    return tuple(torch.cat(part, dim=1) for part in zip(*parts, strict=True))
