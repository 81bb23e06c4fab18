"""`packtrain dpo` as a user meets it: references, what is kept of them, what is refused, what the run says, and its proof."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from here import train_here, verified
from running import LLAMA, WORDS, Run, write_jsonl
from tiny_models import break_borders

from packtrain.config.objective import Objective
from packtrain.config.schema import Batch, Data, Model, Optim, Packing, Peft, RunConfig, Trainer
from packtrain.data.prepare import prepare
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import CheckFailed, UserError
from packtrain.model.load import load_model
from packtrain.model.precision import Precision
from packtrain.model.weights import weights_hash
from packtrain.packing.segments import Segments
from packtrain.train.objectives import training_objective
from packtrain.train.objectives.training_objective import identity_of_reference
from packtrain.train.verify.command import print_verdicts
from packtrain.train.verify.loss_proofs import MODES

LN2 = 0.6931472
BY_DOCUMENT = Model(init="random", config=dict(LLAMA), tokenizer="quickstart", attention="per_document")
ROUTED = {**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "output_router_logits": True}


def pairs(count: int) -> list[dict[str, str]]:
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        words = rng.choices(WORDS, k=rng.randint(2, 12))
        asked = "Say backwards: " + " ".join(words)
        rows.append({"prompt": asked, "chosen": " ".join(reversed(words)), "rejected": " ".join([*words, "no"])})
    return rows


@pytest.fixture
def start(tmp_path: Path) -> RunConfig:
    """Three steps on 15 pairs, 7 a step in several rows; the last step of the epoch has a single pair."""
    data = write_jsonl(tmp_path / "pairs.jsonl", pairs(15))
    return RunConfig(
        model=Model(init="random", config=dict(LLAMA), tokenizer="quickstart"),
        data=Data(train=str(data), max_length=64, cache_dir=str(tmp_path / "cache")),
        batch=Batch(examples_per_step=7, tokens_per_device=256),
        objective=Objective(kind="dpo"),
        optim=Optim(learning_rate=1e-3, schedule="constant"),
        trainer=Trainer(max_steps=3, log_every=1, output_dir=str(tmp_path / "run")),
    )


def trained(config: RunConfig, name: str, **groups: Any) -> Run:
    """A finished run of `config` in this process, in a folder beside its own."""
    return train_here(replace(config, **groups), Path(config.trainer.output_dir).with_name(name))


def test_a_hybrid_and_its_reference_round_alike(start: RunConfig) -> None:
    """Modules that run per document are found once: under autocast a search on the reference might find others."""
    hybrid = {**LLAMA, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
    start = replace(start, model=replace(start.model, config=hybrid))
    run = trained(start, "hybrid", trainer=replace(start.trainer, max_steps=1, mixed_precision="bf16"))
    assert run.summary["verify"]["backend"] == "mixers" and run.losses == pytest.approx([LN2], abs=1e-6)


def against(reference: str) -> Objective:
    return Objective(kind="dpo", reference=reference)


@pytest.mark.exhaustive
def test_a_second_model_its_own_folder_and_what_it_said_once_are_the_same_reference(
    start: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained(start, "model")
    assert model.losses[0] == pytest.approx(LN2, abs=1e-6) and model.losses[-1] < 0.69

    once = trained(start, "once", objective=against("precomputed"))
    np.testing.assert_allclose(once.losses, model.losses, rtol=1e-5)
    (kept,) = (tmp_path / "cache" / "reference").glob("*.npy")

    computed = []
    monkeypatch.setattr(training_objective, "reduce", lambda *_: computed.append(1))
    again = trained(start, "again", objective=against("precomputed"))
    assert again.losses == once.losses and not computed  # from the cache
    monkeypatch.undo()

    another = replace(start.model, config={**LLAMA, "initializer_range": 0.1})
    other = trained(start, "other", objective=against("precomputed"), model=another)
    assert other.losses[0] == pytest.approx(LN2, abs=1e-6)
    assert len(list(kept.parent.glob("*.npy"))) == 2  # other weights, another entry

    known = np.load(kept)
    np.save(kept, known + np.float32([0.1, 0.0]))
    with pytest.raises(CheckFailed, match="stale"):
        trained(start, "stale", objective=against("precomputed"))


@pytest.mark.exhaustive
def test_in_16_bits_the_kept_log_probabilities_are_those_of_the_rows_that_are_trained(
    start: RunConfig, tmp_path: Path
) -> None:
    rounded = replace(start, model=replace(start.model, dtype="bfloat16"), objective=against("precomputed"))
    rounded = replace(rounded, packing=Packing(mode="padding"))
    for name, a_row in (("rows", 256), ("other-rows", 160)):
        run = trained(rounded, name, batch=replace(start.batch, tokens_per_device=a_row))
        assert run.losses[0] == pytest.approx(LN2, abs=1e-6)
        assert run.steps[0]["rewards/chosen"] == run.steps[0]["rewards/rejected"] == 0
    assert len(list((tmp_path / "cache" / "reference").glob("*.npy"))) == 2


def test_kept_log_probabilities_are_named_by_the_pairs_the_weights_and_the_settings(
    start: RunConfig, tmp_path: Path
) -> None:
    start = replace(start, objective=against("precomputed"))
    tokenizer = load_tokenizer(start.model)

    def name(rows: int = 15, ld_alpha: float | None = None, **groups: Any) -> str:
        config = replace(start, **groups)
        data = replace(config.data, train=str(write_jsonl(tmp_path / f"{rows}.jsonl", pairs(rows))))
        prepared = prepare(data, tokenizer, "dpo", seed=0).train
        model = load_model(config.model, config.peft, tokenizer, seed=config.trainer.seed)
        identity = identity_of_reference(model, config.peft, weights_hash(model))
        bf16 = torch.bfloat16 if config.trainer.mixed_precision == "bf16" else None
        precision = Precision(model.dtype, bf16)
        return repr((prepared.fingerprint, identity, precision, ld_alpha))

    known = name()
    assert known == name(optim=Optim(), batch=Batch(examples_per_step=3), packing=Packing(mode="padding"))
    others = [
        name(rows=14),
        name(ld_alpha=0.5),
        name(model=replace(start.model, dtype="bfloat16")),
        name(model=replace(start.model, config={**LLAMA, "rms_norm_eps": 0.1})),
        name(trainer=replace(start.trainer, mixed_precision="bf16", seed=1)),
        name(data=replace(start.data, max_length=32)),
    ]
    assert len({known, *others}) == 1 + len(others)


@pytest.mark.sample(without=("model",))
@pytest.mark.parametrize("way", ["model", "precomputed"])
def test_a_run_goes_on_against_the_reference_that_it_began_with_or_not_at_all(start: RunConfig, way: str) -> None:
    timely = replace(start.trainer, checkpoint_every=2, keep_checkpoints=None)
    whole = trained(start, "whole", objective=against(way), trainer=timely)
    after_two = replace(timely, resume=str(whole.folder / "checkpoints/step-000002"))
    assert trained(start, "on", objective=against(way), trainer=after_two).losses == whole.losses[2:]
    other = replace(start.model, config={**LLAMA, "initializer_range": 0.1})
    with pytest.raises(UserError, match=r"\[changed-since-checkpoint\]") as refused:
        trained(start, "changed", objective=against(way), trainer=after_two, model=other)
    assert [one.where for one in refused.value.problems] == ["model.config.initializer_range", "objective.reference"]


@pytest.fixture
def earlier(start: RunConfig) -> RunConfig:
    """A run with adapters on a folder's model, as those that went before: in earlier/final, and merged beside it."""
    base = trained(start, "base").folder / "final"
    config = replace(start, model=replace(start.model, init="pretrained", path=str(base), config={}, tokenizer=None))
    config = replace(config, peft=Peft(kind="lora", r=4, alpha=8), optim=replace(start.optim, learning_rate=1e-2))
    trained(config, "earlier", peft=replace(config.peft, merge=True))
    return config


def test_earlier_adapters_are_a_reference_beside_new_ones(earlier: RunConfig) -> None:
    before = Path(earlier.trainer.output_dir).with_name("earlier")
    named = trained(earlier, "named", objective=against(str(before / "final")))
    merged = trained(earlier, "merged", objective=against(str(before / "final-merged")))
    assert abs(named.losses[0] - LN2) > 1e-3
    np.testing.assert_allclose(named.losses, merged.losses, rtol=1e-5)
    assert (
        verified(replace(earlier, objective=against(str(before / "final"))))["start"] is None
    )  # the reference is another model


def test_training_goes_on_from_adapters_and_is_held_to_them(earlier: RunConfig) -> None:
    before = Path(earlier.trainer.output_dir).with_name("earlier")
    config = replace(earlier, model=replace(earlier.model, path=str(before / "final")))
    timely = replace(config.trainer, checkpoint_every=2, keep_checkpoints=None)
    on = trained(config, "on", trainer=timely)
    assert on.losses[0] == pytest.approx(LN2, abs=1e-6) and on.losses[1] < LN2 - 1e-3
    for way in ("precomputed", str(before / "final"), str(before / "final-merged")):
        same = trained(config, "same", objective=against(way))
        np.testing.assert_allclose(same.losses, on.losses, rtol=1e-5)
    assert verified(config)["start"]["loss"] == pytest.approx(LN2, abs=1e-6)  # of adapters that are not new
    base = trained(config, "base-as-reference", objective=against("adapters_off"))
    assert abs(base.losses[0] - LN2) > 1e-3
    assert not [one for one in on.folder.glob("checkpoints/*/*") if one.is_dir()]  # the reference is not kept
    with pytest.raises(UserError, match=r"r 4, not 16 \[adapter-settings-differ\]"):
        trained(config, "other", peft=Peft(kind="lora", alpha=8))


@pytest.mark.parametrize(
    ("groups", "where"),
    [
        ({"batch": Batch(examples_per_step=7, tokens_per_device=32)}, "batch.tokens_per_device"),
        ({"model": Model(init="random", config=ROUTED, tokenizer="quickstart")}, "router"),
        ({"packing": Packing(share_prefix=True), "model": BY_DOCUMENT}, "packing.share_prefix"),
    ],
    ids=["long", "routers", "why_not_shared"],
)
def test_what_cannot_be_is_refused_with_the_key(start: RunConfig, groups: dict[str, Any], where: str) -> None:
    with pytest.raises((UserError, CheckFailed), match=where):
        trained(start, "refused", **groups)


TWO = Objective(kind="dpo", loss=["ipo", "sft"], options={"loss_weights": [1.0, 0.5]}, beta=0.3)
WEIGHTED = Objective(kind="dpo", loss="apo_zero", options={"use_weighting": True})


def test_verify_proves_that_no_answer_sees_the_other_one_nor_another_pair(
    start: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    for insists, attention, code in ((None, "auto", 0), (None, "per_document", 0), (True, "per_document", 3)):
        packing, model = Packing(share_prefix=insists), replace(start.model, attention=attention)
        config = replace(start, packing=packing, model=model)
        report = verified(config, expect=code)
        assert report["start"]["loss"] == pytest.approx(LN2, abs=1e-6) and not report["start"]["problems"]
        proof = report["pairs"]
        assert proof["prompts_shared"] == (attention == "auto")
        if attention == "auto":
            worst = max(proof[f"max_abs_diff_{what}"] for what in ("before", "after", "alone"))
            assert worst <= proof["tolerance"] and proof["control"] > 5 * proof["tolerance"]
        print_verdicts(report, as_json=False)
        assert ("share_prefix=false" in capsys.readouterr().out) == bool(insists)


@pytest.mark.parametrize("way", ["model", "precomputed"])
def test_verify_says_why_the_first_loss_is_not_that_of_a_zero_margin(start: RunConfig, way: str) -> None:
    dropping = replace(start.model, config={**LLAMA, "attention_dropout": 0.2})
    report = verified(replace(start, model=dropping, objective=against(way)), expect=3)
    assert report["verdict"] == "unsupported" and report["isolation"]["max_abs_diff_after"] == 0
    assert "0.69" in report["problem"] and "model.config.attention_dropout=0" in report["fix"]
    off = abs(report["start"]["loss"] - report["start"]["zero_margin"])
    assert off > report["start"]["tolerance"] and len(report["start"]["problems"]) == 1


@pytest.mark.parametrize(
    "objective, groups",
    [
        (Objective(kind="dpo"), {}),
        (TWO, {"peft": Peft(kind="lora", r=4)}),
        (Objective(kind="dpo", loss="aot"), {}),
        (WEIGHTED, {"trainer": Trainer(mixed_precision="bf16")}),
    ],
    ids=["sigmoid", "two losses, lora", "sorted pairs", "weighted, bf16"],
)
def test_verify_compares_the_modes_by_the_losses_and_gradients_of_dpo(
    start: RunConfig, objective: Objective, groups: dict[str, Any], tmp_path: Path
) -> None:
    config = replace(start, objective=objective, **groups)
    report = verified(replace(config, trainer=replace(config.trainer, output_dir=str(tmp_path / "run"))))
    assert (report["verdict"], report["objective"], tuple(report["modes"])) == ("exact", "dpo", MODES)
    tolerances, begins = report["tolerances"], report["start"]
    assert abs(begins["loss"] - begins["zero_margin"]) <= begins["tolerance"] and not begins["problems"]
    for figures in (*report["modes"].values(), report["prefix_shared"]):
        assert figures["loss_rel_diff"] <= tolerances["loss"] and abs(figures["loss"] - LN2) > 1e-3
        assert figures["grad_rel_diff"] <= tolerances["grad_rel_diff"]
    assert report["control"]["grad_rel_diff"] > tolerances["control"]


def test_verify_sees_an_answer_that_sees_the_other_one_where_only_long_rows_show_it(
    start: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_prompts(_: Any, row: Segments) -> Segments:
        """No answer sees its prompt, in rows of several pairs."""
        return Segments(row.lengths) if row.tokens >= 60 and any(row.prefix_lengths) else row

    break_borders(monkeypatch, lose_prompts)
    report = verified(start, expect=3)
    assert report["verdict"] == "leaks"
    assert report["modes"]["packed"]["grad_rel_diff"] < 1e-4 < report["prefix_shared"]["grad_rel_diff"]
