"""Weights that no text reaches are found for every type, and no others."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from sweep import WINDOW, documents, one_by_one
from test_architectures import types
from tiny import tiny_model
from torch import nn
from transformers import PreTrainedModel

from packtrain.config.schema import Peft
from packtrain.errors import UserError
from packtrain.model.adapters import add_adapters
from packtrain.model.spread import Ranks
from packtrain.train.optim.weight_groups import freeze_unreached, reduce_unreached

LONGEST = max(len(document.input_ids) for document in documents())
NEITHER = ("reformer",)  # runs in eval mode alone, and is refused


def trained(model: nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("peft", ["none", "lora"])
@pytest.mark.parametrize("model_type", types())
def test_what_no_document_gives_a_gradient_is_frozen(model_type: str, peft: str) -> None:
    model: Any = tiny_model(model_type, WINDOW)
    if not isinstance(model, PreTrainedModel) or model_type in NEITHER:
        pytest.skip("cannot be built, or is refused")
    model = add_adapters(model, Peft(kind="lora"), 0) if peft == "lora" else model
    before = trained(model.train())
    one_by_one(model, documents())
    expected = {name for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    words, at_times = freeze_unreached(model, LONGEST, None)
    assert trained(model) == expected and bool(words) == (expected != before)
    assert at_times == ((model_type, peft) in (("deepseek_v4", "none"), ("deepseek_v4", "lora"), ("rwkv", "none")))
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize(
    ("model_type", "peft", "patterns"),
    [
        ("llama", "none", ""),
        ("gemma3", "none", "model.multi_modal_projector, model.vision_tower"),
        ("gemma3", "lora", ""),
        ("deepseek_v32", "none", "model.layers.*.self_attn.indexer"),
        ("gemma3n_text", "lora", "model.layers.*.altup.correction_coefs"),  # read past in training mode alone
        ("bart", "none", "model.decoder.layers.*.encoder_attn, model.decoder.layers.*.encoder_attn_layer_norm"),
    ],
)
def test_frozen_weights_are_named_by_the_outermost_module(model_type: str, peft: str, patterns: str) -> None:
    model: Any = tiny_model(model_type)
    model = add_adapters(model, Peft(kind="lora"), 0) if peft == "lora" else model
    before = trained(model)
    words, at_times = freeze_unreached(model, 40, None)
    assert (words.partition(": ")[2], at_times) == (patterns, False)
    places = "|".join(re.escape(part).replace(r"\*", r"\d+") for part in patterns.split(", ")) or "none"
    named = {name for name in before if re.match(rf"(base_model\.model\.)?({places})\.", name)}
    assert named == before - trained(model)


def test_a_weight_that_only_long_documents_reach_is_trained() -> None:
    """The compressors of deepseek_v4 begin to work after four tokens, here."""
    model: Any = tiny_model("deepseek_v4")
    assert freeze_unreached(model, 40, None)[1]
    names = trained(model)
    assert any("compressor.kv_proj" in name for name in names) and not any("indexer" in name for name in names)
    freeze_unreached(short := tiny_model("deepseek_v4"), 3, None)
    assert not any("compressor.kv_proj" in name for name in trained(short))  # type: ignore[arg-type]


class Experts(nn.Module):
    """Eight modules, one for each token, as in code that comes with models."""

    def __init__(self, width: int, kind: type) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 8)
        made = [nn.Linear(width, width) for _ in range(8)]
        self.experts = nn.ModuleList(made) if kind is list else nn.ModuleDict({f"e{i}": m for i, m in enumerate(made)})
        self.unused = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        share, chosen = self.gate(hidden).softmax(-1).max(-1)
        each = [*self.experts.children()]
        return sum((share * (chosen == i))[..., None] * each[i](hidden) for i in chosen.unique().tolist())  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [list, dict])
def test_experts_and_layers_that_are_left_out_by_chance_stay_trained(kind: type) -> None:
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp = Experts(64, kind)
    words, at_times = freeze_unreached(model, 40, None)
    assert at_times and words.endswith(": model.layers.*.mlp.unused")
    assert sum("experts" in name for name in trained(model)) == 2 * 8 * len(model.model.layers)


def test_a_training_of_nothing_that_text_reaches_is_refused() -> None:
    model: Any = tiny_model("gemma3")
    adapted = add_adapters(model, Peft(kind="lora", target_modules=".*vision_tower.*fc1"), 0)
    with pytest.raises(UserError, match=r"\[no-gradient-from-text\]"):
        freeze_unreached(adapted, 40, None)


# a model that torch does not shard is as of an older torch
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp2"])
def test_strategies_that_mix_gradients_of_idle_weights_are_refused(strategy: str) -> None:
    model = tiny_model("llama")
    with pytest.raises(UserError, match=r"\[gradients-differ-by-rank\]"):
        reduce_unreached(model, Ranks(0, 2, torch.device("cpu"), strategy), True)
    reduce_unreached(model, Ranks(0, 2, torch.device("cpu"), strategy), False)
    for ranks in (Ranks(0, 1, torch.device("cpu"), strategy), Ranks(0, 2, torch.device("cpu"), "zero3")):
        reduce_unreached(model, ranks, True)
