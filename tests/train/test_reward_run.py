"""packtrain reward as a user runs it: neither mode, processes, micro-batches nor a kill change it, and it trains as TRL does."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from answer_runs import AnswerRuns, preferences, said_at_start, saved_model
from here import train_here
from peft import AutoPeftModelForSequenceClassification
from running import LLAMA, Run, packtrain, train
from safetensors.torch import load_file
from test_strategies import MODEL, NEEDS_DEEPSPEED
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from packtrain.config.compose import load_config
from packtrain.config.schema import Model
from packtrain.train.objectives.reward_loss import FIGURES

PAIRS, HELD_OUT, A_STEP, STEPS = 22, 5, 7, 10  # step 4 of an epoch has one pair
SMALL = "batch.tokens_per_device=190"  # one to four pairs, so that steps have several micro-batches
OBJECTIVE = {"center_rewards_coefficient": 0.02}


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Pairs with margins; the first has none."""
    found: list[dict[str, Any]] = preferences(count, seed)
    return [{**row, "margin": number % 3 / 4} for number, row in enumerate(found)]


RUNS = AnswerRuns("reward", FIGURES, A_STEP, STEPS, {"options": OBJECTIVE})
config_of, run, assert_same_training = RUNS.config_of, RUNS.run, RUNS.assert_same_training


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the pairs in it, and a causal language model to start from."""
    return RUNS.write(tmp_path_factory.mktemp("reward"), rows(PAIRS, 0), rows(HELD_OUT, 1))


@pytest.fixture(scope="module")
def packed(folder: Path) -> Run:
    return train(folder, config_of(folder), name="packed", command="reward")


def test_the_first_steps_equal_those_of_trl(folder: Path, packed: Run) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "start")
    theirs = RewardTrainer(
        model=str(folder / "start"),
        args=RewardConfig(**RUNS.of_trl(folder, HELD_OUT), train_sampling_strategy="sequential", **OBJECTIVE),
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


def held_out_figures(model: Any, folder: Path) -> dict[str, float]:
    """TRL's figures of the held-out pairs, each document scored alone by a loaded model."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "start")

    def scores(side: str) -> torch.Tensor:
        chats = [[*row["prompt"], *row[side]] for row in rows(HELD_OUT, 1)]
        inputs = [tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt") for chat in chats]
        with torch.no_grad():
            return torch.cat([model(**one).logits[:, 0] for one in inputs])

    chosen, rejected = scores("chosen"), scores("rejected")
    both, margin = torch.cat([chosen, rejected]), chosen - rejected
    right = (margin > 0).float()
    figures = (both.min(), both.mean(), both.max(), right.mean(), margin.mean())
    return dict(zip(FIGURES, (figure.item() for figure in figures), strict=True))


def test_a_reward_model_that_is_trained_as_a_language_model_loses_its_head_and_the_run_says_so(folder: Path) -> None:
    tied = Model(init="random", config={**LLAMA, "tie_word_embeddings": True}, tokenizer="quickstart")
    place = saved_model(tied, folder / "scoring", scores=True)
    dpo = ["objective.kind=dpo", "~objective.options"]
    found = run(folder, "as-dpo", f"model.path={place}", *dpo, trainer={"max_steps": 1})
    said = said_at_start(found)
    assert f"{place} is a reward model or classifier: its head is left away, and final/ has none" in said


def assert_scores_as_trained(model: Any, run: Run, folder: Path) -> None:
    model = model.eval()
    assert model.config.num_labels == 1 and model.config.pad_token_id is not None
    for name, value in held_out_figures(model, folder).items():
        assert run.evals[-1][f"eval_{name}"] == pytest.approx(value, rel=1e-5, abs=1e-5), name


def test_the_saved_model_scores_as_trained_and_is_a_reward_model_to_go_on_from(folder: Path, packed: Run) -> None:
    final = packed.folder / "final"
    assert_scores_as_trained(AutoModelForSequenceClassification.from_pretrained(final), packed, folder)
    onward = run(folder, "onward", f"model.path={final}", trainer={"max_steps": 1})
    first, last = onward.evals[0], packed.evals[-1]  # with the head that it has
    assert all(first[f"eval_{name}"] == pytest.approx(last[f"eval_{name}"], rel=1e-5, abs=1e-6) for name in FIGURES)
    right = f"{last['eval_accuracy']:.1%} rank right (chance: 50%), margin"
    assert f"of {HELD_OUT} held-out pairs {right}" in said_at_start(packed)
    command = next(line for line in said_at_start(packed).splitlines() if "AutoModelForSequenceClassification" in line)
    code = shlex.split(command)[shlex.split(command).index("-c") + 1]
    exec(code)


def test_adapters_train_the_head_in_full_and_score_as_trained_merged_or_not(folder: Path) -> None:
    lora = {
        "peft": {"kind": "lora", "r": 4, "merge": True},
        "trainer": {"gradient_checkpointing": True, "max_steps": 3},
    }
    padded = run(folder, "lora-padding", "packing.mode=padding", **lora)
    packed = run(folder, "lora-packed", SMALL, **lora)
    assert_same_training(packed, padded, "adapter_model.safetensors")
    merged = AutoModelForSequenceClassification.from_pretrained(packed.folder / "final-merged")
    assert_scores_as_trained(merged, packed, folder)
    adapted = AutoPeftModelForSequenceClassification.from_pretrained(packed.folder / "final", num_labels=1)
    adapted.config.pad_token_id = merged.config.pad_token_id
    assert_scores_as_trained(adapted, packed, folder)
    saved = load_file(packed.folder / "final" / "adapter_model.safetensors")
    assert any("score" in name for name in saved)
    onward = run(folder, "lora-onward", f"model.path={packed.folder / 'final'}", **lora)
    assert onward.evals[0]["eval_loss"] == pytest.approx(packed.evals[-1]["eval_loss"], rel=1e-5)


def test_bf16_is_the_same_packed_and_padded_within_its_precision(folder: Path) -> None:
    for name, bf16 in {"autocast": {"trainer": {"mixed_precision": "bf16"}}, "weights": {}}.items():
        bf16 = {"trainer": {"max_steps": 3, **bf16.get("trainer", {})}}
        dtype = ["model.dtype=bfloat16"] if name == "weights" else []
        padded = run(folder, f"{name}-padding", "packing.mode=padding", *dtype, **bf16)
        packed = run(folder, f"{name}-packed", SMALL, *dtype, **bf16)
        assert packed.losses == pytest.approx(padded.losses, rel=1e-2)
        assert packed.weights()["score.weight"].dtype == (torch.bfloat16 if dtype else torch.float32)


def test_killed_and_resumed_gives_bitwise_the_same_weights(folder: Path, packed: Run) -> None:
    RUNS.assert_resumes_bitwise(folder, packed, 4)


def test_verify_proves_the_scores(folder: Path) -> None:
    path = folder / "verified.yaml"
    path.write_text(yaml.safe_dump(config_of(folder)))
    report = json.loads(packtrain("verify", str(path), f"trainer.output_dir={folder / 'verified'}", "--json").stdout)
    assert (report["verdict"], report["objective"], report["head"]) == ("exact", "reward", "score")
    assert report["controls_see"] and report["pairs"]["prompts_shared"]
    for figures in (*report["modes"].values(), report["prefix_shared"]):
        assert figures["loss_rel_diff"] < 1e-5 and figures["grad_rel_diff"] < 1e-4


@pytest.mark.parametrize(
    ("name", "peft"),
    [
        pytest.param("zero3", {}, marks=NEEDS_DEEPSPEED),
        ("fsdp2", {}),
        ("fsdp2", {"kind": "lora", "r": 4, "merge": True}),
    ],
)
def test_however_the_model_is_spread_the_training_is_the_same(folder: Path, name: str, peft: dict[str, Any]) -> None:
    config = config_of(folder, trainer={"max_steps": 5}, peft=peft)
    if not peft:
        config["model"] = {"init": "random", "config": MODEL, "tokenizer": "quickstart"}
    run = f"{name}-adapters" if peft else name
    path = folder / f"alone-{run}.yaml"
    path.write_text(yaml.safe_dump(config))
    alone = train_here(load_config(str(path), []), folder / f"alone-{run}")
    found = train(folder, config, SMALL, f"strategy={name}", name=run, command="reward", processes=2)
    assert_same_training(found, alone, "adapter_model.safetensors" if peft else "model.safetensors")
    place = found.folder / ("final-merged" if peft else "final")
    assert_scores_as_trained(AutoModelForSequenceClassification.from_pretrained(place), found, folder)
