"""What a reader goes through to follow a step: the files whose functions run between the ends of two steps."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from here import train_here
from running import base_config

import packtrain
from packtrain.config.compose import load_config
from packtrain.train.loop import StepTrainer

PACKAGE = Path(packtrain.__file__).parent
MOST = 25
"""Files of a step that has no line, no evaluation and no checkpoint."""


def test_a_step_goes_through_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: set[str] = set()
    next_batches = StepTrainer.next_batches

    def note(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(path.relative_to(PACKAGE).as_posix())

    def watched(self: StepTrainer, *given: Any) -> Any:
        sys.setprofile({3: note, 5: None}.get(self.state.global_step, sys.getprofile()))
        return next_batches(self, *given)

    monkeypatch.setattr(StepTrainer, "next_batches", watched)
    (path := tmp_path / "run.yaml").write_text(
        yaml.safe_dump(base_config(tmp_path, trainer={"max_steps": 6, "log_every": 6}))
    )
    try:
        train_here(load_config(str(path), []), tmp_path / "run")
    finally:
        sys.setprofile(None)
    section = (
        (PACKAGE.parent / "docs/architecture.md")
        .read_text()
        .partition("## One step of training\n")[2]
        .partition("\n## ")[0]
    )
    map_ = set(re.findall(r"`([\w/]+\.py)", section))
    assert "train/loop.py" in map_ and map_ - {"train/checkpoint/state.py"} <= files  # this step has no checkpoint
    assert len(files) <= MOST, sorted(files)
