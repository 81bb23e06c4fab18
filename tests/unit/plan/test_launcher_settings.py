"""What accelerate's launcher and DeepSpeed are told under each strategy, as values."""

from __future__ import annotations

import json

import pytest

from packtrain.plan.launcher_settings import launch_argv, launch_config
from packtrain.plan.topology import Processes
from packtrain.strategies.spec import STRATEGIES

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3}
TWO = Processes(1, 2, "two on this machine")


@pytest.mark.parametrize("name", STRATEGIES.all())
def test_deepspeed_has_every_number_from_the_config_and_nothing_to_fill_in(name: str) -> None:
    make = STRATEGIES[name].engine_settings
    assert (make is not None) == (name in STAGES)
    if make is None:
        return
    made = make("bfloat16", 0.3)
    assert "auto" not in json.dumps(made)
    assert made["gradient_clipping"] == 0.3
    assert (made["train_micro_batch_size_per_gpu"], made["gradient_accumulation_steps"]) == (1, 1)
    assert not {"optimizer", "scheduler", "fp16"} & made.keys()
    assert made["zero_optimization"]["stage"] == STAGES[name]
    assert ("offload_param" in made["zero_optimization"]) == (name == "zero3_offload")


@pytest.mark.parametrize(
    ("name", "kind"), [("ddp", "MULTI_GPU"), *((name, "DEEPSPEED") for name in STAGES), ("fsdp2", "FSDP")]
)
def test_accelerate_is_told_the_same_in_its_yaml_and_on_its_command_line(name: str, kind: str) -> None:
    launcher = STRATEGIES[name].launcher("run/deepspeed.json")
    settings = launch_config(TWO, 0, launcher, port=29500, gpus=True)
    flags = launch_argv(
        "accelerate", "run/accelerate.yaml", settings, launcher, ["sft", "run.yaml"], join_timeout_s=300
    )
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
    if kind == "MULTI_GPU":
        assert "--multi_gpu" in flags
