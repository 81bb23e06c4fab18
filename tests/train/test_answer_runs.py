"""packtrain dpo, kto and reward train as TRL does, prove themselves, and save what they trained; their modes and processes: test_cells.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from answer_runs import AnswerRuns, labelled, preferences, save_model
from here import ALONE
from matrix import assert_same_training
from peft import AutoPeftModelForSequenceClassification
from running import LLAMA, WORDS, Run, write_jsonl
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

from packtrain.config.schema import Model
from packtrain.errors import CheckFailed, UserError
from packtrain.run_folder import RunFolder
from packtrain.train.run import verify_in
from packtrain.train.verify.loss_proofs import MODES

LN2 = 0.6931472
PAIRS = {"train_rows": preferences(22, 0), "eval_rows": preferences(5, 1), "small": "batch.tokens_per_device=190"}
ANSWERS = {"train_rows": labelled(23, 0), "eval_rows": labelled(6, 1), "small": "batch.tokens_per_device=110"}
KINDS: dict[str, dict[str, Any]] = {
    "dpo": {"examples": [7, 7, 7, 1, 7, 7], **PAIRS},
    # of one kind in the second pass, too
    "kto": {
        "examples": [7, 7, 7, 2] * 2,
        "options": {"undesirable_weight": 1.5},
        **ANSWERS,
    },
    "reward": {
        "examples": [7, 7, 7, 1, 7, 7],
        "options": {"center_rewards_coefficient": 0.02},
        **PAIRS,
    },
}
TRL: dict[str, Any] = {
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "reward": (RewardTrainer, RewardConfig),
}
LORA = {
    "peft": {"kind": "lora", "r": 4, "merge": True},
    "trainer": {"gradient_checkpointing": "selective", "max_steps": 3},
}


@pytest.fixture(scope="module", params=KINDS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnswerRuns:
    return AnswerRuns(request.param, tmp_path_factory.mktemp(request.param), **KINDS[request.param])


@pytest.fixture(scope="module")
def packed(runs: AnswerRuns) -> Run:
    return runs.run("packed")


def only(*kinds: str) -> Any:
    return pytest.mark.parametrize("runs", kinds, indirect=True)


def test_the_steps_equal_those_of_trl(runs: AnswerRuns, packed: Run) -> None:
    """Of kto those before the last step of a pass, where TRL makes the pairs of the KL estimate as we do."""
    (trainer, config), start = TRL[runs.kind], runs.folder / "start"
    model: Any = str(start)
    if runs.kind != "reward":
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    held_out = {} if runs.kind == "kto" else {"eval_dataset": datasets.Dataset.from_list(runs.eval_rows)}
    rows = runs.train_rows
    if runs.kind == "dpo":
        rows = [{name: part for name, part in row.items() if name != "margin"} for row in rows]
    theirs = trainer(
        model=model,
        args=config(**runs.arguments_of_trl()),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(start),
        **held_out,
    )
    theirs.train()
    expected = [line for line in theirs.state.log_history if "loss" in line]
    for ours, line in zip(packed.steps, expected, strict=True):
        names = line.keys() - {"learning_rate", "epoch", "step", "num_tokens"}
        assert names == {"loss", "grad_norm", *(name for name in runs.figures if name in ours)}  # all that TRL logs
        for name in names:
            assert ours[name] == pytest.approx(line[name], rel=1e-5, abs=1e-5), (ours["step"], name)
        assert (ours["tokens"], ours["lr"]) == (line["num_tokens"], line["learning_rate"])
    if runs.kind == "kto":
        assert max(line["kl"] for line in expected) > 0.01
    else:
        evaluated = theirs.evaluate()
        for name in ("eval_loss", *(f"eval_{name}" for name in runs.figures)):
            assert packed.evals[-1][name] == pytest.approx(evaluated[name], rel=1e-5, abs=1e-5), name
    weights, parameters = packed.weights(), dict(theirs.model.named_parameters())
    assert parameters.keys() - weights.keys() <= {"lm_head.weight"}  # a tied head is stored once
    for name in parameters.keys() & weights.keys():
        assert (weights[name] - parameters[name]).norm() <= 1e-4 * parameters[name].norm(), name


@only("reward")
def test_adapters_score_as_trained_alone_and_merged_and_are_gone_on_from(runs: AnswerRuns) -> None:
    packed = runs.run("lora-packed", runs.small, **LORA)
    adapters = packed.folder / "final"
    merged = AutoModelForSequenceClassification.from_pretrained(packed.folder / "final-merged")
    assert_scores_as_trained(runs, merged, packed)
    adapted = AutoPeftModelForSequenceClassification.from_pretrained(adapters, num_labels=1)
    adapted.config.pad_token_id = merged.config.pad_token_id
    assert_scores_as_trained(runs, adapted, packed)
    assert any("score" in name for name in load_file(adapters / "adapter_model.safetensors"))
    onward = runs.run("lora-onward", f"model.path={adapters}", **LORA)
    assert onward.evals[0]["eval_loss"] == pytest.approx(packed.evals[-1]["eval_loss"], rel=1e-5)


@only("kto", "reward")  # dpo: test_dpo_verify.py
@pytest.mark.parametrize("reference", ["model", pytest.param("precomputed", marks=pytest.mark.exhaustive)])
def test_verify_proves_modes_and_the_first_loss(runs: AnswerRuns, reference: str) -> None:
    if (runs.kind, reference) == ("reward", "precomputed"):
        pytest.skip("it has no reference")
    override = [] if runs.kind == "reward" else [f"objective.reference={reference}"]
    config = runs.load(f"verify-{reference}", *override)
    assert verify_in(config, ALONE) == 0
    report = json.loads(RunFolder.of(config.trainer).verification.read_text())
    assert (report["verdict"], report["objective"], set(report["modes"])) == ("exact", runs.kind, set(MODES))
    assert report["controls_see"]
    if runs.kind == "reward":
        assert report["head"] == "score" and report["pairs"]["prompts_shared"]
        for figures in (*report["modes"].values(), report["prefix_shared"]):
            assert figures["loss_rel_diff"] < 1e-5 and figures["grad_rel_diff"] < 1e-4
    else:  # of 14 answers every other one is desirable
        assert report["start"]["loss"] == pytest.approx((0.5 + 0.75) / 2, abs=1e-6) and not report["start"]["problems"]
        assert abs(report["reference"]["loss"] - 0.625) > 0.01


# -- dpo alone


@only("dpo")
@pytest.mark.parametrize(
    "objective",
    [
        {"loss": ["sigmoid", "sft"], "options": {"loss_weights": [0.7, 0.3]}},
        pytest.param({"options": {"use_weighting": True, "ld_alpha": 0.5}}, marks=pytest.mark.exhaustive),
    ],
    ids=["two-losses", "weighted"],
)
def test_losses_that_are_not_means_over_pairs_are_those_of_one_process(
    runs: AnswerRuns, objective: dict[str, Any]
) -> None:
    """In steps of several micro-batches, and a last one that gives two of three processes no pair."""
    groups: Any = {"objective": {"kind": "dpo", **objective}, "trainer": {"max_steps": 4}}
    name = "-".join(objective)
    alone = runs.run(f"{name}-alone", "packing.mode=padding", **groups)
    for mode in ("packed", "padding_free"):
        small = [f"packing.mode={mode}", runs.small if mode == "packed" else "batch.examples_per_device=2"]
        assert_same_training(runs.start(f"{name}-{mode}", *small, processes=3, **groups), alone)


@only("dpo")
def test_a_loss_that_sorts_pairs_is_refused_where_only_the_evaluation_would_be_split(runs: AnswerRuns) -> None:
    short = [{**runs.train_rows[0], "prompt": [{"role": "user", "content": word}]} for word in WORDS[:2]]
    files = {"train": str(write_jsonl(runs.folder / "short.jsonl", short)), "eval": str(runs.folder / "train.jsonl")}
    files |= {"max_length": 92}
    groups: Any = {"trainer": {"max_steps": 1}, "objective": {"kind": "dpo", "loss": "aot"}, "data": files}
    assert len(runs.run("aot", runs.small, "data.eval=null", **groups).losses) == 1
    with pytest.raises(UserError, match="aot"):
        runs.run("aot-refused", runs.small, **groups)


# -- kto alone


@only("kto")
def test_what_cannot_be_estimated_from_the_answers_of_a_step_is_refused(runs: AnswerRuns) -> None:
    unlabelled = write_jsonl(runs.folder / "unlabelled.jsonl", [{"prompt": "Say", "completion": " it."}] * 3)
    single = write_jsonl(runs.folder / "single.jsonl", labelled(1, 3))
    for override, where in {
        f"data.train={unlabelled}": "unlabelled.jsonl",
        "batch.examples_per_step=1": "batch.examples_per_step",
        "objective.loss=hinge": "objective.loss",
        "data.overlong=split": "data.overlong",
        "batch.examples_per_step=11": "batch.examples_per_step",  # the last step of a pass has a single answer
        f"data.eval={single}": "data.eval",
        # a row of one long answer
        "batch.examples_per_step=null batch.tokens_per_step=96 batch.tokens_per_device=96": "batch.tokens_per_step",
    }.items():
        with pytest.raises(UserError) as caught:
            runs.run("refused", *override.split())
        assert where in str(caught.value), override
    # these have no estimate, and no last step of a pass
    for override in (
        "objective.loss=apo_zero_unpaired",
        f"data.stages=[{{weights: {{{runs.folder}/train.jsonl: 1}}}}]",
    ):
        run = runs.run("kept", "batch.examples_per_step=11", override, "trainer.resume=never")
        assert len(run.losses) == len(runs.examples)


@only("kto")
def test_a_reference_that_differs_at_the_start_is_named(runs: AnswerRuns) -> None:
    with pytest.raises(CheckFailed, match=r"the first loss is 0\.\d+, but 0\.\d+ while(.|\n)*attention_dropout"):
        runs.run("dropping", "model.config.attention_dropout=0.2")


# -- reward alone


def assert_scores_as_trained(runs: AnswerRuns, model: Any, run: Run) -> None:
    """The figures of the held-out pairs, each document scored alone by a loaded model, are those of the last evaluation."""
    model = model.eval()
    assert model.config.num_labels == 1 and model.config.pad_token_id is not None
    tokenizer: Any = AutoTokenizer.from_pretrained(runs.folder / "start")

    def scores(side: str) -> torch.Tensor:
        chats = [[*row["prompt"], *row[side]] for row in runs.eval_rows]
        inputs = [tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt") for chat in chats]
        with torch.no_grad():
            return torch.cat([model(**one).logits[:, 0] for one in inputs])

    chosen, rejected = scores("chosen"), scores("rejected")
    both, margin = torch.cat([chosen, rejected]), chosen - rejected
    figures = (both.min(), both.mean(), both.max(), (margin > 0).float().mean(), margin.mean())
    for name, value in zip(runs.figures, figures, strict=True):
        assert run.evals[-1][f"eval_{name}"] == pytest.approx(value.item(), rel=1e-5, abs=1e-5), name


@only("reward")
def test_the_saved_model_scores_as_trained_and_is_a_reward_model_to_go_on_from(runs: AnswerRuns, packed: Run) -> None:
    final = packed.folder / "final"
    assert_scores_as_trained(runs, AutoModelForSequenceClassification.from_pretrained(final), packed)
    onward = runs.run("onward", f"model.path={final}", trainer={"max_steps": 1})
    first, last = onward.evals[0], packed.evals[-1]  # with the head that it has
    assert all(
        first[f"eval_{name}"] == pytest.approx(last[f"eval_{name}"], rel=1e-5, abs=1e-6) for name in runs.figures
    )


@only("reward")
def test_a_reward_model_that_is_trained_as_a_language_model_loses_its_head_and_the_run_says_so(
    runs: AnswerRuns,
) -> None:
    tied = Model(init="random", config={**LLAMA, "tie_word_embeddings": True}, tokenizer="quickstart")
    place: Path = save_model(tied, runs.folder / "scoring", scores=True)
    dpo = ["objective.kind=dpo", "~objective.options"]
    run = runs.run("as-dpo", f"model.path={place}", *dpo, trainer={"max_steps": 1})
    assert f"{place} is a reward model or classifier" in run.log
