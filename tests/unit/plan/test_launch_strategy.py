"""What a strategy says to DeepSpeed and to accelerate, as values, and what it cannot be combined with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from packtrain.config.rules.strategies import check_strategy
from packtrain.config.schema import Model, Optim, RunConfig, Strategy, Trainer
from packtrain.plan.accelerate import accelerate_part
from packtrain.plan.deepspeed import STAGES, deepspeed_config

STRATEGIES: tuple[Any, ...] = ("ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp2")


def config(name: Any, **groups: Any) -> RunConfig:
    return RunConfig(strategy=Strategy(name=name), **groups)


@pytest.mark.parametrize("name", STRATEGIES)
def test_deepspeed_has_every_number_from_the_config_and_nothing_to_fill_in(name: str) -> None:
    made = deepspeed_config(config(name, optim=Optim(max_grad_norm=0.3), model=Model(dtype="bfloat16")))
    if name not in STAGES:
        assert made is None
        return
    assert made is not None and "auto" not in json.dumps(made)
    assert made["gradient_clipping"] == 0.3
    assert made["bf16"] == {"enabled": True}
    assert (made["train_micro_batch_size_per_gpu"], made["gradient_accumulation_steps"]) == (1, 1)
    assert not {"optimizer", "scheduler", "fp16"} & made.keys()
    assert made["zero_optimization"]["stage"] == STAGES[name]
    assert ("offload_param" in made["zero_optimization"]) == (name == "zero3_offload")


def test_mixed_precision_leaves_deepspeeds_weights_as_they_are() -> None:
    made = deepspeed_config(config("zero2", trainer=Trainer(mixed_precision="bf16")))
    assert made is not None and made["bf16"] == {"enabled": False}


def test_the_format_of_the_file_is_known_when_it_is_loaded() -> None:
    kept = config("zero3", model=Model(dtype="auto"))
    before, loaded = deepspeed_config(kept), deepspeed_config(kept, bf16_weights=True)
    assert before is not None and before["bf16"] == {"enabled": "auto"}
    assert loaded is not None and loaded["bf16"] == {"enabled": True}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("ddp", "MULTI_GPU"), *((name, "DEEPSPEED") for name in STAGES), ("fsdp2", "FSDP")],
)
def test_accelerate_is_told_the_same_in_its_yaml_and_on_its_command_line(name: str, kind: str) -> None:
    settings, flags = accelerate_part(config(name), deepspeed_file="run/deepspeed.json")
    assert settings["distributed_type"] == kind
    if kind == "DEEPSPEED":
        assert settings["deepspeed_config"]["deepspeed_config_file"] == "run/deepspeed.json"
        assert flags[flags.index("--deepspeed_config_file") + 1] == "run/deepspeed.json"
        # by its default launcher DeepSpeed trains a model per machine, and writes the environment to a file
        assert settings["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"
        assert flags[flags.index("--deepspeed_multinode_launcher") + 1] == "standard"
    if kind == "FSDP":
        assert settings["fsdp_config"]["fsdp_version"] == 2
        assert {"--use_fsdp", "--fsdp_version"} <= set(flags)


@pytest.mark.parametrize(
    ("name", "groups", "key"),
    [
        ("zero2", {"optim": Optim(name="adafactor")}, "optim.name"),
        ("fsdp2", {"optim": Optim(name="adamw_8bit")}, "optim.name"),
        ("zero3_offload", {"optim": Optim(name="sgd")}, "optim.name"),
        ("zero1", {"model": Model(dtype="float16")}, "model.dtype"),
        ("zero3", {"model": Model(attention="per_document")}, "model.attention"),
        ("fsdp2", {"model": Model(attention="per_document")}, "model.attention"),
    ],
)
def test_what_a_strategy_cannot_do_is_refused(name: str, groups: dict[str, Any], key: str) -> None:
    (finding,) = check_strategy(config(name, **groups))
    assert key in finding.keys and "strategy.name" in finding.keys
    assert not list(check_strategy(config("ddp", **groups)))


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_takes_the_defaults(name: str) -> None:
    assert not list(check_strategy(config(name)))
