"""Reward models as an objective: pairs with margins, and the proof that rows are scored as padded batches are.

The loss is in reward_loss.py, the model's side in model/score_head.py.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import RewardConfig

from packtrain.attention.backends import attention_of
from packtrain.config.objective import Objective
from packtrain.config.schema import Batch, Packing
from packtrain.data.dataset import PairDataset
from packtrain.errors import CheckFailed
from packtrain.model.load import base_model
from packtrain.model.spread import Ranks
from packtrain.packing.schedule import Schedule
from packtrain.plan.memory import COMPARED_PAIRS
from packtrain.proof.isolation import evaluating, refusals_of_a_model, tolerance_of
from packtrain.train.loader import ScoredSteps
from packtrain.train.log import console
from packtrain.train.log.console import Log
from packtrain.train.loop import StepTrainer
from packtrain.train.objectives.pair_objective import PairObjective
from packtrain.train.objectives.reward_loss import RewardLoss, objective_arguments
from packtrain.train.patches import arguments_on_one_gpu
from packtrain.train.settings import LoopSettings


class Reward(PairObjective):
    """The TrainingObjective of reward models."""

    def __init__(self, objective: Objective, packing: Packing, batch: Batch) -> None:
        super().__init__(packing, batch)
        self.objective = objective
        self._margins = False

    def take_reference(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing: there is no reference."""
        return {}

    def steps(
        self, data: PairDataset, schedule: Schedule, pad_token_id: int, ranks: Ranks, *, evaluation: bool = False
    ) -> ScoredSteps:
        """The optimizer steps over `data`."""
        return ScoredSteps(data, schedule, self.layout, pad_token_id, ranks.rank, ranks.world_size)

    def loss(
        self,
        model: PreTrainedModel,
        arguments: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        settings: LoopSettings,
    ) -> RewardLoss:
        """The loss of pairs on `model`."""
        args = arguments_on_one_gpu(RewardConfig, **arguments, **objective_arguments(self.objective))
        return RewardLoss(model, args, tokenizer, settings)

    def prove(self, trainer: StepTrainer, log: Log, attention: str, *, preflight: bool, **_: Any) -> None:
        """Says what is trained, and compares the first scores with those of padded batches."""
        console.log_prompts(log, self.layout, self.unshared)
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
def check_scores(trainer: StepTrainer, attention: str) -> float:
    """Compares scores of the first pairs in their row with those by the model's own call of a padded batch, of COMPARED_PAIRS pairs.

    `attention` is the model's original implementation. Returns the largest difference, relative to the largest score; raises
    CheckFailed if it is more than rounding.
    """
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
            refusals_of_a_model(f"{type(base).__name__} cannot run padded pairs", fix="please report this model"),
        ):
            theirs = loss.scores(padded.collate(few))
    off = ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-8)).item()
    if not off <= tolerance_of(loss.compute_dtype):  # NaN fails too
        worst = int((ours - theirs).abs().argmax())
        raise CheckFailed(
            f"an answer of the first pairs scores {ours[worst]:.6g} in its row, but {theirs[worst]:.6g} by "
            f"{type(base).__name__} itself on a padded batch",
            fix="its classifier does more than score the last token: set packing.mode=padding",
        )
    return off
