"""packtrain reward as a user runs it: neither mode, processes, micro-batches nor a kill change it, and it trains as TRL does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from here import train_here
from running import LLAMA, Run, base_config, train, write_jsonl
from safetensors.torch import load_file
from test_dpo_run import preferences
from transformers import AutoTokenizer
from trl import RewardConfig, RewardTrainer

from packtrain.config.compose import load_config
from packtrain.config.schema import Model, Peft
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.model.load import load_model
from packtrain.train.objectives.reward_trainer import FIGURES

PAIRS, HELD_OUT, A_STEP, STEPS = 22, 5, 7, 10  # step 4 of an epoch has one pair
SMALL = "batch.tokens_per_device=190"  # one to four pairs, so that steps have several micro-batches
OBJECTIVE = {"kind": "reward", "center_rewards_coefficient": 0.02}


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Pairs with margins; the first has none."""
    found: list[dict[str, Any]] = preferences(count, seed)
    return [{**row, "margin": number % 3 / 4} for number, row in enumerate(found)]


def config_of(folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    """A run on the pairs in their order, from the model in folder/start."""
    model = {"init": "pretrained", "path": str(folder / "start"), "config": {}, "tokenizer": None}
    files = {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl")}
    given = {"model": model, "data": {**files, "shuffle": False, "max_length": 92}, "objective": OBJECTIVE}
    batch = {"examples_per_step": A_STEP, "tokens_per_device": 1024}
    return base_config(
        folder, **given, batch=batch, trainer={"max_steps": STEPS, **groups.pop("trainer", {})}, **groups
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the pairs in it, and a causal language model to start from."""
    folder = tmp_path_factory.mktemp("reward")
    write_jsonl(folder / "train.jsonl", rows(PAIRS, 0))
    write_jsonl(folder / "eval.jsonl", rows(HELD_OUT, 1))
    description = Model(init="random", config=LLAMA, tokenizer="quickstart")
    tokenizer = load_tokenizer(description)
    load_model(description, Peft(), tokenizer, seed=0).save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")
    return folder


def run(folder: Path, name: str, *overrides: str, **groups: dict[str, Any]) -> Run:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config_of(folder, **groups)))
    return train_here(load_config(str(path), [*overrides]), folder / name)


@pytest.fixture(scope="module")
def packed(folder: Path) -> Run:
    return train(folder, config_of(folder), name="packed", command="reward")


def assert_same_training(found: Run, expected: Run, weights: str = "model.safetensors") -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert [line["examples"] for line in found.steps] == [line["examples"] for line in expected.steps]
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        for name in FIGURES:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), (ours["step"], name)
    for ours, theirs in zip(found.evals, expected.evals, strict=True):
        for name in ("loss", *FIGURES):
            assert ours[f"eval_{name}"] == pytest.approx(theirs[f"eval_{name}"], rel=1e-5, abs=1e-5), name
    ours, theirs = (load_file(run.folder / "final" / weights) for run in (found, expected))
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).norm() <= 1e-4 * theirs[name].norm(), name


def said_at_start(run: Run) -> str:
    return (run.folder / "logs" / "rank-00000.log").read_text()


def test_the_first_steps_equal_those_of_trl(folder: Path, packed: Run) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "start")
    theirs = RewardTrainer(
        model=str(folder / "start"),
        args=RewardConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=A_STEP,
            per_device_eval_batch_size=HELD_OUT,
            center_rewards_coefficient=OBJECTIVE["center_rewards_coefficient"],
            max_steps=STEPS,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            train_sampling_strategy="sequential",
            activation_checkpointing=False,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            max_length=None,
            seed=0,
        ),
        train_dataset=datasets.Dataset.from_list(rows(PAIRS, 0)),
        eval_dataset=datasets.Dataset.from_list(rows(HELD_OUT, 1)),
        processing_class=tokenizer,
    )
    theirs.train()
    expected = [line for line in theirs.state.log_history if "loss" in line]
    assert len(expected) == STEPS
    for ours, line in zip(packed.steps, expected, strict=True):
        for name in ("loss", "grad_norm", *FIGURES):
            assert ours[name] == pytest.approx(line[name], rel=1e-5, abs=1e-5), (ours["step"], name)
        assert (ours["tokens"], ours["lr"]) == (line["num_tokens"], line["learning_rate"])
        usual = {"loss", "grad_norm", "learning_rate", "epoch", "step", "num_tokens"}
        assert line.keys() - usual == set(FIGURES)  # all that TRL logs
    evaluated = theirs.evaluate()
    for name in ("loss", *FIGURES):
        assert packed.evals[-1][f"eval_{name}"] == pytest.approx(evaluated[f"eval_{name}"], rel=1e-5, abs=1e-5), name
    weights = packed.weights()
    for name, parameter in theirs.model.named_parameters():
        assert (weights[name] - parameter).norm() <= 1e-4 * parameter.norm(), name


@pytest.mark.parametrize(
    ("name", "prompts", "overrides"),
    [
        ("padding", "", ["packing.mode=padding"]),
        ("padding-free", "computed once for both answers", ["packing.mode=padding_free"]),
        ("unshared", "computed for each answer", ["packing.share_prefix=false", SMALL]),
        ("per-document", "computed for each answer", ["model.attention=per_document", SMALL]),
    ],
)
def test_mode_and_micro_batches_never_change_the_training(
    folder: Path, packed: Run, name: str, prompts: str, overrides: list[str]
) -> None:
    found = run(folder, name, *overrides)
    assert_same_training(found, packed)
    assert prompts in said_at_start(found)


@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_train_as_one_also_where_one_of_them_has_no_pair(
    folder: Path, packed: Run, processes: int
) -> None:
    started = {"name": f"of-{processes}", "command": "reward", "processes": processes}
    found = train(folder, config_of(folder), SMALL, **started)
    assert_same_training(found, packed)
    assert "computed once for both answers" in said_at_start(found)
