"""Direct preference optimisation: its loss, figures, and objective. The formulas are in objectives/losses.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from packtrain.config.objective import Objective
from packtrain.data.dataset import PairDataset
from packtrain.errors import UserError
from packtrain.model.spread import Ranks
from packtrain.objectives.answers import Figures, Inputs, PairLogps, Pairs, TokenFigures, mean_of, sum_answers
from packtrain.objectives.losses import PairOptions, make_pairs, pair_loss
from packtrain.packing.schedule import Schedule
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.objectives.loss import Logps, ReferenceLoss, Setup
from packtrain.train.objectives.pairs_and_answers import PairObjective
from packtrain.train.objectives.training_objective import ReferenceObjective
from packtrain.wording import counted


@torch.no_grad()
def pair_figures(pairs: Pairs, beta: float, tokens: TokenFigures, is_top1: torch.Tensor) -> Figures:
    """Return the figures of DPOTrainer; rewards are `β log t`, with `ld_alpha` but without an f-divergence.

    `is_top1` [targets]: whether a target is the model's first choice.
    """
    reward, rejected_reward = beta * pairs.chosen_logratios, beta * pairs.rejected_logratios
    return {
        "entropy": mean_of(tokens.entropy),
        "logits/chosen": mean_of(tokens.mean_logits, tokens.chosen),
        "logits/rejected": mean_of(tokens.mean_logits, ~tokens.chosen),
        "mean_token_accuracy": mean_of(is_top1, tokens.chosen),
        "rewards/chosen": mean_of(reward),
        "rewards/rejected": mean_of(rejected_reward),
        "rewards/accuracies": mean_of(reward > rejected_reward),
        "rewards/margins": mean_of(reward - rejected_reward),
        "logps/chosen": mean_of(pairs.chosen_logps),
        "logps/rejected": mean_of(pairs.rejected_logps),
    }


class DPOLoss(ReferenceLoss):
    """The loss of pairs on `model`, against `reference`."""

    reference_names = ("ref_chosen_logps", "ref_rejected_logps")

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
        self.document_figures = () if objective.sorting_losses else ("loss", "margin")
        self.outputs = ("log_probs", "entropy", "mean_logits", "is_top1")
        self.outputs += ("log_sum_sq_probs",) if self.options.use_weighting else ()
        super().__init__(setup, objective, reference)

    def open_step(self, batches: Sequence[MicroBatch]) -> None:
        """See Loss. The steps of a stream are known only now."""
        check_whole(self.objective, 1, len(batches))

    def measure(self, model: torch.nn.Module, inputs: Inputs, counts: torch.Tensor) -> tuple[torch.Tensor, Figures]:
        """See ExampleLoss.

        The loss sft is a mean over chosen tokens, all others over pairs.
        """
        reference = PairLogps(
            *self.compared_with(inputs)
        )  # before the model: its activations would take memory meanwhile
        outputs = self.score_tokens(model, inputs)
        targets = self.targets(outputs, inputs)
        pairs = make_pairs(targets, reference, self.options)
        entropy, mean_logits, is_top1 = (
            self.targets_of(outputs, inputs, name) for name in ("entropy", "mean_logits", "is_top1")
        )
        chosen = torch.arange(len(entropy), device=entropy.device) < pairs.chosen_tokens.sum()
        figures = pair_figures(pairs, self.beta, TokenFigures(chosen, entropy, mean_logits), is_top1)
        each = list[torch.Tensor]()
        loss = pair_loss(pairs, self.weights, self.options, counts[3], counts[0], each)
        margins = self.beta * (pairs.chosen_logratios - pairs.rejected_logratios).detach()
        self.by_document = torch.stack(each).sum(dim=0), margins
        return loss, figures

    def logps_of(self, outputs: ModelOutput, inputs: Inputs) -> Logps:
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

    @property
    def logps_depend_on(self) -> tuple[object, ...]:
        """See ReferenceObjective."""
        return (self.objective.option("ld_alpha"),)

    def steps(
        self, data: PairDataset, schedule: Schedule, pad_token_id: int, ranks: Ranks, *, evaluation: bool = False
    ) -> Steps:
        """See PairObjective. Raises UserError as `check_whole` does."""
        if self.objective.sorting_losses:
            layouts = (schedule.layout(step, ranks.world_size) for step in range(schedule.total_steps))
            check_whole(self.objective, ranks.world_size, max(len(layout[0]) for layout in layouts))
        return super().steps(data, schedule, pad_token_id, ranks, evaluation=evaluation)


def check_whole(objective: Objective, processes: int, micro_batches: int) -> None:
    """Raise UserError if a loss sorts pairs of a step that is spread out."""
    if (sorting := objective.sorting_losses) and (processes > 1 or micro_batches > 1):
        raise UserError(
            f"{' and '.join(sorting)} sorts all pairs of a step, which here are spread over {counted(processes, 'processes')} "
            f"and up to {counted(micro_batches, 'micro-batches')}",
            where="objective.loss",
            fix="use one process and a larger batch.tokens_per_device (and batch.examples_per_device), or another loss",
            code="sorted-pairs-spread",
        )


OBJECTIVE = DPO
