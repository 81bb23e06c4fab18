"""The experts of a layer run in one product: `model.experts` is `grouped` or `fused`.

`grouped` is transformers' own (transformers.integrations.moe): `grouped_mm` sorts tokens by expert and gives all to torch's grouped product.
`fused` is Liger's, in Triton: products gather their tokens themselves, and the first one computes the activation. Neither supports autocast
(pytorch/pytorch#174763). So here they get weights and tokens in autocast's format, as the linear layers of the loop do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from packtrain.changes.liger import why_no_kernels
from packtrain.changes.spec import NO_GRADIENTS, Change, Proposal, Situation
from packtrain.errors import UserError
from packtrain.model.expert_adapters import AdaptedTensor, whole
from packtrain.model.layers import EXPERTS_KEY, LOOP, can_group
from packtrain.model.precision import cast_weight

GROUPED, FUSED = "packtrain_grouped", "packtrain_fused"
"""Names in transformers' ExpertsInterface."""
Run = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Runs the experts `chosen` [T, k] on `hidden` [T, h]. Returns outputs [T, h], weighted by `weights` [T, k]."""


def group_experts(model: PreTrainedModel) -> Callable[[], None]:
    """Make `model` compute by grouped products. Returns the undo function."""
    return _compute_by(GROUPED, grouped_mm_experts_forward, model)


def fuse_experts(model: PreTrainedModel) -> Callable[[], None]:
    """Make `model` compute by Liger's fused product. Returns the undo function."""
    from liger_kernel.ops import LigerFusedMoEFunction  # pyright: ignore[reportMissingImports]

    def run(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        hidden = hidden.to(experts.gate_up_proj.dtype)  # float32 where a proof computes in it; weights follow
        first, second = (weight.to(hidden.dtype) for weight in map(whole, (experts.gate_up_proj, experts.down_proj)))
        return LigerFusedMoEFunction.apply(hidden, first, second, chosen.int(), weights)

    return _compute_by(FUSED, run, model)


def _compute_by(name: str, run: Run, model: PreTrainedModel) -> Callable[[], None]:
    ALL_EXPERTS_FUNCTIONS.register(name, partial(_in_format, run))
    model.set_experts_implementation(name)
    return lambda: model.set_experts_implementation(LOOP)


def _in_format(run: Run, experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
    kind, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(kind):
        experts = _InFormat(experts, torch.get_autocast_dtype(kind))
        hidden = hidden.to(experts.dtype)
    return run(experts, hidden, chosen, weights).to(dtype)


class _InFormat:
    """A module whose tensors are converted to `dtype` when they are read."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return cast_weight(cast(Any, value), self.dtype) if isinstance(value, torch.Tensor | AdaptedTensor) else value


def _check(situation: Situation) -> None:
    if situation.config.model.experts == "fused" and (lacks := why_no_kernels(situation.ranks.device)):
        what = f"Liger's fused experts are not available: {lacks}"
        raise UserError(what, where=f"{EXPERTS_KEY} (fused)", fix="set it to auto", code="change-unavailable")


def _propose(situation: Situation) -> Proposal | None:
    asked, ranks = situation.config.model.experts, situation.ranks
    if asked == "loop" or not can_group(situation.model):
        return None
    if asked == "fused":
        what = "all of a layer in Liger's fused product"
        return Proposal(what=what, make=fuse_experts, key=EXPERTS_KEY)
    return Proposal(
        what="all of a layer in one grouped product",
        make=group_experts,
        key=EXPERTS_KEY if asked == "grouped" else None,
        # transformers groups experts without a proof too
        unproved=f"{ranks.strategy} {NO_GRADIENTS}" if ranks.spec.gathers_by_engine else "",
    )


CHANGE = Change(name="experts", order=10, kernel=False, propose=_propose, check=_check)
