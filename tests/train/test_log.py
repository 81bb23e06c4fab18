"""Where the time of a step goes on each rank, a narrow terminal, and trackers."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from running import after, base_config, train

from packtrain.config.schema import RunConfig, Tracking
from packtrain.monitor.heartbeat import Heartbeat, Phase
from packtrain.run_folder import RunFolder
from packtrain.train import loop
from packtrain.train.log.console import Log
from packtrain.train.log.metrics import RankTimes, StepClock, TerminalProgress
from packtrain.train.log.trackers import trackers_of
from packtrain.train.run_state import RunState
from tests.train import forked


class Watch(Heartbeat):
    """A heartbeat whose time passes only when it is told so, however loaded the machine is."""

    now = 0.0
    at = 0

    def enter(self, phase: Phase, *, step: int | None = None, micro: int = 0) -> float:
        self.at = self.at if step is None else step
        super().enter(phase, step=step, micro=micro)
        return self.now


def step(clock: StepClock, watch: Watch, number: int, forward: float = 0.0, data: float = 0.0) -> None:
    clock.enter("data", step=number)
    watch.now += data
    clock.enter("counts")
    for micro in (1, 2):
        clock.enter("forward", micro=micro)
        watch.now += forward / 2
        clock.enter("backward", micro=micro)
    clock.enter("optimizer")


def test_a_clock_adds_the_parts_of_steps_up_and_leaves_the_first_one_out() -> None:
    watch = Watch(1)
    clock = StepClock(torch.device("cpu"), rank=1, world_size=3, heartbeat=watch)
    step(clock, watch, 1, forward=0.3)
    assert watch.usual_s == 0.0
    for number in (2, 3):
        step(clock, watch, number, forward=0.04, data=0.02)
    clock.enter("checkpoint")
    watch.now += 0.1
    clock.enter("data", step=4)
    assert clock.steps == 2
    assert watch.usual_s == pytest.approx(0.06)  # neither the first step nor the checkpoint
    slots = clock.reduction_values()
    assert len(slots) == 12 and not any(slots[:4] + slots[8:])
    assert slots[4:8] == pytest.approx([80_000, 0, 40_000, 0], abs=4)
    assert clock.steps == 0 and not any(clock.reduction_values())


def test_on_a_gpu_a_step_is_timed_there_and_two_steps_later_when_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(0)

    class Event:
        """One that the GPU comes to when its process is nearly two steps further; its own time runs three times as fast."""

        def __init__(self, enable_timing: bool) -> None:
            self.step, self.at = 0, 0.0

        def record(self) -> None:
            self.step, self.at = watch.at, 3 * watch.now

        def query(self) -> bool:
            return watch.at >= self.step + 2

        def elapsed_time(self, end: Event) -> float:
            assert end.query()
            return 1000 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StepClock(torch.device("cuda"), heartbeat=watch)
    for number in range(1, 7):
        step(clock, watch, number, forward=0.01 * number)
    clock.enter("data", step=7)
    assert clock.steps == 3  # of 2 to 6, the first one being left out, those of which the end is known
    assert clock.reduction_values()[0] == pytest.approx(3e4 * (2 + 3 + 4), abs=4)


def test_a_logged_line_has_least_median_most_and_the_slowest_rank() -> None:
    times = RankTimes(3)
    slots = torch.tensor([10, 20, 0, 0, 40, 20, 0, 0, 10, 20, 6, 0]) * 1_000_000
    times.store(slots, 10)
    figures = times.pop_metrics()
    assert figures["slowest_rank"] == 1
    assert [figures[f"forward_seconds/{name}"] for name in ("min", "median", "max")] == [1, 1, 4]
    assert figures["data_seconds/max"] == pytest.approx(0.6)
    assert times.pop_metrics() == {}  # nothing new
    assert RankTimes(1).pop_metrics() == {}


def test_the_means_of_a_run_are_over_all_its_exchanges() -> None:
    times = RankTimes(2)
    assert times.means() is None
    for forward in (10_000, 30_000):
        times.store(torch.tensor([forward, 0, 4_000, 0, 2 * forward, 0, 4_000, 0]), steps=10)
        times.pop_metrics()
    means = times.means()
    assert means is not None
    assert means["forward"] == pytest.approx([0.002, 0.004]) and means["data"] == pytest.approx([0.0004, 0.0004])


def with_a_slow_rank(*given: Any) -> None:
    """`forked.run`, in which the forward passes of rank 0 take longer."""
    loop.EXCHANGE_EVERY = 4  # in place of 10
    kind: Any = torch.nn.parallel.DistributedDataParallel
    kind.forward = after(lambda *_, **__: time.sleep(0.15 * (os.environ["RANK"] == "0")), kind.forward)
    forked.run(*given)


def test_a_rank_whose_forward_passes_are_slow_is_named_and_not_those_that_wait(tmp_path: Path) -> None:
    trainer = {"max_steps": 12, "log_every": 4}
    config = base_config(tmp_path, trainer=trainer, batch={"examples_per_step": 6})
    run = train(tmp_path, config, processes=3, begin=with_a_slow_rank)
    slowest = [line["slowest_rank"] for line in run.lines if "slowest_rank" in line]
    assert len(slowest) >= 2 and set(slowest) == {0}, slowest


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_the_line_of_progress_keeps_step_loss_speed_and_time_left(width: int, tmp_path: Path) -> None:
    log, shown = Log(tmp_path / "log", main=True), io.StringIO()
    log.console = Console(file=shown, force_terminal=True, width=width, highlight=False, soft_wrap=True)
    figures = {"loss": 12.3456, "tokens_per_second": 1234567.8, "padding_fraction": 0.123, "learning_rate": 1e-3}
    progress, state = TerminalProgress(log), RunState(step=99_998, last_step=100_000)
    progress.train_begin(state)
    state.step += 1
    progress.step_end(state)
    progress.log(state, figures)
    progress.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue()).strip()  # without colours and movements
    line = re.split(r"[\r\n]+", plain)[-1]
    assert len(line) <= width
    kept = r"step +99999/100000 .*loss 12\.3456  1,234,568 tokens/s .*left +(\d+:\d+:\d+|-:--:--)"
    assert re.match(kept, line), line
    assert ("lr 1.00e-03" in line) == (width >= 120)


def test_a_tracker_that_has_no_login_finds_nobody_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = os.fdopen(os.openpty()[1], closefd=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert trackers_of(RunConfig(), RunFolder(tmp_path), print) == [] and sys.stdin.isatty()
    trackers_of(RunConfig(tracking=Tracking(report_to=["tensorboard"])), RunFolder(tmp_path), print)
    assert not sys.stdin.isatty() and sys.stdin.read() == ""


SAVE = """
import json
def save(kind, values):
    with open("told.jsonl", "a") as file: file.write(json.dumps([kind, values], default=str) + "\\n")
class Run:
    def log(self, values=None, data=None, **_): save("log", values or data)
    def finish(self): save("finish", {})
"""
PACKAGES = {
    "trackio": """
class Config(dict):
    def update(self, values, **_): super().update(values)
config = Config()
def init(**given): return save("init", given) or Run()
""",
    "swanlab": """
config = {}
def init(**given): return save("init", {**given, "name": given["experiment_name"]}) or Run()
""",
    "comet_ml": """
__version__ = "3.49.0"
def ExperimentConfig(name): return name
class Experiment(Run):
    end, log_metrics = Run.finish, Run.log
    log_parameters = log_other = set_step = lambda *_, **__: None
    def log_metric(self, name, value, **_): save("log", {name: value})
def start(project_name, experiment_config): return save("init", {"name": experiment_config}) or Experiment()
""",
}


def with_packages_of_the_folder(*given: Any) -> None:
    """The command, which finds the packages that are in its folder."""
    sys.path.insert(0, "")
    forked.run(*given)


def test_trackers_are_told_the_figures_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, code in PACKAGES.items():
        (tmp_path / f"{package}.py").write_text(SAVE.replace("told", package) + code)
    monkeypatch.chdir(tmp_path)
    tracking = {"report_to": ["trackio", "swanlab", "comet"], "run_name": "mine"}
    config = base_config(tmp_path, trainer={"max_steps": 2}, tracking=tracking)
    run = train(tmp_path, config, begin=with_packages_of_the_folder)
    assert "left out" not in run.log and len(run.losses) == 2
    for package in PACKAGES:
        told = [json.loads(line) for line in (tmp_path / f"{package}.jsonl").read_text().splitlines()]
        assert told[0][0] == "init" and told[0][1]["name"] == "mine" and told[-1][0] == "finish"
        losses = [values["train/loss"] for kind, values in told if kind == "log" and "train/loss" in values]
        assert losses == run.losses, package
