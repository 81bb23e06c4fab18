"""Tiny random models of several families, with the attention quirks that packing has to survive."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from packtrain.attention import segmented
from packtrain.data.dataset import MIN_PROMPT, Document, Preference
from packtrain.data.sources.quickstart import tokenizer as quickstart_tokenizer
from packtrain.packing.segments import Segments

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
_COMMON = {**SIZES, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
Weights = dict[str, torch.Tensor]
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


def longrope_model() -> PreTrainedModel:
    """A model whose rotary frequencies are others for a document of more than 100 tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope |= {"original_max_position_embeddings": 100, "factor": 8.0}
    model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=100)
    assert model.config.rope_parameters["original_max_position_embeddings"] == 100
    return model


def gradient(model: torch.nn.Module) -> torch.Tensor:
    """All gradients as one vector, zeros where there is none."""
    parts = [p.grad.flatten() if p.grad is not None else torch.zeros(p.numel()) for p in model.parameters()]
    return torch.cat(parts).clone()


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """How far `ours` is off, as a part of the norm of `theirs`."""
    return ((ours - theirs).norm() / theirs.norm()).item()


def documents(lengths: Sequence[int], seed: int = 0) -> list[Document]:
    """Documents of random tokens; about seven of ten are trained."""
    rng = np.random.default_rng(seed)
    return [Document(rng.integers(3, 97, n, dtype=np.int32), rng.random(n) < 0.7) for n in lengths]


def a_pair(rng: np.random.Generator, prompt: int, chosen: int, rejected: int) -> Preference:
    """Random tokens, as many as told of each part."""
    before = rng.integers(3, 97, prompt)

    def document(answer: int) -> Document:
        ids = np.concatenate([before, rng.integers(3, 97, answer)]).astype(np.int32)
        return Document(ids, np.arange(len(ids)) >= prompt)

    return Preference(document(chosen), document(rejected), prompt if prompt >= MIN_PROMPT else 0)


def whole(row: Segments) -> Segments:
    return Segments((row.tokens,))


def break_borders(monkeypatch: pytest.MonkeyPatch, broken: Callable[[Any, Segments], Segments]) -> None:
    """Every layer takes the row that it runs for what `broken` makes of the layer and the row."""
    exact = segmented.segmented_attention

    def attend(module: Any, *args: Any, segments: Segments, **kwargs: Any) -> Any:
        return exact(module, *args, segments=broken(module, segments), **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, segmented.NAME, attend)


def save_model(folder: Path, family: str = "llama", **config: Any) -> Path:
    """A random model with the built-in tokenizer."""
    tokenizer = quickstart_tokenizer()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = tiny_model(family, vocab_size=len(tokenizer), num_hidden_layers=2, **{**special, **config})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def with_files(folder: Path, change: Callable[[Weights], Weights], **config: Any) -> Path:
    """The model in `folder` with other weights in its file, and values in its config.json."""
    file, settings = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    save_file({name: one.clone() for name, one in change(load_file(file)).items()}, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings | config))
    return folder


def bring_code(folder: Path, code: str, config: dict[str, Any]) -> str:
    """Gives a folder the code of OwnConfig and OwnForCausalLM, as a hub model with remote code has it."""
    names = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    (folder / "own_code.py").write_text(code)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": names}))
    return str(folder)


def save_adapters(folder: Path, base: Path, **lora: Any) -> Path:
    """Adapters on the model in `base` that change what it says."""
    torch.manual_seed(1)
    given = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "down_proj"], **lora}
    adapted: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, **given))
    for weight in adapted.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.2)
    adapted.save_pretrained(folder)
    return folder


def save_run(root: Path, made: Path, **summary: Any) -> Path:
    """A run folder that ended, with the model of `made` as its final/."""
    root.mkdir()
    made.rename(root / "final")
    (root / ".packtrain").write_text("made by a test\n")
    (root / "summary.json").write_text(json.dumps({"status": "done", **summary}))
    return root
