"""Kahneman-Tversky optimisation: the loss of TRL's KTOTrainer, unmodified, over the answers of a whole step, and the objective.

The KL estimate of the loss `kto` is that of the global step as well: it is computed before the first micro-batch, over mismatched pairs
of prompt and completion (loader.py) and without gradients, and TRL's code is given it in place of its own. An evaluation is one
step over the whole set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from trl import KTOConfig, KTOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from packtrain.data.dataset import UnpairedDataset
from packtrain.errors import UserError
from packtrain.model.precision import Precision
from packtrain.model.spread import Ranks
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.collate import IGNORE
from packtrain.packing.schedule import Schedule
from packtrain.train.loader import MicroBatch, UnpairedSteps
from packtrain.train.log.console import Log
from packtrain.train.loop import StepTrainer
from packtrain.train.objectives.loss import EvaluationBatches, Logps, ReferenceLoss, WeightedMetrics
from packtrain.train.objectives.training_objective import ReferenceObjective
from packtrain.train.patches import hold_trainer
from packtrain.train.settings import LoopSettings
from packtrain.wording import counted

_COLUMNS: dict[str, list[Any]] = {"prompt_ids": [[0]], "completion_ids": [[0]], "label": [True]}
ANSWERS, CHOSEN, REJECTED, TARGETS, CHOSEN_TARGETS, REJECTED_TARGETS = range(6)
METRIC_UNITS = {
    "kl": ANSWERS,
    "entropy": TARGETS,
    "logits/chosen": CHOSEN_TARGETS,
    "logits/rejected": REJECTED_TARGETS,
    "rewards/chosen": CHOSEN,
    "rewards/rejected": REJECTED,
    "logps/chosen": CHOSEN,
    "logps/rejected": REJECTED,
}
"""The metrics that TRL logs, and the unit that each is a mean over; chosen answers are the desirable ones."""
MARGINS = "rewards/margins"


class KTOLoss(ReferenceLoss):
    """The loss of answers with labels on `model`, against `reference`."""

    example_unit = "answers"
    answers = ("answer",)
    reference_names = ("ref_logps",)
    new_metrics = partial(WeightedMetrics, METRIC_UNITS, derived=(MARGINS,))

    def __init__(self, model: Any, args: KTOConfig, tokenizer: Any, settings: LoopSettings, reference: Any) -> None:
        trl = hold_trainer(KTOTrainer, model, args, tokenizer, _COLUMNS, ref_model=reference)
        super().__init__(trl, settings, ("log_probs", "entropy", "mean_logits"))
        self._kl = torch.zeros(1, device=self.device)
        self.estimates: bool = trl.calculate_KL
        # the mean of TRL's `KL_logps - ref_KL_logps`, which TRL clamps, is the estimate
        trl._compute_kl_logps = lambda *_: self._kl if self.estimates else None
        # mismatched pairs are as long as the answers: one more pass by the model, one by the reference
        if self.estimates:
            self.extra_forwards = 1 + 2 * self.extra_forwards

    def open_step(self, batches: Sequence[MicroBatch]) -> None:
        """Estimates the divergence of the model from the reference, over the mismatched pairs of the global step."""
        if self.estimates:
            self._kl = self._divergence(batches[0].mismatched)

    def open_evaluation(self, batches: EvaluationBatches) -> None:
        """Estimates the divergence over the mismatched pairs of an evaluation set."""
        if self.estimates:
            self._kl = self._divergence(batches(UnpairedSteps.mismatched))

    def prepare_standalone(self, batch: MicroBatch, *, estimated: bool) -> None:
        """Estimates the divergence over the batch's own mismatched pairs; it is 0 if not `estimated`."""
        self._kl = torch.zeros_like(self._kl)
        if estimated:
            self.open_step([batch])

    def inputs(self, batch: MicroBatch) -> dict[str, Any]:
        """See Loss; labels stay on the host, so that TRL finds the desirable answers there (deferred_reads.py)."""
        return super().inputs(batch) | {"label": batch.inputs["label"]}

    def part(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """The micro-batch's part of the mean loss over the answers of the step."""
        inputs = self.inputs(batch)
        if not batch.examples:
            return self.zero(model, inputs)
        loss = self.compute_with_trl(model, inputs)
        chosen = int(batch.inputs["label"].sum())
        self.add_metrics(
            batch,
            {
                ANSWERS: batch.examples,
                CHOSEN: chosen,
                REJECTED: batch.examples - chosen,
                TARGETS: batch.trained + batch.rejected,
                CHOSEN_TARGETS: batch.trained,
                REJECTED_TARGETS: batch.rejected,
            },
        )
        return loss * (batch.examples / counts[3])

    def zero_margin_loss(self, batch: MicroBatch) -> float:
        """Half of the mean weight of the answers."""
        desirable = batch.inputs["label"].double().mean().item()
        return 0.5 * (desirable * self.trl.desirable_weight + (1 - desirable) * self.trl.undesirable_weight)

    def pop_metrics(self) -> dict[str, Any]:
        """TRL's metrics over the answers and tokens of all processes since the last call."""
        metrics = super().pop_metrics()
        sides = [metrics.get(f"rewards/{side}") for side in ("chosen", "rejected")]
        if None not in sides:
            metrics[MARGINS] = cast(float, sides[0]) - cast(float, sides[1])
        return metrics

    @torch.no_grad()
    def logps(self, model: Any, inputs: dict[str, Any]) -> Logps:
        """Log-probabilities, summed as TRL sums them."""
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORE)
        options = cast(Any, self.trl.args.gradient_checkpointing_kwargs)
        with disable_gradient_checkpointing(self.model, options), self.accelerator.autocast():
            logps = model(**self.model_inputs(inputs), labels=labels, fused_lm_head=True, use_cache=False).log_probs
        return (logps[:, 1 - labels.shape[1] :].sum(-1),)

    def with_reference(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """See ReferenceLoss; adds zeros for TRL's own KL estimate, since `_kl` is the estimate."""
        inputs = inputs | {"ref_KL_logps": torch.zeros_like(self._kl)}
        if "ref_logps" in inputs:
            return inputs
        if self.trl.ref_model is not None:
            return inputs | {"ref_logps": self.logps(self.trl.ref_model, inputs)[0]}
        adapted: Any = self.accelerator.unwrap_model(self.model)
        with use_adapter(adapted, adapter_name="ref" if "ref" in adapted.peft_config else None):
            return inputs | {"ref_logps": self.logps(self.model, inputs)[0]}

    @torch.no_grad()
    def _divergence(self, batches: Iterable[MicroBatch]) -> torch.Tensor:
        """float32 [1]: the mean over mismatched pairs of all processes of log-probability by the model minus by the reference."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for number, batch in enumerate(batches, start=1):
            if not (batch.examples or self.settings.sharded):  # sharded weights take as many calls on every rank
                continue
            self.report_phase("forward" if self.model.training else "eval", micro=number)
            (policy,), (reference,) = self.policy_logps(batch), self.reference_logps(batch)
            margin = (policy - reference).double()
            total += torch.stack([margin.sum(), torch.ones_like(margin).sum()]) * bool(
                batch.examples and batch.part == 0
            )
        with waiting("the KL estimate of all ranks"):
            total = cast(torch.Tensor, self.accelerator.reduce(total, reduction="sum"))
        return (total[:1] / total[1:]).float()


class KTO(ReferenceObjective):
    """The objective of answers with labels."""

    trl_arguments, loss_class = KTOConfig, KTOLoss

    def __init__(self, *arguments: Any, max_length: int | None) -> None:
        """`arguments` are those of ReferenceObjective; `max_length` is data.max_length."""
        super().__init__(*arguments)
        self._max_length = max_length
        self._estimates = self.objective.losses == ["kto"]

    def longest_document(self, data: UnpairedDataset) -> int:
        """Tokens of the longest prompt with an answer, its own or another one's."""
        longest = int(data.lengths.max())
        if not self._estimates:
            return longest
        mismatched = int((data.lengths - data.trained).max()) + int(data.trained.max())
        return max(longest, mismatched if self._max_length is None else min(mismatched, self._max_length))

    def slots(self, data: UnpairedDataset) -> np.ndarray:
        """int32 [documents]: token slots of each. Raises UserError if one, or a mismatched pair, exceeds a micro-batch."""
        longest, (_, most) = self.longest_document(data), self.batch.limits(self.packing.mode)
        if most is not None and longest > (most := most * self.ranks_per_row):
            what = f"a prompt with an answer (for the KL estimate with another one's) takes {longest} token slots, a micro-batch has {most}"
            fix = f"set batch.tokens_per_device to at least {-(-longest // self.ranks_per_row)}, or data.max_length to {most}"
            raise UserError(what, where="batch.tokens_per_device", fix=fix)
        return data.lengths

    def steps(
        self, data: UnpairedDataset, schedule: Schedule, pad_token_id: int, ranks: Ranks, *, evaluation: bool = False
    ) -> UnpairedSteps:
        """The optimizer steps over `data`."""
        shape: Any = (self.layout, pad_token_id, ranks.rank, ranks.world_size)
        options: Any = {"max_length": self._max_length, "estimates": self._estimates, "whole": evaluation}
        return UnpairedSteps(data, schedule, *shape, **options)

    def prove(self, trainer: StepTrainer, log: Log, attention: str, **options: Any) -> None:
        """See ReferenceObjective. Raises UserError as `check_sizes` does."""
        if self._estimates:
            check_sizes(trainer.settings)
        super().prove(trainer, log, attention, **options)

    def with_reference(
        self, steps: UnpairedSteps, trainer: StepTrainer, ranks: Ranks, precision: Precision
    ) -> UnpairedSteps:
        """See ReferenceObjective. The mismatched pairs differ from step to step, so they are computed for all steps of the run."""
        steps = super().with_reference(steps, trainer, ranks, precision)
        if not self._estimates:
            return steps
        schedule, parts = steps.schedule, steps.mismatched().every_step()
        every = (schedule.settings, schedule.total_steps, steps.max_length, steps.whole)
        shape = (schedule.documents_before(schedule.total_steps),)
        known = self.precompute(steps, trainer, ranks, precision, shape, parts, every)
        return replace(steps, reference_mismatched=known)


def check_sizes(settings: LoopSettings) -> None:
    """Raises UserError where a single answer makes a step (if known), or the evaluation: its KL estimate would be its own reward."""
    schedule, count = settings.steps.schedule, len(settings.steps.data)
    each, whole_pass = schedule.examples_per_step, len(settings.steps) >= schedule.steps_per_epoch(0)
    where = what = ""
    if each is not None and whole_pass and count % each == (1 if each > 1 else 0):
        where, what = "batch.examples_per_step", f"of {counted(count, 'answers')} the last step has a single one"
    elif any(len(steps.data) == 1 for steps in settings.evaluation.values()):
        where, what = "data.eval", "a single answer is held out"
    if where:
        fix = "take another number, or objective.loss=apo_zero_unpaired, which has no KL estimate"
        raise UserError(f"{what}, and the KL estimate is made of two or more", where=where, fix=fix)
