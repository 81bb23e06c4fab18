"""Progress of a run, and its logged lines."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUN_STATE = "trainer_state.json"
"""File of a checkpoint. Other tools read it, so transformers' TrainerState gives it its name and fields."""
# our field: theirs
_FIELDS = {
    "step": "global_step",
    "last_step": "max_steps",
    "epoch": "epoch",
    "tokens": "num_input_tokens_seen",
    "lines": "log_history",
    "best_loss": "best_metric",
    "best_step": "best_global_step",
}


@dataclass(slots=True)
class RunState:
    """Progress of a run, equal on all ranks."""

    step: int = 0
    """Steps done."""
    last_step: int = 0
    """Number of the last step, where the run ends."""
    epoch: float = 0.0
    """Passes over the data, with a fraction."""
    tokens: int = 0
    """Tokens trained on, padding and virtual tokens excluded."""
    lines: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Logged lines, each with its `step`, the evaluations' too."""
    best_loss: float | None = None
    """The lowest evaluation loss. None: no evaluation yet, or trainer.early_stop_patience is not set."""
    best_step: int | None = None
    stops: bool = False
    """Whether no further step follows."""
    saves: bool = False
    """Whether this step gets a checkpoint even if none is due."""

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint."""
        fields = {theirs: getattr(self, ours) for ours, theirs in _FIELDS.items()}
        (folder / RUN_STATE).write_text(json.dumps(fields, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> RunState:
        """Read the state of a checkpoint."""
        fields = json.loads((folder / RUN_STATE).read_text())
        return cls(**{ours: fields[theirs] for ours, theirs in _FIELDS.items() if theirs in fields})
