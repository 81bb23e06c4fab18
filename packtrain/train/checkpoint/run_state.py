"""Progress of a run, and its logged lines."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUN_STATE = "trainer_state.json"
"""File of a checkpoint, with the name and the fields of transformers' TrainerState: other tools read it."""
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
    """Progress of a run."""

    step: int = 0
    """Steps done."""
    last_step: int = 0
    """Steps of the whole run."""
    epoch: float = 0.0
    tokens: int = 0
    """Tokens trained on, padding and virtual tokens excluded."""
    lines: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Logged lines, each with its `step`."""
    best_loss: float | None = None
    """The lowest evaluation loss, with trainer.early_stop_patience; None before the first evaluation."""
    best_step: int | None = None
    stops: bool = False
    """Whether no further step follows."""
    saves: bool = False
    """Whether this step gets a checkpoint, due or not."""

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint."""
        fields = {theirs: getattr(self, ours) for ours, theirs in _FIELDS.items()}
        (folder / RUN_STATE).write_text(json.dumps(fields, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> RunState:
        """Read the state of a checkpoint."""
        fields = json.loads((folder / RUN_STATE).read_text())
        return cls(**{ours: fields[theirs] for ours, theirs in _FIELDS.items() if theirs in fields})
