"""trainer.activation_offload on GPUs: the same bits, less on the device and as planned, under each strategy; refused where it does nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from running import assert_same_bits, base_config, packtrain
from test_gpu_runs import of_objective

from packtrain.config.compose import load_config
from packtrain.errors import UserError
from packtrain.plan.memory import GIB, STASHED, Memory, estimate
from tests.standin import offloaded_layers

OFFLOAD = "trainer.activation_offload=true"
FULL = "trainer.gradient_checkpointing=full"


def test_inputs_of_layers_leave_the_device_and_loss_and_gradients_stay_the_same_bits(gpus) -> None:
    gpus.call(offloaded_layers.keep_their_inputs_on_the_host)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("verb", "strategy", "changes"),
    [
        ("sft", "ddp", ()),
        ("dpo", "ddp", ()),
        ("kto", "ddp", ()),
        ("sft", "ddp", ("peft=lora",)),
        ("sft", "ddp", ("trainer.tokens_per_mlp_tile=50",)),
        ("sft", "ddp", ("batch.tokens_per_device=100",)),  # several micro-batches
        ("sft", "fsdp2", ()),
        ("sft", "zero2", ()),
        ("sft", "zero3", ()),
    ],
)
def test_runs_train_the_same_bits(gpus, tmp_path: Path, verb: str, strategy: str, changes: tuple[str, ...]) -> None:
    devices = 1 if verb != "sft" or "peft=lora" in changes else 2
    how: dict[str, Any] = {"verb": verb, "devices": devices, "ranks": devices}
    config = of_objective(tmp_path, verb)
    config["model"]["config"] = {**config["model"]["config"], "num_hidden_layers": STASHED + 2}
    given = (f"strategy={strategy}", FULL, "verify.preflight=false", "data.eval=null", *changes)
    kept = gpus.train(tmp_path, config, *given, name="kept", **how)
    moved = gpus.train(tmp_path, config, *given, OFFLOAD, name="moved", **how)
    assert "full (asked for), from inputs of layers in the host's memory" in moved.log
    assert moved.losses == kept.losses
    assert [line["grad_norm"] for line in moved.steps] == [line["grad_norm"] for line in kept.steps]
    if "peft=lora" not in changes:
        assert_same_bits(moved, kept)


def test_a_plan_has_less_on_the_device_and_more_on_the_host() -> None:
    sizes = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 24, "vocab_size": 97}
    sizes |= {"intermediate_size": 96, "num_attention_heads": 4}
    given = [f"model.config.{name}={value}" for name, value in sizes.items()]
    given += ["model.init=random", "model.tokenizer=quickstart", "data.train=x", "batch.examples_per_step=4", FULL]
    plans = [estimate(load_config(None, [*given, *changes]), 1, 80 * GIB) for changes in ((), (OFFLOAD,))]
    kept, moved = (plan for plan in plans if isinstance(plan, Memory))
    inputs = 8192 * 64 * 2  # a row, computed in bfloat16
    assert (kept.activations or 0) - (moved.activations or 0) == (24 - STASHED) * inputs
    assert moved.host - kept.host == 24 * inputs


def test_without_a_device_it_is_refused(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"activation_offload": True, "gradient_checkpointing": "full"})
    (path := tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    refused = packtrain("sft", str(path), expect=2)
    assert "trainer.activation_offload" in refused.stderr and "in the host's memory already" in refused.stderr


@pytest.mark.parametrize("policy", ["auto", "none", "selective", "every_2"])
def test_what_layers_keep_otherwise_is_not_moved(policy: str) -> None:
    given = ["model.path=owner/model", "data.train=x", "batch.examples_per_step=4", OFFLOAD]
    with pytest.raises(UserError, match=r"trainer\.gradient_checkpointing=full"):
        load_config(None, [*given, f"trainer.gradient_checkpointing={policy}"])
