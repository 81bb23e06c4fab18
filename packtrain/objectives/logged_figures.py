"""Figures of each objective, under the names that TRL logs, as totals with weights.

Add both up over the micro-batches and ranks of a logged line, then divide. TRL divides each micro-batch, and averages the quotients.
A figure whose weight stays 0 has no value. Totals and weights are float64 scalars without a gradient, on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from packtrain.objectives.answers import LabelledAnswers, Pairs, Sum

MARGINS = "rewards/margins"
"""For kto this is a difference of two means, and no mean itself (`unpaired_margins`)."""


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Outputs of the head at the targets of answers, [targets]."""

    chosen: torch.Tensor
    """bool: true for targets of chosen (or desirable) answers."""
    entropy: torch.Tensor
    mean_logits: torch.Tensor


@torch.no_grad()
def pair_figures(pairs: Pairs, beta: float, tokens: TokenFigures, is_top1: torch.Tensor) -> dict[str, Sum]:
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
        MARGINS: mean_of(reward - rejected_reward),
        "logps/chosen": mean_of(pairs.chosen_logps),
        "logps/rejected": mean_of(pairs.rejected_logps),
    }


@torch.no_grad()
def unpaired_figures(answers: LabelledAnswers, kl: torch.Tensor, beta: float, tokens: TokenFigures) -> dict[str, Sum]:
    """Return the figures of KTOTrainer except the margin; desirable answers are its chosen ones. `kl` is the step's estimate, 0 without one."""
    rewards = beta * answers.logratios
    figures = {"kl": mean_of(kl.expand_as(rewards)), "entropy": mean_of(tokens.entropy)}
    sides = {"chosen": (answers.desirable, tokens.chosen), "rejected": (~answers.desirable, ~tokens.chosen)}
    for side, (of_answers, of_targets) in sides.items():
        figures[f"logits/{side}"] = mean_of(tokens.mean_logits, of_targets)
        figures[f"rewards/{side}"] = mean_of(rewards, of_answers)
        figures[f"logps/{side}"] = mean_of(answers.logps, of_answers)
    return figures


def unpaired_margins(means: Mapping[str, float]) -> dict[str, float]:
    """Return the margin of KTOTrainer from logged means, if both labels have one."""
    if "rewards/chosen" not in means or "rewards/rejected" not in means:
        return {}
    return {MARGINS: means["rewards/chosen"] - means["rewards/rejected"]}


@torch.no_grad()
def reward_figures(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, Sum]:
    """Return the means of RewardTrainer from the rewards of pairs, [pairs] each."""
    return {
        "mean_reward": mean_of(torch.cat([chosen, rejected])),
        "accuracy": mean_of(chosen > rejected),
        "margin": mean_of(chosen - rejected),
    }


@torch.no_grad()
def reward_extremes(chosen: torch.Tensor, rejected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the least and the greatest reward; without pairs they are ∞ and −∞."""
    rewards = torch.cat([chosen, rejected])
    return {
        "min_reward": F.pad(rewards, (0, 1), value=torch.inf).amin(),
        "max_reward": F.pad(rewards, (0, 1), value=-torch.inf).amax(),
    }


@torch.no_grad()
def mean_of(values: torch.Tensor, mask: torch.Tensor | None = None) -> Sum:
    """Return the sum of the values where the mask is true, and their number."""
    values = values.double()
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    return Sum(torch.where(mask, values, 0).sum(), mask.sum().double())
