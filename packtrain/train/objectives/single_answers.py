"""Single answers, with labels or as documents: their steps, and the base of their objectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from packtrain.data.dataset import Document
from packtrain.errors import UserError
from packtrain.model.spread import Ranks
from packtrain.packing.collate import collate_unpaired
from packtrain.packing.schedule import Schedule
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.objectives.training_objective import TrainingObjective


@dataclass(frozen=True)
class AnswerSteps(Steps):
    """Steps of single answers, in padded or flat rows.

    `labelled`: the data is an UnpairedDataset. Otherwise each document is an answer, and has the label true. `reference`, float32 [answers],
    holds the reference's log-probability of each answer.
    """

    labelled: bool = True
    reference: np.ndarray | None = None

    def collate(self, numbers: Sequence[int] | np.ndarray) -> MicroBatch:
        """Return one forward pass over the documents of these numbers."""
        numbers = np.asarray(numbers, dtype=np.int64)
        labels = self.data.labels[numbers] if self.labelled else np.ones(len(numbers), bool)
        known = None if self.reference is None else self.reference[numbers]
        return self.collate_documents([self.data[int(number)] for number in numbers], labels, known)

    def collate_documents(self, documents: list[Document], labels: np.ndarray, known: np.ndarray | None) -> MicroBatch:
        """Return one forward pass over `documents`.

        `labels`: bool [documents]. `known`: log-probabilities by the reference, float32 [documents], if computed before.
        """
        inputs = collate_unpaired(documents, self.pad_token_id, self.layout)
        inputs["label"] = torch.from_numpy(labels if len(labels) else np.ones(1, bool))
        if known is not None:
            inputs["ref_logps"] = torch.from_numpy(known if len(known) else np.zeros(1, np.float32))
        targets = np.array([int(document.loss_mask[1:].sum()) for document in documents], np.int64)
        tokens = sum(len(document.input_ids) for document in documents)
        return MicroBatch(
            inputs=inputs,
            trained=int(targets[labels].sum()),
            tokens=tokens,
            slots=inputs["input_ids"].numel() if self.layout == "padding" else tokens,
            examples=len(documents),
            rejected=int(targets[~labels].sum()),
        )

    def with_reference_by(
        self, logps: Callable[[MicroBatch], np.ndarray], random: np.random.Generator, off: float
    ) -> AnswerSteps:
        """Return these steps with the reference's log-probabilities by `logps`, plus noise of `off` nats."""
        known = logps(self.collate(range(len(self.data))))
        return replace(self, reference=known + random.normal(0, off, known.shape).astype(np.float32))


class AnswerObjective(TrainingObjective):
    """Base of objectives whose loss reads the log-probability of each answer or document."""

    def steps(
        self, data: Any, schedule: Schedule, pad_token_id: int, ranks: Ranks, *, evaluation: bool = False
    ) -> AnswerSteps:
        """See TrainingObjective. Raises UserError if rows would share the beginnings of documents."""
        if self.packing.share_prefix:
            what = f"packtrain {self.objective.kind} does not share the beginnings of documents"
            raise UserError(what, where="packing.share_prefix", fix="Remove the key.")
        labelled = self.objective.spec.examples == "answers"
        place: Any = (self.layout, pad_token_id, ranks.rank, ranks.world_size)
        return AnswerSteps(data, schedule, *place, labelled=labelled)
