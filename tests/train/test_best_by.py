"""trainer.best_by: any figure decides which weights are kept, and when a run stops."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from here import run_here
from running import Run, base_config, conversations, write_jsonl
from safetensors.torch import load_file
from transformers import TrainerState

from packtrain.config.compose import load_config
from packtrain.errors import UserError
from packtrain.train.run_state import Measure, RunState

NAN = math.nan


class Planned(Measure):
    """Figures by step, in place of measured ones."""

    def __init__(self, values: dict[int, float]) -> None:
        self.values = values

    def figures(self, state: RunState) -> dict[str, float]:
        return {"right": self.values[state.step]} if state.step in self.values else {}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Values of eval_right by step, which a test fills."""
    values: dict[int, float] = {}

    monkeypatch.setattr("packtrain.train.run._measures_of", lambda run: Planned(values))
    return values


def config_of(folder: Path, best_by: str = "highest eval_right", **trainer: Any) -> dict[str, Any]:
    held_out = write_jsonl(folder / "held-out.jsonl", conversations(3, seed=1))
    length = {"max_steps": 8, "eval_every": 1, "early_stop_patience": 3, "keep_checkpoints": 1, "checkpoint_every": 1}
    keys = {**length, "answers": "exact", "best_by": best_by, **trainer}
    return base_config(folder, data={"eval": str(held_out)}, optim={"learning_rate": 0.01}, trainer=keys)


def kept(run: Run) -> list[str]:
    return sorted(path.name for path in (run.folder / "checkpoints").iterdir())


@pytest.mark.sample("values1-2-5")
@pytest.mark.parametrize(
    ("values", "best", "steps"),
    [
        ([0.0, 0.5, 0.25, 0.5, 0.25], 1, 4),  # a tie keeps the earlier
        ([9.0, NAN, 0.25, NAN, 0.0, math.inf], 2, 5),  # step 0 does not count, nor what is no number
        ([0, 0.1, None, 0.0, None, 0.0, None, 0.3, None], 7, 8),  # evaluations without the figure do not count
        ([0, NAN, NAN, NAN], None, 3),
    ],
)
def test_patience_and_weights_go_by_the_figure(
    values: list[float | None], best: int | None, steps: int, tmp_path: Path, planned: dict[int, float]
) -> None:
    planned |= {step: value for step, value in enumerate(values) if value is not None}
    run = run_here(tmp_path, config_of(tmp_path, "highest eval_right"))
    summary = run.summary
    assert (summary["steps"], summary["best_step"]) == (steps, best)
    assert summary["best_by"] == "highest eval_right"
    assert summary["best_value"] == (None if best is None else planned[best])
    assert kept(run) == sorted({f"step-{step:06}" for step in (best or steps, steps)})
    weights = load_file(run.folder / "checkpoints" / f"step-{best or steps:06}" / "model.safetensors")
    final = load_file(run.folder / "final" / "model.safetensors")
    assert all(final[name].equal(weight) for name, weight in weights.items())
    evals = {line["step"]: line for line in run.evals}
    assert summary["eval_loss"] == evals[best or steps]["eval_loss"]
    assert summary["best_eval_loss"] == min(line["eval_loss"] for step, line in evals.items() if step)
    said = f"the weights are from step {best}, with the highest eval_right"
    assert (said in run.log) == (best is not None)
    state = json.loads((run.folder / "checkpoints" / kept(run)[-1] / "trainer_state.json").read_text())
    assert (state["best_global_step"], state["best_metric"]) == (best, best and planned[best])


def test_a_resumed_run_keeps_its_best_and_another_figure_seeks_a_new_one(
    tmp_path: Path, planned: dict[int, float]
) -> None:
    planned |= dict(enumerate([0.0, 0.9, 0.1, 0.1, 0.2, 0.1, 0.1, 0.1, 0.1]))
    config = config_of(tmp_path, "lowest eval_loss", keep_checkpoints=None, early_stop_patience=9)
    first = run_here(tmp_path, config, name="first")
    assert first.summary["best_step"] > 3 and f"{first.summary['best_value']:.4f}" in first.log
    at_3 = first.folder / "checkpoints" / "step-000003"
    assert TrainerState.load_from_json(str(at_3 / "trainer_state.json")).best_global_step == 3
    answers = ("trainer.best_by=highest eval_right", "trainer.early_stop_patience=2")
    other = run_here(tmp_path, config, *answers, f"trainer.resume={at_3}", name="other")
    assert (other.summary["best_step"], other.summary["best_value"], other.summary["steps"]) == (4, 0.2, 6)
    assert "trainer.best_by has changed" in other.log  # step 1 has 0.9, and its weights may be gone
    at_5 = other.folder / "checkpoints" / "step-000005"
    same = run_here(tmp_path, config, *answers, f"trainer.resume={at_5}", name="same")
    assert same.summary["steps"] == 6 and "trainer.best_by has changed" not in same.log
    assert "step-000004 is not there: final/ has the weights of the last step" in same.log


@pytest.mark.parametrize(
    ("overrides", "code", "advice"),
    [
        (["trainer.best_by=eval_loss"], "no-order", "lowest"),
        (["trainer.best_by=highest"], "no-order", "lowest"),
        (["trainer.best_by=lowest loss"], "no-such-figure", "eval_loss"),
        (["trainer.best_by=highest eval_right"], "no-such-figure", "eval_loss"),
        (["trainer.best_by=highest eval_gsm8k/exact_match"], "no-such-figure", "eval_loss"),
        (["trainer.best_by=highest eval_math_los", "data.eval={math:quickstart}"], "no-such-figure", "eval_math_loss"),
        (["objective.kind=dpo", "trainer.best_by=highest eval_accuracies"], "no-such-figure", "rewards/accuracies"),
        (["trainer.best_by=highest eval_loss", "trainer.early_stop_patience=null"], "no-best", "patience"),
    ],
)
def test_a_figure_that_no_evaluation_has_is_refused_with_advice(overrides: list[str], code: str, advice: str) -> None:
    needed = ["model.path=some/model", "data.train=quickstart", "data.eval=quickstart", "batch.examples_per_step=8"]
    evaluated = ["trainer.eval_every=1", "trainer.early_stop_patience=2"]
    with pytest.raises(UserError) as refused:
        load_config(None, [*needed, *evaluated, *overrides])
    (problem,) = refused.value.problems
    assert "trainer.best_by" in problem.where and problem.code == code and advice in problem.fix


def test_figures_of_objectives_and_of_sets_may_be_the_best() -> None:
    needed = ["model.path=some/model", "data.train=quickstart", "data.eval={math:quickstart}", "objective.kind=dpo"]
    evaluated = ["trainer.eval_every=1", "trainer.early_stop_patience=2", "batch.examples_per_step=8"]
    for name in ("eval_loss", "eval_math_loss", "eval_rewards/accuracies", "eval_math_rewards/margins"):
        load_config(None, [*needed, *evaluated, f"trainer.best_by=highest {name}"])
