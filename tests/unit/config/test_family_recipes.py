"""Recipes of model families fit their GPUs, by the weight shapes that transformers makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packtrain.config.compose import load_config
from packtrain.plan.fit import GIB, Memory
from packtrain.plan.known_model import language_sizes, weights_of
from packtrain.plan.memory import estimate
from tests.unit.config.stored_shapes import write_shapes
from tests.unit.config.test_recipes import PROCESSES

QWEN35_9B = {"vision_config": {"out_hidden_size": 4096}}
GEMMA4_31B = {
    "text_config": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "num_global_key_value_heads": 4,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 1024,
        "vocab_size": 262144,
    },
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 72,
    },
}
GPT_OSS_20B = {"num_hidden_layers": 24, "num_local_experts": 32}
MISTRAL_SMALL = {"tie_word_embeddings": False}
GRANITE_TINY = {
    "hidden_size": 1536,
    "num_hidden_layers": 40,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 48,
    "mamba_d_state": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "vocab_size": 100352,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "layer_types": ["full_attention" if n in (5, 15, 25, 35) else "linear_attention" for n in range(40)],
}


@pytest.mark.parametrize(
    ("recipe", "model_type", "sizes", "billions", "adapters", "gib"),
    [
        ("qwen3.5-1x8", "qwen3_5", QWEN35_9B, 9.41, 0, 80),
        ("gemma4-1x8", "gemma4", GEMMA4_31B, 31.3, 244.9, 80),
        ("gpt-oss-1gpu", "gpt_oss", GPT_OSS_20B, 20.9, 184.9, 80),
        ("mistral-small-1x8", "mistral3", MISTRAL_SMALL, 24.0, 0, 80),
        ("granite4-1gpu", "granitemoehybrid", GRANITE_TINY, 6.94, 23.7, 24),
    ],
)
def test_a_family_recipe_fits_its_gpus_with_room_to_spare(
    recipe: str, model_type: str, sizes: dict[str, Any], billions: float, adapters: float, gib: int, tmp_path: Path
) -> None:
    folder = write_shapes(tmp_path, model_type, sizes, mxfp4=model_type == "gpt_oss")
    config = load_config(f"recipes/{recipe}.yaml", [f"model.path={folder}"])
    found = estimate(config, PROCESSES.get(recipe, 1), gib * GIB)
    assert isinstance(found, Memory) and found.device
    assert found.parameters == pytest.approx(billions * 1e9, rel=0.003)
    if adapters:
        assert found.trained == pytest.approx(adapters * 1e6, rel=0.003)
    if found.activations is not None:
        assert found.fits and found.total < 0.9 * found.device
        return
    # not counted for this type: leave room for the inputs of all layers, and for as much again inside of one
    assert found.fits is None and found.checkpointing == "full" and config.batch.tokens_per_device
    text = language_sizes(weights_of(config.model).sizes)
    inputs = 2 * config.batch.tokens_per_device * text["num_hidden_layers"] * text["hidden_size"]
    assert found.total + 2 * inputs < 0.9 * found.device
