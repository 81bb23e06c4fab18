"""`packtrain dpo` as a user meets it: references, what is kept of them, what is refused, and what the run says."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import LLAMA, WORDS, Run, write_jsonl

from packtrain.config.compose import to_yaml
from packtrain.config.schema import Batch, Data, Model, Objective, Optim, Packing, Peft, RunConfig, Trainer
from packtrain.errors import UserError
from packtrain.launch.verification import show
from packtrain.run_folder import RunFolder
from packtrain.train import reference
from packtrain.train.run import Process, train_in
from packtrain.train.verify import verify

LN2 = 0.6931472


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
        data=Data(train=str(data), max_length=64, cache_dir=str(tmp_path / "cache"), workers=1),
        batch=Batch(examples_per_step=7, tokens_per_device=256),
        objective=Objective(kind="dpo"),
        optim=Optim(learning_rate=1e-3, schedule="constant"),
        trainer=Trainer(max_steps=3, output_dir=str(tmp_path / "run")),
    )


def trained(config: RunConfig, name: str, **groups: Any) -> Run:
    """A finished run of `config` in this process, in a folder beside its own."""
    folder = Path(config.trainer.output_dir).with_name(name)
    config = replace(config, **groups)
    config = replace(config, trainer=replace(config.trainer, output_dir=str(folder)))
    prepared = RunFolder.of(config)
    prepared.open_attempt("auto")
    prepared.attempt.config.write_text(to_yaml(config))
    assert train_in(config, Process(0, 1, torch.device("cpu"))) == 0
    return Run(folder)


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
    (kept,) = (tmp_path / "cache" / "reference").iterdir()

    computed = []
    monkeypatch.setattr(reference, "_fill", lambda *_: computed.append(1))
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
    assert len(list(kept.parent.iterdir())) == 2  # other weights, another entry

    known = np.load(kept)
    known[::2] = np.nan
    np.save(kept.with_name(f"{kept.stem}.rank-0-of-2.npy"), known)  # what an interrupted run of two processes left
    kept.unlink()
    resumed = trained(start, "resumed", objective=against("precomputed"))
    np.testing.assert_allclose(resumed.losses, model.losses, rtol=1e-5)
    assert not list(kept.parent.glob("*.rank-*")) and kept.exists()


def test_another_folder_is_a_reference_and_need_not_begin_at_a_zero_margin(start: RunConfig) -> None:
    model = trained(start, "first")
    other = trained(start, "second", objective=against(str(model.folder / "final")))
    assert abs(other.losses[0] - LN2) > 1e-3


def test_with_adapters_the_reference_is_the_model_without_them(start: RunConfig) -> None:
    lora = Peft(kind="lora", r=4, alpha=8)
    off = trained(start, "off", peft=lora)
    assert off.losses[0] == pytest.approx(LN2, abs=1e-6) and off.losses[-1] < off.losses[0]
    for way in ("model", "precomputed"):
        np.testing.assert_allclose(trained(start, way, peft=lora, objective=against(way)).losses, off.losses, rtol=1e-5)


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
        ({"objective": Objective(kind="dpo", loss_type="aot")}, "aot sorts all pairs of a step"),
        ({"objective": Objective(kind="dpo", reference="/nowhere/at/all")}, "objective.reference"),
    ],
)
def test_what_cannot_be_is_refused_in_words_of_pairs(start: RunConfig, groups: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        trained(start, "refused", **groups)


def test_verify_proves_that_no_answer_sees_the_other_one_nor_another_pair(
    start: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    for insists, attention, code in ((None, "auto", 0), (None, "per_document", 0), (True, "per_document", 3)):
        packing, model = Packing(share_prefix=insists), replace(start.model, attention=attention)
        config = replace(start, packing=packing, model=model)
        assert verify(config, Process(0, 1, torch.device("cpu"))) == code
        report = json.loads(RunFolder.of(config).verification.read_text())
        proof = report["pairs"]
        assert proof["prompts_shared"] == (attention == "auto")
        if attention == "auto":
            worst = max(proof[f"max_abs_diff_{what}"] for what in ("before", "after", "alone"))
            assert worst <= proof["tolerance"] and proof["control"] > 5 * proof["tolerance"]
        show(report, as_json=False)
        said = capsys.readouterr().out
        assert ("pairs: beside a changed one" in said) == (attention == "auto")
        assert ("prompts cannot be shared: per_document" in said and "share_prefix=false" in said) == bool(insists)
