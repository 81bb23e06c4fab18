"""Direct preference optimisation: the loss of TRL's DPOTrainer, unmodified, over the pairs of a whole step, and the objective."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from trl import DPOConfig, DPOTrainer

from packtrain.data.dataset import PairDataset
from packtrain.errors import UserError
from packtrain.model.spread import Ranks
from packtrain.packing.schedule import Schedule
from packtrain.train.loader import MicroBatch, PairSteps
from packtrain.train.log import console
from packtrain.train.log.console import Log
from packtrain.train.loop import StepTrainer
from packtrain.train.objectives.loss import Logps, ReferenceLoss, WeightedMetrics
from packtrain.train.objectives.training_objective import PairObjective, ReferenceObjective
from packtrain.train.patches import hold_trainer
from packtrain.train.settings import LoopSettings

_COLUMNS: dict[str, list[Any]] = {"prompt_ids": [[0]], "chosen_ids": [[0]], "rejected_ids": [[0]]}
CHOSEN_TOKEN_LOSSES = ("sft",)
"""Losses that are a mean over the trained tokens of the chosen answers."""
PAIRS, CHOSEN, REJECTED, ANSWERS = range(4)
METRIC_UNITS = {
    "entropy": ANSWERS,
    "logits/chosen": CHOSEN,
    "logits/rejected": REJECTED,
    "mean_token_accuracy": CHOSEN,
    "rewards/chosen": PAIRS,
    "rewards/rejected": PAIRS,
    "rewards/accuracies": PAIRS,
    "rewards/margins": PAIRS,
    "logps/chosen": PAIRS,
    "logps/rejected": PAIRS,
}
"""The metrics that TRL logs, and the unit that each is a mean over."""


class DPOLoss(ReferenceLoss):
    """The loss of pairs on `model`, against `reference`."""

    answers = ("the chosen answer of pair", "the rejected answer of pair")
    reference_names = ("ref_chosen_logps", "ref_rejected_logps")
    new_metrics = partial(WeightedMetrics, METRIC_UNITS)

    def __init__(self, model: Any, args: DPOConfig, tokenizer: Any, settings: LoopSettings, reference: Any) -> None:
        trl = hold_trainer(DPOTrainer, model, args, tokenizer, _COLUMNS, ref_model=reference)
        outputs = ("log_probs", "entropy", "mean_logits", "is_top1")
        super().__init__(trl, settings, (*outputs, "log_sum_sq_probs") if trl.use_weighting else outputs)
        self._weights = list(trl.loss_weights)

    def part(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """The micro-batch's part of the mean loss over the pairs of the step; `sft` is a mean over its trained tokens."""
        inputs = self.inputs(batch)
        if not batch.examples:
            return self.zero(model, inputs)
        pairs = batch.examples / counts[3]
        tokens = batch.trained / counts[0].clamp(min=1)
        # TRL averages each loss over this micro-batch; weight it by its share of the step's pairs or tokens
        self.trl.loss_weights = [
            weight * (tokens if name in CHOSEN_TOKEN_LOSSES else pairs)
            for name, weight in zip(self.trl.loss_types, self._weights, strict=True)
        ]
        loss = self.compute_with_trl(model, inputs)
        chosen, rejected = batch.trained, batch.rejected
        self.add_metrics(batch, {PAIRS: batch.examples, CHOSEN: chosen, REJECTED: rejected, ANSWERS: chosen + rejected})
        return loss

    def prepare_standalone(self, batch: MicroBatch, *, estimated: bool) -> None:
        """Has TRL average over the micro-batch."""
        self.trl.loss_weights = self._weights

    def zero_margin_loss(self, batch: MicroBatch) -> float | None:
        """ln 2 for the plain sigmoid loss, None for all others."""
        plain = self._weights == [1.0] and not self.trl.use_weighting
        return math.log(2) if self.trl.loss_types == ["sigmoid"] and plain else None

    def logps(self, model: Any, inputs: dict[str, Any]) -> Logps:
        """Log-probabilities, computed by TRL."""
        reference, self.trl.ref_model = self.trl.ref_model, model  # else TRL turns adapters off
        try:
            return self.trl.compute_ref_log_probs(model, inputs)
        finally:
            self.trl.ref_model = reference

    def with_reference(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """See ReferenceLoss; computed by TRL."""
        if self.reference_names[0] in inputs:
            return inputs
        model = self.model if self.trl.ref_model is None else self.trl.ref_model
        return inputs | dict(zip(self.reference_names, self.trl.compute_ref_log_probs(model, inputs), strict=True))


class DPO(PairObjective, ReferenceObjective):
    """The objective of preference pairs against a reference."""

    trl_arguments, loss_class = DPOConfig, DPOLoss

    def steps(
        self, data: PairDataset, schedule: Schedule, pad_token_id: int, ranks: Ranks, *, evaluation: bool = False
    ) -> PairSteps:
        """The optimizer steps over `data`. Raises UserError if a loss that sorts all pairs of a step would get only some."""
        sorting = self.objective.sorting_losses
        most = schedule.summary(ranks.world_size).micro_batches_max if sorting else 1
        if sorting and (ranks.world_size > 1 or most > 1):
            raise UserError(
                f"{' and '.join(sorting)} sorts all pairs of a step, which here are spread over {ranks.world_size} process"
                f"{'es' if ranks.world_size > 1 else ''} and up to {most} micro-batches",
                where="objective.loss",
                fix="use one process and a larger batch.tokens_per_device (and batch.examples_per_device), or another loss",
            )
        return PairSteps(data, schedule, self.layout, pad_token_id, ranks.rank, ranks.world_size)

    def prove(self, trainer: StepTrainer, log: Log, attention: str, **options: Any) -> None:
        """See ReferenceObjective."""
        console.log_prompts(log, self.layout, self.why_not_shared)
        super().prove(trainer, log, attention, **options)
