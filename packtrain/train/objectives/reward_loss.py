"""The loss of reward models: that of TRL's RewardTrainer, unmodified, over the pairs of a whole step.

The least and the greatest reward are those of all answers of the global step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import RewardConfig, RewardTrainer

from packtrain.config.objective import Objective
from packtrain.model.forward import patch_forward
from packtrain.model.load import base_model
from packtrain.monitor.heartbeat import waiting
from packtrain.train.loader import MicroBatch
from packtrain.train.objectives.loss import ExampleLoss, WeightedFigures
from packtrain.train.patches import hold_trainer
from packtrain.train.settings import LoopSettings

_COLUMNS: dict[str, list[Any]] = {"chosen_ids": [[0]], "rejected_ids": [[0]]}
MEANS = ("mean_reward", "accuracy", "margin")
"""The figures of TRL that are means over pairs."""
LEAST, GREATEST = "min_reward", "max_reward"
PAIRS = 0
FIGURES = (LEAST, "mean_reward", GREATEST, "accuracy", "margin")


class RewardLoss(ExampleLoss):
    """The loss of pairs on `model`, a sequence classifier with one label."""

    def __init__(
        self, model: PreTrainedModel, args: RewardConfig, tokenizer: PreTrainedTokenizerBase, settings: LoopSettings
    ) -> None:
        super().__init__(hold_trainer(RewardTrainer, model, args, tokenizer, _COLUMNS), settings)
        patch_forward(base_model(model), scores=True, autocast=self.autocast, backend=settings.backend)

    def new_figures(self) -> WeightedFigures:
        """Sums of TRL's figures, of nothing yet."""
        return RewardFigures()

    def part(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """The micro-batch's part of the mean loss over the pairs of the step."""
        inputs = self.inputs(batch)
        if not batch.examples:  # a filler, of a process that has fewer micro-batches
            return model(**inputs, use_cache=False).logits.sum() * 0.0
        with self.accelerator.autocast():
            loss = self.trl.compute_loss(model, inputs)
        self.add_figures({PAIRS: batch.examples})
        return loss * (batch.examples / counts[3])

    @torch.no_grad()
    def scores(self, batch: MicroBatch) -> torch.Tensor:
        """float32 [2 × pairs]: the rewards of a micro-batch, those of the chosen answers first."""
        with self.accelerator.autocast():
            return self.model(**self.inputs(batch), use_cache=False).logits[:, 0].float()


class RewardFigures(WeightedFigures):
    """Means over pairs, and the least and the greatest reward of all answers."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(MEANS, PAIRS))
        self._range = torch.tensor([torch.inf, -torch.inf], dtype=torch.float64)

    def take(self, noted: dict[str, list[float]], over: Mapping[Any, int]) -> None:
        """As of WeightedFigures."""
        self._range[0] = self._range[0].clamp(max=noted.pop(LEAST)[-1])
        self._range[1] = self._range[1].clamp(min=noted.pop(GREATEST)[-1])
        super().take(noted, over)

    def values(self, accelerator: Accelerator) -> dict[str, float]:
        """As of WeightedFigures."""
        means, ends = super().values(accelerator), self._range.to(accelerator.device)
        self._range = torch.tensor([torch.inf, -torch.inf], dtype=torch.float64)
        with waiting("the figures of all ranks"):
            ends = cast(torch.Tensor, accelerator.gather(ends)).view(-1, 2)
        found = {**means, LEAST: ends[:, 0].min().item(), GREATEST: ends[:, 1].max().item()}
        return {name: found[name] for name in FIGURES} if means else {}  # of a step whose pairs are left out


def objective_arguments(objective: Objective) -> dict[str, Any]:
    """The loss as arguments of TRL's RewardConfig."""
    return dict(objective.options)
