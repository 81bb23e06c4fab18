"""`model.experts=grouped`: the experts of a layer run in one grouped product.

It is transformers' own (transformers.integrations.moe): `grouped_mm` sorts tokens by expert and gives all to torch's grouped product. torch's product does not support autocast (pytorch/pytorch#174763): over float32 weights it would compute in
float32. So here it gets weights and tokens in autocast's format, as the linear layers of the loop do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from packtrain.changes.spec import NO_GRADIENTS, Change, Proposal, Situation
from packtrain.model.layers import EXPERTS_KEY, LOOP, can_group
from packtrain.model.precision import cast_weight

GROUPED = "packtrain_grouped"
"""Its name in transformers' ExpertsInterface."""


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
        return cast_weight(value, self.dtype) if isinstance(value, torch.Tensor) else value


def _propose(situation: Situation) -> Proposal | None:
    asked, ranks = situation.config.model.experts, situation.ranks
    if asked == "loop" or not can_group(situation.model):
        return None
    return Proposal(
        what="all of a layer in one grouped product",
        make=group_experts,
        key=EXPERTS_KEY if asked == "grouped" else None,
        # transformers groups experts without a proof too
        unproved=f"{ranks.strategy} {NO_GRADIENTS}" if ranks.spec.gathers_by_engine else "",
    )


CHANGE = Change(name="experts", order=10, kernel=False, propose=_propose)
