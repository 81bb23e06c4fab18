"""`packtrain dpo` as a user meets it: references, what is kept of them, what is refused, and what the run says."""

from __future__ import annotations

import gc
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from here import ALONE, train_here
from running import LLAMA, WORDS, Run, write_jsonl
from transformers import PreTrainedModel

from packtrain.config.objective import Objective
from packtrain.config.schema import Batch, Data, Model, Optim, Packing, Peft, RunConfig, Trainer
from packtrain.data.prepare import prepare_pairs
from packtrain.data.tokens.pretrained import load_tokenizer
from packtrain.errors import CheckFailed, UserError
from packtrain.model import reference
from packtrain.model.flops import training_flops
from packtrain.model.load import load_model, weights_hash
from packtrain.model.precision import precision_of
from packtrain.run_folder import RunFolder
from packtrain.train.log import metrics
from packtrain.train.log.console import _documents
from packtrain.train.loop import StepTrainer
from packtrain.train.objectives.reference_objective import identity_of_reference
from packtrain.train.run import verify_in
from packtrain.train.verify.command import show

LN2 = 0.6931472
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
        trainer=Trainer(max_steps=3, output_dir=str(tmp_path / "run")),
    )


def trained(config: RunConfig, name: str, **groups: Any) -> Run:
    """A finished run of `config` in this process, in a folder beside its own."""
    return train_here(replace(config, **groups), Path(config.trainer.output_dir).with_name(name))


def test_prompts_that_are_not_token_exact_or_too_short_to_share_are_told_of(tmp_path: Path) -> None:
    rows = [
        *pairs(5),
        {"prompt": "Say back", "chosen": "wards", "rejected": "bone"},
        {"prompt": "a", "chosen": " b", "rejected": " c"},
    ]
    data = Data(train=str(write_jsonl(tmp_path / "pairs.jsonl", rows)), cache_dir=str(tmp_path))
    report = prepare_pairs(data, load_tokenizer(Model(tokenizer="quickstart")), seed=0).train.report
    assert report.apart and report.pairs and report.pairs.pairs - report.pairs.shareable == 1
    said = _documents(report)
    assert "1 of them shorter than two tokens and not shared" in said
    assert (report.apart, "1 of them tokenised differently once the answer follows" in said) == (1, True)
    assert "pairs (of ranked lists, the best answer with the worst)" in _documents(replace(report, format="ranked"))


def against(reference: str) -> Objective:
    return Objective(kind="dpo", reference=reference)


def test_a_second_model_its_own_folder_and_what_it_said_once_are_the_same_reference(
    start: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained(start, "model")
    assert model.losses[0] == pytest.approx(LN2, abs=1e-6) and model.losses[-1] < 0.69
    said = capsys.readouterr().out
    assert "15 pairs of 15 rows" in said and "each of 7 pairs" in said and "pairs and" in said
    assert "packtrain dpo" in said.split("next:")[1]

    once = trained(start, "once", objective=against("precomputed"))
    np.testing.assert_allclose(once.losses, model.losses, rtol=1e-5)
    (kept,) = (tmp_path / "cache" / "reference").glob("*.npy")

    computed = []
    monkeypatch.setattr(reference, "reduce", lambda *_: computed.append(1))
    again = trained(start, "again", objective=against("precomputed"))
    assert again.losses == once.losses and not computed  # from the cache
    monkeypatch.undo()

    other = trained(
        start,
        "other",
        objective=against("precomputed"),
        model=replace(start.model, config={**LLAMA, "initializer_range": 0.1}),
    )
    assert other.losses[0] == pytest.approx(LN2, abs=1e-6)
    assert len(list(kept.parent.glob("*.npy"))) == 2  # other weights, another entry

    known = np.load(kept)
    np.save(kept, known + np.float32([0.1, 0.0]))
    with pytest.raises(CheckFailed, match="the log-probabilities that were kept are stale"):
        trained(start, "stale", objective=against("precomputed"))


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

    def name(config: RunConfig, *, rows: int = 15, moved: float = 0.0, ld_alpha: float | None = None) -> Any:
        data = replace(config.data, train=str(write_jsonl(tmp_path / f"{rows}.jsonl", pairs(rows))))
        prepared = prepare_pairs(data, tokenizer, seed=0).train
        model = load_model(config.model, config.peft, tokenizer, seed=config.trainer.seed)
        with torch.no_grad():
            next(model.parameters())[0, 0] += moved
        identity = identity_of_reference(model, config.peft, weights_hash(model))
        precision = precision_of(model, config.trainer.mixed_precision)
        return reference.cache_key(prepared.fingerprint, identity, precision, ld_alpha)

    def model_as(**keys: Any) -> RunConfig:
        return replace(start, model=replace(start.model, **keys))

    known = name(start)
    assert known == name(
        replace(start, optim=Optim(), batch=Batch(examples_per_step=3), packing=Packing(mode="padding"))
    )
    others = [
        name(start, rows=14),
        name(start, moved=1e-6),
        name(start, ld_alpha=0.5),
        name(model_as(dtype="bfloat16")),
        name(model_as(config={**LLAMA, "rms_norm_eps": 0.1})),
        name(replace(start, trainer=replace(start.trainer, mixed_precision="bf16"))),
        name(replace(start, data=replace(start.data, max_length=32))),
    ]
    assert len({known, *others}) == 1 + len(others)


@pytest.mark.parametrize(("kind", "expected"), [("model", 2), ("precomputed", 1)])
def test_with_kept_log_probabilities_no_reference_is_in_memory(
    start: RunConfig, kind: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def models() -> int:
        gc.collect()
        return sum(issubclass(type(one), PreTrainedModel) and hasattr(one, "lm_head") for one in gc.get_objects())

    before, step, found = models(), StepTrainer.forward_and_backward, []
    monkeypatch.setattr(
        StepTrainer, "forward_and_backward", lambda *given: [found.append(models() - before), step(*given)][1]
    )
    trained(start, "counted", objective=against(kind))
    assert found == [expected] * 3


@pytest.mark.parametrize("way", ["model", "precomputed"])
def test_a_run_goes_on_against_the_reference_that_it_began_with_or_not_at_all(start: RunConfig, way: str) -> None:
    timely = replace(start.trainer, checkpoint_every=2, keep_checkpoints=None)
    whole = trained(start, "whole", objective=against(way), trainer=timely)
    after_two = replace(timely, resume=str(whole.folder / "checkpoints/step-000002"))
    assert trained(start, "on", objective=against(way), trainer=after_two).losses == whole.losses[2:]
    other = replace(start.model, config={**LLAMA, "initializer_range": 0.1})
    with pytest.raises(UserError, match=r"made with one of weights with hash \w+, this run has one") as refused:
        trained(start, "changed", objective=against(way), trainer=after_two, model=other)
    assert [one.where for one in refused.value.problems] == ["model.config.initializer_range", "objective.reference"]


def test_another_folder_is_a_reference_and_need_not_begin_at_a_zero_margin(start: RunConfig) -> None:
    model = trained(start, "first")
    other = trained(start, "second", objective=against(str(model.folder / "final")))
    assert abs(other.losses[0] - LN2) > 1e-3


def test_with_adapters_the_reference_is_the_model_without_them(
    start: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = Peft(kind="lora", r=4, alpha=8, dropout=0.5)
    off = trained(start, "off", peft=lora)
    assert off.losses[0] == pytest.approx(LN2, abs=1e-6) and off.losses[-1] < off.losses[0]
    assert "off, peft.dropout=0.5 too" in capsys.readouterr().out
    for way in ("model", "precomputed"):
        np.testing.assert_allclose(trained(start, way, peft=lora, objective=against(way)).losses, off.losses, rtol=1e-5)


@pytest.fixture
def earlier(start: RunConfig) -> RunConfig:
    """A run with adapters on a folder's model, as those that went before: in earlier/final, and merged beside it."""
    base = trained(start, "base").folder / "final"
    config = replace(start, model=replace(start.model, init="pretrained", path=str(base), config={}, tokenizer=None))
    config = replace(config, peft=Peft(kind="lora", r=4, alpha=8), optim=replace(start.optim, learning_rate=1e-2))
    trained(config, "earlier", peft=replace(config.peft, merge=True))
    return config


def test_earlier_adapters_are_a_reference_beside_new_ones(
    earlier: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path(earlier.trainer.output_dir).with_name("earlier")
    named = trained(earlier, "named", objective=against(str(before / "final")))
    merged = trained(earlier, "merged", objective=against(str(before / "final-merged")))
    assert abs(named.losses[0] - LN2) > 1e-3
    np.testing.assert_allclose(named.losses, merged.losses, rtol=1e-5)
    assert verify_in(replace(earlier, objective=against(str(before / "final"))), ALONE) == 0
    report = json.loads(RunFolder.of(earlier.trainer).verification.read_text())
    assert report["start"] is None
    show(report, as_json=False)
    assert "first loss not checked: the reference is another model" in capsys.readouterr().out
    full = trained(earlier, "full", objective=against(str(before / "final")), peft=Peft())
    assert full.losses[0] == pytest.approx(named.losses[0], rel=1e-5)  # a second model, merged
    assert sorted(one.name for one in (named.folder / "final").iterdir() if one.is_dir()) == []


def test_training_goes_on_from_adapters_and_is_held_to_them(
    earlier: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path(earlier.trainer.output_dir).with_name("earlier")
    config = replace(earlier, model=replace(earlier.model, path=str(before / "final")))
    timely = replace(config.trainer, checkpoint_every=2, keep_checkpoints=None)
    on = trained(config, "on", trainer=timely)
    assert on.losses[0] == pytest.approx(LN2, abs=1e-6) and on.losses[1] < LN2 - 1e-3
    assert f"against the model with the adapters of {before / 'final'}" in " ".join(capsys.readouterr().out.split())
    for way in ("precomputed", str(before / "final"), str(before / "final-merged")):
        same = trained(config, "same", objective=against(way))
        np.testing.assert_allclose(same.losses, on.losses, rtol=1e-5)
    assert verify_in(config, ALONE) == 0  # of adapters that are not new
    begins = json.loads(RunFolder.of(config.trainer).verification.read_text())["start"]
    assert begins["loss"] == pytest.approx(LN2, abs=1e-6)
    base = trained(config, "base-as-reference", objective=against("adapters_off"))
    assert abs(base.losses[0] - LN2) > 1e-3
    assert not [one for one in on.folder.glob("checkpoints/*/*") if one.is_dir()]  # the reference is not kept
    resumed = trained(config, "resumed", trainer=replace(timely, resume=str(on.folder / "checkpoints/step-000002")))
    assert resumed.losses[-1] == on.losses[-1]

    merged = replace(config.model, path=str(before / "final-merged"))
    whole = [trained(config, "whole", peft=Peft(), model=one).losses for one in (config.model, merged)]
    np.testing.assert_allclose(*whole, rtol=1e-5)
    with pytest.raises(UserError, match="have r 4, not 16"):
        trained(config, "other", peft=Peft(kind="lora", alpha=8))


@pytest.mark.parametrize("share", [True, False])
def test_utilisation_is_of_a_peak_that_is_named_and_counts_what_pairs_take(
    start: RunConfig, share: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics, "_peak", lambda *_: metrics.Peak(2e9, "abacus, float32"))
    run = trained(start, "used", packing=Packing(share_prefix=share), objective=against("precomputed"))
    assert "mfu of 0 TFLOP/s a device: abacus, float32, without sparsity" in " ".join(capsys.readouterr().out.split())
    data = prepare_pairs(start.data, load_tokenizer(start.model), seed=0).train
    flops = training_flops(load_model(start.model, Peft(), load_tokenizer(start.model), seed=0))
    sides, prompts = data.documents.lengths.reshape(-1, 2), data.lengths - data.shared_lengths
    # the last step of the epoch has a single pair, of its 15
    singles = [flops.of(pair, alone if share else None) for pair, alone in zip(sides, prompts[:, None], strict=True)]
    step, alone = run.steps[-1], run.steps[-1]["mfu"] * 2e9 / run.steps[-1]["tokens_per_second"]
    assert step["examples"] == 1
    assert any(
        alone == pytest.approx(each / tokens, rel=1e-6) for each, tokens in zip(singles, sides.sum(1), strict=True)
    )


def test_held_out_pairs_are_evaluated_and_told_of(start: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    timely = replace(start.trainer, eval_every=2, early_stop_patience=1, max_steps=4)
    run = trained(start, "eval", data=replace(start.data, eval=0.2), trainer=timely)
    assert [line["step"] for line in run.evals] == [0, 2, 4]
    assert run.evals[0]["eval_loss"] == pytest.approx(LN2, abs=1e-6) and run.evals[0]["eval_pairs"] == 3
    said = capsys.readouterr().out
    assert "of 3 held-out pairs" in said and "(chance: 50%), margin 0.00 → " in said


@pytest.mark.parametrize(
    "groups, said",
    [
        ({"batch": Batch(examples_per_step=7, tokens_per_device=32)}, r"longest pair takes \d+ token slots"),
        ({"objective": Objective(kind="dpo", loss="aot")}, "aot sorts all pairs of a step"),
        ({"objective": Objective(kind="dpo", reference="/nowhere/at/all")}, "objective.reference"),
        ({"model": Model(init="random", config=ROUTED, tokenizer="quickstart")}, "no load-balancing loss of routers"),
    ],
)
def test_what_cannot_be_is_refused_in_words_of_pairs(start: RunConfig, groups: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        trained(start, "refused", **groups)
    if said not in ("aot sorts all pairs of a step", r"longest pair takes \d+ token slots"):  # which hang on the data
        with pytest.raises(UserError, match=said):
            verify_in(replace(start, **groups), ALONE)


def test_a_run_that_insists_on_shared_prompts_never_computes_them_twice(start: RunConfig) -> None:
    insisting: dict[str, Any] = {
        "packing": Packing(share_prefix=True),
        "model": replace(start.model, attention="per_document"),
    }
    with pytest.raises(CheckFailed, match="prompts cannot be shared: per_document") as refused:
        trained(start, "insists", **insisting)
    assert refused.value.problems[0].where == "packing.share_prefix"
