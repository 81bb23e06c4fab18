"""What the trainers share whose loss is a mean over the examples of a step: pairs, or answers with labels."""

from __future__ import annotations

from typing import Any, cast

import datasets
import torch

from packtrain.monitor.heartbeat import waiting
from packtrain.train.loader import MicroBatch
from packtrain.train.loop import StepTrainer
from packtrain.train.objectives.weighted_figures import WeightedFigures


class ExampleTrainer(StepTrainer):
    """A StepTrainer over TRL's code for one micro-batch, whose loss and figures are weighted by their share of the step.

    A subclass sets `noted` (by `new_figures`) before it calls `open_loop`, and defines `weighted_loss` and `new_figures`.
    """

    examples = "pairs"
    """What they are called in the figures of an evaluation."""
    noted: WeightedFigures
    """TRL's figures of the micro-batches since the last line."""

    def weighted_loss(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """Scalar: the micro-batch's part of the mean loss over the examples of a step of these `counts`; notes its figures."""
        raise NotImplementedError

    def new_figures(self) -> WeightedFigures:
        """Sums of TRL's figures, of nothing yet."""
        raise NotImplementedError

    def open_evaluation(self) -> None:
        """Called before the losses of an evaluation."""

    def loss_of(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """The micro-batch's part of the mean loss over the examples of the step, by TRL's own code."""
        return self.weighted_loss(model, batch, counts) * self.accelerator.num_processes

    def figures(self) -> dict[str, Any]:
        """TRL's figures over the examples and tokens of all processes since the last call."""
        return self.noted.values(self.accelerator)

    def evaluated(self) -> dict[str, float]:
        """The loss and all figures over the evaluation set."""
        kept, self.noted = self.noted, self.new_figures()
        counts = torch.zeros(4, dtype=torch.int64, device=self.args.device)
        for batch in self.evaluation_batches():
            counts += torch.tensor(batch.counts, device=counts.device)
        with waiting("the counts of all ranks"):
            counts = cast(torch.Tensor, self.accelerator.reduce(counts, reduction="sum"))
        self.open_evaluation()
        loss = torch.zeros((), dtype=torch.float64, device=self.args.device)
        for batch in self.evaluation_batches():
            loss += self.weighted_loss(self.model, batch, counts).double()
        with waiting("the loss of all ranks"):
            loss = cast(torch.Tensor, self.accelerator.reduce(loss, reduction="sum"))
        figures, self.noted = self.figures(), kept
        return {"loss": loss.item(), self.examples: int(counts[3].item()), **figures}

    def _prepare_dataset(self, dataset: datasets.Dataset, *_: Any) -> datasets.Dataset:
        """Unchanged: the placeholder is never read."""
        return dataset

    def _precompute_ref_logps(self, dataset: datasets.Dataset, name: str, batch_size: int) -> datasets.Dataset:
        """Unchanged: precomputed log-probabilities come with the batches."""
        return dataset
