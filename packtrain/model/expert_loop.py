"""`model.experts=loop`: the experts of a layer run one after the other.

That is the code of the model (transformers.integrations.moe).
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from packtrain.errors import UserError
from packtrain.proof.comparison import has_routers

KEY = "model.experts"
LOOP = "eager"
"""Its name in transformers' ExpertsInterface."""


def can_group(model: nn.Module) -> bool:
    """Return whether tensors of `model` hold all experts of a layer. transformers can then multiply them in any way."""
    quantised = getattr(model, "is_quantized", False)  # their experts have their own formats and code
    return not quantised and any(hasattr(module, "_is_expert_parallel") for module in model.modules())


def loop_over_experts(model: PreTrainedModel, asked: str) -> None:
    """Make experts compute one after the other. changes/experts.py groups them later, by proof.

    Raises UserError if `asked`, model.experts, names a way that this model does not have.
    """
    if can_group(model):
        model.set_experts_implementation(LOOP)
    elif asked != "auto":
        what = "its experts are code of its own" if has_routers(model) else "it has no experts"
        what = f"{type(model).__name__} cannot do that: {what}"
        raise UserError(what, where=f"{KEY} ({asked})", fix="set it to auto", code="experts-not-groupable")
