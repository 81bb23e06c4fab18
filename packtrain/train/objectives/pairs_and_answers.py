"""Objectives of preference pairs and of single answers: their steps, and the parts of a run that depend on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from packtrain.data.dataset import Document, PairDataset
from packtrain.errors import UserError
from packtrain.model.spread import Ranks
from packtrain.objectives.answers import Inputs
from packtrain.packing.collate import collate_pairs, collate_unpaired
from packtrain.packing.schedule import Schedule
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.log import console
from packtrain.train.objectives.training_objective import Start, TrainingObjective

if TYPE_CHECKING:
    from packtrain.train.preparation import Prepared

Compared = TypeVar("Compared", bound="ComparedSteps")


@dataclass(frozen=True)
class ComparedSteps(Steps):
    """Steps of answers.

    `reference`: the reference's log-probabilities, if computed before, float32 [pairs, 2] (chosen, rejected) or [answers].
    """

    reference: np.ndarray | None = None

    def with_reference_by(
        self: Compared, logps: Callable[[MicroBatch], np.ndarray], random: np.random.Generator, off: float
    ) -> Compared:
        """Return these steps with the reference's log-probabilities by `logps`, plus noise of `off` nats."""
        known = logps(self.collate(range(len(self.data))))
        return replace(self, reference=known + random.normal(0, off, known.shape).astype(np.float32))

    def _counted(self, inputs: Inputs, chosen: list[Document], others: list[Document], examples: int) -> MicroBatch:
        """Return the micro-batch of `inputs`, with the counts of its chosen and other answers."""
        trained, rejected = (sum(int(one.loss_mask[1:].sum()) for one in side) for side in (chosen, others))
        tokens = sum(len(one.input_ids) for one in (*chosen, *others))
        slots = inputs["input_ids"].numel() if self.layout == "padding" else tokens
        return MicroBatch(inputs, trained, tokens, slots, examples, rejected)


@dataclass(frozen=True)
class PairSteps(ComparedSteps):
    """Steps of preference pairs: `examples` of a micro-batch are pairs."""

    def documents_of(self, step: int) -> tuple[np.ndarray, np.ndarray | None, int]:
        """See Steps. Each pair has a chosen and a rejected document, which may share their prompt."""
        if self.feed is not None:
            return self.feed.current.documents_of(0)
        pairs = self.schedule.documents(step)
        shared = (self.data.lengths - self.data.shared_lengths)[pairs] if self.layout == "shared" else None
        targets = int(self.data.trained[pairs].sum(dtype=np.int64))
        return self.data.documents.lengths.reshape(-1, 2)[pairs].ravel(), shared, targets

    def collate(self, numbers: Sequence[int] | np.ndarray) -> MicroBatch:
        """Return one forward pass over the pairs of these numbers."""
        pairs: Any = [self.data[int(number)] for number in numbers]
        inputs = collate_pairs(pairs, self.pad_token_id, self.layout, self.sight)
        if self.reference is not None:
            known = self.reference[numbers] if len(numbers) else np.zeros((1, 2), np.float32)
            chosen, rejected = torch.from_numpy(known).unbind(1)
            inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        return self._counted(inputs, [pair.chosen for pair in pairs], [pair.rejected for pair in pairs], len(pairs))


class PairObjective(TrainingObjective):
    """Base of objectives of preference pairs. A proof decides once how pairs are laid out in rows."""

    shares_unless_told = True
    steps_class = PairSteps

    def longest_document(self, data: PairDataset) -> int:
        """Tokens of the longest prompt with an answer."""
        return int(data.documents.lengths.max())

    def slots(self, data: PairDataset) -> np.ndarray:
        """int32 [pairs]: token slots of each. Raises UserError if the longest exceeds a micro-batch: pairs are not cut."""
        # padded a pair takes two rows as long as the longer of its documents
        longer = 2 * data.documents.lengths.reshape(-1, 2).max(axis=1)
        slots = {"padding": longer, "flat": data.lengths, "shared": data.shared_lengths}[self.layout].astype(np.int32)
        self.check_longest("the longest pair", int(slots.max(initial=0)), documents=2)
        return slots

    def prove(self, start: Start) -> None:
        """See TrainingObjective."""
        console.log_prompts(start.log, self.layout, self.why_not_shared)
        super().prove(start)


@dataclass(frozen=True)
class AnswerSteps(ComparedSteps):
    """Steps of single answers, in padded or flat rows. Without labels of the data (UnpairedDataset) each is a document, with the label true."""

    def collate(self, numbers: Sequence[int] | np.ndarray) -> MicroBatch:
        """Return one forward pass over the documents of these numbers."""
        numbers = np.asarray(numbers, dtype=np.int64)
        labels = getattr(self.data, "labels", np.ones(len(self.data), bool))[numbers]
        known = None if self.reference is None else self.reference[numbers]
        return self.collate_documents([self.data[int(number)] for number in numbers], labels, known)

    def collate_documents(self, documents: list[Document], labels: np.ndarray, known: np.ndarray | None) -> MicroBatch:
        """Return one forward pass over `documents`.

        `labels`: bool [documents]. `known`: log-probabilities by the reference, float32 [documents], if computed before.
        """
        inputs = collate_unpaired(documents, self.pad_token_id, self.layout, self.sight)
        inputs["label"] = torch.from_numpy(labels if len(labels) else np.ones(1, bool))
        if known is not None:
            inputs["ref_logps"] = torch.from_numpy(known if len(known) else np.zeros(1, np.float32))
        chosen, others = ([documents[at] for at in np.flatnonzero(labels == side)] for side in (True, False))
        return self._counted(inputs, chosen, others, len(documents))


class AnswerObjective(TrainingObjective):
    """Base of objectives whose loss reads the log-probability of each answer or document."""

    steps_class = AnswerSteps

    def why_repeated(self, run: Prepared) -> str:
        """See TrainingObjective."""
        return f"packtrain {self.objective.kind} does not share the beginnings of documents"

    def steps(
        self, data: Any, schedule: Schedule, pad_token_id: int, ranks: Ranks, *, evaluation: bool = False
    ) -> Steps:
        """See TrainingObjective. Raises UserError if rows would share the beginnings of documents."""
        if self.packing.share_prefix:
            what = f"packtrain {self.objective.kind} does not share the beginnings of documents"
            raise UserError(what, where="packing.share_prefix", fix="Remove the key.", code="beginnings-not-shared")
        return super().steps(data, schedule, pad_token_id, ranks, evaluation=evaluation)
