"""What an objective is to a run: its data, attention, steps and loss, and the proofs of these."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from packtrain.model.spread import Ranks
from packtrain.packing.schedule import Schedule
from packtrain.proof.choice import AttentionChoice
from packtrain.train.loader import Steps
from packtrain.train.log.console import Log
from packtrain.train.loop import StepTrainer
from packtrain.train.objectives.loss import Loss
from packtrain.train.settings import LoopSettings


class TrainingObjective(Protocol):
    """The parts of a run that depend on the objective, in the order of use; implemented in objectives/."""

    def longest_document(self, data: Any) -> int:
        """Tokens of the longest document of a data set, for the check of the model's positions."""
        raise NotImplementedError

    def take_reference(self, model: Any, tokenizer: Any, ranks: Ranks, precision: Any, *, seed: int) -> dict[str, Any]:
        """Loads the reference, if any, before the model is sharded; returns what a resumed run must agree on of it."""
        raise NotImplementedError

    def decide_attention(
        self, wanted: str, model: Any, ranks: Ranks, precision: Any, *, prove: bool
    ) -> AttentionChoice:
        """The backend for packed rows; `wanted` is model.attention."""
        raise NotImplementedError

    def slots(self, data: Any) -> np.ndarray:
        """int [examples]: token slots that each example takes in a row."""
        raise NotImplementedError

    def steps(
        self, data: Any, schedule: Schedule, pad_token_id: int, ranks: Ranks, *, evaluation: bool = False
    ) -> Steps:
        """The optimizer steps over a data set, or those of an `evaluation`."""
        raise NotImplementedError

    def loss(self, model: Any, arguments: dict[str, Any], tokenizer: Any, settings: LoopSettings) -> Loss:
        """The loss on `model`, whose forward it patches; `arguments` are those of TRL's trainers."""
        raise NotImplementedError

    def prove(
        self, trainer: StepTrainer, log: Log, attention: str, *, preflight: bool, ranks: Ranks, precision: Any
    ) -> None:
        """Checks the trainer before step 1, fully with `preflight`; `attention` is the model's original implementation."""
        raise NotImplementedError
