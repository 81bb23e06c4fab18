"""sft, dpo, kto and reward train as TRL does, prove themselves, and save what they trained; their modes and processes: test_cells.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pytest
import torch
from answer_runs import AnswerRuns, labelled, save_model
from here import verified
from matrix import OPTIONS, ROOM, ROWS, assert_same_training
from peft import AutoPeftModelForSequenceClassification
from running import LLAMA, WORDS, Run, config_on, train, write_jsonl
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl_trainers import settings

from packtrain.config.schema import Model
from packtrain.errors import CheckFailed, UserError
from packtrain.train.verify.loss_proofs import MODES

LN2 = 0.6931472
EXAMPLES = {"dpo": [7, 7, 7, 1, 7, 7], "kto": [7, 7, 7, 2] * 2, "reward": [7, 7, 7, 1, 7, 7]}
"""Of each step; of kto in a second pass, too."""
TRL: dict[str, Any] = {
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "reward": (RewardTrainer, RewardConfig),
}
LORA: dict[str, Any] = {"peft": {"kind": "lora", "r": 4, "merge": True}}
LORA["trainer"] = {"gradient_checkpointing": "selective", "max_steps": 3}


@pytest.fixture(scope="module", params=EXAMPLES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnswerRuns:
    kind = request.param
    small, folder = f"batch.tokens_per_device={ROOM[kind]}", tmp_path_factory.mktemp(kind)
    return AnswerRuns(kind, folder, *ROWS[kind], EXAMPLES[kind], small, OPTIONS.get(kind, {}))


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


@only("kto", "reward")  # dpo: test_dpo_user.py
@pytest.mark.parametrize("reference", ["model", pytest.param("precomputed", marks=pytest.mark.exhaustive)])
def test_verify_proves_modes_and_the_first_loss(runs: AnswerRuns, reference: str) -> None:
    if (runs.kind, reference) == ("reward", "precomputed"):
        pytest.skip("it has no reference")
    override = [] if runs.kind == "reward" else [f"objective.reference={reference}"]
    report = verified(runs.load(f"verify-{reference}", *override))
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
@pytest.mark.parametrize("mode", ["packed", pytest.param("padding_free", marks=pytest.mark.exhaustive)])
def test_losses_that_are_not_means_over_pairs_are_those_of_one_process(
    runs: AnswerRuns, objective: dict[str, Any], mode: str
) -> None:
    """In steps of several micro-batches, and a last one that gives two of three processes no pair."""
    groups: Any = {"objective": {"kind": "dpo", **objective}, "trainer": {"max_steps": 4}}
    name = "-".join(objective)
    alone = runs.run(f"{name}-alone", "packing.mode=padding", **groups)
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
        "batch.examples_per_step=11": "batch.examples_per_step",  # the last step of a pass has a single answer
        f"data.eval={single}": "data.eval",
        # a row of one long answer
        "batch.examples_per_step=null batch.tokens_per_step=96 batch.tokens_per_device=96": "batch.tokens_per_step",
    }.items():
        with pytest.raises(UserError, match=where):
            runs.run("refused", *override.split())
    # these have no estimate, and no last step of a pass
    stages = f"data.stages=[{{weights: {{{runs.folder}/train.jsonl: 1}}}}]"
    for override in ("objective.loss=apo_zero_unpaired", stages):
        run = runs.run("kept", "batch.examples_per_step=11", override, "trainer.resume=never")
        assert len(run.losses) == len(runs.examples)


@only("kto")
def test_a_reference_that_differs_at_the_start_is_named(runs: AnswerRuns) -> None:
    with pytest.raises(CheckFailed, match=r"\[first-loss-wrong\](.|\n)*attention_dropout"):
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
    for name in (f"eval_{one}" for one in runs.figures):
        assert first[name] == pytest.approx(last[name], rel=1e-5, abs=1e-6)


@only("reward")
def test_a_reward_model_that_is_trained_as_a_language_model_loses_its_head_and_the_run_says_so(
    runs: AnswerRuns,
) -> None:
    tied = Model(init="random", config={**LLAMA, "tie_word_embeddings": True}, tokenizer="quickstart")
    place: Path = save_model(tied, runs.folder / "scoring", scores=True)
    dpo = ["objective.kind=dpo", "~objective.options"]
    run = runs.run("as-dpo", f"model.path={place}", *dpo, trainer={"max_steps": 1})
    assert f"{place} is a reward model or classifier" in run.log


DOCUMENTS, BATCH, STEPS = 24, 4, 6


@pytest.fixture(scope="module")
def tokenised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Documents of 2 to 90 tokens, with parts that are not trained, as a jsonl of `input_ids` and `labels`."""
    rng = np.random.default_rng(0)
    rows = []
    for length in rng.integers(2, 90, DOCUMENTS):
        ids = rng.integers(5, 400, length)
        # the label of a document's first token is never a target: TRL counts it all the same unless it is masked
        mask = rng.random(length) < 0.6
        mask[0], mask[-1] = False, True
        rows.append({"input_ids": ids.tolist(), "labels": np.where(mask, ids, -100).tolist()})
    return write_jsonl(tmp_path_factory.mktemp("tokens") / "tokens.jsonl", rows), rows


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that both begin with."""
    model = Model(init="random", config=LLAMA, tokenizer="quickstart")
    return save_model(model, tmp_path_factory.mktemp("start") / "model")


@pytest.fixture(scope="module")
def theirs(tokenised: tuple[Path, list[dict]], start: Path, tmp_path_factory: pytest.TempPathFactory) -> SFTTrainer:
    """TRL's trainer, at its end."""
    given = {"per_device_train_batch_size": BATCH, "max_steps": STEPS, "learning_rate": 1e-3, "weight_decay": 0.1}
    given |= {"optim": "adamw_torch_fused", "lr_scheduler_type": "linear", "warmup_steps": 2, "max_grad_norm": 0.5}
    given |= {"train_sampling_strategy": "sequential", "dataset_kwargs": {"skip_prepare_dataset": True}}
    trainer = SFTTrainer(
        model=cast(Any, AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)),
        args=SFTConfig(**settings(tmp_path_factory.mktemp("trl"), **given)),
        train_dataset=datasets.Dataset.from_list(tokenised[1]),
        processing_class=AutoTokenizer.from_pretrained(start),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("mode", ["padding", "packed"])
def test_losses_gradients_and_weights_equal_trl_padding(
    mode: str, tokenised: tuple[Path, list[dict]], start: Path, theirs: SFTTrainer, tmp_path: Path
) -> None:
    expected = [line for line in theirs.state.log_history if "loss" in line]

    config = config_on(
        start,
        tmp_path,
        data={"train": str(tokenised[0]), "shuffle": False, "max_length": 100},
        batch={"examples_per_step": BATCH, "tokens_per_device": 128},
        optim={"schedule": "linear", "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5},
        trainer={"max_steps": STEPS},
    )
    ours = train(tmp_path, config, f"packing.mode={mode}", name="ours")
    assert ours.losses == pytest.approx([line["loss"] for line in expected], rel=1e-5)
    assert ours.norms == pytest.approx([line["grad_norm"] for line in expected], rel=1e-5)
    assert [s["lr"] for s in ours.steps] == pytest.approx([line["learning_rate"] for line in expected])
    weights = ours.weights()
    for name, parameter in theirs.model.named_parameters():
        if name in weights:  # a tied head is stored once
            assert ((weights[name] - parameter).norm() / parameter.norm()).item() < 1e-5, name
