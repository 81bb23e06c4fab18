"""What gives way to a run that trains is moved aside and never removed; what is not a run's stays where it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from running import Run, base_config, train


def kill(run: Run) -> None:
    """Leaves a run as if it had been killed before its end."""
    (run.folder / "summary.json").unlink()
    shutil.rmtree(run.folder / "final")


def test_a_killed_run_without_a_checkpoint_is_kept_when_another_begins(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 2})
    run = train(tmp_path, config)
    kill(run)
    (run.folder / "notes.md").write_text("the user's\n")
    kept = {name: (run.folder / name).read_bytes() for name in ("metrics.jsonl", "config.yaml", "plan.json")}
    again = train(tmp_path, config, "trainer.max_steps=1")
    assert {name: (tmp_path / "run.1" / name).read_bytes() for name in kept} == kept
    assert [line["step"] for line in again.steps] == [1] and (again.folder / "notes.md").exists()
    assert "run held another run: it is in " in (again.folder / "logs" / "rank-00000.log").read_text()


def test_checkpoints_that_the_run_did_not_make_are_not_removed(tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 2, "checkpoint_every": 1, "keep_checkpoints": 1})
    run = train(tmp_path, config)
    (run.folder / "summary.json").unlink()
    checkpoints = run.folder / "checkpoints"
    another = shutil.copytree(checkpoints / "step-000002", checkpoints / "step-000001")
    (another / "origin.json").write_text(json.dumps({"trainer.seed": 7}))
    (checkpoints / "step-000003").mkdir()  # without a manifest
    (checkpoints / "step-000003" / "mine").write_text("the user's\n")
    longer = train(tmp_path, config, "trainer.max_steps=3")
    assert [line["step"] for line in longer.steps] == [1, 2, 3]
    names = {path.name for path in checkpoints.iterdir()}
    (aside,) = names - {"step-000001", "step-000003"}
    assert (checkpoints / aside / "mine").read_text() == "the user's\n" and (another / "model.safetensors").exists()
    assert (tmp_path / "run.1" / "final" / "model.safetensors").exists() and (longer.folder / "final").exists()
    (kept,) = longer.folder.glob("logs/*-config.yaml")  # the config that the new one has replaced
    assert "max_steps: 2" in kept.read_text()
