"""Adapters on experts equal PEFT's without sums, and are counted, continued and merged."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from here import loaded, run_here
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from running import base_config, config_on
from test_fused_experts import DEEPSEEK
from tiny_models import EXPERTS, off, save_model, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from packtrain.changes.experts import group_experts
from packtrain.config.schema import Model, Peft
from packtrain.errors import UserError
from packtrain.model import expert_adapters
from packtrain.model.adapters import add_adapters, continue_adapters
from packtrain.model.layers import loop_over_experts, recompute
from packtrain.model.load import base_model
from packtrain.plan.known_model import adapter_shapes, weights_of
from packtrain.serve.export import merge
from packtrain.serve.trained import adapters_of, find_trained
from packtrain.train.log.console import adapted_share

ON_EXPERTS = Peft(kind="lora", r=3, alpha=7, experts=True)
FAMILIES = {
    "qwen3_moe": EXPERTS,
    "mixtral": EXPERTS,
    "gpt_oss": {},
    "deepseek_v3": EXPERTS | DEEPSEEK,
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "granitemoe": EXPERTS,
    "llama4_text": {**EXPERTS, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2},
}
FEW = ("qwen3_moe", "mixtral", "gpt_oss")
EACH = [pytest.param(one, marks=[pytest.mark.exhaustive] * (one not in FEW)) for one in FAMILIES]
IDS = torch.arange(3, 40)[None]


def adapted(family: str, peft: Peft = ON_EXPERTS, dtype: torch.dtype = torch.float32, std: float = 0.1) -> Any:
    """A tiny model whose adapters change its outputs."""
    model: Any = tiny_model(family, **FAMILIES[family])
    loop_over_experts(model, "auto")
    return stirred(add_adapters(model.to(dtype), peft, seed=0), std)


def stirred(model: Any, std: float = 0.1) -> Any:
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=std, generator=torch.Generator().manual_seed(len(name)))
    return model


def trained(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of a row, and gradients by name."""
    ids = torch.arange(59)[None] * 7 % 94 + 3
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits[0].double(), ids[0] * 5 % 97)
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def by_definition(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients in float64, with each adapter added to its expert by its formula."""
    base, wanted = model.double().get_base_model(), dict[str, torch.Tensor]()
    plain = type(base)(base.config).double().eval()
    names = {name.replace(".base_layer", ""): one for name, one in base.state_dict().items()}
    plain.load_state_dict({name: one for name, one in names.items() if ".lora_" not in name})
    layers: list[tuple[str, Any]] = [one for one in base.named_modules() if isinstance(one[1], LoraLayer)]
    for name, layer in layers:
        whole, count = weight_of(layer), getattr(layer, "num_experts", 1)
        a, b, scale = layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"]
        each = [b[:, at::count] @ a.view(count, -1, a.shape[1])[at] for at in range(count)]
        added = torch.stack(each) if whole.ndim == 3 else each[0]
        added = added.mT if getattr(layer.get_base_layer(), "is_transposed", False) else added
        place = f"{name.replace('.base_layer', '')}.{getattr(layer, 'parameter_name', 'weight')}"
        wanted[place] = whole + scale * added
    for name, weight in wanted.items():
        module = plain.get_submodule(name.rpartition(".")[0])
        del module._parameters[name.rpartition(".")[2]]
        setattr(module, name.rpartition(".")[2], weight)
    loop_over_experts(plain, "auto")
    loss, _ = trained(plain)
    return loss, {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}


def weight_of(layer: Any) -> torch.Tensor:
    return layer.get_param() if hasattr(layer, "get_param") else layer.get_base_layer().weight


def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may add an adapter to a tensor of experts."""
    own = expert_adapters.whole

    def whole(one: Any) -> Any:
        assert not isinstance(one, expert_adapters.AdaptedTensor)
        return own(one)

    monkeypatch.setattr(expert_adapters, "whole", whole)


@pytest.mark.parametrize("family", EACH)
def test_losses_and_gradients_are_those_of_the_definition_and_nothing_is_added_up(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, gradients = by_definition(adapted(family))
    assert {name for name in gradients if "experts" in name}
    never(monkeypatch)
    ways = {"loop": (lambda _: None, 1e-12), "again": (lambda one: recompute(one, "full"), 1e-12)}
    if family != "llama4_text":
        ways |= {"grouped": (group_experts, 5e-5)}
        ways |= {"selective": (lambda one: (group_experts(one), recompute(one, "selective")), 5e-5)}
    for way, (change, near) in ways.items():
        model = adapted(family)
        model = model.double() if near < 1e-9 else model
        change(base_model(model.train()))
        loss, ours = trained(model)
        assert abs(loss - expected) <= near * abs(expected), way
        most = max(one.norm() for one in gradients.values())
        for name, one in gradients.items():
            assert (ours[name] - one).norm() <= near * max(one.norm(), 1e-2 * most), (way, name)


@torch.no_grad()
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_in_bfloat16_what_adapters_change_is_nearer_to_float64_than_by_sums(family: str, autocast: Any) -> None:
    dtype = torch.bfloat16 if autocast is None else torch.float32
    model = adapted(family, replace(ON_EXPERTS, target_modules=[]), dtype, std=1e-2)
    layers = [one for one in model.modules() if isinstance(one, ParamWrapper)]
    hidden = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))

    def change(layer: Any, dtype: torch.dtype, autocast: Any = None) -> torch.Tensor:
        """The part of the outputs that the adapters add."""
        chosen, weights = torch.arange(1024).view(512, 2) % 4, torch.full((512, 2), 0.5, dtype=dtype)
        given = hidden.to(dtype), chosen, weights
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            return (layer(*given) - layer.get_base_layer()(*given)).double()

    ours = change(layers[0], dtype, autocast)
    for layer in layers:
        del vars(layer)["forward"]
    theirs = change(layers[0], dtype, autocast)
    wanted = change(layers[0].double(), torch.float64)
    assert off(ours, wanted) < 0.95 * off(theirs, wanted)


def saved(place: Path, family: str, **more: Any) -> Path:
    kinds = {"layer_types": ["conv", "full_attention"]} if family == "lfm2_moe" else {}
    return save_model(place, family, **{**FAMILIES[family], **kinds, **more})


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS, use_cache=False).logits.float()


@pytest.mark.parametrize("family", [one for one in EACH if one.values != ("mixtral",)])
def test_saved_they_load_in_peft_alone_are_merged_and_trained_further(family: str, tmp_path: Path) -> None:
    base = saved(tmp_path / "base", family)
    load = AutoModelForCausalLM.from_pretrained
    adapted = stirred(add_adapters(load(base), ON_EXPERTS, seed=0))
    expected, place = logits(adapted), str(tmp_path / "adapters")
    adapted.save_pretrained(place)
    assert off(logits(load(base)), expected) > 0.1
    assert off(logits(PeftModel.from_pretrained(load(base), place)), expected) <= 1e-5
    assert off(logits(continue_adapters(load(base), place, adapters_of(find_trained(place)))), expected) <= 1e-6
    assert off(logits(continue_adapters(load(base), place, Peft())), expected) <= 1e-5
    for peft, fix in (
        (replace(ON_EXPERTS, experts=False), "set peft.experts=true"),
        (replace(ON_EXPERTS, r=4), "set peft.r=3"),
    ):
        with pytest.raises(UserError, match=fix):
            continue_adapters(load(base), place, peft)
    merge(place, None, None)
    assert off(logits(load(f"{place}-merged")), expected) <= 1e-5


def test_a_run_says_what_it_adapts_and_its_merged_model_says_what_plain_peft_says(tmp_path: Path) -> None:
    """Strategies, layouts and resumed runs: test_cells.py."""
    base = saved(tmp_path / "base", "mixtral")
    config = config_on(base, tmp_path, trainer={"max_steps": 2})
    run = run_here(tmp_path, config, "peft=lora", "peft.r=4", "peft.experts=true", "peft.merge=true")
    assert "% of the weights in layers\n" in run.log and "in one grouped product" in run.summary["changes"]["experts"]
    load = AutoModelForCausalLM.from_pretrained
    expected = logits(PeftModel.from_pretrained(load(base), str(run.folder / "final")))
    assert off(logits(load(run.folder / "final-merged")), expected) <= 1e-5
    assert off(logits(load(base)), expected) > 1e-3


def test_on_a_bfloat16_base_small_adapters_of_experts_are_merged_by_chance_not_rounded_away(tmp_path: Path) -> None:
    base, place = saved(tmp_path / "base", "qwen3_moe", dtype=torch.bfloat16), tmp_path / "adapters"
    load = partial(AutoModelForCausalLM.from_pretrained, dtype="auto")
    before = load(base).bfloat16()
    before.save_pretrained(base)
    adapted = stirred(add_adapters(load(base), ON_EXPERTS, seed=0), std=1e-4)
    adapted.save_pretrained(place)
    name = "model.layers.1.mlp.experts.down_proj"
    change = adapted.get_submodule(f"base_model.model.{name.rpartition('.')[0]}").get_delta_weight("default").double()
    merge(str(place), None, None)
    moved = load(f"{place}-merged").get_parameter(name).double() - before.get_parameter(name).double()
    share = (moved * change).sum() / change.square().sum()
    assert 0.8 < share < 1.2 and load(f"{place}-merged").dtype == torch.bfloat16


@pytest.mark.parametrize("peft", [ON_EXPERTS, replace(ON_EXPERTS, experts=False)], ids=["experts", "none"])
@pytest.mark.parametrize("family", EACH[:-1])
def test_a_plan_counts_the_weights_that_are_trained(family: str, peft: Peft, tmp_path: Path) -> None:
    options = {"rank_pattern": {"experts.gate_up_proj": 5, "down_proj": 2}, "exclude_modules": r".*self_attn\.o.*"}
    base = saved(tmp_path / "base", family)
    shapes = weights_of(Model(path=str(base))).shapes
    whole = replace(peft, target_modules=r".*self_attn\.(o|out)_proj", modules_to_save=["experts", "embed_tokens"])
    for one in (peft, replace(peft, options=options) if peft.experts else whole):
        model: Any = add_adapters(AutoModelForCausalLM.from_pretrained(base), one, seed=0)
        counted = sum(map(math.prod, adapter_shapes(shapes, one)))
        assert counted == sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {}, r"peft\.experts: LlamaForCausalLM has no .*\[no-joint-experts\]"),
        ("jetmoe", {}, r"peft\.experts: JetMoe.* has no .*\[no-joint-experts\]"),
        ("qwen3_moe", {"options": {"exclude_modules": ["experts"]}}, r"or they are excluded"),
        ("deepseek_v3", {"experts": False, "dropout": 0.1}, r"peft\.dropout.*: .*gate_proj.*\[tensors-not-adaptable\]"),
        ("deepseek_v3", {"experts": False, "options": {"use_dora": True}}, r"use_dora: .*\[tensors-not-adaptable\]"),
        ("gpt_oss", {"options": {"rank_pattern": {"gate_upproj": 4}}}, r"no module 'gate_upproj'"),
        ("deepseek_v3", {"options": {"rank_pattern": {"gate_upproj": 4}}}, r"no module 'gate_upproj'"),
    ],
)
def test_adapters_that_cannot_be_are_refused_with_a_reason(family: str, changes: Any, said: str) -> None:
    more = {"kv_channels": 16} if family == "jetmoe" else FAMILIES.get(family, {})
    with pytest.raises(UserError, match=said):
        add_adapters(tiny_model(family, **more), replace(ON_EXPERTS, **changes), seed=0)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("peft.dropout=0.1", "experts-with-dropout"),
        ("peft.options={use_dora: true}", "experts-with-dora"),
        ("peft=none", "no-adapters"),
    ],
)
def test_keys_that_experts_do_not_go_with_are_named_before_anything_is_loaded(
    given: str, code: str, tmp_path: Path
) -> None:
    names = "peft.target_modules=[q_proj]"
    with pytest.raises(UserError, match=rf"peft\.experts.*\[{code}\]"):
        loaded(tmp_path, base_config(tmp_path), "peft=lora", names, "peft.experts=true", given)


def test_parts_can_be_excluded_and_have_ranks_of_their_own() -> None:
    options = {"exclude_modules": ["down_proj", r"q_proj"], "rank_pattern": {"experts.gate_up_proj": 5}}
    model = adapted("qwen3_moe", replace(ON_EXPERTS, options=options))
    names = {name for name, one in model.named_parameters() if one.requires_grad and "experts" in name}
    assert {re.sub(r"layers\.\d+", "layers", name) for name in names} == {
        f"base_model.model.model.layers.mlp.experts.lora_{one}.default.weight" for one in "AB"
    }
    assert {one.shape[0] for name, one in model.named_parameters() if "experts.lora_A" in name} == {5 * 4}
    options = {"layers_to_transform": [1], "use_rslora": True}
    only = adapted("qwen3_moe", replace(ON_EXPERTS, target_modules=[], options=options))
    names = {name for name, one in only.named_parameters() if one.requires_grad}
    assert names and all("layers.1.mlp.experts" in name for name in names)
    assert "% of the weights in layers, not on experts: " in adapted_share(only)
    assert adapted_share(adapted("qwen3_moe")).endswith("of the weights in layers")
