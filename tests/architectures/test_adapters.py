"""peft=lora adapts every type by default, and says which share of the layers.

Layers that cannot be adapted are left out, or named.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import model_types, tiny_model
from transformers import PreTrainedModel

from packtrain.config.schema import Peft
from packtrain.errors import UserError
from packtrain.model.adapters import add_adapters, continue_adapters
from packtrain.model.towers import towers_of
from packtrain.train.log.console import adapted_share
from packtrain.train.optim.weight_groups import freeze_unreached

LORA = Peft(kind="lora")
ODD = {one: {"out_proj"} for one in ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")}
ODD |= {one: {"router"} for one in ("llama4", "llama4_text", "phimoe")} | {"deepseek_v4": {"o_a_proj"}}
"""Layers without adapters: PEFT refuses them in Mamba, routers give two values, and a grouped layer takes no matrix."""


def made(model_type: str) -> Any:
    model = tiny_model(model_type)
    if not isinstance(model, PreTrainedModel) or model_type == "reformer":
        pytest.skip("cannot be built, or is refused")
    return model


FEW = ("falcon_h1", "nemotron_h", "llama4_text", "phimoe", "deepseek_v4", "gpt2", "gemma4", "qwen3_vl", "llama4", "git")
OTHERS = [pytest.param(one, marks=pytest.mark.exhaustive) for one in model_types() if one not in FEW]


@pytest.mark.parametrize("model_type", [*FEW, *OTHERS])
def test_every_type_trains_adapters_by_default(model_type: str) -> None:
    model = made(model_type)
    towers = towers_of(model)
    adapted: Any = add_adapters(model, LORA, 0)
    chosen = {*adapted.base_model.targeted_module_names}
    assert chosen and not any(name.startswith(f"{tower}.") for name in chosen for tower in towers)
    if not towers:
        assert (adapted.peft_config["default"].exclude_modules or None) == ODD.get(model_type)
    freeze_unreached(adapted, 40, None)
    ids = torch.arange(3, 40)[None]
    logits = adapted(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    logits.float().logsumexp(-1).sum().backward()
    assert all(weight.grad is not None for weight in adapted.parameters() if weight.requires_grad)
    assert "of the weights in layers" in adapted_share(adapted)


def share(model_type: str, adapted: str) -> str:
    """Count the matrices whose names have one of these words, by the shapes alone."""
    layers = [
        (name, weight.numel())
        for name, weight in made(model_type).named_parameters()
        if re.search(r"\.(layers|blocks)\.", name)
    ]
    chosen = sum(number for name, number in layers if any(word in name for word in adapted.split()))
    return f"{chosen / sum(number for _, number in layers):.0%} of the weights in layers"


@pytest.mark.parametrize(
    ("model_type", "adapted", "left"),
    [
        ("llama", "_proj", ""),
        ("qwen3_moe", "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj", "experts.down_proj, experts.gate_up_proj"),
        ("deepseek_v3", "self_attn.q_a_proj self_attn.q_b_proj self_attn.kv_a_proj self_attn.kv_b_proj self_attn.o_proj shared_experts mlp.gate_proj mlp.up_proj mlp.down_proj", "experts.down_proj, experts.gate_up_proj"),
        ("gpt_oss", "q_proj.weight k_proj.weight v_proj.weight o_proj.weight", "experts.down_proj, experts.gate_up_proj"),
        ("qwen2_moe", "self_attn.q_proj.w self_attn.k_proj.w self_attn.v_proj.w self_attn.o_proj shared_expert", "experts.down_proj, experts.gate_up_proj"),
        ("dbrx", "Wqkv out_proj router", "mlp.v1, mlp.w1, mlp.w2"),
        ("jetmoe", "kv_proj", "experts.input_linear, experts.output_linear, mlp.input_linear, mlp.output_linear"),
    ],
)  # fmt: skip
def test_the_header_says_which_share_is_adapted_and_that_experts_are_not(model_type, adapted, left):
    said = adapted_share(add_adapters(made(model_type), LORA, 0))  # type: ignore[arg-type]
    kind = "" if model_type == "dbrx" else "experts: "  # its routers have no loss
    how = "" if model_type in ("dbrx", "jetmoe") else " (peft.experts=true adapts them)"
    wanted = f", not on {kind}{left}{how}" if left else ""
    if model_type == "jetmoe":
        assert said.endswith(wanted)
    else:
        assert said == share(model_type, adapted) + wanted
    by_name = replace(LORA, target_modules=["gate_proj", "up_proj", "down_proj"])
    if model_type == "qwen3_moe":  # experts are adapted by name where PEFT finds them
        assert adapted_share(add_adapters(made(model_type), by_name, 0)) == share(model_type, "experts.")


@pytest.mark.parametrize("excluded", [["q_proj"], ".*q_proj", None])
def test_adapters_that_leave_layers_out_are_trained_further(tmp_path: Path, excluded: Any) -> None:
    peft = replace(LORA, options={"exclude_modules": excluded} if excluded else {})
    adapted = add_adapters(made("llama4_text"), peft, 0)
    adapted.save_pretrained(tmp_path)
    again = continue_adapters(made("llama4_text"), str(tmp_path), peft)
    names = {name for name, _ in again.named_parameters() if "lora_A" in name}
    assert names == {name for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert not any("router" in name or ("q_proj" in name and excluded) for name in names)


@pytest.mark.parametrize(
    ("model_type", "targets", "words"),
    [
        ("gpt_oss", ["gate_proj"], "joint tensors (experts.down_proj, experts.gate_up_proj): peft.experts"),
        ("qwen2_moe", ["experts", "w1"], None),
        ("gpt_oss", ["q_porj"], "Did you mean q_proj?"),
        ("llama", ["gate_porj"], "Did you mean gate_proj?"),
        ("qwen3_moe", ["gate_proj"], "without also targeting up_proj"),
        ("llama4_text", ["router", "q_proj"], 'peft.options.exclude_modules=["router"]'),
        ("llama4_text", ".*(router|q_proj)", 'peft.options.exclude_modules=["router"]'),
        ("nemotron_h", ["out_proj"], 'peft.options.exclude_modules=["out_proj"]'),
    ],
)
def test_targets_that_cannot_be_adapted_get_true_advice(model_type: str, targets: Any, words: str | None) -> None:
    peft = replace(LORA, target_modules=targets)
    with pytest.raises(UserError) as refused:
        add_adapters(made(model_type), peft, 0)
    assert words is None or words in str(refused.value)
    for fix in ["router"] if words and "router" in words else []:  # the advice works
        add_adapters(made(model_type), replace(peft, options={"exclude_modules": [fix]}), 0)
