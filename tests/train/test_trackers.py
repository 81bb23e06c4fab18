"""Trackers of accelerate, on stand-ins of their packages, get every figure of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from running import base_config, train

from tests.train import forked

SAVE = """
import json, types
def save(kind, values):
    with open("told.jsonl", "a") as file:
        file.write(json.dumps([kind, values], default=str) + "\\n")
"""
PACKAGES = {
    "trackio": """
class Config(dict):
    def update(self, values, **_): super().update(values)
config = Config()
class Run:
    def log(self, values, **_): save("log", values)
    def finish(self): save("finish", {})
def init(**given):
    save("init", given)
    return Run()
""",
    "swanlab": """
config = {}
class Run:
    def log(self, data=None, step=None, **_): save("log", data)
    def finish(self): save("finish", {})
def init(**given):
    save("init", {**given, "name": given["experiment_name"]})
    return Run()
""",
    "comet_ml": """
__version__ = "3.49.0"
def ExperimentConfig(name): return name
class Experiment:
    def log_parameters(self, *given, **named): pass
    def set_step(self, step): pass
    def log_metrics(self, values, **named): save("log", values)
    def log_metric(self, name, value, **named): save("log", {name: value})
    def log_other(self, *given, **named): pass
    def end(self): save("finish", {})
def start(project_name, experiment_config):
    save("init", {"name": experiment_config})
    return Experiment()
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
