"""Trackers get every figure of a run under its name, by transformers' callbacks of their packages, here stand-ins of these."""

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
__version__ = "0.43.0"
class Config(dict):
    def update(self, values, **_): super().update(values)
config = Config()
context_vars = types.SimpleNamespace(current_space_id=types.SimpleNamespace(get=lambda: None))
def init(**given): save("init", given)
def log(values): save("log", values)
def finish(): save("finish", {})
""",
    "swanlab": """
config = {}
def get_run(): return None
def init(**given): save("init", {**given, "name": given["experiment_name"]})
def log(values, step=None): save("log", values)
""",
    "comet_ml": """
def ExperimentConfig(name): return name
class Experiment:
    def __internal_api__set_model_graph__(self, *given, **named): pass
    def __internal_api__log_parameters__(self, *given, **named): pass
    def __internal_api__log_metrics__(self, values, **named): save("log", values)
def start(online, mode, experiment_config):
    save("init", {"name": experiment_config})
    return Experiment()
""",
}


def with_packages_of_the_folder(*given: Any) -> None:
    """The command, which finds the packages that are in its folder; what transformers has looked for before is there."""
    from transformers.integrations import integration_utils

    integration_utils._is_comet_installed = integration_utils._is_comet_recent_enough = True
    sys.path.insert(0, "")
    forked.run(*given)


@pytest.mark.parametrize(
    ("tracker", "package"), [("trackio", "trackio"), ("swanlab", "swanlab"), ("comet", "comet_ml")]
)
def test_a_tracker_is_told_the_figures_of_a_run(
    tracker: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{package}.py").write_text(SAVE + PACKAGES[package])
    monkeypatch.chdir(tmp_path)
    config = base_config(tmp_path, trainer={"max_steps": 2}, tracking={"report_to": [tracker], "run_name": "mine"})
    run = train(tmp_path, config, begin=with_packages_of_the_folder)
    assert "left out" not in run.log
    told = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    assert told[0][0] == "init" and told[0][1]["name"] == "mine"
    losses = [values["train/loss"] for kind, values in told if kind == "log" and "train/loss" in values]
    assert losses == run.losses and len(losses) == 2
