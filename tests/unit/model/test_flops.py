"""The FLOPs of training, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tiny_models import SIZES
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from packtrain.config.schema import Peft
from packtrain.model.adapters import add_adapters
from packtrain.model.flops import training_flops, visible_keys

LAYER = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96
HEAD = 97 * 64
PAIR = 2 * 4 * (16 + 16)  # a query and a key, forwards in one layer
DOCUMENTS = np.array([10, 20], np.int32)
SEEN = 10 * 11 // 2 + 20 * 21 // 2


def model_of(kind: str, **more: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SIZES, **more}))


def test_full_training_takes_six_flops_a_weight_and_token() -> None:
    for tied in (False, True):
        found = training_flops(model_of("llama", tie_word_embeddings=tied))
        assert (found.token, found.target) == (6 * 3 * LAYER, 6 * HEAD)
        assert found.of(DOCUMENTS, None, 28) == 30 * 6 * 3 * LAYER + 28 * 6 * HEAD + SEEN * 3 * 3 * PAIR
    # the head is computed only where a target is predicted: long prompts add nothing to it
    assert found.of(DOCUMENTS, None, 28) - found.of(DOCUMENTS, None, 3) == 25 * 6 * HEAD


def test_frozen_weights_have_no_gradient_and_what_adapters_do_not_follow_no_backward_pass() -> None:
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**SIZES))
    found = training_flops(add_adapters(model, Peft(kind="lora", r=4), seed=0))
    adapters = 4 * (128 + 96 + 96 + 128 + 160 + 160 + 160)
    assert (found.token, found.target) == (4 * 3 * LAYER + 6 * 3 * adapters, 4 * HEAD)
    assert found.by_window == {None: 3 * 3 * PAIR}

    late: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**SIZES)).requires_grad_(False)
    late.model.layers[2].mlp.down_proj.weight.requires_grad_(True)
    found = training_flops(late)
    down = 64 * 96
    assert (found.token, found.target) == (2 * 3 * LAYER + 2 * LAYER + 2 * down, 4 * HEAD)


def test_experts_count_by_their_share_and_windows_by_what_they_show() -> None:
    routed = {"num_local_experts": 8, "num_experts_per_tok": 2}
    found = training_flops(model_of("mixtral", **routed))
    experts, router = 2 * 3 * 64 * 96, 8 * 64
    assert found.token == 6 * 3 * (LAYER - 3 * 64 * 96 + experts + router)
    assert visible_keys(DOCUMENTS, 8) == (36 + 2 * 8) + (36 + 12 * 8)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    mixed = training_flops(model_of("qwen3", use_sliding_window=True, sliding_window=8, layer_types=kinds))
    assert mixed.by_window == {8: 2 * 3 * PAIR, None: 3 * PAIR}


def test_a_shared_prompt_counts_once_and_a_reference_is_a_forward_pass_more() -> None:
    model = model_of("llama")
    pair, shared = np.array([15, 12], np.int32), np.array([9], np.int32)
    found = training_flops(model)
    seen = 15 * 16 // 2 + 12 * 13 // 2 - 9 * 10 // 2
    assert found.of(pair, shared, 9) == 18 * found.token + 9 * found.target + seen * 9 * PAIR
    with_reference = training_flops(model, forwards=1)
    assert (with_reference.token, with_reference.target) == (8 / 6 * found.token, 8 / 6 * found.target)
    assert with_reference.by_window == {None: 4 * 3 * PAIR}
