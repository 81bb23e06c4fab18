"""`model.experts`: the experts of a layer run in a loop, or in one grouped product.

Both are transformers' own (transformers.integrations.moe): the loop is the code of the model; `grouped_mm` sorts tokens by expert and gives
all to torch's grouped product. torch's product does not support autocast (pytorch/pytorch#174763): over float32 weights it would compute in
float32. So here it gets weights and tokens in autocast's format, as the linear layers of the loop do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from packtrain.errors import UserError
from packtrain.proof.comparison import has_routers

KEY = "model.experts"
LOOP, GROUPED = "eager", "packtrain_grouped"
"""Names of the two ways in transformers' ExpertsInterface."""


def can_group(model: nn.Module) -> bool:
    """Return whether tensors of `model` hold all experts of a layer. transformers can then multiply them in any way."""
    quantised = getattr(model, "is_quantized", False)  # their experts have their own formats and code
    return not quantised and any(hasattr(module, "_is_expert_parallel") for module in model.modules())


def loop_over_experts(model: PreTrainedModel, asked: str) -> None:
    """Make experts compute one after the other. train/verify/changes.py groups them later, by proof.

    Raises UserError if `asked`, model.experts, names a way that this model does not have.
    """
    if can_group(model):
        model.set_experts_implementation(LOOP)
    elif asked != "auto":
        what = "its experts are code of its own" if has_routers(model) else "it has no experts"
        raise UserError(
            f"{type(model).__name__} cannot do that: {what}", where=f"{KEY} ({asked})", fix="set it to auto"
        )


def group_experts(model: PreTrainedModel) -> Callable[[], None]:
    """Make `model` compute by grouped products. Returns the undo function."""
    ALL_EXPERTS_FUNCTIONS.register(GROUPED, _by_grouped_products)
    model.set_experts_implementation(GROUPED)
    return lambda: model.set_experts_implementation(LOOP)


def _by_grouped_products(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Run the experts `chosen` [T, k] on `hidden` [T, h]. Returns outputs [T, h], weighted by `weights` [T, k]."""
    kind, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(kind):
        experts = _InFormat(experts, torch.get_autocast_dtype(kind))
        hidden = hidden.to(experts.dtype)
    return grouped_mm_experts_forward(experts, hidden, chosen, weights).to(dtype)


class _InFormat:
    """A module whose tensors are converted to `dtype` when they are read."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return value.to(self.dtype) if isinstance(value, torch.Tensor) else value
