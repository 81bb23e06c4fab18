"""Reward models: the Bradley-Terry loss over the pairs of a whole step, and the objective.

The model's side is in model/forward.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from packtrain.attention.backends import attention_of
from packtrain.config.objective import Objective
from packtrain.data.dataset import PairDataset
from packtrain.model.forward import patch_forward
from packtrain.model.load import base_model
from packtrain.objectives.answers import Figures, Inputs, mean_of
from packtrain.objectives.losses import bradley_terry
from packtrain.objectives.spec import COMPARED_PAIRS
from packtrain.packing.collate import collate_scored
from packtrain.proof.comparison import check_equal, evaluating, model_refusals, tolerance_of
from packtrain.train.loader import MicroBatch
from packtrain.train.log import console
from packtrain.train.loop import StepTrainer
from packtrain.train.objectives.loss import ExampleLoss, Setup, at_places
from packtrain.train.objectives.pairs_and_answers import PairObjective, PairSteps
from packtrain.train.objectives.training_objective import Start


@torch.no_grad()
def reward_figures(chosen: torch.Tensor, rejected: torch.Tensor) -> Figures:
    """Return the figures of RewardTrainer from the rewards of pairs, [pairs] each, at least one."""
    rewards = torch.cat([chosen, rejected])
    return {
        "min_reward": rewards.amin(),
        "mean_reward": mean_of(rewards),
        "max_reward": rewards.amax(),
        "accuracy": mean_of(chosen > rejected),
        "margin": mean_of(chosen - rejected),
    }


@dataclass(frozen=True)
class ScoredSteps(PairSteps):
    """Steps of pairs with scores: `trained` of a micro-batch counts the scored documents."""

    def collate(self, numbers: Sequence[int] | np.ndarray) -> MicroBatch:
        """Return one forward pass over the pairs of these numbers."""
        pairs: Any = [self.data[int(number)] for number in numbers]
        margins = [float(self.data.margins[n]) for n in numbers]
        inputs = collate_scored(pairs, margins, self.pad_token_id, self.layout, self.sight)
        tokens = sum(len(pair.chosen.input_ids) + len(pair.rejected.input_ids) for pair in pairs)
        slots = inputs["input_ids"].numel() if self.layout == "padding" else tokens
        return MicroBatch(inputs, trained=2 * len(pairs), tokens=tokens, slots=slots, examples=len(pairs))


class RewardLoss(ExampleLoss):
    """The loss of pairs on `model`, a sequence classifier with one label."""

    document_figures = ("loss", "margin")

    def __init__(self, setup: Setup, objective: Objective) -> None:
        # a classifier finds the last token by it
        setup.model.config.get_text_config().pad_token_id = setup.tokenizer.pad_token_id
        super().__init__(setup, objective)
        patch_forward(base_model(self.model), scores=True, autocast=self.autocast, backend=self.settings.backend)
        self._center: float | None = objective.option("center_rewards_coefficient")

    def measure(self, model: torch.nn.Module, inputs: Inputs, counts: torch.Tensor) -> tuple[torch.Tensor, Figures]:
        """See ExampleLoss; the loss is a mean over the pairs of the step."""
        chosen, rejected = self._scores(model, inputs).chunk(2)
        values = bradley_terry(chosen, rejected, margin=inputs["margin"], center_rewards_coefficient=self._center)
        self.by_document = values.detach(), (chosen - rejected).detach()
        return values.sum() / counts[3], reward_figures(chosen, rejected)

    def zero(self, model: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
        """See ExampleLoss."""
        return self._scores(model, inputs).sum() * 0.0

    @torch.no_grad()
    def scores(self, batch: MicroBatch) -> torch.Tensor:
        """float32 [2 × pairs]: the rewards of a micro-batch, those of the chosen answers first."""
        with self.accelerator.autocast():
            return self._scores(self.model, batch.inputs_on(self.device))

    def _scores(self, model: Any, inputs: Inputs) -> torch.Tensor:
        """Return the rewards, float32 [2 × pairs]. A padded batch is scored by the model's own call."""
        given = {name: value for name, value in inputs.items() if name not in ("margin", "ends")}
        if "ends" not in inputs:
            # more rows than scored documents: a blank picture
            return model(**given, use_cache=False).logits[: 2 * len(inputs["margin"]), 0].float()
        return at_places(model(**given, every_token=True).logits, inputs, "ends")[:, 0].float()


class Reward(PairObjective):
    """The objective of reward models: pairs with margins, and no reference."""

    loss_class = RewardLoss
    steps_class = ScoredSteps

    def prove(self, start: Start) -> None:
        """Say what is trained, and compare the first scores with those of padded batches."""
        trainer = start.trainer
        console.log_prompts(start.log, self.layout, self.why_not_shared)
        margins = cast(PairDataset, trainer.steps.data).margins
        loss = "Bradley-Terry"
        if margins.any():
            loss += f", with the margins of the data (mean {margins.mean():.3g})"
        if center := self.objective.option("center_rewards_coefficient"):
            loss += f", and {center:g} × rewards centred at zero"
        start.log.fact("loss", loss)
        if start.preflight and self.layout != "padding":
            check_scores(trainer, start.attention)


@torch.no_grad()
def check_scores(trainer: StepTrainer, attention: str) -> None:
    """Raises CheckFailed if COMPARED_PAIRS pairs score otherwise in their row than by the model's own call of a padded batch."""
    loss, steps = cast(RewardLoss, trainer.loss), cast(ScoredSteps, trainer.steps)
    model, base = loss.model, base_model(loss.model)
    numbers = steps.first_examples(trainer.settings.first_step)
    few = numbers[:COMPARED_PAIRS]
    rows = [*range(len(few)), *range(len(numbers), len(numbers) + len(few))]
    padded = ScoredSteps(steps.data, steps.schedule, "padding", steps.pad_token_id, sight=steps.sight)
    with evaluating(model):
        ours = loss.scores(steps.collate(numbers))[rows]
        with (
            attention_of(base, attention),
            model_refusals(f"{type(base).__name__} cannot run padded pairs", fix="please report this model"),
        ):
            theirs = loss.scores(padded.collate(few))

    what = (
        "an answer of the first pairs scores {candidate:.6g} in its row, but {definition:.6g} by "
        f"{type(base).__name__} itself on a padded batch"
    )
    fix = "its classifier does more than score the last token: set packing.mode=padding"
    check_equal(ours, theirs, tolerance_of(loss.compute_dtype).outputs, what, fix=fix, code="scores-differ")


OBJECTIVE = Reward
