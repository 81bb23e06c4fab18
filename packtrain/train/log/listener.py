"""Listeners to a run: metrics.jsonl, the terminal, trackers, early stopping."""

from __future__ import annotations

from typing import Any

from packtrain.train.checkpoint.run_state import RunState


class Listener:
    """A listener that does nothing; subclasses override what they need. All ranks have listeners."""

    def train_begin(self, state: RunState) -> None:
        """The steps begin, from the start or after a checkpoint."""

    def rolled_back(self, state: RunState) -> None:
        """A spike was rolled back: the steps after `state` follow once more."""

    def step_end(self, state: RunState) -> None:
        """A step was made."""

    def log(self, state: RunState, line: dict[str, Any]) -> None:
        """A line was logged; `line` has its figures by name, and the epoch."""

    def evaluate(self, state: RunState, figures: dict[str, float]) -> None:
        """An evaluation was made; its line was logged before."""
