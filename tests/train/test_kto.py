"""Every loss of TRL's KTOTrainer, over any layout and any micro-batches, is TRL's own of one padded batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny_dpo import SPLITS, assert_same_step, in_parts, padded_trainer, step_of_trl
from tiny_kto import ANSWERS, LABELS, LAYOUTS, Answers, arguments, ours, rows, steps_of
from trl import KTOTrainer
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from packtrain.objectives.kto.spec import SPEC

OBJECTIVES: list[dict[str, Any]] = [
    {"loss_type": "kto"},
    {"loss_type": "apo_zero_unpaired"},
    {"loss_type": "kto", "beta": 0.7, "desirable_weight": 1.5, "undesirable_weight": 0.3},
    {"loss_type": "apo_zero_unpaired", "desirable_weight": 0.0, "undesirable_weight": 2.0},
]


def of_trl(
    folder: Path, labels: list[bool] = LABELS, max_length: int | None = None, **objective: Any
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient and logged figures of one padded batch of all answers."""
    columns = {"prompt_ids": [0], "completion_ids": [0], "label": True}
    given = [{**row, "label": label} for row, label in zip(rows(), labels, strict=True)]
    batch = DataCollatorForUnpairedPreference(pad_token_id=0, max_length=max_length)(given)
    return step_of_trl(padded_trainer(KTOTrainer, arguments(folder, **objective), columns), batch)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda one: "-".join(map(str, one.values())))
def test_loss_gradient_and_figures_equal_trl_padding(objective: dict[str, Any], tmp_path: Path) -> None:
    expected = of_trl(tmp_path, **objective)
    assert set(expected[2]) - {"num_tokens"} == {one.name for one in SPEC.figures}
    assert (expected[2]["kl"] > 0.1) == (objective["loss_type"] == "kto")
    for layout in LAYOUTS:
        for parts in SPLITS:
            found = in_parts(ours(tmp_path, layout, **objective), parts)
            assert_same_step(found, expected, f"{layout} in {len(parts)} micro-batches")


@pytest.mark.parametrize("label", [True, False])
def test_steps_of_one_kind_of_answers_are_those_of_trl(label: bool, tmp_path: Path) -> None:
    labels = [label] * len(LABELS)
    expected = of_trl(tmp_path, labels)
    steps = replace(steps_of("flat"), data=cast(Any, Answers(labels)))
    assert_same_step(in_parts(ours(tmp_path, "flat", steps=steps), SPLITS[1]), expected, "one kind")
    assert "rewards/margins" not in expected[2]


def test_mismatched_pairs_are_cut_as_by_trl_and_keep_to_the_limits_of_a_micro_batch(tmp_path: Path) -> None:
    longest = max(len(row["prompt_ids"]) + len(row["KL_completion_ids"]) for row in rows())
    assert longest == 38 and max(ANSWERS.lengths) == 35
    expected = of_trl(tmp_path, max_length=36)
    for layout in LAYOUTS:
        steps = steps_of(layout, 40, max_length=36)
        batches = steps.mismatched()[0]
        assert len(batches) > 2 and max(batch.slots for batch in batches) <= 40
        rows_of = [batch.inputs.get("segments") for batch in batches]
        padded = [batch.inputs["input_ids"].shape[1] for batch in batches]
        lengths = [max(row.lengths) if row else slots for row, slots in zip(rows_of, padded, strict=True)]
        assert max(lengths) == 36
        assert sum(batch.examples for batch in batches) == len(ANSWERS)
        assert_same_step(in_parts(ours(tmp_path, layout, steps=steps), SPLITS[1]), expected, layout)


def test_an_evaluation_is_one_step_over_the_whole_set(tmp_path: Path) -> None:
    loss, _, figures = of_trl(tmp_path)
    trainer = ours(tmp_path, "flat")
    trainer.evaluation = {"": replace(steps_of("flat", 40, a_step=3), whole=True)}
    trainer.evaluate()
    found = {name.removeprefix("eval_"): value for name, value in trainer.state.lines[-1].items()}
    assert found.pop("step") == 0 and found.pop("epoch") == 0
    assert found.pop("loss") == pytest.approx(loss, rel=1e-5) and found.pop("answers") == 7
    assert found == pytest.approx({name: figures[name] for name in found}, rel=1e-5, abs=1e-5)
