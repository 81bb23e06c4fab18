"""`packtrain verify` of preferences: pairs are kept apart, modes agree by the objective's loss, and it starts at a zero margin."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_dpo_user
from here import ALONE
from running import LLAMA
from test_dpo_user import LN2, against
from test_verify import break_borders

from packtrain.config.objective import Objective
from packtrain.config.schema import Packing, Peft, RunConfig, Trainer
from packtrain.packing.segments import Segments
from packtrain.run_folder import RunFolder
from packtrain.train.run import verify_in
from packtrain.train.verify.command import print_verdicts
from packtrain.train.verify.loss_proofs import MODES

start = test_dpo_user.start
TWO = Objective(kind="dpo", loss=["ipo", "sft"], options={"loss_weights": [1.0, 0.5]}, beta=0.3)
WEIGHTED = Objective(kind="dpo", loss="apo_zero", options={"use_weighting": True})


def test_verify_proves_that_no_answer_sees_the_other_one_nor_another_pair(
    start: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    for insists, attention, code in ((None, "auto", 0), (None, "per_document", 0), (True, "per_document", 3)):
        packing, model = Packing(share_prefix=insists), replace(start.model, attention=attention)
        config = replace(start, packing=packing, model=model)
        assert verify_in(config, ALONE) == code
        report = json.loads(RunFolder.of(config.trainer).verification.read_text())
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
    assert verify_in(replace(start, model=dropping, objective=against(way)), ALONE) == 3
    report = json.loads(RunFolder.of(start.trainer).verification.read_text())
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
    config = replace(config, trainer=replace(config.trainer, output_dir=str(tmp_path / "run")))
    assert verify_in(config, ALONE) == 0
    report = json.loads(RunFolder.of(config.trainer).verification.read_text())
    assert (report["verdict"], report["objective"], tuple(report["modes"])) == ("exact", "dpo", MODES)
    tolerances, begins = report["tolerances"], report["start"]
    assert abs(begins["loss"] - begins["zero_margin"]) <= begins["tolerance"] and not begins["problems"]
    for figures in (*report["modes"].values(), report["prefix_shared"]):
        assert (
            figures["loss_rel_diff"] <= tolerances["loss"] and figures["grad_rel_diff"] <= tolerances["grad_rel_diff"]
        )
        assert abs(figures["loss"] - LN2) > 1e-3
    assert report["control"]["grad_rel_diff"] > tolerances["control"]


def test_verify_sees_an_answer_that_sees_the_other_one_where_only_long_rows_show_it(
    start: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_prompts(row: Segments) -> Segments:
        """No answer sees its prompt, in rows of several pairs."""
        return Segments(row.lengths) if row.tokens >= 60 and any(row.prefix_lengths) else row

    break_borders(monkeypatch, lose_prompts)
    assert verify_in(start, ALONE) == 3
    report = json.loads(RunFolder.of(start.trainer).verification.read_text())
    assert report["verdict"] == "leaks"
    assert report["modes"]["packed"]["grad_rel_diff"] < 1e-4 < report["prefix_shared"]["grad_rel_diff"]
