"""`model.kernels=lora`: a linear layer and its LoRA adapter as one function of autograd.

y = x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ. PEFT runs three layers, then scales and adds the result of the third. Here the last product also scales and adds
(addmm), for y and for the gradient of x. The product with W comes first, as PEFT computes it: a new adapter, whose B is zero, changes no bit
of y.

PEFT's own forward stays for dropout, DoRA and other variants, biases of adapters, quantised or sharded weights, Conv1D, several active
adapters, adapters that are off or merged, and compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from packtrain.changes.spec import Change, Proposal, Situation
from packtrain.model.layers import is_compiled
from packtrain.wording import counted

if TYPE_CHECKING:
    from peft.tuners.lora import Linear

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class AdaptedProduct(torch.autograd.Function):
    """x·Wᵀ + bias + scale·(x·Aᵀ)·Bᵀ of x [T, in], all tensors in one format."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        out, thin = F.linear(x, weight, bias), x @ a.t()
        ctx.save_for_backward(x, weight, a, b, thin)
        ctx.scale = scale
        # selective checkpointing keeps results of products: they must not change
        kept = any(type(mode).__module__ == "torch.utils.checkpoint" for mode in _get_current_dispatch_mode_stack())
        return (torch.addmm if kept else Tensor.addmm_)(out, thin, b.t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, thin = ctx.saved_tensors
        scale, needed, of_thin = ctx.scale, ctx.needs_input_grad, gradient @ b
        of_x = (gradient @ weight).addmm_(of_thin, a, alpha=scale) if needed[0] else None
        of_weight = gradient.t() @ x if needed[1] else None
        of_bias = gradient.sum(0) if needed[2] else None
        # with beta=0 the first argument is not read
        of_a = torch.addmm(a, of_thin.t(), x, beta=0, alpha=scale) if needed[3] else None
        of_b = torch.addmm(b, gradient.t(), thin, beta=0, alpha=scale) if needed[4] else None
        return of_x, of_weight, of_bias, of_a, of_b, None


def plain_layers(model: nn.Module) -> Iterator[Linear]:
    """Yield the linear layers of `model` with plain LoRA adapters."""
    from peft.tuners.lora import Linear

    for layer in model.modules():
        if type(layer) is Linear and not (layer.fan_in_fan_out or layer.lora_variant or any(layer.lora_bias.values())):
            dropouts, parts = layer.lora_dropout.values(), [*layer.lora_A.values(), *layer.lora_B.values()]
            untouched = "forward" not in vars(layer) and all(map(_is_untouched, [layer.base_layer, *parts]))
            if untouched and not any(getattr(dropout, "p", 0) for dropout in dropouts):
                yield layer


def _is_untouched(module: nn.Module) -> bool:
    return type(module) is nn.Linear and not ("forward" in vars(module) or any(vars(module)[name] for name in _HOOKS))


def fuse_adapters(model: PreTrainedModel) -> Callable[[], object]:
    """Make the plain adapted layers of `model` compute as one function each. Returns the undo function."""
    layers = [*plain_layers(model)]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    return lambda: [vars(layer).pop("forward") for layer in layers]


def _forward(layer: Linear, x: Tensor, *given: object, **named: object) -> Tensor:
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    off = layer.disable_adapters or layer.merged or torch.compiler.is_compiling()
    if given or named or off or len(names) != 1:
        return type(layer).forward(layer, x, *given, **named)
    base, a, b = (cast(nn.Linear, one) for one in (layer.base_layer, layer.lora_A[names[0]], layer.lora_B[names[0]]))
    tensors = x.reshape(-1, x.shape[-1]), base.weight, base.bias, a.weight, b.weight
    if (dtype := _format_of([one for one in tensors if one is not None])) is None:
        return type(layer).forward(layer, x)
    # cast here, with gradients: casts within the function would stay in autocast's cache without them
    out = AdaptedProduct.apply(*(one if one is None else one.to(dtype) for one in tensors), layer.scaling[names[0]])
    return out.view(*x.shape[:-1], out.shape[-1])


def _format_of(tensors: list[Tensor]) -> torch.dtype | None:
    """Return the number format to compute in. None: tensors are sharded or quantised, or their formats differ."""
    formats, kind = {one.dtype for one in tensors}, tensors[0].device.type
    if any(map(is_traceable_wrapper_subclass, tensors)):
        return None
    if torch.is_autocast_enabled(kind):
        return None if torch.float64 in formats else torch.get_autocast_dtype(kind)
    return formats.pop() if len(formats) == 1 else None


def _propose(situation: Situation) -> Proposal | None:
    asked, model = situation.config.model.kernels, situation.model
    if situation.config.peft.kind != "lora" or (asked == "auto" and not situation.on_gpu):
        return None
    count, lacks = len([*plain_layers(model)]), ""
    if not count:
        lacks = "none has a plain adapter on plain weights (docs/speed.md)"
    elif is_compiled(model):
        lacks = "trainer.torch_compile fuses them already"
    return Proposal(what=f"{counted(count, 'adapted layers')} as one function each", make=fuse_adapters, lacks=lacks)


CHANGE = Change(name="lora", propose=_propose)
