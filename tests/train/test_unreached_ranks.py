"""Weights that text never reaches are frozen alike under every strategy.

Experts that are left out by chance train on, on two processes as on one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from running import base_config, train
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from packtrain.data.sources.quickstart import tokenizer

WIDTHS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
IDLE = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class IdleConfig(LlamaConfig):
    model_type = "idle"


class Experts(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 64)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(64))

    def forward(self, hidden):
        share, chosen = self.gate(hidden).softmax(-1).max(-1)
        return sum((share * (chosen == i))[..., None] * self.experts[i](hidden) for i in chosen.unique().tolist())


class IdleForCausalLM(LlamaForCausalLM):
    config_class = IdleConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Experts(config.hidden_size)
        self.tower = nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()
"""


def gemma3(folder: Path) -> None:
    """A language model with a tower for pictures."""
    words = tokenizer()
    own = {**WIDTHS, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(words), "sliding_window": 64}
    tower = {**WIDTHS, "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=own, vision_config=tower, mm_tokens_per_image=4)
    config.text_config.pad_token_id = config.text_config.eos_token_id = words.eos_token_id
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words.save_pretrained(folder)


def idle(folder: Path) -> None:
    """A model whose code came with it: of 64 experts, each a module, a token chooses one; and a tower."""
    words = tokenizer()
    ids: dict[str, Any] = {"vocab_size": len(words), "pad_token_id": 0, "eos_token_id": words.eos_token_id}
    config = LlamaConfig(**WIDTHS, **ids)
    scope: dict[str, Any] = {}
    exec(IDLE, scope)
    torch.manual_seed(0)
    scope["IdleForCausalLM"](config).save_pretrained(folder)
    (folder / "modeling_idle.py").write_text(IDLE)
    settings = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "IdleConfig", "AutoModelForCausalLM": "IdleForCausalLM"}
    settings |= {"model_type": "idle", "auto_map": {auto: f"modeling_idle.{name}" for auto, name in names.items()}}
    (folder / "config.json").write_text(json.dumps(settings))
    words.save_pretrained(folder)


SGD = ["optim.name=sgd", "optim.learning_rate=0.5"]
EXHAUSTIVE = [pytest.mark.exhaustive, pytest.mark.slow]


@pytest.mark.parametrize(
    ("made", "overrides", "frozen"),
    [
        (idle, ["model.trust_remote_code=true"], ": tower"),
        *(  # sgd: they give experts that idle on all ranks a gradient of zero, and Adam moves on by that
            pytest.param(idle, [f"strategy={name}", "model.trust_remote_code=true", *SGD], ": tower", marks=EXHAUSTIVE)
            for name in ("fsdp2", "zero3")
        ),
        *(
            pytest.param(gemma3, [f"strategy={name}", *more], "model.vision_tower", marks=EXHAUSTIVE)
            for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2")
            for more in ([], ["peft=lora"])
        ),
    ],
)
def test_two_processes_train_as_one(
    tmp_path: Path, made: Callable[[Path], None], overrides: list[str], frozen: str
) -> None:
    made(tmp_path / "model")
    config = {
        **base_config(tmp_path, trainer={"max_steps": 3, "checkpoint_every": 2}),
        "model": {"path": str(tmp_path / "model")},
    }
    two = train(tmp_path, config, *overrides, name="two", processes=2)
    one = train(tmp_path, config, *(item for item in overrides if not item.startswith("strategy")), name="one")
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    kind = "adapter_model" if "peft=lora" in overrides else "model"
    start = {} if kind == "adapter_model" else load_file(tmp_path / "model/model.safetensors")
    ours, theirs = (load_file(run.folder / f"final/{kind}.safetensors") for run in (two, one))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=2e-4, rtol=0)
        if start and "tower" in name:
            assert torch.equal(weight, start[name])
    said = [line for line in two.log.splitlines() if " frozen " in line]
    assert [frozen in line for line in said] == [True]
    if made is idle:
        before, moved = start, ours
        assert any(torch.equal(moved[name], before[name]) for name in moved if ".experts." in name)  # idle in each step
        assert any(not torch.equal(moved[name], before[name]) for name in moved if ".experts." in name)
