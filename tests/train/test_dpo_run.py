"""packtrain dpo as a user runs it: neither mode, processes, micro-batches nor a kill change it, and it trains as TRL does."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from here import train_here
from running import ENVIRONMENT, LLAMA, WORDS, Run, base_config, train, write_jsonl
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from packtrain.config.compose import load_config
from packtrain.config.schema import Model, Peft
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import UserError
from packtrain.model.load import load_model
from packtrain.train.checkpoint import hooks as checkpoint_hooks
from packtrain.train.objectives.dpo_trainer import FIGURES
from tests.train import forked

PAIRS, HELD_OUT, A_STEP, STEPS = 22, 5, 7, 6  # step 4 has one pair, step 5 is of the second epoch
SMALL = "batch.tokens_per_device=190"  # one to four pairs, so that steps have several micro-batches


def preferences(count: int, seed: int) -> list[dict[str, Any]]:
    """Pairs with prompts and answers of very different lengths; some answers of a pair are equally long."""
    rng = random.Random(seed)

    def said(role: str, most: list[int]) -> list[dict[str, str]]:
        return [{"role": role, "content": " ".join(rng.choices(WORDS, k=rng.choice(most)))}]

    rows = []
    while len(rows) < count:
        prompt, chosen, rejected = said("user", [1, 3, 20]), said("assistant", [1, 4]), said("assistant", [1, 9])
        if chosen != rejected:
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows


def config_of(folder: Path, **groups: dict[str, Any]) -> dict[str, Any]:
    """A run on the pairs in their order, from the model in folder/start."""
    model = {"init": "pretrained", "path": str(folder / "start"), "config": {}, "tokenizer": None}
    data = {
        "train": str(folder / "train.jsonl"),
        "eval": str(folder / "eval.jsonl"),
        "shuffle": False,
        "max_length": 92,
    }
    given = {"model": model, "data": data, "batch": {"examples_per_step": A_STEP, "tokens_per_device": 1024}}
    return base_config(folder, **given, trainer={"max_steps": STEPS, **groups.pop("trainer", {})}, **groups)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the pairs in it, and a model to start from."""
    folder = tmp_path_factory.mktemp("dpo")
    write_jsonl(folder / "train.jsonl", preferences(PAIRS, 0))
    write_jsonl(folder / "eval.jsonl", preferences(HELD_OUT, 1))
    description = Model(init="random", config=LLAMA, tokenizer="quickstart")
    tokenizer = load_tokenizer(description)
    load_model(description, Peft(), tokenizer, seed=0).save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")
    return folder


def run(folder: Path, name: str, *overrides: str, **groups: dict[str, Any]) -> Run:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config_of(folder, **groups)))
    return train_here(load_config(str(path), ["objective.kind=dpo", *overrides]), folder / name)


@pytest.fixture(scope="module")
def packed(folder: Path) -> Run:
    return train(folder, config_of(folder), name="packed", command="dpo")


def assert_same_training(found: Run, expected: Run, weights: str = "model.safetensors") -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert [line["examples"] for line in found.steps] == [line["examples"] for line in expected.steps]
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
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
    theirs = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32),
        args=DPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=A_STEP,
            per_device_eval_batch_size=HELD_OUT,
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
        train_dataset=datasets.Dataset.from_list(preferences(PAIRS, 0)),
        eval_dataset=datasets.Dataset.from_list(preferences(HELD_OUT, 1)),
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
        if name in weights:  # a tied head is stored once
            assert (weights[name] - parameter).norm() <= 1e-4 * parameter.norm(), name


@pytest.mark.parametrize(
    ("name", "prompts", "overrides"),
    [
        ("padding", "", ["packing.mode=padding"]),
        ("padding-free", "computed once for both answers", ["packing.mode=padding_free"]),
        ("unshared", "computed for each answer", ["packing.share_prefix=false", SMALL]),
    ],
)
def test_mode_and_micro_batches_never_change_the_training(
    folder: Path, packed: Run, name: str, prompts: str, overrides: list[str]
) -> None:
    found = run(folder, name, *overrides)
    assert_same_training(found, packed)
    assert prompts in said_at_start(found)


@pytest.mark.parametrize(("processes", "reference"), [(3, "model"), (2, "precomputed")])
def test_several_processes_train_as_one_also_where_one_of_them_has_no_pair(
    folder: Path, packed: Run, processes: int, reference: str
) -> None:
    started = {"name": f"of-{processes}", "command": "dpo", "processes": processes}
    found = train(folder, config_of(folder), SMALL, f"objective.reference={reference}", **started)
    assert_same_training(found, packed)
    assert "computed once for both answers" in said_at_start(found)


def test_a_run_starts_at_ln_2_learns_and_says_what_it_is_held_to(packed: Run) -> None:
    assert packed.losses[0] == pytest.approx(0.6931472, abs=1e-6)
    assert packed.evals[0]["eval_loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert [line["examples"] for line in packed.steps] == [7, 7, 7, 1, 7, 7]
    assert packed.steps[-1]["rewards/margins"] > 0.01
    assert "sigmoid, beta 0.1, against a second copy of the model" in said_at_start(packed)


def test_lora_with_gradient_checkpointing_is_the_same_packed_and_padded(folder: Path) -> None:
    lora = {"peft": {"kind": "lora", "r": 4}, "trainer": {"gradient_checkpointing": True, "max_steps": 3}}
    padded = run(folder, "lora-padding", "packing.mode=padding", **lora)
    packed = run(folder, "lora-packed", SMALL, **lora)
    assert_same_training(packed, padded, "adapter_model.safetensors")
    assert "against the model with its adapters off" in said_at_start(packed)
    assert packed.losses[0] == pytest.approx(0.6931472, abs=1e-6) and packed.losses[2] < packed.losses[0]


def test_bf16_is_the_same_packed_and_padded_within_its_precision(folder: Path) -> None:
    bf16 = {"trainer": {"mixed_precision": "bf16", "max_steps": 3}}
    padded = run(folder, "bf16-padding", "packing.mode=padding", **bf16)
    packed = run(folder, "bf16-packed", SMALL, **bf16)
    assert packed.losses == pytest.approx(padded.losses, rel=5e-3)


def test_a_loss_that_sorts_pairs_is_refused_where_only_the_evaluation_would_be_split(folder: Path) -> None:
    one = preferences(1, 0)[0]
    short = [{**one, "prompt": [{"role": "user", "content": word}]} for word in WORDS[:2]]
    write_jsonl(folder / "short.jsonl", short)
    config = config_of(folder, trainer={"max_steps": 1}, objective={"loss_type": "aot"})
    config["data"] |= {"train": str(folder / "short.jsonl"), "eval": str(folder / "train.jsonl")}
    path = folder / "aot.yaml"
    path.write_text(yaml.safe_dump(config))
    alone, both = (load_config(str(path), ["objective.kind=dpo", SMALL, *more]) for more in (["data.eval=null"], []))
    assert len(train_here(alone, folder / "aot").losses) == 1
    with pytest.raises(UserError, match="aot sorts all pairs of a step"):
        train_here(both, folder / "aot-refused")


def _killed_after_a_checkpoint(*given: Any) -> None:
    complete = checkpoint_hooks.complete

    def last(staging: Path, target: Path) -> None:
        complete(staging, target)
        os.kill(os.getpid(), signal.SIGKILL)

    checkpoint_hooks.complete = last
    forked.run(*given)


def test_killed_and_resumed_gives_bitwise_the_same_weights(folder: Path, packed: Run) -> None:
    config = config_of(folder, trainer={"checkpoint_every": 2, "output_dir": str(folder / "killed")})
    path, outputs = folder / "killed.yaml", [folder / "killed.out", folder / "killed.err"]
    path.write_text(yaml.safe_dump(config))
    process = forked.start(("dpo", str(path)), ENVIRONMENT, folder, outputs, _killed_after_a_checkpoint)
    process.join()
    assert process.exitcode == -signal.SIGKILL, outputs[1].read_text()
    resumed = run(folder, "killed", trainer={"checkpoint_every": 2})
    assert "resuming from step-000002" in said_at_start(resumed)
    assert resumed.losses == packed.losses
    weights = packed.weights()
    for name, tensor in resumed.weights().items():
        assert torch.equal(tensor, weights[name]), name
