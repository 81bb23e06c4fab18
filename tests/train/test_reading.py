"""What a reader goes through to follow a step: the files whose functions run between the ends of two steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from here import run_here
from running import base_config

import packtrain
from packtrain.train.loop import StepTrainer
from tests.unit.test_layout import files_of_section

PACKAGE = Path(packtrain.__file__).parent
MOST = 23
"""Files of a step that has no line, no evaluation and no checkpoint."""


def test_a_step_goes_through_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: set[str] = set()
    next_batches = StepTrainer.next_batches

    def note(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(path.relative_to(PACKAGE).as_posix())

    def watched(self: StepTrainer, *given: Any) -> Any:
        sys.setprofile({3: note, 5: None}.get(self.state.step, sys.getprofile()))
        return next_batches(self, *given)

    monkeypatch.setattr(StepTrainer, "next_batches", watched)
    try:
        run_here(tmp_path, base_config(tmp_path, trainer={"max_steps": 6, "log_every": 6}))
    finally:
        sys.setprofile(None)
    map_ = files_of_section(PACKAGE.parent / "docs/architecture.md", "One step of training")
    assert "train/loop.py" in map_ and map_ - {"train/checkpoint/state.py"} <= files  # this step has no checkpoint
    assert len(files) <= MOST, "\n".join(sorted(files))
