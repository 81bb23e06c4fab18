"""Kahneman-Tversky optimisation: its loss and its objective. The formulas are in objectives/losses.py.

The loss `kto` needs an estimate of the KL divergence of the model from the reference. It is made for each global step, before the first
micro-batch, without gradients, from mismatched pairs of prompt and completion (mismatched.py). An evaluation has one estimate for the whole set.
The loss `apo_zero_unpaired` needs none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from packtrain.config.objective import Objective
from packtrain.config.schema import RunConfig
from packtrain.data.dataset import UnpairedDataset
from packtrain.errors import UserError
from packtrain.model.spread import Ranks
from packtrain.monitor.heartbeat import waiting
from packtrain.objectives.answers import Figures, Inputs, LabelledAnswers, Sum, TokenFigures, mean_of
from packtrain.objectives.kto.mismatched import UnpairedSteps
from packtrain.objectives.losses import UNPAIRED_LOSSES, UnpairedOptions, estimate_kl
from packtrain.packing.schedule import Schedule
from packtrain.train.loader import MicroBatch
from packtrain.train.objectives.loss import EvaluationBatches, Logps, ReferenceLoss, Setup
from packtrain.train.objectives.training_objective import ReferenceObjective, Start
from packtrain.train.run_state import LoopSettings
from packtrain.wording import counted


@torch.no_grad()
def unpaired_figures(answers: LabelledAnswers, kl: torch.Tensor, beta: float, tokens: TokenFigures) -> Figures:
    """Return the figures of KTOTrainer except the margin; desirable answers are its chosen ones. `kl` is the step's estimate, 0 without one."""
    rewards = beta * answers.logratios
    figures: Figures = {"kl": mean_of(kl.expand_as(rewards)), "entropy": mean_of(tokens.entropy)}
    sides = {"chosen": (answers.desirable, tokens.chosen), "rejected": (~answers.desirable, ~tokens.chosen)}
    for side, (of_answers, of_targets) in sides.items():
        figures[f"logits/{side}"] = mean_of(tokens.mean_logits, of_targets)
        figures[f"rewards/{side}"] = mean_of(rewards, of_answers)
        figures[f"logps/{side}"] = mean_of(answers.logps, of_answers)
    return figures


class KTOLoss(ReferenceLoss):
    """The loss of answers with labels on `model`, against `reference`."""

    answers = ("answer",)
    reference_names = ("ref_logps",)
    outputs = ("log_probs", "entropy", "mean_logits")

    def __init__(self, setup: Setup, objective: Objective, reference: PreTrainedModel | None) -> None:
        super().__init__(setup, objective, reference)
        weights = {name: objective.option(name) for name in ("desirable_weight", "undesirable_weight")}
        self.options = UnpairedOptions(beta=objective.beta, **weights)
        (name,) = objective.losses
        self._values, self.estimates = UNPAIRED_LOSSES[name], name == "kto"
        self._kl = torch.zeros((), device=self.device)
        # mismatched pairs are as long as the answers: one more pass by the model, and one by a reference that is not precomputed
        if self.estimates:
            self.extra_forwards = 1 + 2 * self.extra_forwards

    def open_step(self, batches: Sequence[MicroBatch]) -> None:
        """Estimate the divergence over the mismatched pairs of the global step."""
        if self.estimates:
            self._kl = self._divergence(batches[0].mismatched)

    def open_evaluation(self, batches: EvaluationBatches) -> None:
        """Estimate the divergence over the mismatched pairs of an evaluation set."""
        if self.estimates:
            self._kl = self._divergence(batches(UnpairedSteps.mismatched))

    def prepare_standalone(self, batch: MicroBatch, *, estimated: bool) -> None:
        """Estimate the divergence over the mismatched pairs in `batch`. If not `estimated`, set it to 0."""
        self._kl = torch.zeros_like(self._kl)
        if estimated:
            self.open_step([batch])

    def measure(self, model: torch.nn.Module, inputs: Inputs, counts: torch.Tensor) -> tuple[torch.Tensor, Figures]:
        """See ExampleLoss; the loss is a mean over the answers of the step."""
        (reference,) = self.compared_with(inputs)  # before the model: its activations would take memory meanwhile
        outputs = self.score_tokens(model, inputs)
        targets, desirable = self.targets(outputs, inputs), inputs["label"].bool()
        answers = LabelledAnswers(targets.logps, reference, desirable)
        loss = self._values(answers, self._kl, self.options).sum() / counts[3].clamp(min=1)
        entropy, mean_logits = (self.targets_of(outputs, inputs, name) for name in ("entropy", "mean_logits"))
        tokens = TokenFigures(targets.of_answers(desirable), entropy, mean_logits)
        return loss, unpaired_figures(answers, self._kl, self.beta, tokens)

    def logps_of(self, outputs: ModelOutput, inputs: Inputs) -> Logps:
        """See ReferenceLoss."""
        return (self.targets(outputs, inputs).logps,)

    def zero_margin_loss(self, batch: MicroBatch) -> float:
        """Half of the mean weight of the answers."""
        desirable = batch.inputs["label"].double().mean().item()
        return 0.5 * (desirable * self.options.desirable_weight + (1 - desirable) * self.options.undesirable_weight)

    @torch.no_grad()
    def _divergence(self, batches: Iterable[MicroBatch]) -> torch.Tensor:
        """Estimate the divergence of the model from the reference over the mismatched pairs of all processes, float32 scalar."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for number, batch in enumerate(batches, start=1):
            if not (
                batch.examples or self.settings.sharded
            ):  # ranks with sharded weights must all call the model equally often
                continue
            self.report_phase("forward" if self.model.training else "eval", micro=number)
            (policy,), (reference,) = self.policy_logps(batch), self.reference_logps(batch)
            margin = (policy - reference).double()
            counts = bool(batch.examples and batch.part == 0)  # a filler counts nothing, and a split row once
            total += torch.stack([margin.sum(), torch.ones_like(margin).sum()]) * counts
        with waiting("the KL estimate of all ranks"):
            total = cast(torch.Tensor, self.accelerator.reduce(total, reduction="sum"))
        return estimate_kl(Sum(*total)).float()


class KTO(ReferenceObjective):
    """The objective of answers with labels."""

    loss_class = KTOLoss
    steps_class = UnpairedSteps

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._max_length = config.data.max_length
        self._estimates = self.objective.losses == ["kto"]

    @property
    def losses_in_words(self) -> str:
        """See ReferenceObjective."""
        weights = (self.objective.option("desirable_weight"), self.objective.option("undesirable_weight"))
        return self.objective.losses[0] + " (desirable × {:g}, undesirable × {:g})".format(*weights)

    def longest_document(self, data: UnpairedDataset) -> int:
        """Return the tokens of the longest answer, or mismatched pair, with its prompt."""
        longest = int(data.lengths.max())
        if not self._estimates:
            return longest
        mismatched = int((data.lengths - data.trained).max()) + int(data.trained.max())
        return max(longest, mismatched if self._max_length is None else min(mismatched, self._max_length))

    def slots(self, data: UnpairedDataset) -> np.ndarray:
        """Return the token slots of each document, int32 [documents].

        Raises UserError if a document or a mismatched pair exceeds a micro-batch.
        """
        thing = "a prompt with an answer (for the KL estimate with another one's)"
        self.check_longest(thing, self.longest_document(data))
        return data.lengths

    def steps(
        self, data: UnpairedDataset, schedule: Schedule, pad_token_id: int, ranks: Ranks, *, evaluation: bool = False
    ) -> UnpairedSteps:
        """See TrainingObjective. An evaluation is one step: its mismatched pairs cross the steps."""
        steps = cast(UnpairedSteps, super().steps(data, schedule, pad_token_id, ranks))
        return replace(steps, max_length=self._max_length, estimates=self._estimates, whole=evaluation)

    def prove(self, start: Start) -> None:
        """See ReferenceObjective. Raises UserError if a step or an evaluation has too few answers for an estimate."""
        if self._estimates:
            check_sizes(start.trainer.settings)
        super().prove(start)

    def with_reference(self, steps: UnpairedSteps, start: Start) -> UnpairedSteps:
        """See ReferenceObjective. Each pass has other mismatched pairs: all steps of the run are computed."""
        steps = super().with_reference(steps, start)
        if not self._estimates:
            return steps
        schedule, parts = steps.schedule, steps.mismatched().every_step()
        every = (schedule.settings, schedule.total_steps, steps.max_length, steps.whole)
        shape = (schedule.documents_before(schedule.total_steps),)
        return replace(steps, reference_mismatched=self.precompute(steps, start, shape, parts, every))


def check_sizes(settings: LoopSettings) -> None:
    """Raise UserError if a step or an evaluation set has a single answer.

    Its only mismatched pair would be its own prompt and completion, so the KL estimate would be its own reward.
    """
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


OBJECTIVE = KTO
