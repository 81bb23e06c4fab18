"""Every architecture with a load-balancing loss in transformers trains its routers the same in every mode."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest
import torch
from test_routers import SPLITS, WEIGHT, by_transformers, documents, gradients, micro_batches, relative, step
from tiny import model_types, tiny_model
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from trl.trainer.utils import add_fused_lm_head

from packtrain.attention.backends import attending_by
from packtrain.model.forward import add_loss_sum
from packtrain.model.routers import router_loss
from packtrain.proof.choice import decide

REFUSED = ("doge",)  # a loss over other logits than its routers', see tests/train/test_routers.py


def with_router_loss() -> list[str]:
    """The types of whose code a load-balancing loss is part."""
    known = [one for one in model_types() if CONFIG_MAPPING[one] in MODEL_FOR_CAUSAL_LM_MAPPING]
    modules = {one: sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[one]].__module__] for one in known}
    return [one for one, module in modules.items() if hasattr(module, "load_balancing_loss_func")]


def test_the_loss_of_routers_is_that_of_transformers_in_every_mode_of_every_family() -> None:
    """Losses, router losses and gradients of a step in four micro-batches, one of them empty, padded and packed."""
    families = [one for one in with_router_loss() if one not in REFUSED]
    assert len(families) >= 25 and {"mixtral", "qwen3_moe", "gpt_oss", "olmoe", "jamba", "qwen3_next"} <= {*families}
    items = documents()
    for family in families:
        model = tiny_model(family)
        assert isinstance(model, PreTrainedModel), family
        expected_loss, expected_aux, expected = by_transformers(model, items)
        add_fused_lm_head(model)
        add_loss_sum(model)
        routers = router_loss(model, WEIGHT)
        assert routers is not None, family
        for layout in ("padding", decide("auto", model, torch.device("cpu")).backend.name):
            model.zero_grad()
            batches = micro_batches(items, SPLITS["several, one of them empty"], padded=layout == "padding")
            with nullcontext() if layout == "padding" else attending_by(model, layout):
                loss = step(model, routers, batches)
            assert loss == pytest.approx(expected_loss, rel=1e-5), (family, layout)
            assert routers.value() == pytest.approx(expected_aux, rel=1e-5), (family, layout)
            assert relative(gradients(model), expected) < 1e-4, (family, layout)
