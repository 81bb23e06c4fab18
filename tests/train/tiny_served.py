"""Models with tokenizers as a training leaves them, tiny and untrained, for what comes after the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from packtrain.data.sources.quickstart import tokenizer as quickstart_tokenizer


def save_model(folder: Path, family: str = "llama", **config: Any) -> Path:
    """A random model with the built-in tokenizer."""
    tokenizer = quickstart_tokenizer()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = tiny_model(family, vocab_size=len(tokenizer), num_hidden_layers=2, **special, **config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
    import json

    root.mkdir()
    made.rename(root / "final")
    (root / ".packtrain").write_text("made by a test\n")
    (root / "summary.json").write_text(json.dumps({"status": "done", **summary}))
    return root
