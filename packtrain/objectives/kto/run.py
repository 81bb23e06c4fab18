"""Kahneman-Tversky optimisation: its loss and its objective. The formulas are in objectives/losses.py.

The loss `kto` needs an estimate of the KL divergence of the model from the reference. Each global step makes one before its first
micro-batch, without gradients, from mismatched pairs of prompt and completion (UnpairedSteps). An evaluation has one for the whole set.
The loss `apo_zero_unpaired` needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from packtrain.config.objective import Objective
from packtrain.config.schema import RunConfig
from packtrain.data.dataset import Document, UnpairedDataset
from packtrain.errors import UserError
from packtrain.model.spread import Ranks
from packtrain.monitor.heartbeat import waiting
from packtrain.objectives.answers import Figures, Inputs, LabelledAnswers, Sum, TokenFigures, mean_of
from packtrain.objectives.losses import UNPAIRED_LOSSES, UnpairedOptions, estimate_kl
from packtrain.packing.balance import Layout, parts_of_rank
from packtrain.packing.schedule import Schedule
from packtrain.train.loader import ByStep, MicroBatch
from packtrain.train.objectives.loss import EvaluationBatches, Logps, ReferenceLoss, Setup
from packtrain.train.objectives.pairs_and_answers import AnswerSteps
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
    document_figures = ("loss", "reward")

    def __init__(self, setup: Setup, objective: Objective, reference: PreTrainedModel | None) -> None:
        super().__init__(setup, objective, reference)
        weights = {name: objective.option(name) for name in ("desirable_weight", "undesirable_weight")}
        self.options = UnpairedOptions(beta=objective.beta, **weights)
        (name,) = objective.losses
        self._loss_of, self.estimates = UNPAIRED_LOSSES[name], name == "kto"
        self._kl = torch.zeros((), device=self.device)
        # mismatched pairs are as long as the answers: one more pass by the model, and one by a reference that is not precomputed
        if self.estimates:
            self.extra_forwards = 1 + 2 * self.extra_forwards

    def open_step(self, batches: Sequence[MicroBatch]) -> None:
        """Estimate the divergence over the mismatched pairs of the global step."""
        if self.estimates:
            self._kl = self._estimate_divergence(batches[0].mismatched)

    def open_evaluation(self, batches: EvaluationBatches) -> None:
        """Estimate the divergence over the mismatched pairs of an evaluation set."""
        if self.estimates:
            self._kl = self._estimate_divergence(batches(UnpairedSteps.mismatched))

    def prepare_standalone(self, batch: MicroBatch, *, estimated: bool) -> None:
        """Estimate the divergence over the mismatched pairs in `batch`. If not `estimated`, set it to 0."""
        self._kl = torch.zeros_like(self._kl)
        if estimated:
            self.open_step([batch])

    def measure(self, model: torch.nn.Module, inputs: Inputs, counts: torch.Tensor) -> tuple[torch.Tensor, Figures]:
        """See ExampleLoss; the loss is a mean over the answers of the step."""
        (reference,) = self.compared_with(inputs)  # first: later, the model's activations would take memory
        outputs = self.score_tokens(model, inputs)
        targets, desirable = self.targets(outputs, inputs), inputs["label"].bool()
        answers = LabelledAnswers(targets.logps, reference, desirable)
        losses = self._loss_of(answers, self._kl, self.options)
        self.by_document = losses.detach(), self.beta * answers.logratios.detach()
        loss = losses.sum() / counts[3].clamp(min=1)
        entropy, mean_logits = (self.targets_of(outputs, inputs, name) for name in ("entropy", "mean_logits"))
        tokens = TokenFigures(targets.of_answers(desirable), entropy, mean_logits)
        return loss, unpaired_figures(answers, self._kl, self.beta, tokens)

    def logps_of(self, outputs: ModelOutput, inputs: Inputs) -> Logps:
        """See ReferenceLoss."""
        return (self.targets(outputs, inputs).logps,)

    def zero_margin_loss(self, batch: MicroBatch) -> float:
        """Return half of the mean weight of the answers."""
        desirable = batch.inputs["label"].double().mean().item()
        return 0.5 * (desirable * self.options.desirable_weight + (1 - desirable) * self.options.undesirable_weight)

    @torch.no_grad()
    def _estimate_divergence(self, batches: Iterable[MicroBatch]) -> torch.Tensor:
        """Estimate the divergence over the mismatched pairs of all processes, float32 scalar."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for number, batch in enumerate(batches, start=1):
            # with sharded weights all ranks must call the model equally often
            if not (batch.examples or self.settings.sharded):
                continue
            self.report_phase("forward" if self.model.training else "eval", micro=number)
            (policy,), (reference,) = self.policy_logps(batch), self.reference_logps(batch)
            margin = (policy - reference).double()
            is_counted = bool(batch.examples and batch.part == 0)  # fillers never, and split rows once
            total += torch.stack([margin.sum(), torch.ones_like(margin).sum()]) * is_counted
        with waiting("the KL estimate of all ranks"):
            total = cast(torch.Tensor, self.accelerator.reduce(total, reduction="sum"))
        return estimate_kl(Sum(*total)).float()


@dataclass(frozen=True)
class UnpairedSteps(AnswerSteps):
    """Steps of answers with labels, and their mismatched pairs.

    A mismatched pair is the prompt of a document with the completion of the document before it in the step (for the first document: of the
    last), cut to `max_length` tokens. `estimates`: the loss needs them, so the first micro-batch of each step has them. `whole`: all steps
    count as one, as in an evaluation; `mismatched` then loads the pairs separately. `reference_mismatched`: the reference's
    log-probabilities of the mismatched pairs in the order of the steps, if precomputed.
    """

    max_length: int | None = None
    estimates: bool = True
    whole: bool = False
    reference_mismatched: np.ndarray | None = None

    def __getitem__(self, step: int) -> list[MicroBatch]:
        batches = super().__getitem__(step)
        return self.complete(batches, step) if self.estimates and not self.whole else batches

    def first_batch(self, first_step: int) -> MicroBatch:
        """See Steps; adds the step's mismatched pairs. `first_step` may be past the end, where a finished run resumes."""
        batch = super().first_batch(first_step)
        return self.complete([batch], first_step % len(self))[0] if self.estimates else batch

    def within(self, longest: int) -> UnpairedSteps:
        """See Steps."""
        return replace(self, max_length=longest)

    def complete(self, batches: Sequence[MicroBatch], step: int) -> list[MicroBatch]:
        """Return `batches` of `step` with the step's mismatched pairs, in the first one."""
        return [replace(batches[0], mismatched=tuple(self.mismatched()[step])), *batches[1:]]

    def mismatched(self) -> MismatchedSteps:
        """Return the mismatched pairs of every step."""
        return MismatchedSteps(self)

    def pairs_of(self, step: int) -> np.ndarray:
        """Return int64 [n, 2]: document numbers of a step's mismatched pairs, prompt and completion."""
        documents = self.schedule.documents(step)
        before = np.roll(documents, 1)
        if self.whole:
            before[0] = self.schedule.documents((step or len(self)) - 1)[-1]
        return np.stack([documents, before], axis=1)

    def collate_mismatched(self, pairs: np.ndarray, known: np.ndarray | None) -> MicroBatch:
        """Return one forward pass over mismatched `pairs`, int64 [n, 2].

        `known`: their log-probabilities by the reference, float32 [n], if precomputed.
        """
        documents = []
        for prompt, completion in ((self.data[int(own)], self.data[int(other)]) for own, other in pairs):
            prompt_length = len(prompt.input_ids) - int(prompt.loss_mask.sum())
            ids = np.concatenate([prompt.input_ids[:prompt_length], completion.input_ids[completion.loss_mask]])
            ids = ids[: self.max_length]
            documents.append(Document(ids, np.arange(len(ids)) >= prompt_length, prompt.pictures))
        return self.collate_documents(documents, np.ones(len(documents), bool), known)

    def with_reference_by(
        self, logps: Callable[[MicroBatch], np.ndarray], random: np.random.Generator, off: float
    ) -> UnpairedSteps:
        """Return these steps with the reference's log-probabilities from `logps`, plus noise of `off` nats.

        For mismatched pairs the noise is negative, so that the estimate of the divergence stays above 0.
        """
        known = super().with_reference_by(logps, random, off).reference
        (order,), (pairs,) = self.mismatched().layout(0)[0], self.mismatched()[0]
        mismatched = np.empty(len(self.data), np.float32)
        mismatched[order] = logps(pairs)
        mismatched -= np.abs(random.normal(0, off, len(mismatched))).astype(np.float32)
        return replace(self, reference=known, reference_mismatched=mismatched)


@dataclass(frozen=True)
class MismatchedSteps(ByStep):
    """Mismatched pairs by step: `mismatched[k]` are this rank's, in micro-batches with the step's own limits."""

    steps: UnpairedSteps

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, step: int) -> list[MicroBatch]:
        pairs, all_known = self.steps.pairs_of(step), self.steps.reference_mismatched
        first = self.steps.schedule.examples_before(step)
        known = None if all_known is None else all_known[first : first + len(pairs)]
        batches = []
        for part, is_split in self._own_parts(step):
            batch = self.steps.collate_mismatched(pairs[part], None if known is None else known[part])
            batches.append(batch.split(self.steps.rank, self.steps.schedule.ranks_per_row) if is_split else batch)
        return batches

    def every_step(self) -> Iterator[tuple[np.ndarray, MicroBatch]]:
        """Yield this rank's micro-batches of all steps. The array has each pair's place in the order of the steps."""
        for step in range(len(self)):
            first = self.steps.schedule.examples_before(step)
            for (part, _), batch in zip(self._own_parts(step), self[step], strict=True):
                yield first + part, batch

    def _own_parts(self, step: int) -> list[tuple[np.ndarray, bool]]:
        return parts_of_rank(self.layout(step), self.steps.rank)

    def layout(self, step: int) -> Layout:
        """Deal a step's pairs to ranks and micro-batches: `[rank][micro-batch]` arrays of places in `pairs_of(step)`.

        Every rank has the same number of micro-batches.
        """
        data, (prompt, completion) = self.steps.data, self.steps.pairs_of(step).T
        lengths = (data.lengths - data.trained)[prompt] + data.trained[completion]
        lengths = lengths if self.steps.max_length is None else np.minimum(lengths, self.steps.max_length)
        return self.steps.schedule.lay_out(lengths, self.steps.world_size)


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
        thing = "a prompt with an answer (in the KL estimate, the answer to another prompt)"
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
        """See ReferenceObjective. Mismatched pairs differ between epochs, so all steps are computed."""
        steps = super().with_reference(steps, start)
        if not self._estimates:
            return steps
        schedule, parts = steps.schedule, steps.mismatched().every_step()
        cache_key = (schedule.settings, schedule.total_steps, steps.max_length, steps.whole)
        shape = (schedule.examples_before(schedule.total_steps),)
        return replace(steps, reference_mismatched=self.precompute(steps, start, shape, parts, cache_key))


def check_sizes(settings: LoopSettings) -> None:
    """Raise UserError if a step or an evaluation set has a single answer.

    Looks at the steps of the first pass over the data. A single answer's only mismatched pair would be its own prompt and completion, so the KL estimate would be its own reward.
    """
    schedule, count = settings.steps.schedule, len(settings.steps.data)
    number = min(len(settings.steps), schedule.steps_per_epoch(0))
    sizes = np.diff([schedule.examples_before(step) for step in range(number + 1)]).tolist()
    where = what = ""
    if 1 in sizes:
        where = "batch.examples_per_step" if schedule.examples_per_step else "batch.tokens_per_step"
        what = f"step {sizes.index(1) + 1} has a single one of {counted(count, 'answers')}"
    elif any(len(steps.data) == 1 for steps in settings.evaluation.values()):
        where, what = "data.eval", "a single answer is held out"
    if where:
        fix = "take another number, or objective.loss=apo_zero_unpaired, which has no KL estimate"
        what = f"{what}, and the KL estimate needs two or more"
        raise UserError(what, where=where, fix=fix, code="kl-needs-two-answers")


OBJECTIVE = KTO
