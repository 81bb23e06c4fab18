"""Direct preference optimisation: the losses of pairs over a whole step, and the objective."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedModel

from packtrain.config.objective import Objective
from packtrain.data.dataset import PairDataset
from packtrain.errors import UserError
from packtrain.model.spread import Ranks
from packtrain.objectives.answers import PairLogps, Sum, sum_answers
from packtrain.objectives.logged_figures import MARGINS, TokenFigures, pair_figures
from packtrain.objectives.losses import PairCounts, PairOptions, make_pairs, pair_loss
from packtrain.packing.schedule import Schedule
from packtrain.train.loader import MicroBatch
from packtrain.train.objectives.loss import Logps, ReferenceLoss, Setup
from packtrain.train.objectives.pairs import PairObjective, PairSteps
from packtrain.train.objectives.training_objective import ReferenceObjective

FIGURES = ("entropy", "logits/chosen", "logits/rejected", "mean_token_accuracy", "rewards/chosen", "rewards/rejected")
FIGURES += ("rewards/accuracies", MARGINS, "logps/chosen", "logps/rejected")


class DPOLoss(ReferenceLoss):
    """The loss of pairs on `model`, against `reference`."""

    reference_names = ("ref_chosen_logps", "ref_rejected_logps")
    figures = FIGURES

    def __init__(self, setup: Setup, objective: Objective, reference: PreTrainedModel | None) -> None:
        option = objective.option
        self.options = PairOptions(
            beta=objective.beta,
            label_smoothing=option("label_smoothing"),
            f_divergence_type=option("f_divergence_type"),
            f_alpha_divergence_coef=option("f_alpha_divergence_coef"),
            ld_alpha=option("ld_alpha"),
            use_weighting=option("use_weighting"),
            discopop_tau=option("discopop_tau"),
        )
        self.weights: dict[str, float] = {}
        for weight, name in weighted_losses(objective):
            self.weights[name] = self.weights.get(name, 0.0) + weight
        self.outputs = ("log_probs", "entropy", "mean_logits", "is_top1")
        self.outputs += ("log_sum_sq_probs",) if self.options.use_weighting else ()
        super().__init__(setup, objective, reference)

    def measure(
        self, model: torch.nn.Module, inputs: dict[str, Any], counts: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Sum]]:
        """See ExampleLoss; the loss `sft` is a mean over the chosen tokens of the step, all others over its pairs."""
        reference = PairLogps(*self.compared_with(inputs))  # first: later it would run beside held activations
        outputs = self.score_tokens(model, inputs)
        targets = self.targets(outputs, inputs)
        pairs = make_pairs(targets, reference, self.options)
        step = PairCounts(pairs=counts[3], chosen_tokens=counts[0])
        entropy, mean_logits, is_top1 = (
            self.targets_of(outputs, inputs, name) for name in ("entropy", "mean_logits", "is_top1")
        )
        chosen = torch.arange(len(entropy), device=entropy.device) < pairs.chosen_tokens.sum()
        figures = pair_figures(pairs, self.beta, TokenFigures(chosen, entropy, mean_logits), is_top1)
        return pair_loss(pairs, self.weights, self.options, step), figures

    def logps_of(self, outputs: Any, inputs: dict[str, Any]) -> Logps:
        """See ReferenceLoss."""
        return sum_answers(self.targets(outputs, inputs), self.options.ld_alpha)

    def zero_margin_loss(self, batch: MicroBatch) -> float | None:
        """ln 2 for the plain sigmoid loss, None for all others."""
        return math.log(2) if self.weights == {"sigmoid": 1.0} and not self.options.use_weighting else None


def weighted_losses(objective: Objective) -> list[tuple[float, str]]:
    """Return the losses by name, each with its weight."""
    weights = objective.option("loss_weights") or [1.0] * len(objective.losses)
    return [*zip(weights, objective.losses, strict=True)]


class DPO(PairObjective, ReferenceObjective):
    """The objective of preference pairs against a reference."""

    loss_class = DPOLoss

    @property
    def losses_in_words(self) -> str:
        """See ReferenceObjective."""
        return " + ".join(f"{weight:g} × {name}" for weight, name in weighted_losses(self.objective))

    def steps(
        self, data: PairDataset, schedule: Schedule, pad_token_id: int, ranks: Ranks, *, evaluation: bool = False
    ) -> PairSteps:
        """See PairObjective.

        Raises UserError if a loss that sorts all pairs of a step would get only some."""
        sorting = self.objective.sorting_losses
        most = schedule.summary(ranks.world_size).micro_batches_max if sorting else 1
        if sorting and (ranks.world_size > 1 or most > 1):
            raise UserError(
                f"{' and '.join(sorting)} sorts all pairs of a step, which here are spread over {ranks.world_size} process"
                f"{'es' if ranks.world_size > 1 else ''} and up to {most} micro-batches",
                where="objective.loss",
                fix="use one process and a larger batch.tokens_per_device (and batch.examples_per_device), or another loss",
            )
        return super().steps(data, schedule, pad_token_id, ranks, evaluation=evaluation)


OBJECTIVE = DPO
