"""The memory estimate of a plan, against transformers' and peft's own counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packtrain.config.compose import load_config
from packtrain.launch.memory import Memory, estimate

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
}
MADE = ["model.init=random", "model.tokenizer=quickstart", "data.train=owner/data", "batch.examples_per_step=4"]


def sized(kind: str, **more: object) -> list[str]:
    sizes = {"model_type": kind, **SIZES, **more}
    return [f"model.config.{name}={str(value).lower()}" for name, value in sizes.items()]


def known(overrides: list[str], processes: int = 1) -> Memory:
    found = estimate(load_config(None, [*MADE, *overrides]), processes)
    assert isinstance(found, Memory), found
    return found


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("mistral", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_parameters_from_sizes_are_those_of_the_model_that_transformers_makes(
    kind: str, more: dict[str, bool], tmp_path: Path
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **more))
    expected = sum(one.numel() for one in model.parameters())
    assert known(sized(kind, **more)).parameters == expected
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    stored = known(["model.init=pretrained", f"model.path={tmp_path}", "model.dtype=auto"])
    assert (stored.parameters, stored.weights, stored.optimizer) == (expected, 2 * expected, 4 * expected)
    for targets in ("all-linear", ["q_proj", "down_proj"]):
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
        trained = sum(one.numel() for one in adapted.parameters() if one.requires_grad)
        listed = targets if isinstance(targets, str) else f"[{','.join(targets)}]"
        lora = known([*sized(kind, **more), "peft=lora", "peft.r=4", f"peft.target_modules={listed}"])
        assert (lora.trained, lora.gradients) == (trained, 4 * trained)
        model = adapted.unload()


@pytest.mark.parametrize(("optimizer", "per_parameter"), [("adamw_torch", 8), ("sgd", 0), ("adamw_torch_fused", 8)])
def test_optimizer_state_depends_on_the_optimizer(optimizer: str, per_parameter: int) -> None:
    found = known([*sized("llama"), f"optim.name={optimizer}"])
    assert found.optimizer == per_parameter * found.parameters
    assert found.gradients == 4 * found.parameters


@pytest.mark.parametrize(
    ("overrides", "missing"),
    [
        (["model.init=pretrained", "model.path=owner/model"], "owner/model is not on this machine yet"),
        (["model.config.model_type=mamba"], "model type mamba"),
        (["model.config.model_type=llama"], "model.config.hidden_size is left to the model type"),
        ([*sized("llama")[:-1]], "model.config.vocab_size is left to the tokenizer"),
        ([*sized("llama"), "peft=lora", "peft.target_modules=[nope]"], "peft.target_modules"),
    ],
)
def test_what_is_missing_for_an_estimate_is_said(
    overrides: list[str], missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = estimate(load_config(None, [*MADE, *overrides]), 1)
    assert isinstance(found, str) and missing in found


@pytest.mark.parametrize("damage", [None, b"", b"\xff" * 20, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_folder_whose_weights_cannot_be_read_is_no_error(damage: bytes | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    if damage is not None:
        (tmp_path / "model.safetensors").write_bytes(damage)
    found = estimate(load_config(None, [*MADE, "model.init=pretrained", f"model.path={tmp_path}"]), 1)
    assert isinstance(found, str) and "cannot be read as safetensors" in found


def test_a_model_in_the_cache_of_the_hub_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--owner--model/snapshots/abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub/models--owner--model/refs").mkdir()
    (tmp_path / "hub/models--owner--model/refs/main").write_text("abc")
    header = json.dumps({"a.weight": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}}).encode()
    (snapshot / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert known(["model.init=pretrained", "model.path=owner/model"]).parameters == 15


def test_a_reference_model_is_counted_where_one_is_kept() -> None:
    llama = [*sized("llama"), "objective.kind=dpo"]
    assert known(llama).reference == known(llama).weights > 0
    assert "reference" in known(llama).sentence()
    for kept_elsewhere in (["peft=lora"], ["objective.reference=precomputed"], ["objective.kind=sft"]):
        assert known([*llama, *kept_elsewhere]).reference == 0
