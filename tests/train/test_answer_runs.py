"""packtrain dpo, kto and reward: neither mode, processes, micro-batches nor a kill change a run, and it trains as TRL does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from answer_runs import AnswerRuns, labelled, preferences, save_model
from here import ALONE
from peft import AutoPeftModelForSequenceClassification
from running import LLAMA, WORDS, Run, write_jsonl
from safetensors.torch import load_file
from test_strategies import MODEL, NEEDS_DEEPSPEED
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer

from packtrain.config.schema import Model
from packtrain.errors import CheckFailed, UserError
from packtrain.run_folder import RunFolder
from packtrain.train.run import verify_in
from packtrain.train.verify.modes import MODES

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
LAYOUTS = {
    "padding": ["packing.mode=padding", "batch.examples_per_device=3"],
    "padding_free": ["packing.mode=padding_free", "batch.examples_per_device=2"],
    "small": [],
    "why_not_shared": ["packing.share_prefix=false"],
    "per_document": ["model.attention=per_document"],
}
PRECOMPUTED = "objective.reference=precomputed"
WORLDS = {"dpo": [(2, [PRECOMPUTED]), (3, [])], "kto": [(3, []), (2, [PRECOMPUTED])], "reward": [(2, []), (3, [])]}
"""Of each kind a world in which one process has no example of a step, and one that is tried by -m exhaustive."""
LORA = {
    "peft": {"kind": "lora", "r": 4, "merge": True},
    "trainer": {"gradient_checkpointing": "selective", "max_steps": 3},
}


@pytest.fixture(scope="module", params=KINDS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnswerRuns:
    return AnswerRuns(request.param, tmp_path_factory.mktemp(request.param), **KINDS[request.param])


@pytest.fixture(scope="module")
def packed(runs: AnswerRuns) -> Run:
    return runs.start("packed")


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mode_and_micro_batches_never_change_the_training(runs: AnswerRuns, packed: Run, layout: str) -> None:
    if (runs.kind, layout) == ("kto", "why_not_shared"):
        pytest.skip("an answer shares nothing")
    small = [] if "padding" in layout else [runs.small]
    run = runs.run(layout, *LAYOUTS[layout], *small)
    runs.assert_same_training(run, packed)
    once = "computed once for both answers" in run.log
    assert once == (runs.kind != "kto" and layout in ("padding_free", "small"))


@pytest.mark.parametrize("world", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_several_processes_train_as_one_also_where_one_of_them_has_no_example(
    runs: AnswerRuns, packed: Run, world: int
) -> None:
    processes, overrides = WORLDS[runs.kind][world]
    runs.assert_same_training(runs.start(f"of-{processes}", runs.small, *overrides, processes=processes), packed)


def test_a_run_starts_at_the_loss_of_a_zero_margin_and_learns(runs: AnswerRuns, packed: Run) -> None:
    first, held_out = packed.steps[0], packed.evals[0]
    assert [line["examples"] for line in packed.steps] == runs.examples
    if runs.kind == "dpo":
        assert (first["loss"], held_out["eval_loss"]) == pytest.approx((LN2, LN2), abs=1e-6)
        assert packed.steps[-1]["rewards/margins"] > 0.01
    elif runs.kind == "kto":
        weights = [0.5 if row["label"] else 0.75 for row in runs.train_rows[:7]]
        assert first["loss"] == pytest.approx(sum(weights) / 7, abs=1e-6) and first["kl"] == held_out["eval_kl"] == 0
    assert packed.losses[4] < packed.losses[0]  # of the same examples


def test_lora_with_gradient_checkpointing_is_the_same_packed_and_padded(runs: AnswerRuns) -> None:
    padded = runs.run("lora-padding", "packing.mode=padding", **LORA)
    packed = runs.run("lora-packed", runs.small, **LORA)
    runs.assert_same_training(packed, padded, "adapter_model.safetensors")
    if runs.kind == "dpo":  # against the model with its adapters off
        assert packed.losses[0] == pytest.approx(LN2, abs=1e-6) and packed.losses[2] < packed.losses[0]
    if runs.kind == "reward":
        adapters = packed.folder / "final"
        merged = AutoModelForSequenceClassification.from_pretrained(packed.folder / "final-merged")
        assert_scores_as_trained(runs, merged, packed)
        adapted = AutoPeftModelForSequenceClassification.from_pretrained(adapters, num_labels=1)
        adapted.config.pad_token_id = merged.config.pad_token_id
        assert_scores_as_trained(runs, adapted, packed)
        assert any("score" in name for name in load_file(adapters / "adapter_model.safetensors"))
        onward = runs.run("lora-onward", f"model.path={adapters}", **LORA)
        assert onward.evals[0]["eval_loss"] == pytest.approx(packed.evals[-1]["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    "override",
    ["trainer.mixed_precision=bf16", pytest.param("model.dtype=bfloat16", marks=pytest.mark.exhaustive)],
)
def test_bf16_is_the_same_packed_and_padded_within_its_precision(runs: AnswerRuns, override: str) -> None:
    if override.startswith("model") and runs.kind != "reward":
        pytest.skip("see test_dpo.py and test_dpo_user.py")
    short, name = {"trainer": {"max_steps": 3}}, override.partition(".")[0]
    padded = runs.run(f"{name}-padding", "packing.mode=padding", override, **short)
    packed = runs.run(f"{name}-packed", runs.small, override, **short)
    assert packed.losses == pytest.approx(padded.losses, rel=1e-2 if runs.kind == "reward" else 5e-3)
    if runs.kind == "reward":
        dtype = torch.bfloat16 if name == "model" else torch.float32
        assert packed.weights()["score.weight"].dtype == dtype


def test_killed_and_resumed_gives_bitwise_the_same_weights(runs: AnswerRuns, packed: Run) -> None:
    runs.assert_resumes_bitwise(packed, {"dpo": 2, "kto": 5, "reward": 4}[runs.kind])


@pytest.mark.parametrize(
    ("runs", "strategy", "more"),
    [
        ("kto", "fsdp2", {}),
        pytest.param("kto", "zero2", {}, marks=[NEEDS_DEEPSPEED, pytest.mark.exhaustive]),
        pytest.param("kto", "zero3", {}, marks=[NEEDS_DEEPSPEED, pytest.mark.exhaustive]),
        pytest.param("reward", "zero3", {}, marks=NEEDS_DEEPSPEED),
        pytest.param("reward", "fsdp2", {}, marks=pytest.mark.exhaustive),
        pytest.param("reward", "fsdp2", {"peft": LORA["peft"]}, marks=pytest.mark.exhaustive),
    ],
    indirect=["runs"],
)
def test_strategies_train_as_one_process_also_where_one_has_no_example(
    runs: AnswerRuns, strategy: str, more: dict[str, Any]
) -> None:
    """dpo: test_strategies.py. Of weights that ZeRO-3 does not keep whole; adapters are of a model that has a name."""
    groups: dict[str, Any] = {"trainer": {"max_steps": 4}, **more}
    if not more:
        groups["model"] = {"init": "random", "config": MODEL, "tokenizer": "quickstart", "path": None}
    name = f"{strategy}{'-lora' if more else ''}"
    alone = runs.run(f"alone-{name}", **groups)
    processes = 3 if runs.kind == "kto" else 2
    run = runs.start(name, runs.small, f"strategy={strategy}", processes=processes, **groups)
    runs.assert_same_training(run, alone, "adapter_model.safetensors" if more else "model.safetensors")
    if runs.kind == "reward":
        place = run.folder / ("final-merged" if more else "final")
        assert_scores_as_trained(runs, AutoModelForSequenceClassification.from_pretrained(place), run)


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
        runs.assert_same_training(runs.start(f"{name}-{mode}", *small, processes=3, **groups), alone)


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
    }.items():
        with pytest.raises(UserError) as caught:
            runs.run("refused", override)
        assert where in str(caught.value), override
    run = runs.run("apo", "batch.examples_per_step=11", "objective.loss=apo_zero_unpaired")
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
