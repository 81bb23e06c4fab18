"""What a reader goes through to follow a step or a resume: the files whose functions run meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from here import run_here
from running import base_config

import packtrain
from packtrain.train import run as training
from packtrain.train.checkpoint.state import Checkpoints
from packtrain.train.loop import StepTrainer
from tests.unit.test_layout import files_of_section

PACKAGE = Path(packtrain.__file__).parent
MOST, MOST_OF_A_RESUME = 18, 8
"""Files of a step that has no line, no evaluation and no checkpoint, and is not judged; of a resume on as many processes."""


def noting(files: set[str]) -> Callable[[FrameType, str, object], None]:
    """A profiler that adds the package's files whose functions are called."""

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(path.relative_to(PACKAGE).as_posix())

    return note


def test_a_step_goes_through_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: set[str] = set()
    next_batches = StepTrainer.next_batches

    def watched(self: StepTrainer, *given: Any) -> Any:
        sys.setprofile({3: noting(files), 5: None}.get(self.state.step, sys.getprofile()))
        return next_batches(self, *given)

    monkeypatch.setattr(StepTrainer, "next_batches", watched)
    try:
        run_here(tmp_path, base_config(tmp_path, trainer={"max_steps": 6, "log_every": 6}))
    finally:
        sys.setprofile(None)
    map_ = files_of_section(PACKAGE.parent / "docs/architecture.md", "One step of training")
    not_this_step = {"train/checkpoint/state.py", "train/spikes.py"}
    assert "train/loop.py" in map_ and map_ - not_this_step <= files
    assert len(files) <= MOST, "\n".join(sorted(files))


def test_a_resume_goes_through_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, files = (
        base_config(tmp_path, trainer={"max_steps": 4, "checkpoint_every": 2, "keep_checkpoints": None}),
        set[str](),
    )
    first = run_here(tmp_path, config)

    def watched(do: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            sys.setprofile(noting(files))
            try:
                return do(*given, **named)
            finally:
                sys.setprofile(None)

        return call

    for place, name in ((training, "find_resume"), (Checkpoints, "restore"), (Checkpoints, "restore_random_state")):
        monkeypatch.setattr(place, name, watched(getattr(place, name)))
    again = run_here(tmp_path, config, f"trainer.resume={first.folder}/checkpoints/step-000002", name="again")
    assert again.losses == first.losses[2:]
    assert len(files) <= MOST_OF_A_RESUME, "\n".join(sorted(files))
