"""The model's own computation in float32, without a float32 copy of the model.

Layers get float32 inputs, and keep only these for the backward pass, as under trainer.gradient_checkpointing=full: else a run could need most
of its memory before step 1. A function that gets a float32 tensor and a 16-bit weight casts the weight for this call, and again in the backward
pass. Kernels without float32 (flash attention, grouped products) and the output head compute in their own format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from packtrain.attention.backends import attention_functions
from packtrain.attention.forwards import replace_forward
from packtrain.system import holding

LOW = (torch.bfloat16, torch.float16)
_CHECKPOINT = "_gradient_checkpointing_func"


@contextmanager
def in_float32(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """Make `model` compute in float32 inside the block, backward passes included. Outside it computes in `dtype`."""
    backbone: Any = model.base_model
    # functions of transformers and of the hub have "flash" in their names
    without = attention_functions(without="float32")
    without += [name for name in ALL_ATTENTION_FUNCTIONS if "flash_" in name or "flash-" in name]
    lowered = {name: partial(_attend_in, dtype, ALL_ATTENTION_FUNCTIONS[name]) for name in without}
    mapping = {**ALL_ATTENTION_FUNCTIONS._local_mapping, **lowered}
    with ExitStack() as undo:
        undo.enter_context(holding(ALL_ATTENTION_FUNCTIONS, _local_mapping=mapping))
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        for part in _parts(backbone, layers_in(model)):
            can_run_again = isinstance(part, GradientCheckpointingLayer) and not part.gradient_checkpointing
            run = _keep_input if can_run_again else _run
            undo.callback(replace_forward(part, partial(run, dtype, part.forward)))
            if can_run_again and _CHECKPOINT not in vars(part):
                undo.callback(vars(part).pop, _CHECKPOINT)
                vars(part)[_CHECKPOINT] = None
        for layer in [layer for layer in model.modules() if _CHECKPOINT in vars(layer)]:
            undo.enter_context(holding(layer, **{_CHECKPOINT: partial(_run_again, dtype)}))
        undo.callback(replace_forward(backbone, partial(_without_autocast, model.dtype, backbone.forward)))
        yield


def layers_in(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers: the modules named in `_no_split_modules`."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def raised(value: Any) -> Any:
    """Return `value`, its 16-bit tensors and formats in float32."""
    return tree_map(_raised, value)


def _raised(leaf: Any) -> Any:
    if isinstance(leaf, torch.dtype):
        return torch.float32 if leaf in LOW else leaf
    return leaf.float() if _is(leaf, LOW) else leaf


def _is(leaf: object, dtypes: tuple[torch.dtype, ...]) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in dtypes


def _to(dtype: torch.dtype, value: Any) -> Any:
    """Return `value`, its float32 tensors in `dtype`."""
    return tree_map(lambda leaf: leaf.to(dtype) if _is(leaf, (torch.float32,)) else leaf, value)


def _parts(module: nn.Module, layers: list[nn.Module]) -> Iterator[nn.Module]:
    """Yield the layers, and the largest modules beside them. Hooks of layers, which gather sharded weights, do not see the mode."""
    for child in module.children():
        is_around = isinstance(child, (nn.ModuleList, nn.ModuleDict)) or not {*layers}.isdisjoint(child.modules())
        if child in layers or not is_around:
            yield child
        else:
            yield from _parts(child, layers)


def _run(
    dtype: torch.dtype, own: Callable[..., object], _: nn.Module | None, *args: object, **kwargs: object
) -> object:
    args, kwargs = raised((args, kwargs))
    with UpcastMode(dtype):
        output = own(*args, **kwargs)
    return raised(output)


def _keep_input(dtype: torch.dtype, own: Callable[..., object], layer: Any, *args: object, **kwargs: object) -> object:
    """Run a layer, and again in the backward pass.

    Layers do this by themselves only in train mode, and some draw random numbers there. A cache would grow twice.
    """
    cached = any(isinstance(one, Cache) for one in kwargs.values())
    if cached or not torch.is_grad_enabled():
        return _run(dtype, own, layer, *args, **kwargs)
    return getattr(layer, _CHECKPOINT)(partial(own, **kwargs), *args)


def _run_again(dtype: torch.dtype, function: Callable[..., object], *args: object) -> object:
    """Checkpoint a layer in full.

    A policy that keeps some products counts them. It would count products twice here, since UpcastMode runs them again by itself.
    """
    return checkpoint(partial(_run, dtype, function, None), *args, use_reentrant=False)


def _without_autocast(
    weights: torch.dtype, own: Callable[..., object], model: nn.Module, *args: object, **kwargs: object
) -> object:
    """Run the backbone. Its output has the format of the head's `weights`."""
    kind = next(model.parameters()).device.type
    with torch.autocast(kind, enabled=False):
        return _to(weights, own(*args, **kwargs))


def _attend_in(
    dtype: torch.dtype, own: Callable[..., Any], module: nn.Module, *args: object, **kwargs: object
) -> object:
    with torch._C.DisableTorchFunction():
        args, kwargs = _to(dtype, (args, kwargs))
        return raised(own(module, *args, **kwargs))


class UpcastMode(TorchFunctionMode):
    """Functions of float32 tensors get their other tensors in float32, and make no 16-bit ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **kwargs)
        if "grouped_mm" in name:
            return raised(func(*_to(self.dtype, args), **_to(self.dtype, kwargs)))
        leaves = tree_leaves((args, kwargs))
        low = [leaf for leaf in leaves if _is(leaf, LOW)]
        mixed = low and any(_is(leaf, (torch.float32,)) for leaf in leaves)
        if not mixed and (low or not any(leaf in LOW for leaf in leaves if isinstance(leaf, torch.dtype))):
            return func(*args, **kwargs)

        def call(*args: object, **kwargs: object) -> object:
            return func(*raised(args), **raised(kwargs))

        if torch.is_grad_enabled() and any(leaf.dim() > 1 for leaf in low):  # keep the weight, not its float32 copy
            return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return call(*args, **kwargs)
