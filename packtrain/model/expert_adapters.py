"""LoRA on experts: `peft.experts=true` adapts tensors that hold all experts of a layer.

PEFT (`target_parameters`) adds A·B to a tensor W, and keeps a copy and a gradient of the size of W. Here a product adds (x·A)·B to x·W.
While an experts' module runs, an AdaptedTensor takes the place of W (`forward_in_products`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packtrain.config.schema import Peft
from packtrain.errors import UserError
from packtrain.plan.known_model import is_chosen

_PRODUCTS = ("linear", "matmul", "__matmul__", "mm", "bmm", "grouped_mm", "_grouped_mm", "grouped_mm_fallback")


class AdaptedTensor:
    """W + left·right, for products that never add them up. Other operators get the sum."""

    def __init__(self, weight: Tensor, left: Tensor, right: Tensor) -> None:
        self.parts = weight, left, right

    def __getattr__(self, name: str) -> Any:
        is_fact = name in ("shape", "dtype", "device", "ndim", "dim", "size", "data_ptr", "requires_grad", "is_leaf")
        return getattr(self.parts[0] if is_fact else whole(self), name)

    def __getitem__(self, expert: Any) -> Any:
        return whole(self)[expert] if isinstance(expert, tuple) else AdaptedTensor(*(one[expert] for one in self.parts))

    def to(self, dtype: torch.dtype) -> AdaptedTensor:
        return AdaptedTensor(*(part.to(dtype) for part in self.parts))

    def transpose(self, *sides: int) -> Any:
        swaps = {*sides} in ({-2, -1}, {1, 2})
        return AdaptedTensor(*(self.parts[at].mT for at in (0, 2, 1))) if swaps else whole(self).transpose(*sides)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        named, name = named or {}, getattr(function, "__name__", "")
        if name in _PRODUCTS and isinstance(given[0], Tensor) and isinstance(given[1], cls):
            # linear multiplies by the transpose: x·(left·right)ᵀ = (x·rightᵀ)·leftᵀ
            weight, first, second = given[1].parts if name != "linear" else (given[1].parts[at] for at in (0, 2, 1))
            groups = {key: one for key, one in named.items() if key == "offs"}
            thin = function(function(given[0], first, **groups), second, **groups)
            return function(given[0], weight, *given[2:], **named) + thin
        return function(*map(whole, given), **{key: whole(one) for key, one in named.items()})


def whole(one: Any) -> Any:
    """Return the sum of an AdaptedTensor, or `one` itself."""
    return one.parts[0] + one.parts[1] @ one.parts[2] if isinstance(one, AdaptedTensor) else one


def forward_in_products(layer: Any, x: Tensor, *given: Any, **named: Any) -> Any:
    """Run a ParamWrapper's module with an AdaptedTensor. Cases without one trained adapter are left to PEFT."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    replaced = F.linear.__name__ != "linear"  # by DeepSpeed's, under ZeRO-3
    if layer.disable_adapters or layer.merged or len(names) != 1 or layer._param_ndim == 2 or replaced:
        return type(layer).forward(layer, x, *given, **named)
    weight, count, rank = layer.get_param(), layer.num_experts, layer.r[names[0]]
    more = -rank % 8  # GPUs group products whose rows are a multiple of 16 bytes
    a = F.pad(layer.lora_A[names[0]].weight.view(count, rank, -1), (0, 0, 0, more)).to(weight.dtype)
    b = layer.lora_B[names[0]].weight.view(-1, rank, count).permute(2, 0, 1) * layer.scaling[names[0]]
    b = F.pad(b, (0, more)).to(weight.dtype).contiguous()
    inside = vars(layer.get_base_layer())  # attributes come before parameters
    inside[layer.parameter_name] = AdaptedTensor(weight, *((b, a) if layer._did_swap_in_out_features else (a.mT, b.mT)))
    try:
        return layer.base_layer(x, *given, **named)
    finally:
        del inside[layer.parameter_name]


def expert_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of `model` that hold a matrix of each expert, by name. Quantised ones are left out."""
    named = ((name.replace(".base_layer", ""), one) for name, one in model.named_parameters() if one.itemsize > 1)
    found = {at: one for at, one in named if at.split(".")[-2:-1] == ["experts"]}
    shapes = {at: getattr(one, "ds_shape", one.shape) for at, one in found.items()}
    return {at: one for at, one in found.items() if len(shapes[at]) == 3 and shapes[at][0] > 1}


def choose_tensors(model: nn.Module, peft: Peft, layers: list[str]) -> list[str]:
    """Return PEFT's target_parameters: experts if `peft` asks for them, weights of `layers`. Raises UserError if they cannot be."""
    chosen = [name for name in expert_tensors(model) if peft.experts and is_chosen(name, peft, name)]
    if peft.experts and not chosen:
        what = f"{type(model).__name__} has no unquantised experts in one tensor for a layer, or they are excluded"
        raise UserError(what, where="peft.experts", fix="Leave it out.", code="no-joint-experts")
    if layers and (peft.dropout or peft.options.get("use_dora")):
        names = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        what = f"PEFT adapts {names} of {type(model).__name__} as tensors, without dropout or DoRA"
        fix = f"Leave these keys out, or set peft.options.exclude_modules=[{names}]."
        raise UserError(what, where="peft.dropout, peft.options.use_dora", fix=fix, code="tensors-not-adaptable")
    return sorted([*chosen, *(f"{name}.weight" for name in layers)])
