"""Steps that are spikes: what follows is what trainer.on_spike says, on all ranks, and again after a resume."""

from __future__ import annotations

import math
import os
import shutil
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from answer_runs import of_objective
from here import train_here
from matrix import needs
from running import Run, assert_same_bits, base_config, packtrain, train
from running import written as yaml_of

from packtrain.config.compose import load_config
from packtrain.errors import CheckFailed
from packtrain.train.log.metrics import MetricsFile
from packtrain.train.loop import StepTrainer
from packtrain.train.run_state import RunState
from packtrain.train.spikes import IN_A_ROW, RecentFigures
from tests.train import forked

SPIKE = 5
"""The step whose gradients are no numbers."""
EVERY_2: dict[str, Any] = {"max_steps": 8, "checkpoint_every": 2, "keep_checkpoints": None}
NEEDS_DEEPSPEED = needs("deepspeed")


def broken_at(step: int, times: float = math.nan, last: int = 0) -> Any:
    """A `forward_and_backward` whose loss and gradients are multiplied in `step`, or from there to the `last`, each time it comes."""
    backward = StepTrainer.forward_and_backward

    def forward_and_backward(self: Any, inputs: Any, counts: Any) -> Any:
        own = self.loss.compute
        if step <= self.state.step + 1 <= max(step, last):
            self.loss.compute = lambda *given: own(*given) * times if torch.is_grad_enabled() else own(*given)
        try:
            return backward(self, inputs, counts)
        finally:
            self.loss.compute = own

    return forward_and_backward


def with_a_spike(*given: Any) -> None:
    """The command, in which step 5 is broken."""
    StepTrainer.forward_and_backward = broken_at(SPIKE)
    forked.run(*given)


def with_a_spike_and_an_end(*given: Any) -> None:
    """The same, killed after step 7."""
    log = MetricsFile.log

    def last(self: Any, state: RunState, line: dict[str, Any]) -> None:
        log(self, state, line)
        if state.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)

    MetricsFile.log = last
    with_a_spike(*given)


def written(folder: Path, **trainer: Any) -> str:
    return yaml_of(folder, base_config(folder, trainer={**EVERY_2, **trainer}))


@pytest.fixture(scope="module")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of one process that skips step 5."""
    folder = tmp_path_factory.mktemp("skipped")
    packtrain("sft", written(folder, on_spike="skip"), begin=with_a_spike)
    return Run(folder / "run")


def test_a_skipped_step_changes_nothing_and_is_told_with_its_documents(skipped: Run) -> None:
    (line,) = skipped.spikes
    assert (line["step"], line["action"], line["loss"]) == (SPIKE, "skip", "nan")
    assert len(line["documents"]) == 7
    assert all("data.jsonl:" in one["place"] and 0 < one["loss"] < 10 for one in line["documents"])
    assert [one["step"] for one in skipped.steps] == list(range(1, 9))
    assert [one["step"] for one in skipped.steps if "skipped" in one] == [SPIKE]
    assert {one["step"] for one in skipped.ledger} == {*range(1, 9)} - {SPIKE}
    assert all(math.isfinite(one["loss"]) and math.isfinite(one["grad_norm"]) for one in skipped.steps)
    assert [skipped.states(step)["state"][0]["step"] for step in (4, 6)] == [4, 5]


@pytest.mark.sample(without=("dpo",))
@pytest.mark.parametrize("verb", ["sft", "dpo"])
def test_the_means_of_a_line_leave_a_skipped_step_out(tmp_path: Path, verb: str) -> None:
    """Of lines for several steps, and TRL's own figures as well; a line of one skipped step repeats the loss before it."""

    def trained(name: str, log_every: int) -> Run:
        keys: dict[str, Any] = {"max_steps": 8, "log_every": log_every, "on_spike": "skip"}
        config = of_objective(tmp_path, verb, 60, trainer=keys)
        return train(tmp_path, config, name=name, command=verb, begin=with_a_spike)

    each, some = trained("each", 1).steps, trained("some", 4).steps
    assert [line["step"] for line in some] == [1, 4, 8] and some[2]["skipped"] == 1
    assert each[SPIKE - 1]["loss"] == each[SPIKE - 2]["loss"]
    made = [line for line in each[4:] if "skipped" not in line]
    assert some[2]["loss"] == pytest.approx(statistics.mean(line["loss"] for line in made), rel=1e-6)
    if verb == "dpo":
        margins = statistics.mean(line["rewards/margins"] for line in made)
        assert "rewards/margins" not in each[SPIKE - 1] and some[2]["rewards/margins"] == pytest.approx(margins)


@pytest.mark.exhaustive
def test_killed_after_a_skipped_step_a_run_ends_the_same(skipped: Run, tmp_path: Path) -> None:
    path = written(tmp_path, on_spike="skip", checkpoint_every=4)
    assert packtrain("sft", path, begin=with_a_spike_and_an_end, expect=None).returncode == -9
    packtrain("sft", path, begin=with_a_spike)
    again = Run(tmp_path / "run")
    assert_same_bits(again, skipped)
    assert len(again.spikes) == 1


def test_figures_of_experts_leave_a_skipped_step_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTrainer, "forward_and_backward", broken_at(SPIKE))
    experts = "{num_local_experts: 4, num_experts_per_tok: 2, output_router_logits: true}"
    config = load_config(
        written(tmp_path, on_spike="skip"), ["model.config.model_type=mixtral", f"model.config={experts}"]
    )
    steps = train_here(config, tmp_path / "run").steps
    assert [line["step"] for line in steps if "router_aux_loss" not in line] == [SPIKE]
    assert all(math.isfinite(line.get("router_aux_loss", 0.0)) for line in steps)


def test_spikes_without_end_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTrainer, "forward_and_backward", broken_at(SPIKE, last=100))
    with pytest.raises(CheckFailed, match=str(IN_A_ROW)):
        train_here(load_config(written(tmp_path, on_spike="skip", max_steps=30), []), tmp_path / "run")
    assert [line["step"] for line in Run(tmp_path / "run").spikes] == list(range(SPIKE, SPIKE + IN_A_ROW))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("strategy", "dtype", "near"),
    [
        ("ddp", "float32", 1e-5),
        pytest.param("zero2", "float32", 1e-5, marks=NEEDS_DEEPSPEED),
        pytest.param("zero1", "bfloat16", 1e-3, marks=NEEDS_DEEPSPEED),  # its own optimizer
        ("fsdp2", "float32", 1e-5),
    ],
)
def test_two_processes_skip_the_same_step(skipped: Run, tmp_path: Path, strategy: str, dtype: str, near: float) -> None:
    config = base_config(tmp_path, trainer={**EVERY_2, "on_spike": "skip"})
    run = train(tmp_path, config, f"strategy={strategy}", f"model.dtype={dtype}", processes=2, begin=with_a_spike)
    assert run.losses == pytest.approx(skipped.losses, rel=near)
    (line,) = run.spikes
    found, expected = (
        {Path(one["place"]).name: one["loss"] for one in of["documents"]} for of in (line, skipped.spikes[0])
    )
    assert found == pytest.approx(expected, rel=10 * near)


@pytest.mark.parametrize(
    ("strategy", "processes"),
    [
        ("ddp", 1),
        pytest.param("fsdp2", 2, marks=pytest.mark.exhaustive),
        pytest.param("zero2", 2, marks=[NEEDS_DEEPSPEED, pytest.mark.exhaustive]),
    ],
)
def test_rolled_back_a_run_leaves_the_documents_out(
    skipped: Run, tmp_path: Path, strategy: str, processes: int
) -> None:
    config = base_config(tmp_path, trainer={**EVERY_2, "on_spike": "rollback", "max_steps": 12, "checkpoint_every": 3})
    run = train(tmp_path, config, f"strategy={strategy}", processes=processes, begin=with_a_spike)
    (line,) = run.spikes
    assert (line["step"], line["action"], line["from"]) == (SPIKE, "rollback", 3)
    assert [one["step"] for one in run.steps] == list(range(1, 13))
    assert run.losses[:3] == pytest.approx(skipped.losses[:3], rel=1e-5)
    assert abs(run.losses[5] - skipped.losses[5]) > 1e-4  # without the update that led to the spike, too
    assert [one["step"] for one in run.ledger] == [one["step"] for one in run.steps for _ in range(one["examples"])]
    passes = [sum(one["examples"] for one in run.steps[first : first + 4]) for first in (0, 4, 8)]
    assert passes == [22 - skipped.steps[3]["examples"], 15, 15]
    assert [run.steps[at]["examples"] for at in (3, 4)] == [0, 0]


def test_killed_after_a_rollback_a_run_ends_the_same(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={**EVERY_2, "on_spike": "rollback", "checkpoint_every": 4, "max_steps": 12})
    whole = train(tmp_path, config, name="whole", begin=with_a_spike)
    train(tmp_path, config, name="killed", begin=with_a_spike_and_an_end, expect=-9)
    with (tmp_path / "killed" / "spikes.jsonl").open("a") as file:
        file.write('{"step": 7, "act')  # and in the middle of another line
    killed = train(tmp_path, config, name="killed", begin=with_a_spike)
    assert_same_bits(killed, whole)
    assert len(killed.spikes) == 1


@pytest.mark.exhaustive
def test_a_run_that_goes_on_in_another_folder_goes_back_to_the_checkpoint_there(tmp_path: Path) -> None:
    """And takes what was decided along."""
    start = Run(tmp_path / "run")
    packtrain("sft", path := written(tmp_path, on_spike="rollback"))
    others = [start.resume(4), "trainer.checkpoint_every=4"]
    packtrain("sft", path, *others, f"trainer.output_dir={tmp_path / 'b'}", begin=with_a_spike)
    (line,) = Run(tmp_path / "b").spikes
    assert (line["step"], line["action"], line["from"]) == (SPIKE, "rollback", 4)
    others[0] = others[0].replace(str(start.folder), str(tmp_path / "c"))
    (tmp_path / "c" / "checkpoints").mkdir(parents=True)
    shutil.copytree(start.folder / "checkpoints" / "step-000004", tmp_path / "c" / "checkpoints" / "step-000004")
    shutil.copy(tmp_path / "b" / "spikes.jsonl", tmp_path / "c")
    packtrain("sft", path, *others, f"trainer.output_dir={tmp_path / 'd'}")
    assert Run(tmp_path / "d").spikes == [line]
    assert Run(tmp_path / "d").losses == Run(tmp_path / "b").losses


@pytest.mark.parametrize(
    ("at", "times", "losses", "trainer"),
    [(2, math.nan, [None] * 7, {}), (12, 50.0, None, {"max_steps": 20, "spike_factor": 10.0})],
)
def test_a_loss_that_is_no_number_and_a_jump_stop_the_run_before_their_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, times: float, losses: Any, trainer: dict[str, Any]
) -> None:
    monkeypatch.setattr(StepTrainer, "forward_and_backward", broken_at(at, times))
    with pytest.raises(CheckFailed, match=rf"the loss is .* at step {at}\b"):
        train_here(load_config(written(tmp_path, **trainer), []), tmp_path / "run")
    (line,) = Run(tmp_path / "run").spikes
    assert (line["step"], line["action"]) == (at, "stop")
    assert losses is None or [one["loss"] for one in line["documents"]] == losses
    assert Run(tmp_path / "run").steps[-1]["step"] == at - 1


def test_between_logged_lines_the_first_step_whose_loss_is_no_number_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepTrainer, "forward_and_backward", broken_at(3))
    config = load_config(written(tmp_path, log_every=6, checkpoint_every=None), [])
    with pytest.raises(CheckFailed, match=r"nan at step 3\b.*\[loss-not-finite\]"):
        train_here(config, tmp_path / "run")
    (line,) = (run := Run(tmp_path / "run")).spikes
    assert (line["step"], len(line["documents"])) == (3, 7)
    assert [one["step"] for one in run.steps] == [1]


def test_what_is_usual_is_a_median_that_jumps_do_not_move() -> None:
    usual = RecentFigures()
    for _ in range(8):
        assert usual.spike_reason(100.0, 100.0, 2.0) == ""  # too few steps
        usual.figures.append([1.0, 3.0])
    assert usual.spike_reason(1.9, 5.9, 2.0) == ""
    for loss, norm, factor, figures in (
        (2.1, 5.9, 2.0, "2.1 1"),
        (1.9, 6.1, 2.0, "6.1 3"),
        (1.9, math.inf, None, "inf"),
    ):
        assert all(figure in usual.spike_reason(loss, norm, factor) for figure in figures.split())
