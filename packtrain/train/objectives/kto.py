"""Kahneman-Tversky optimisation as an objective: answers with labels, the reference, the KL estimate's rows, and their proofs.

The loss is in kto_loss.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import KTOConfig

from packtrain.config.objective import Objective
from packtrain.config.schema import Batch, Model, Packing, Peft
from packtrain.data.dataset import LabelFigures, UnpairedDataset
from packtrain.errors import UserError
from packtrain.model.precision import Precision
from packtrain.model.reference import cache_key, computer, precompute
from packtrain.model.spread import Ranks
from packtrain.packing.collate import PairRows
from packtrain.packing.schedule import Schedule
from packtrain.plan.reference_choice import ReferenceChoice
from packtrain.proof.choice import AttentionChoice
from packtrain.train.loader import MicroBatch, Steps, UnpairedSteps
from packtrain.train.log import console
from packtrain.train.log.console import Log
from packtrain.train.loop import StepTrainer
from packtrain.train.objectives.kto_loss import KTOLoss, objective_arguments
from packtrain.train.objectives.reference_objective import ReferenceObjective
from packtrain.train.patches import arguments_on_one_gpu
from packtrain.train.preflight import choose_together
from packtrain.train.settings import LoopSettings
from packtrain.wording import counted


class KTO(ReferenceObjective):
    """The TrainingObjective of answers with labels."""

    def __init__(
        self,
        objective: Objective,
        packing: Packing,
        batch: Batch,
        max_length: int | None,
        model: Model,
        peft: Peft,
        reference: ReferenceChoice,
        cache: Path,
    ) -> None:
        """`max_length` is data.max_length. Precomputed log-probabilities go to the folder `cache`."""
        super().__init__(objective, model, peft, reference, cache)
        self._packing, self._batch, self._max_length = packing, batch, max_length
        self.layout: PairRows = "padding" if packing.mode == "padding" else "flat"

    def longest_document(self, data: UnpairedDataset) -> int:
        """Tokens of the longest prompt with an answer, its own or another one's."""
        longest = int(data.lengths.max())
        if self.objective.losses != ["kto"]:
            return longest
        mismatched = int((data.lengths - data.trained).max()) + int(data.trained.max())
        return max(longest, mismatched if self._max_length is None else min(mismatched, self._max_length))

    def decide_attention(
        self, wanted: str, model: PreTrainedModel, ranks: Ranks, precision: Precision, *, prove: bool
    ) -> AttentionChoice:
        """Which backend serves packed rows of `model`."""
        return choose_together(wanted, model, ranks, precision.autocast, prove=prove)

    def slots(self, data: UnpairedDataset) -> np.ndarray:
        """int32 [documents]: token slots of each. Raises UserError if one, or a mismatched pair, exceeds a micro-batch."""
        longest, (_, most) = self.longest_document(data), self._batch.limits(self._packing.mode)
        if most is not None and longest > most:
            what = f"a prompt with an answer (for the KL estimate with another one's) takes {longest} token slots, a micro-batch has {most}"
            fix = f"set batch.tokens_per_device to at least {longest}, or data.max_length to {most}"
            raise UserError(what, where="batch.tokens_per_device", fix=fix)
        return data.lengths

    def steps(
        self, data: UnpairedDataset, schedule: Schedule, pad_token_id: int, ranks: Ranks, *, evaluation: bool = False
    ) -> UnpairedSteps:
        """The optimizer steps over `data`."""
        shape: Any = (self.layout, pad_token_id, ranks.rank, ranks.world_size)
        estimates = self.objective.losses == ["kto"]
        return UnpairedSteps(data, schedule, *shape, max_length=self._max_length, estimates=estimates, whole=evaluation)

    def loss(
        self,
        model: PreTrainedModel,
        arguments: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        settings: LoopSettings,
    ) -> KTOLoss:
        """The loss of answers with labels on `model`. Raises UserError as `check_sizes`."""
        own = objective_arguments(self.objective, precomputed=self.reference.kind == "precomputed")
        if self.objective.losses == ["kto"]:
            check_sizes(settings)
        args = arguments_on_one_gpu(KTOConfig, **arguments, **own)
        return KTOLoss(model, args, tokenizer, settings, self._reference_model)

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
        console.log_loss(log, self.objective, self.reference, self._peft.dropout)
        if (remark := balance(cast(UnpairedSteps, trainer.steps).data.report.labels, self.objective)) is not None:
            log.warn(remark)
        self.hold(trainer, attention, preflight=preflight, ranks=ranks, precision=precision)

    def with_reference(self, steps: Steps, trainer: StepTrainer, ranks: Ranks, precision: Precision) -> UnpairedSteps:
        """`steps` with the reference's log-probabilities; the reference is the model before step 1.

        Those of the answers are computed in the rows of the first pass: in 16 bits an answer has another one in another row. The
        mismatched pairs are other ones in every step of the run, and are computed for all of them.
        """
        steps, schedule, loss = cast(UnpairedSteps, steps), steps.schedule, cast(KTOLoss, trainer.loss)

        def logps(batch: MicroBatch) -> torch.Tensor:
            trainer.clock.enter("proof")
            return loss.policy_logps(batch)[0]

        rows = None
        if loss.compute_dtype.itemsize == 2:
            rows = (schedule.settings, steps.layout, trainer.settings.backend, ranks.world_size, computer(ranks.device))
        depends = (steps.data.fingerprint, self.identity, (precision.weights, precision.autocast), rows)
        place = self._cache / cache_key("kto", *depends)
        steps = replace(steps, reference=precompute(place, (len(steps.data),), steps.first_pass(), ranks, logps))
        if self.objective.losses != ["kto"]:
            return steps
        every = (schedule.settings, schedule.total_steps, steps.max_length, steps.whole)
        place, pairs = self._cache / cache_key("kto", *depends, every), steps.mismatched()
        shape = (schedule.documents_before(schedule.total_steps),)
        return replace(steps, reference_mismatched=precompute(place, shape, pairs.every_step(), ranks, logps))


def check_sizes(settings: LoopSettings) -> None:
    """Raises UserError where a single answer makes a step, or the evaluation: its KL estimate would be its own reward.

    Of steps of a number of tokens that is not known beforehand.
    """
    fix = "take another number, or objective.loss=apo_zero_unpaired, which has no KL estimate"
    evaluation, schedule, count = settings.evaluation, settings.steps.schedule, len(settings.steps.data)
    each = schedule.examples_per_step
    if (
        each is not None
        and count % each == (1 if each > 1 else 0)
        and len(settings.steps) >= schedule.steps_per_epoch(0)
    ):
        what = (
            f"of {counted(count, 'answers')} the last step has a single one, and the KL estimate is made of two or more"
        )
        raise UserError(what, where="batch.examples_per_step", fix=fix)
    if evaluation is not None and len(evaluation.data) == 1:
        what = "a single answer is held out, and the KL estimate is made of two or more"
        raise UserError(
            what, where="data.eval", fix="give more, or set objective.loss=apo_zero_unpaired, which has none"
        )


def balance(labels: LabelFigures, objective: Objective) -> str | None:
    """A warning where labels and weights are out of balance; None where they are not.

    The KTO paper (arXiv 2402.01306, eq. 8) has the ratio of both sides, each its number times its weight, between 1 and 4/3.
    """
    desirable, undesirable = labels.desirable, labels.undesirable
    if not (desirable and undesirable):
        kind = "desirable" if desirable else "undesirable"
        return f"all answers are {kind}: nothing says what the others would be like"
    gains, losses = (
        desirable * objective.option("desirable_weight"),
        undesirable * objective.option("undesirable_weight"),
    )
    ratio = gains / losses if losses else math.inf
    if 0.9 <= ratio <= 1.5:  # what chance leaves of a balance is none of the weights' business
        return None
    side, least = "desirable", losses / desirable
    if ratio > 1:
        side, least = "undesirable", gains / undesirable * 3 / 4
    wanted = f"objective.options.{side}_weight={least:.3g} to {least * 4 / 3:.3g}"
    return (
        f"{desirable:,} desirable and {undesirable:,} undesirable answers, by their weights {ratio:.2g} to 1: the KTO paper "
        f"advises 1 to 4/3, here {wanted}"
    )
