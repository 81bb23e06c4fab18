"""`segmented` for models whose attention is code of their own: the whole attention module runs once per document.

bloom, mpt, falcon, gptj and others (remote code too) do not look up their attention function in transformers'
`AttentionInterface`. So the forward of the attention module is replaced: it is called with its arguments cut to the documents of
one length, and the outputs are put together. Scores, biases and probabilities then exist per document only; all other layers
run on the flattened row. What documents share goes through the module with each of them, and through all other layers once.

How an argument is cut follows from its name and its number of dimensions, never from a size that happens to be T: so the
isolation proof at one length holds for all. An argument that fits no rule is refused.

The price: such a model still builds the mask of the whole row, T×T once per forward pass (falcon with ALiBi: one per head),
and the module's projections run per segment. ZeRO-3 has to gather the attention module as a whole.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from packtrain.attention.segmented import joined, on_paths
from packtrain.errors import CheckFailed
from packtrain.packing.segments import Segments

_FIX = "set model.attention=per_document"
_CHECKPOINTED_BY = ("_gradient_checkpointing_func", "checkpoint_fn")
"""The attributes of layers that hold the function by which they are recomputed."""
_FOR_KERNELS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def uses_attention_interface(model: PreTrainedModel) -> bool:
    """Whether the attention function of `model` can be replaced by transformers' `set_attn_implementation`."""
    return model._can_set_attn_implementation()


def run_attention_once_per_segment(model: PreTrainedModel) -> Callable[[], None]:
    """From now on a call of `model` with `segments` keeps them apart in every attention module; returns the undo function.

    Calls without `segments` are left as they are. Raises CheckFailed where the model has no attention module; the call
    raises it for arguments that cannot be cut.
    """
    modules = _attention_modules(model)
    if not modules:
        raise CheckFailed(f"{type(model).__name__} has no attention module to run once per document", fix=_FIX)
    current = _Current()
    undo = ExitStack()
    for module in modules:
        undo.callback(replace_forward(module, _forward_of_module(module, current)))
    undo.callback(replace_forward(model, _forward_of_model(model, current)))
    return undo.close


@dataclass(slots=True)
class _Current:
    """The segments of the row that is running, None for a padded batch, "unknown" outside the model's forward."""

    row: Segments | Literal["unknown"] | None = "unknown"

    @contextmanager
    def set_to(self, row: Segments | None) -> Iterator[None]:
        before, self.row = self.row, row
        try:
            yield
        finally:
            self.row = before


def _attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The outermost modules whose class is named for attention: GPTNeoAttention and not the GPTNeoSelfAttention in it."""
    outermost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        attends = any(word in type(module).__name__.lower() for word in ("attention", "attn"))
        inside = any(name.startswith(f"{outer}.") for outer in outermost)
        if attends and not inside and not isinstance(module, PreTrainedModel):
            outermost[name] = module
    return list(outermost.values())


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Has calls of `module` go to `forward(module, ...)`; returns the undo function. Deep copies of it run as their class does."""
    own = module.__dict__.get("forward")

    @functools.wraps(forward)
    def ours(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # a deep copy takes this method along, but `forward` runs the weights of the original
        return forward(self, *args, **kwargs) if self is module else type(self).forward(self, *args, **kwargs)

    def undo() -> None:
        if own is None:
            del module.forward
        else:
            module.forward = own

    module.forward = types.MethodType(ours, module)
    return undo


def _forward_of_model(model: PreTrainedModel, current: _Current) -> Callable[..., Any]:
    inner = model.forward
    takes = {name for part in (model, model.base_model) for name in inspect.signature(type(part).forward).parameters}

    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, segments: Segments | None = None, **kwargs: Any) -> Any:
        if segments is not None:
            kwargs = {name: value for name, value in kwargs.items() if name not in _FOR_KERNELS}
            if "position_ids" not in takes:
                kwargs.pop("position_ids", None)
            # an explicit mask: models may guess padding from token ids, or borders from restarting positions
            kwargs["attention_mask"] = torch.ones(1, segments.tokens, dtype=torch.int64, device=self.device)
        with current.set_to(segments), kept_for_recomputation(model, lambda: cast(Any, current.set_to(segments))):
            return inner(*args, **kwargs)

    return forward


@contextmanager
def kept_for_recomputation(model: nn.Module, around: Callable[[], ContextDecorator]) -> Iterator[None]:
    """Inside the block, layers under gradient checkpointing remember `around` for their second forward, in the backward pass.

    By then another row may have run, so the context that `around` makes is bound to the checkpointed function. Serves
    transformers' own checkpointing and torch's wrapper, which FSDP puts around layers.
    """

    def within(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(around()(function), *args, **kwargs)

    layers = [(module, name) for module in model.modules() for name in _CHECKPOINTED_BY if name in module.__dict__]
    own: list[tuple[Any, str, Any]] = [(module, name, getattr(module, name)) for module, name in layers]
    for module, name, checkpoint in own:
        setattr(module, name, functools.partial(within, checkpoint))
    try:
        yield
    finally:
        for module, name, checkpoint in own:
            setattr(module, name, checkpoint)


def _forward_of_module(module: nn.Module, current: _Current) -> Callable[..., Any]:
    inner = module.forward
    signature = inspect.signature(inner)
    name = type(module).__name__

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        row = current.row
        if row == "unknown":
            raise CheckFailed(
                f"{name} ran outside the forward of its model, or was recomputed by other means than its own gradient "
                "checkpointing: which documents its tokens belong to is not known",
                fix=_FIX,
            )
        if row is None or len(row.lengths) == 1:
            return inner(*args, **kwargs)
        pieces = _cut_all(signature.bind(*args, **kwargs).arguments, row, name)
        calls = [inspect.BoundArguments(signature, cast(Any, piece)) for piece in pieces]
        return _joined([inner(*call.args, **call.kwargs) for call in calls], row, name)

    return forward


@lru_cache(maxsize=64)  # the same for every layer
def _batches(row: Segments) -> dict[int, list[int]]:
    """Documents, by their last segments, under the number of their tokens."""
    batches: dict[int, list[int]] = {}
    for leaf in row.leaves:
        batches.setdefault(row.prefix_lengths[leaf] + row.lengths[leaf], []).append(leaf)
    return batches


def _cut_all(arguments: dict[str, Any], row: Segments, module: str) -> list[dict[str, Any]]:
    """`arguments` by name for each batch."""
    cut = {name: _cut(name, value, row, module) for name, value in arguments.items()}
    return [{name: pieces[number] for name, pieces in cut.items()} for number in range(len(_batches(row)))]


def _cut(name: str, value: Any, row: Segments, module: str) -> list[Any]:
    """The argument `name` of `module` for each batch, with its documents in place of the one row of the flattened call."""
    calls = len(_batches(row))
    if value is None or isinstance(value, (bool, int, float, str)):
        return [value] * calls
    if isinstance(value, Cache) and value.get_seq_length() == 0:
        return [None] * calls  # training generates nothing, and a cache would mix the documents
    if isinstance(value, dict):
        return _cut_all(value, row, module)
    if isinstance(value, (tuple, list)):
        columns = [_cut(name, part, row, module) for part in value]
        return [type(value)(column[number] for column in columns) for number in range(calls)]
    if isinstance(value, torch.Tensor):
        pieces = _cut_tensor(name, value, row)
        if pieces is not None:
            return pieces
        what = f"of shape {list(value.shape)}"
    else:
        what = f"a {type(value).__name__}"
    raise CheckFailed(f"{module} takes {name!r}, {what}, which cannot be cut by document", fix=_FIX)


def _cut_tensor(name: str, value: torch.Tensor, row: Segments) -> list[torch.Tensor] | None:
    """The parts of `value` for each batch, or None if no rule fits its name and shape."""
    batches, tokens = _batches(row), row.tokens
    shape, rank = value.shape, value.dim()
    if name == "position_bias":  # mpt, [heads, 1, longest]: the module takes the last l itself
        return [value] * len(batches) if rank == 3 and shape[1] == 1 else None
    if name == "alibi":  # bloom and falcon, [heads, 1, T]: later values differ by a constant, which 16 bits round
        if rank not in (3, 4) or shape[-2:] != (1, tokens):
            return None
        return [value[..., :length].repeat(len(leaves), *[1] * (rank - 1)) for length, leaves in batches.items()]
    if rank not in (2, 3, 4) or shape[0] != 1:
        return None
    if "mask" in name and rank > 2:
        return _blocks(value, row) if shape[-1] == tokens and shape[-2] in (1, tokens) else None
    along = 2 if rank == 4 else 1  # [1, T], [1, T, d], [1, 1, T, d]
    if shape[along] != tokens or (rank == 4 and shape[1] != 1):
        return None
    if name == "sinusoidal_pos":  # roformer, [1, 1, T, d]: counts over the row, not by the position ids
        return [value.narrow(along, 0, length) for length in batches]
    # one split in place of a slice per segment: the backward of a slice fills a tensor of the whole row
    parts = on_paths(value.split(row.lengths, dim=along), row, row.leaves)
    documents = {leaf: joined(pieces, along) for leaf, pieces in zip(row.leaves, parts, strict=True)}
    return [torch.cat([documents[leaf] for leaf in leaves]) for leaves in batches.values()]  # [count, …, length, …]


def _blocks(mask: torch.Tensor, row: Segments) -> list[torch.Tensor]:
    """Of a mask [1, …, T or 1, T] the blocks [count, …, length or 1, length] of the documents' own tokens.

    A mask with one plane per head has a position bias (falcon's ALiBi): every document gets the first block, as alone.
    """
    first, each = mask.dim() == 4 and mask.shape[1] > 1, mask.shape[-2] > 1

    def block(pieces: list[slice]) -> torch.Tensor:
        columns = joined([mask[..., piece] for piece in pieces], -1)
        return joined([columns[..., piece, :] for piece in pieces], -2) if each else columns

    def inside(number: int) -> slice:
        return slice(row.starts[number], row.starts[number] + row.lengths[number])

    return [
        block([slice(0, length)]).expand(len(leaves), -1, -1, -1)
        if first
        else torch.cat([block([inside(number) for number in row.path(leaf)]) for leaf in leaves])
        for length, leaves in _batches(row).items()
    ]


def _joined(outputs: list[Any], row: Segments, module: str) -> Any:
    """The output for the row [1, T, …]; of a tuple, its first item is joined, and others (attention weights) are kept if equal."""
    if isinstance(outputs[0], (tuple, list)):
        first, *others = zip(*outputs, strict=True)
        shared = [other[0] if all(value is other[0] for value in other) else None for other in others]
        return type(outputs[0])([_joined(list(first), row, module), *shared])
    documents: dict[int, torch.Tensor] = {}
    for output, (length, leaves) in zip(outputs, _batches(row).items(), strict=True):
        if not isinstance(output, torch.Tensor) or output.shape[:2] != (len(leaves), length):
            raise CheckFailed(f"{module} does not return its tokens one by one", fix=_FIX)
        documents |= zip(leaves, output.unbind(0), strict=True)
    return in_row(documents, row)


def in_row(documents: dict[int, torch.Tensor], row: Segments) -> torch.Tensor:
    """[1, T, …] of the tokens of documents [length, …], each under its last segment; what is shared comes from the first."""
    place: dict[int, torch.Tensor] = {}
    for leaf in row.leaves:
        path = row.path(leaf)
        for number, piece in zip(path, documents[leaf].split([row.lengths[segment] for segment in path]), strict=True):
            place.setdefault(number, piece)
    return torch.cat([place[number] for number in range(len(row.lengths))])[None]
