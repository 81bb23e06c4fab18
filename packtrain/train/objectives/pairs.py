"""Preference pairs: their steps, and the parts of a run that depend on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from packtrain.data.dataset import PairDataset
from packtrain.errors import UserError
from packtrain.model.spread import Ranks
from packtrain.packing.collate import collate_pairs
from packtrain.packing.schedule import Schedule
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.log import console
from packtrain.train.log.console import Log
from packtrain.train.loop import StepTrainer
from packtrain.train.objectives.training_objective import TrainingObjective


@dataclass(frozen=True)
class PairSteps(Steps):
    """Steps of preference pairs: `examples` of a micro-batch are pairs.

    `reference`, float32 [pairs, 2], holds the reference's log-probabilities of the chosen and the rejected answer of each pair.
    """

    reference: np.ndarray | None = None

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
        inputs = collate_pairs(pairs, self.pad_token_id, self.layout)
        if self.reference is not None:
            known = self.reference[numbers] if len(numbers) else np.zeros((1, 2), np.float32)
            chosen, rejected = torch.from_numpy(known).unbind(1)
            inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        tokens = sum(len(pair.chosen.input_ids) + len(pair.rejected.input_ids) for pair in pairs)
        return MicroBatch(
            inputs=inputs,
            trained=sum(int(pair.chosen.loss_mask[1:].sum()) for pair in pairs),
            tokens=tokens,
            slots=inputs["input_ids"].numel() if self.layout == "padding" else tokens,
            examples=len(pairs),
            rejected=sum(int(pair.rejected.loss_mask[1:].sum()) for pair in pairs),
        )

    def with_reference_by(
        self, logps: Callable[[MicroBatch], np.ndarray], random: np.random.Generator, off: float
    ) -> PairSteps:
        """Return these steps with the reference's log-probabilities by `logps`, plus noise of `off` nats."""
        known = logps(self.collate(range(len(self.data))))
        return replace(self, reference=known + random.normal(0, off, known.shape).astype(np.float32))


class PairObjective(TrainingObjective):
    """Base of objectives of preference pairs. A proof decides once how pairs are laid out in rows."""

    shares_unless_told = True

    def longest_document(self, data: PairDataset) -> int:
        """Tokens of the longest prompt with an answer."""
        return int(data.documents.lengths.max())

    def slots(self, data: PairDataset) -> np.ndarray:
        """int32 [pairs]: token slots of each. Raises UserError if the longest exceeds a micro-batch: pairs are not cut."""
        # padded a pair takes two rows as long as the longer of its documents
        longer = 2 * data.documents.lengths.reshape(-1, 2).max(axis=1)
        slots = {"padding": longer, "flat": data.lengths, "shared": data.shared_lengths}[self.layout].astype(np.int32)
        longest, (_, most) = int(slots.max(initial=0)), self.batch.limits(self.packing.mode)
        if most is not None and longest > (most := most * self.ranks_per_row):
            raise UserError(
                f"the longest pair takes {longest} token slots, a micro-batch has {most}",
                where="batch.tokens_per_device",
                fix=f"set batch.tokens_per_device to at least {-(-longest // self.ranks_per_row)}, or data.max_length to {most // 2}",
            )
        return slots

    def steps(
        self, data: PairDataset, schedule: Schedule, pad_token_id: int, ranks: Ranks, *, evaluation: bool = False
    ) -> PairSteps:
        """See TrainingObjective."""
        return PairSteps(data, schedule, self.layout, pad_token_id, ranks.rank, ranks.world_size)

    def prove(self, trainer: StepTrainer, log: Log, attention: str, **options: Any) -> None:
        """See TrainingObjective."""
        console.log_prompts(log, self.layout, self.why_not_shared)
        super().prove(trainer, log, attention, **options)
