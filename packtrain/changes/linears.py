"""Linear layers that read one tensor add up its gradient inside their products.

Autograd makes a gradient of the input for each of q, k and v, and for gate and up of an MLP, and adds them up in passes of their own. Here each
product adds to the result of the one before. Under autocast the tensor is also cast once for all of them. Every layer still runs by itself, but
gives autograd no gradient of its input. Instead a node between the tensor and the layers gives the sum, after their backward passes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from packtrain.changes.spec import Change, Proposal, Situation
from packtrain.model.layers import is_compiled
from packtrain.model.precision import cast_weight
from packtrain.model.spread import language_layers

_READERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_Sums = dict[int, torch.Tensor]
"""The gradient [n, h] of a tensor so far, by the number of the backward pass. A pass may run layers, but not the tensor's node."""


class _Node(torch.autograd.Function):
    """A view of the tensor. Layers give it no gradient; in its backward pass it takes their sum."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sums: _Sums) -> torch.Tensor:
        ctx.sums, ctx.shape = sums, tensor.shape
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, unused: None) -> tuple[torch.Tensor, None]:
        return ctx.sums.pop(torch._C._current_graph_task_id()).view(ctx.shape), None


class _Product(torch.autograd.Function):
    """A linear layer that adds the gradient of its input to `sums`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sums: _Sums, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.sums = sums
        return F.linear(rows, weight, *bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows, weight), made, now = ctx.saved_tensors, gradient.flatten(0, -2), torch._C._current_graph_task_id()
        ctx.sums[now] = ctx.sums[now].addmm_(made, weight) if now in ctx.sums else made @ weight
        of_weight = made.t() @ rows.flatten(0, -2) if ctx.needs_input_grad[2] else None
        return None, None, of_weight, *(made.sum(dim=0) if needs else None for needs in ctx.needs_input_grad[3:])


def _run(layer: nn.Linear, read: list[Any], hidden: torch.Tensor) -> torch.Tensor:
    """Return `layer` of `hidden` [..., h]. `read`: the `hidden` of the layer before, its node in the format of the products, its sums."""
    if not (torch.is_grad_enabled() and hidden.requires_grad):
        return F.linear(hidden, layer.weight, layer.bias)
    if not read or read[0] is not hidden:
        kind, sums = hidden.device.type, _Sums()
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        read[:] = hidden, _Node.apply(hidden.to(dtype), sums), sums
    weights = [cast_weight(one, read[1].dtype) for one in (layer.weight, layer.bias) if one is not None]
    return cast(torch.Tensor, _Product.apply(*read[1:], *weights))


def linears_together(model: nn.Module) -> list[tuple[nn.Module, list[nn.Linear]]]:
    """Return groups of plain linear modules with one input, each with the module around it."""
    modules = [module for layer in language_layers(model) for module in layer.modules()]
    found = [(around, [getattr(around, name, None) for name in names]) for around in modules for names in _READERS]
    own = [(around, [layer for layer in layers if type(layer) is nn.Linear]) for around, layers in found]
    plain = [(around, [layer for layer in layers if "forward" not in vars(layer)]) for around, layers in own]
    return [(around, layers) for around, layers in plain if len(layers) > 1]


def add_in_products(model: nn.Module) -> Callable[[], None]:
    """Make these modules of `model` add up gradients in their products. Returns the undo function."""
    undo = ExitStack()
    for around, layers in linears_together(model):
        read = list[Any]()
        undo.enter_context(around.register_forward_hook(lambda *_, read=read: read.clear(), always_call=True))
        for layer in layers:
            vars(layer)["forward"] = partial(_run, layer, read)
            undo.callback(vars(layer).pop, "forward")
    return undo.close


def _propose(situation: Situation) -> Proposal | None:
    off = not situation.on_gpu or situation.config.model.kernels == "none" or situation.precision.fp8
    if off or is_compiled(situation.model) or not linears_together(situation.model):
        return None
    return Proposal(what="gradients of inputs added up in the products", make=add_in_products)


CHANGE = Change(name="linears", order=35, kernel=False, propose=_propose)
