"""A run folder in the place of a model stands for its final/, or is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from packtrain.config.compose import load_config
from packtrain.config.rules.paths_and_packages import model_of
from packtrain.errors import UserError
from packtrain.serve.trained import find_trained


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/short has ended, runs/stopped has only checkpoints."""
    monkeypatch.chdir(tmp_path)
    for place in ("short/final", "stopped/checkpoints/step-000002", "stopped/checkpoints/step-000010"):
        (folder := tmp_path / "runs" / place).mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    for name in ("short", "stopped"):
        (tmp_path / "runs" / name / ".packtrain").touch()
    return tmp_path / "runs"


def refused(*given: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(None, [*given, "data.train=quickstart", "batch.examples_per_step=2", "trainer.output_dir=new"])
    return str(caught.value)


def test_a_run_stands_for_its_final_model(runs: Path) -> None:
    given = ["objective.kind=dpo", "data.train=quickstart", "batch.examples_per_step=2", "trainer.output_dir=new"]
    config = load_config(None, ["model.path=runs/short", "objective.reference=runs/short", *given])
    assert (config.model.path, config.objective.reference) == ("runs/short/final",) * 2
    assert find_trained("runs/short").path == "runs/short/final" and model_of("owner/name") == "owner/name"
    (runs.parent / "model").mkdir()  # the name of a reference, and no folder
    named = load_config(None, ["model.path=runs/short", "objective.reference=model", *given])
    assert named.objective.reference == "model"


def test_a_stopped_run_names_its_newest_checkpoint(runs: Path) -> None:
    said = refused("model.path=runs/stopped")
    with pytest.raises(UserError) as caught:
        find_trained("runs/stopped")
    for words in (said, str(caught.value)):
        assert "[run-not-ended]" in words and "runs/stopped/checkpoints/step-000010" in words


def test_a_near_run_is_named_and_the_hub_not_asked_and_a_folder_without_a_model_is_refused(runs: Path) -> None:
    with pytest.raises(UserError) as caught:
        find_trained("runs/shrt")
    for words in (refused("model.path=runs/shrt"), str(caught.value)):
        assert "there is no" in words and "Near it: runs/short" in words
    (runs.parent / "owner" / "Llama-3.2-1B").mkdir(parents=True)  # a download beside which others are on the hub
    assert find_trained("owner/Llama-3.2-3B").path == "owner/Llama-3.2-3B"
    (runs.parent / "empty").mkdir()
    assert "neither a config.json nor an adapter_config.json" in refused("model.path=empty")
