"""A multimodal checkpoint trained on text keeps all that was not trained."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from here import run_here
from running import config_on
from safetensors.torch import load_file
from tiny import LONGEST, auto_class, tiny_model
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from packtrain.plan.known_model import TOWERS
from packtrain.serve.export import merge

MORE = ("gemma4", "glm4v", "idefics3", "internvl", "kimi_k25", "lfm2_vl", "llama4", "mistral3", "molmo2", "ovis2", "qwen2_5_vl", "qwen2_vl", "smolvlm", "voxtral")  # fmt: skip
CASES = ["qwen3_vl", "gemma3", "llava", "qwen3_5", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in MORE)]
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{{ eos_token }}{% endfor %}"


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each printable character, within the vocabulary of tiny models."""
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)


def published(family: str, folder: Path) -> Path:
    """A folder as the hub has it: weights in bfloat16 but for those that a model keeps in float32, and a processor's files."""
    model = tiny_model(family)
    assert isinstance(model, PreTrainedModel)
    model.save_pretrained(folder)
    auto_class(family).from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    letters().save_pretrained(folder)
    for name in PROCESSORS:
        (folder / name).write_text(json.dumps({"of": name}))
    return folder


def run_on(model: Path, folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    short = {"max_length": LONGEST}
    groups = {"trainer": {"max_steps": 2}, "optim": {"learning_rate": 1e-2}, "verify": {"preflight": False}, **groups}
    config = config_on(model, folder, data=short, **groups)
    return {**config, "model": {"path": str(model), "dtype": "auto"}}


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}


def check_whole(family: str, before: Path, after: Path) -> None:
    """Checks that two folders differ in weights of the language model alone, and that transformers loads the second."""
    old, new = weights_in(before), weights_in(after)
    assert {name: (one.shape, one.dtype) for name, one in old.items()} == {
        name: (one.shape, one.dtype) for name, one in new.items()
    }
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    towers = {name for name in old if TOWERS.search(name)}
    assert towers and changed and not towers & changed
    configs = [json.loads((folder / "config.json").read_text()) for folder in (before, after)]
    assert configs[0]["architectures"] == configs[1]["architectures"] and "ConditionalGeneration" in str(configs[0])
    assert all((after / name).read_text() == (before / name).read_text() for name in PROCESSORS)
    model, found = auto_class(family).from_pretrained(after, output_loading_info=True)
    assert type(model).__name__ in configs[0]["architectures"] and not found["missing_keys"]
    if type(model.config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        found = AutoModelForCausalLM.from_pretrained(after, output_loading_info=True)[1]
        assert not found["missing_keys"]


@pytest.mark.parametrize("family", CASES)
def test_training_on_text_changes_the_language_model_alone_and_keeps_all_else(family: str, tmp_path: Path) -> None:
    model = published(family, tmp_path / "model")
    run_here(tmp_path, run_on(model, tmp_path))
    check_whole(family, model, tmp_path / "run" / "final")


@pytest.mark.parametrize("family", CASES)
def test_merged_adapters_keep_towers(family: str, tmp_path: Path) -> None:
    model = published(family, tmp_path / "model")
    run_here(tmp_path, run_on(model, tmp_path, peft={"kind": "lora", "r": 4, "alpha": 64}))
    adapters = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    assert adapters and not any(TOWERS.search(name.removeprefix("base_model.model.")) for name in adapters)
    merged = merge(str(tmp_path / "run"), tmp_path / "merged", None)
    check_whole(family, model, merged)
