"""The keys of a model's config that are read from transformers' source are those that its classes take."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from packtrain.config.schema import Model, Peft
from packtrain.errors import UserError
from packtrain.plan.known_model.model_config import check_model

TYPES = (
    "llama",
    "gpt2",
    "opt",
    "bloom",
    "mamba",
    "phi",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "glm4_moe",
    "kimi_linear",
)


@pytest.mark.parametrize("kind", TYPES)
def test_each_key_that_a_model_type_has_is_known_and_others_are_not(kind: str) -> None:
    made = CONFIG_MAPPING[kind]()
    taken = {**made.to_dict(), **dict.fromkeys(made.attribute_map), "model_type": kind}
    beside = {"head_dim": 8, "rope_theta": 1e4, "rope_scaling": None, "partial_rotary_factor": 0.5}
    taken |= beside if hasattr(made, "rope_parameters") else {}
    check_model(Model(path=None, init="random", config=taken), Peft())
    with pytest.raises(UserError, match="has no 'hidden_sise'"):
        check_model(Model(path=None, init="random", config={**taken, "hidden_sise": 8}), Peft())
