"""Tiny random models of several families, with the attention quirks that packing has to survive."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_COMMON = {
    **SIZES,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict] = {
    "llama": {},  # grouped queries
    "mistral": {"sliding_window": 8},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 8},  # soft-capped scores and logits, every other layer local
    "gemma3_text": {"sliding_window": 8},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},  # learned positions
    "phi": {"partial_rotary_factor": 0.5},  # output head with a bias
    "cohere": {},  # scaled logits
}


def tiny_model(family: str, **overrides) -> PreTrainedModel:
    """A model of `family` with weights large enough that what a token sees shows in its outputs."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**_COMMON, **FAMILIES.get(family, {}), **overrides})
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()  # no dropout
