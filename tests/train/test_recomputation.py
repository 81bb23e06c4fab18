"""trainer.gradient_checkpointing: what is computed again changes no bit of losses and gradients, and saves what it says."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from here import run_here
from running import assert_same_bits, base_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from packtrain.attention.segmented import NAME
from packtrain.config.compose import load_config
from packtrain.errors import UserError
from packtrain.model.layers import recompute
from packtrain.model.precision import Precision
from packtrain.model.spread import Ranks
from packtrain.packing.segments import Segments
from packtrain.plan.memory import CHECKPOINTING, GIB, Memory, estimate
from packtrain.train import preparation
from packtrain.train.preparation import choose_checkpointing, plan_memory

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "vocab_size": 97}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


class Calls(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        self.of[name] = self.of.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def passes(kind: str, attention: str, policy: str) -> tuple[torch.Tensor, list[torch.Tensor | None], Calls]:
    """Loss and gradients of a model on a row of three documents (a plain one where attention is sdpa), and what ran."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).train()
    model.set_attn_implementation(attention)
    ids = torch.randint(0, SIZES["vocab_size"], (1, 40))
    positions = torch.cat([torch.arange(length) for length in (10, 20, 10)])[None]
    row = {"segments": Segments((10, 20, 10), (None, None, None)), "position_ids": positions}
    if policy != "none":
        recompute(model, policy)
    with Calls() as calls:
        loss = model(input_ids=ids, labels=ids, use_cache=False, **(row if attention == NAME else {})).loss
        loss.backward()
    return loss.detach(), [weight.grad for weight in model.parameters()], calls


@pytest.mark.sample("sdpa-llama", f"{NAME}-llama", f"{NAME}-qwen2")
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_moe", "gpt_oss"])  # the last adds biases in place
@pytest.mark.parametrize("attention", ["sdpa", NAME])
def test_losses_and_gradients_are_the_same_bits(kind: str, attention: str) -> None:
    loss, gradients, _ = passes(kind, attention, "none")
    for policy in CHECKPOINTING[1:]:
        other, theirs, _ = passes(kind, attention, policy)
        assert other.equal(loss), policy
        assert all(one is two is None or one.equal(two) for one, two in zip(gradients, theirs, strict=True)), policy


def test_what_is_computed_again_is_what_the_policy_says() -> None:
    """Of a layer's seven products the last is never made again: nothing in the backward pass needs its result."""
    calls = {policy: passes("llama", "sdpa", policy)[2].of for policy in CHECKPOINTING}
    product, attention = "aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu"
    layers = SIZES["num_hidden_layers"]
    again = {policy: of[product] - calls["none"][product] for policy, of in calls.items()}
    assert again == {
        "none": 0,
        "every_4": 2 * 6,
        "every_3": 2 * 6,
        "selective": layers * 3,
        "every_2": 3 * 6,
        "full": layers * 6,
    }
    attended = {policy: of[attention] - layers for policy, of in calls.items()}
    assert attended == {"none": 0, "every_4": 2, "every_3": 2, "selective": 0, "every_2": 3, "full": layers}


def test_trl_may_switch_it_off_and_on_again() -> None:
    """As it does around a pass of the reference."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    recompute(model, "every_2")
    before = [layer.gradient_checkpointing for layer in model.model.layers]
    model.activation_checkpointing_disable()
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    model.activation_checkpointing_enable({"use_reentrant": True})
    assert [layer.gradient_checkpointing for layer in model.model.layers] == before == [True, False, True, False, True]
    assert model.model.layers[0]._gradient_checkpointing_func.keywords == {"use_reentrant": False}


def test_a_model_whose_layers_cannot_is_refused() -> None:
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    model.supports_gradient_checkpointing = False
    with pytest.raises(UserError, match="cannot compute their activations again") as refused:
        recompute(model, "full")
    assert "gradient_checkpointing=none" in str(refused.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("true", "Set full"),
        ("always", "none|every_4"),
        ("selective", "trainer.torch_compile=false"),
        ("every_5", "every_4"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(value: str, said: str) -> None:
    given = ["model.path=owner/model", "data.train=owner/data", f"trainer.gradient_checkpointing={value}"]
    compiled = ["trainer.torch_compile=true"] if value == "selective" else []
    with pytest.raises(UserError) as refused:
        load_config(None, [*given, *compiled])
    assert said in str(refused.value)


def test_auto_goes_by_the_gpu_that_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary, which the config leaves to the tokenizer, is the loaded model's."""
    sizes = [f"model.config.{name}={value}" for name, value in {"model_type": "qwen3", **SIZES}.items()]
    made = [
        "model.init=random",
        "model.tokenizer=quickstart",
        "data.train=x",
        "batch.examples_per_step=4",
        *sizes,
        "verify.preflight=false",
    ]
    whose = [one for one in made if "vocab_size" not in one]
    config, precision = load_config(None, whose), Precision(torch.float32, torch.bfloat16)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES))
    planned = estimate(load_config(None, [*made, "trainer.gradient_checkpointing=selective"]), 1, GIB)
    assert isinstance(planned, Memory)
    monkeypatch.setattr(preparation, "max_over_ranks", lambda number, _: number)  # one rank, without its GPU
    for device, room, expected in (
        ("cuda", 1.01, "selective"),
        ("cuda", 0.9, "full"),
        ("cuda", 9, "none"),
        ("cpu", 0, "none"),
    ):
        gpu = types.SimpleNamespace(total_memory=(room * planned.total + planned.outside) / 0.9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, gpu=gpu: gpu)
        ranks = Ranks(0, 1, torch.device(device))
        run: Any = types.SimpleNamespace(config=config, precision=precision, ranks=ranks, model=model)
        assert choose_checkpointing("auto", plan_memory(run))[0] == expected


@pytest.mark.parametrize("peft", ["none", "lora"])
def test_runs_train_the_same_bits(peft: str, tmp_path: Path) -> None:
    """As near as rounding under each strategy and of each objective: test_cells.py."""
    config = base_config(tmp_path, trainer={"max_steps": 2, "mixed_precision": "no"})
    config["model"]["config"] = {**config["model"]["config"], "num_hidden_layers": 3}
    plain, *runs = (
        run_here(tmp_path, config, f"peft={peft}", f"trainer.gradient_checkpointing={policy}", name=policy)
        for policy in ("none", "selective", "every_2")
    )
    for run in runs:
        assert_same_bits(run, plain)
        assert [line["grad_norm"] for line in run.steps] == [line["grad_norm"] for line in plain.steps]
