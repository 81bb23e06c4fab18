"""Direct preference optimisation as an objective: pairs instead of documents, the reference, and their proofs.

The loss is in dpo_loss.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import DPOConfig

from packtrain.config.objective import Objective
from packtrain.config.schema import Batch, Model, Packing, Peft
from packtrain.data.dataset import PairDataset
from packtrain.errors import UserError
from packtrain.model.precision import Precision
from packtrain.model.reference import cache_key, computer, precompute
from packtrain.model.spread import Ranks
from packtrain.packing.schedule import Schedule
from packtrain.plan.reference_choice import ReferenceChoice
from packtrain.train.loader import MicroBatch, PairSteps, Steps
from packtrain.train.log import console
from packtrain.train.log.console import Log
from packtrain.train.loop import StepTrainer
from packtrain.train.objectives.dpo_loss import DPOLoss, objective_arguments
from packtrain.train.objectives.pair_objective import PairObjective
from packtrain.train.objectives.reference_objective import ReferenceObjective
from packtrain.train.patches import arguments_on_one_gpu
from packtrain.train.settings import LoopSettings


class DPO(ReferenceObjective, PairObjective):
    """The TrainingObjective of preference optimisation."""

    def __init__(
        self,
        objective: Objective,
        packing: Packing,
        batch: Batch,
        model: Model,
        peft: Peft,
        reference: ReferenceChoice,
        cache: Path,
    ) -> None:
        """Precomputed log-probabilities go to the folder `cache`."""
        PairObjective.__init__(self, packing, batch)
        ReferenceObjective.__init__(self, objective, model, peft, reference, cache)

    def steps(
        self, data: PairDataset, schedule: Schedule, pad_token_id: int, ranks: Ranks, *, evaluation: bool = False
    ) -> PairSteps:
        """The optimizer steps over `data`. Raises UserError if a loss that sorts all pairs of a step would get only some."""
        steps = PairSteps(data, schedule, self.layout, pad_token_id, ranks.rank, ranks.world_size)
        if sorting := self.objective.sorting_losses:
            most = schedule.summary(ranks.world_size).micro_batches_max
            if ranks.world_size > 1 or most > 1:
                raise UserError(
                    f"{' and '.join(sorting)} sorts all pairs of a step, which here are spread over {ranks.world_size} process"
                    f"{'es' if ranks.world_size > 1 else ''} and up to {most} micro-batches",
                    where="objective.loss",
                    fix="use one process and a larger batch.tokens_per_device (and batch.examples_per_device), or another "
                    "loss",
                )
        return steps

    def loss(
        self,
        model: PreTrainedModel,
        arguments: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        settings: LoopSettings,
    ) -> DPOLoss:
        """The loss of pairs on `model`."""
        own = objective_arguments(self.objective, precomputed=self.reference.kind == "precomputed")
        args = arguments_on_one_gpu(DPOConfig, **arguments, **own)
        return DPOLoss(model, args, tokenizer, settings, self._reference_model)

    def prove(
        self,
        trainer: StepTrainer,
        log: Log,
        attention: str,
        *,
        preflight: bool,
        ranks: Ranks,
        precision: Precision,
    ) -> None:
        """Precomputes the reference's log-probabilities if configured, then checks the forward and the first loss."""
        console.log_prompts(log, self.layout, self.unshared)
        console.log_loss(log, self.objective, self.reference, self._peft.dropout)
        self.hold(trainer, attention, preflight=preflight, ranks=ranks, precision=precision)

    def with_reference(self, steps: Steps, trainer: StepTrainer, ranks: Ranks, precision: Precision) -> PairSteps:
        """`steps` with the reference's log-probabilities of every pair; the reference is the model before step 1.

        They are computed in the rows of the first pass: in 16 bits an answer has another one in another row.
        """
        pairs, schedule, loss = cast(PairSteps, steps), steps.schedule, cast(DPOLoss, trainer.loss)

        def logps(batch: MicroBatch) -> torch.Tensor:
            trainer.clock.enter("proof")
            return torch.stack(loss.policy_logps(batch), dim=1)

        rows = None
        if loss.compute_dtype.itemsize == 2:
            rows = (schedule.settings, pairs.layout, trainer.settings.backend, ranks.world_size, computer(ranks.device))
        formats = (precision.weights, precision.autocast)
        key = cache_key(pairs.data.fingerprint, self.identity, formats, loss.trl.ld_alpha, rows)
        shape = (len(pairs.data), 2)
        return replace(pairs, reference=precompute(self._cache / key, shape, pairs.first_pass(), ranks, logps))
