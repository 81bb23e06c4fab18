"""packtrain dpo as a user runs it: neither mode, processes, micro-batches nor a kill change it, and it trains as TRL does."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
import torch
import yaml
from answer_runs import AnswerRuns, preferences, said_at_start
from here import train_here
from running import WORDS, Run, train, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from packtrain.config.compose import load_config
from packtrain.errors import UserError
from packtrain.train.objectives.dpo_loss import FIGURES

PAIRS, HELD_OUT, A_STEP, STEPS = 22, 5, 7, 6  # step 4 has one pair, step 5 is of the second epoch
SMALL = "batch.tokens_per_device=190"  # one to four pairs, so that steps have several micro-batches


RUNS = AnswerRuns("dpo", FIGURES, A_STEP, STEPS)
config_of, run, assert_same_training = RUNS.config_of, RUNS.run, RUNS.assert_same_training


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the pairs in it, and a model to start from."""
    return RUNS.write(tmp_path_factory.mktemp("dpo"), preferences(PAIRS, 0), preferences(HELD_OUT, 1))


@pytest.fixture(scope="module")
def packed(folder: Path) -> Run:
    return train(folder, config_of(folder), name="packed", command="dpo")


def test_the_first_steps_equal_those_of_trl(folder: Path, packed: Run) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "start")
    theirs = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32),
        args=DPOConfig(**RUNS.of_trl(folder, HELD_OUT), train_sampling_strategy="sequential"),
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
    config = config_of(folder, trainer={"max_steps": 1}, objective={"loss": "aot"})
    config["data"] |= {"train": str(folder / "short.jsonl"), "eval": str(folder / "train.jsonl")}
    path = folder / "aot.yaml"
    path.write_text(yaml.safe_dump(config))
    alone, both = (load_config(str(path), ["objective.kind=dpo", SMALL, *more]) for more in (["data.eval=null"], []))
    assert len(train_here(alone, folder / "aot").losses) == 1
    with pytest.raises(UserError, match="aot sorts all pairs of a step"):
        train_here(both, folder / "aot-refused")


def test_killed_and_resumed_gives_bitwise_the_same_weights(folder: Path, packed: Run) -> None:
    RUNS.assert_resumes_bitwise(folder, packed, 2)
