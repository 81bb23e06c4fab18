"""packtrain kto as a user runs it: neither mode, processes, micro-batches nor a kill change it, and it trains as TRL does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from answer_runs import AnswerRuns, message, said_at_start
from here import ALONE
from running import Run, packtrain, train, write_jsonl
from test_strategies import ALSO_ZERO2, MODEL, ZERO3
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import KTOConfig, KTOTrainer

from packtrain.config.compose import load_config
from packtrain.errors import CheckFailed, UserError
from packtrain.run_folder import RunFolder
from packtrain.train.objectives.kto_loss import MARGINS, UNITS
from packtrain.train.run import verify_in
from packtrain.train.verify.modes import MODES

ANSWERS, HELD_OUT, A_STEP, STEPS = 23, 6, 7, 10  # steps 4 and 8 have two answers, of one kind in the second pass too
SMALL = "batch.tokens_per_device=110"  # one to three answers, so that steps have several micro-batches
FIGURES = (*UNITS, MARGINS)


def labelled(count: int, seed: int) -> list[dict[str, Any]]:
    """Answers with prompts of very different lengths; two thirds are desirable."""
    rng = random.Random(seed)
    return [
        {
            "prompt": message(rng, "user", [1, 3, 20]),
            "completion": message(rng, "assistant", [1, 4, 9]),
            "label": rng.random() < 2 / 3,
        }
        for _ in range(count)
    ]


RUNS = AnswerRuns("kto", FIGURES, A_STEP, STEPS, {"options": {"undesirable_weight": 1.5}})
config_of, run, assert_same_training = RUNS.config_of, RUNS.run, RUNS.assert_same_training


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the answers in it, and a model to start from."""
    return RUNS.write(tmp_path_factory.mktemp("kto"), labelled(ANSWERS, 0), labelled(HELD_OUT, 1))


@pytest.fixture(scope="module")
def packed(folder: Path) -> Run:
    return train(folder, config_of(folder), name="packed", command="kto")


def test_the_first_steps_equal_those_of_trl(folder: Path, packed: Run) -> None:
    """Those before the last step of a pass, where TRL makes the pairs of the KL estimate as we do."""
    theirs = KTOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "start", dtype=torch.float32),
        args=KTOConfig(**{**RUNS.of_trl(folder, HELD_OUT), "max_length": 92}, undesirable_weight=1.5),
        train_dataset=datasets.Dataset.from_list(labelled(ANSWERS, 0)),
        processing_class=AutoTokenizer.from_pretrained(folder / "start"),
    )
    theirs.train()
    expected = [line for line in theirs.state.log_history if "loss" in line]
    assert len(expected) == STEPS and max(line["kl"] for line in expected) > 0.01
    for ours, line in zip(packed.steps, expected, strict=True):
        usual = {"epoch", "step", "num_tokens", "learning_rate"}
        for name in line.keys() - usual:
            assert ours[name] == pytest.approx(line[name], rel=1e-5, abs=1e-5), (ours["step"], name)
        assert {name for name in FIGURES if name in ours} == line.keys() - usual - {"loss", "grad_norm"}
        assert (ours["tokens"], ours["lr"]) == (line["num_tokens"], line["learning_rate"])
    weights = packed.weights()
    for name, parameter in theirs.model.named_parameters():
        if name in weights:  # a tied head is stored once
            assert (weights[name] - parameter).norm() <= 1e-4 * parameter.norm(), name


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("padding", ["packing.mode=padding", "batch.examples_per_device=3"]),
        ("padding-free", ["packing.mode=padding_free", "batch.examples_per_device=2"]),
        ("small", [SMALL]),
        ("precomputed", [SMALL, "objective.reference=precomputed"]),
    ],
)
def test_mode_micro_batches_and_how_the_reference_is_kept_never_change_the_training(
    folder: Path, packed: Run, name: str, overrides: list[str]
) -> None:
    assert_same_training(run(folder, name, *overrides), packed)


@pytest.mark.parametrize(("processes", "overrides"), [(3, []), (2, ["objective.reference=precomputed"])])
def test_several_processes_train_as_one_also_where_one_of_them_has_no_answer(
    folder: Path, packed: Run, processes: int, overrides: list[str]
) -> None:
    started = {"name": f"of-{processes}", "command": "kto", "processes": processes}
    assert_same_training(train(folder, config_of(folder), SMALL, *overrides, **started), packed)


def test_a_run_starts_at_half_of_the_weights_and_says_what_it_is_held_to(packed: Run) -> None:
    labels = [row["label"] for row in labelled(A_STEP, 0)]
    assert packed.losses[0] == pytest.approx(sum(0.5 if label else 0.75 for label in labels) / A_STEP, abs=1e-6)
    assert packed.steps[0]["kl"] == packed.evals[0]["eval_kl"] == 0
    assert [line["examples"] for line in packed.steps] == [7, 7, 7, 2, 7, 7, 7, 2, 7, 7]
    said = said_at_start(packed)
    assert "kto (desirable × 1, undesirable × 1.5), beta 0.1, against a second copy of the model" in said
    assert (
        "data       23 answers, " in said
        and "of them desirable and" in said
        and "each of 7 answers" in said
        and "mean rewards of 6 held-out answers: " in said
    )


def test_lora_with_gradient_checkpointing_is_the_same_packed_and_padded(folder: Path) -> None:
    lora = {"peft": {"kind": "lora", "r": 4}, "trainer": {"gradient_checkpointing": True, "max_steps": 3}}
    padded = run(folder, "lora-padding", "packing.mode=padding", **lora)
    packed = run(folder, "lora-packed", SMALL, **lora)
    assert_same_training(packed, padded, "adapter_model.safetensors")
    assert "against the model with its adapters off" in said_at_start(packed)


def test_bf16_is_the_same_packed_and_padded_within_its_precision(folder: Path) -> None:
    bf16 = {"trainer": {"mixed_precision": "bf16", "max_steps": 3}}
    padded = run(folder, "bf16-padding", "packing.mode=padding", **bf16)
    packed = run(folder, "bf16-packed", SMALL, **bf16)
    assert packed.losses == pytest.approx(padded.losses, rel=5e-3)
    assert packed.steps[0]["kl"] == padded.steps[0]["kl"] == 0


def test_killed_and_resumed_gives_bitwise_the_same_weights(folder: Path, packed: Run) -> None:
    RUNS.assert_resumes_bitwise(folder, packed, 5)


def test_what_cannot_be_trained_is_refused_with_exit_code_2(folder: Path) -> None:
    write_jsonl(folder / "unlabelled.jsonl", [{"prompt": "Say", "completion": " it."}] * 3)
    path = folder / "refused.yaml"
    path.write_text(yaml.safe_dump(config_of(folder)))
    for override, said in (
        (f"data.train={folder / 'unlabelled.jsonl'}", "no column 'label' says which answers are desirable"),
        ("batch.examples_per_step=1", "the KL estimate of a step is made of two answers or more"),
        ("objective.loss=hinge", "hinge is no loss of packtrain kto"),
        ("data.overlong=split", "an answer with a label cannot be split"),
    ):
        done = packtrain("kto", str(path), override, f"trainer.output_dir={folder / 'refused'}", expect=2)
        assert said in " ".join(done.stderr.split()), done.stderr
    with pytest.raises(UserError, match="of 23 answers the last step has a single one"):
        run(folder, "single", "batch.examples_per_step=11")
    write_jsonl(folder / "held.jsonl", labelled(1, 3))
    with pytest.raises(UserError, match="a single answer is held out") as caught:
        run(folder, "held", f"data.eval={folder / 'held.jsonl'}")
    assert "apo_zero_unpaired" in caught.value.problems[0].fix
    assert len(run(folder, "apo", "batch.examples_per_step=11", "objective.loss=apo_zero_unpaired").losses) == 10


def test_labels_far_from_balance_are_told_with_the_weights_that_balance_them(folder: Path) -> None:
    few = [{**row, "label": number % 5 == 0} for number, row in enumerate(labelled(20, 3))]
    short = {"max_steps": 1}
    write_jsonl(folder / "few.jsonl", few)
    found = run(folder, "few", f"data.train={folder / 'few.jsonl'}", trainer=short)
    assert "objective.options.desirable_weight=6 to 8" in said_at_start(found)  # 16 × 1.5 / 4
    write_jsonl(folder / "one.jsonl", [{**row, "label": True} for row in few])
    found = run(folder, "one", f"data.train={folder / 'one.jsonl'}", trainer=short)
    assert "all answers are desirable" in said_at_start(found) and MARGINS not in found.steps[0]


@pytest.mark.parametrize("way", ["model", "precomputed"])
def test_verify_proves_modes_and_the_first_loss(folder: Path, way: str) -> None:
    path = folder / f"verify-{way}.yaml"
    path.write_text(yaml.safe_dump(config_of(folder, trainer={"output_dir": str(folder / f"verify-{way}")})))
    config = load_config(str(path), [f"objective.reference={way}"])
    assert verify_in(config, ALONE) == 0
    report = json.loads(RunFolder.of(config.trainer).verification.read_text())
    assert report["verdict"] == "exact" and report["controls_see"] and report["objective"] == "kto"
    # of 14 answers every other one is desirable
    assert report["start"]["loss"] == pytest.approx((0.5 + 0.75) / 2, abs=1e-6) and not report["start"]["problems"]
    assert abs(report["reference"]["loss"] - 0.625) > 0.01 and set(report["modes"]) == set(MODES)


def test_a_reference_that_differs_at_the_start_is_named(folder: Path) -> None:
    with pytest.raises(
        CheckFailed, match=r"the first loss is 0\.\d+, but 0\.\d+ while(.|\n)*dropout is on in the model"
    ):
        run(folder, "dropping", "model.config.attention_dropout=0.2")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Run:
    """One process, on a model of weights that ZeRO-3 does not keep whole."""
    return train(folder, spread_over(folder), name="alone", command="kto")


def spread_over(folder: Path) -> dict[str, Any]:
    config = config_of(folder, trainer={"max_steps": 4})
    return config | {"model": {"init": "random", "config": MODEL, "tokenizer": "quickstart"}}


@pytest.mark.parametrize("name", [ALSO_ZERO2, ZERO3, "fsdp2"])
def test_strategies_train_as_one_process_also_where_one_has_no_answer(folder: Path, alone: Run, name: str) -> None:
    """Step 4 has two answers, on three processes."""
    found = train(folder, spread_over(folder), SMALL, f"strategy={name}", name=name, command="kto", processes=3)
    assert_same_training(found, alone)
