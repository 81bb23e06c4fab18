"""Reward models: TRL's RewardTrainer over whole steps, its loss code unmodified.

TRL computes the loss and its figures for one padded batch on each process. Here a micro-batch is such a batch (the model
runs on a flattened row if packing is on, model/score_head.py), and results are combined exactly: loss and figures are means
over the pairs of the global step, the least and the greatest reward are those of all its answers.
"""

from __future__ import annotations

from typing import Any, cast

import datasets
import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import RewardConfig, RewardTrainer

from packtrain.config.schema import Objective
from packtrain.model.forward import patch_forward
from packtrain.model.load import base_model
from packtrain.monitor.heartbeat import waiting
from packtrain.train.loader import MicroBatch
from packtrain.train.loop import StepTrainer
from packtrain.train.settings import LoopSettings, unread_data

_COLUMNS: dict[str, list[Any]] = {"chosen_ids": [[0]], "rejected_ids": [[0]]}
MEANS = ("mean_reward", "accuracy", "margin")
"""The figures of TRL that are means over pairs."""
LEAST, GREATEST = "min_reward", "max_reward"
FIGURES = (LEAST, "mean_reward", GREATEST, "accuracy", "margin")
_NOT_FIGURES = ("num_tokens",)  # counted by packtrain, exactly even after a resume


class PackedRewardTrainer(StepTrainer, RewardTrainer):
    """Trains `model`, a sequence classifier with one label, by `settings`."""

    def __init__(
        self,
        model: PreTrainedModel,
        args: RewardConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        settings: LoopSettings,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        super().__init__(
            model=model,
            args=args,
            processing_class=tokenizer,
            callbacks=callbacks,
            **unread_data(_COLUMNS, evaluates=settings.evaluation is not None),
        )
        autocast = self.autocast_of_forward(settings)
        patch_forward(base_model(self.model), scores=True, autocast=autocast, backend=settings.backend)
        self._open_figures()
        self.open_loop(settings)

    def loss_of(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """The micro-batch's part of the mean loss over the pairs of the step, by TRL's own code."""
        return self._weighted_loss(model, batch, counts) * self.accelerator.num_processes

    def _weighted_loss(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        inputs = self._prepare_inputs(batch.inputs)
        if not batch.examples:  # a filler, of a process that has fewer micro-batches
            return model(**inputs, use_cache=False).logits.sum() * 0.0
        with self.without_gathering(), self.accelerator.autocast():
            loss = cast(torch.Tensor, self.compute_loss(model, inputs))
        self._take_figures(batch)
        return loss * (batch.examples / counts[3])

    @torch.no_grad()
    def scores_of(self, batch: MicroBatch) -> torch.Tensor:
        """float32 [2 × pairs]: the rewards of a micro-batch, those of the chosen answers first."""
        with self.accelerator.autocast():
            return self.model(**self._prepare_inputs(batch.inputs), use_cache=False).logits[:, 0].float()

    def _open_figures(self) -> None:
        self._sums = torch.zeros(len(MEANS) + 1, dtype=torch.float64)  # the last one counts the pairs
        self._range = torch.tensor([torch.inf, -torch.inf], dtype=torch.float64)

    def _take_figures(self, batch: MicroBatch) -> None:
        """Moves TRL's figures of a micro-batch into ours."""
        noted = self._metrics["train" if self.model.training else "eval"]
        found = {name: noted.pop(name)[-1] for name in FIGURES}
        means = torch.tensor([*(found[name] for name in MEANS), 1.0], dtype=torch.float64)
        self._sums += means * batch.examples
        self._range[0] = self._range[0].clamp(max=found[LEAST])
        self._range[1] = self._range[1].clamp(min=found[GREATEST])
        for name in _NOT_FIGURES:
            noted.pop(name, None)
        if noted:
            raise NotImplementedError(f"figures of TRL that packtrain does not know: {sorted(noted)}")

    def figures(self) -> dict[str, Any]:
        """TRL's figures over the pairs of all processes since the last call."""
        device, sums, ends = self.args.device, self._sums, self._range
        self._open_figures()
        with waiting("the figures of all ranks"):
            sums = cast(torch.Tensor, self.accelerator.reduce(sums.to(device), reduction="sum"))
            ends = cast(torch.Tensor, self.accelerator.gather(ends.to(device))).view(-1, 2)
        means = (sums[:-1] / sums[-1].clamp(min=1)).tolist()
        found = {
            **dict(zip(MEANS, means, strict=True)),
            LEAST: ends[:, 0].min().item(),
            GREATEST: ends[:, 1].max().item(),
        }
        return {name: found[name] for name in FIGURES}

    def evaluated(self) -> dict[str, float]:
        """The loss and all figures over the evaluation set."""
        kept = self._sums, self._range
        self._open_figures()
        counts = torch.zeros(4, dtype=torch.int64, device=self.args.device)
        for batch in self.evaluation_batches():
            counts += torch.tensor(batch.counts, device=counts.device)
        with waiting("the counts of all ranks"):
            counts = cast(torch.Tensor, self.accelerator.reduce(counts, reduction="sum"))
        loss = torch.zeros((), dtype=torch.float64, device=self.args.device)
        for batch in self.evaluation_batches():
            loss += self._weighted_loss(self.model, batch, counts).double()
        with waiting("the loss of all ranks"):
            loss = cast(torch.Tensor, self.accelerator.reduce(loss, reduction="sum"))
        figures = self.figures()
        self._sums, self._range = kept
        return {"loss": loss.item(), "pairs": int(counts[3].item()), **figures}

    def _prepare_dataset(self, dataset: datasets.Dataset, *_: Any) -> datasets.Dataset:
        """Unchanged: the placeholder is never read."""
        return dataset


def objective_arguments(objective: Objective) -> dict[str, Any]:
    """The loss as arguments of TRL's RewardConfig."""
    return {"center_rewards_coefficient": objective.center_rewards_coefficient}
