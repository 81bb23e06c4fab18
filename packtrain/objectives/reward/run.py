"""Reward models: the Bradley-Terry loss over the pairs of a whole step, and the objective.

The least and the greatest reward are those of all answers of the global step. The model's side is in model/heads.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator

from packtrain.attention.backends import attention_of
from packtrain.config.objective import Objective
from packtrain.data.dataset import PairDataset
from packtrain.model.forward import patch_forward
from packtrain.model.load import base_model
from packtrain.model.spread import Ranks
from packtrain.monitor.heartbeat import waiting
from packtrain.objectives.answers import Sum
from packtrain.objectives.logged_figures import reward_extremes, reward_figures
from packtrain.objectives.losses import bradley_terry
from packtrain.packing.collate import collate_scored
from packtrain.packing.schedule import Schedule
from packtrain.plan.memory import COMPARED_PAIRS
from packtrain.proof.comparison import check_equal, evaluating, model_refusals, tolerance_of
from packtrain.train.loader import MicroBatch
from packtrain.train.log import console
from packtrain.train.log.console import Log
from packtrain.train.loop import StepTrainer
from packtrain.train.objectives.loss import ExampleLoss, MeanFigures, Setup, at_places
from packtrain.train.objectives.pairs import PairObjective, PairSteps

LEAST, GREATEST = "min_reward", "max_reward"
MEANS = ("mean_reward", "accuracy", "margin")
METRIC_ORDER = (LEAST, "mean_reward", GREATEST, "accuracy", "margin")


class RewardFigures(MeanFigures):
    """Means over pairs, and the least and the greatest reward of all answers."""

    def __init__(self) -> None:
        super().__init__(MEANS)
        self._ends: torch.Tensor | None = None

    def add_rewards(self, chosen: torch.Tensor, rejected: torch.Tensor) -> None:
        """Keep the least and the greatest reward of a micro-batch."""
        ends = reward_extremes(chosen, rejected)
        self._extend(torch.stack([-ends[LEAST], ends[GREATEST]]).double())

    def add_sums(self, other: Any) -> None:
        """See MeanFigures."""
        if other._ends is not None:
            self._extend(other._ends)
        super().add_sums(other)

    def _extend(self, ends: torch.Tensor) -> None:
        self._ends = ends if self._ends is None else self._ends.maximum(ends)

    def values(self, accelerator: Accelerator) -> dict[str, float]:
        """See MeanFigures."""
        means, ends, self._ends = super().values(accelerator), self._ends, None
        if ends is None:
            ends = torch.full((2,), -torch.inf, dtype=torch.float64, device=accelerator.device)
        with waiting("the metrics of all ranks"):
            least, greatest = cast(torch.Tensor, accelerator.gather(ends)).view(-1, 2).amax(dim=0).tolist()
        metrics = {**means, LEAST: -least, GREATEST: greatest}
        return {name: metrics[name] for name in METRIC_ORDER} if means else {}  # none for a step without pairs


@dataclass(frozen=True)
class ScoredSteps(PairSteps):
    """Steps of pairs with scores: `trained` of a micro-batch counts the scored documents."""

    def collate(self, numbers: Sequence[int] | np.ndarray) -> MicroBatch:
        """Return one forward pass over the pairs of these numbers."""
        pairs: Any = [self.data[int(number)] for number in numbers]
        inputs = collate_scored(pairs, [float(self.data.margins[n]) for n in numbers], self.pad_token_id, self.layout)
        tokens = sum(len(pair.chosen.input_ids) + len(pair.rejected.input_ids) for pair in pairs)
        slots = inputs["input_ids"].numel() if self.layout == "padding" else tokens
        return MicroBatch(inputs, trained=2 * len(pairs), tokens=tokens, slots=slots, examples=len(pairs))


class RewardLoss(ExampleLoss):
    """The loss of pairs on `model`, a sequence classifier with one label."""

    figures = MEANS

    def __init__(self, setup: Setup, objective: Objective) -> None:
        # a classifier finds the last token by it
        setup.model.config.get_text_config().pad_token_id = setup.tokenizer.pad_token_id
        super().__init__(setup)
        patch_forward(base_model(self.model), scores=True, autocast=self.autocast, backend=self.settings.backend)
        self._center: float | None = objective.option("center_rewards_coefficient")

    def new_metrics(self) -> RewardFigures:
        """See ExampleLoss."""
        return RewardFigures()

    def measure(
        self, model: torch.nn.Module, inputs: dict[str, Any], counts: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Sum]]:
        """See ExampleLoss; the loss is a mean over the pairs of the step."""
        chosen, rejected = self._scores(model, inputs).chunk(2)
        values = bradley_terry(chosen, rejected, margin=inputs["margin"], center_rewards_coefficient=self._center)
        cast(RewardFigures, self._metrics).add_rewards(chosen.detach(), rejected.detach())
        return values.sum() / counts[3], reward_figures(chosen, rejected)

    def zero(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """See ExampleLoss."""
        return self._scores(model, inputs).sum() * 0.0

    @torch.no_grad()
    def scores(self, batch: MicroBatch) -> torch.Tensor:
        """float32 [2 × pairs]: the rewards of a micro-batch, those of the chosen answers first."""
        with self.accelerator.autocast():
            return self._scores(self.model, self.inputs(batch))

    def _scores(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the rewards, float32 [2 × pairs]. A padded batch is scored by the model's own call."""
        given = {name: value for name, value in inputs.items() if name not in ("margin", "ends")}
        if "ends" not in inputs:
            return model(**given, use_cache=False).logits[:, 0].float()
        return at_places(model(**given, every_token=True).logits, inputs, "ends")[:, 0].float()


class Reward(PairObjective):
    """The objective of reward models: pairs with margins, and no reference."""

    def steps(
        self, data: PairDataset, schedule: Schedule, pad_token_id: int, ranks: Ranks, *, evaluation: bool = False
    ) -> ScoredSteps:
        """The optimizer steps over `data`."""
        return ScoredSteps(data, schedule, self.layout, pad_token_id, ranks.rank, ranks.world_size)

    def loss(self, setup: Setup) -> RewardLoss:
        """See TrainingObjective."""
        return RewardLoss(setup, self.objective)

    def prove(self, trainer: StepTrainer, log: Log, attention: str, *, preflight: bool, **_: Any) -> None:
        """Says what is trained, and compares the first scores with those of padded batches."""
        console.log_prompts(log, self.layout, self.why_not_shared)
        margins = cast(PairDataset, trainer.steps.data).margins
        loss = "Bradley-Terry"
        if margins.any():
            loss += f", with the margins of the data (mean {margins.mean():.3g})"
        if center := self.objective.option("center_rewards_coefficient"):
            loss += f", and {center:g} × rewards centred at zero"
        log.fact("loss", loss)
        if preflight and self.layout != "padding":
            check_scores(trainer, attention)


@torch.no_grad()
def check_scores(trainer: StepTrainer, attention: str) -> None:
    """Raises CheckFailed if COMPARED_PAIRS pairs score otherwise in their row than by the model's own call of a padded batch."""
    loss, steps = cast(RewardLoss, trainer.loss), cast(ScoredSteps, trainer.steps)
    model, base = loss.model, base_model(loss.model)
    numbers = steps.first_examples(trainer.settings.first_step)
    few = numbers[:COMPARED_PAIRS]
    rows = [*range(len(few)), *range(len(numbers), len(numbers) + len(few))]
    padded = ScoredSteps(steps.data, steps.schedule, "padding", steps.pad_token_id)
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
    check_equal(ours, theirs, tolerance_of(loss.compute_dtype).outputs, what, fix=fix)


OBJECTIVE = Reward
