"""Figures of each objective, under the names that TRL logs, as totals with weights.

Add both up over the micro-batches and ranks of a logged line, then divide. TRL divides each micro-batch, and averages the quotients.
A figure whose weight stays 0 has no value. Totals and weights are float64 scalars without a gradient, on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from packtrain.objectives.answers import LabelledAnswers, Pairs, Sum, masked

MARGINS = "rewards/margins"
"""For kto this is a difference of two means, and no mean itself (`unpaired_margins`)."""


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Outputs of the head at the targets of answers, [answers, slots]."""

    mask: torch.Tensor
    """bool: true for targets."""
    entropy: torch.Tensor
    mean_logits: torch.Tensor
    is_top1: torch.Tensor


@torch.no_grad()
def pair_figures(pairs: Pairs, beta: float, chosen: TokenFigures, rejected: TokenFigures) -> dict[str, Sum]:
    """Return the figures of DPOTrainer; rewards are `β log t`, with `ld_alpha` but without an f-divergence."""
    reward, rejected_reward = beta * pairs.chosen_logratios, beta * pairs.rejected_logratios
    return {
        "entropy": _both(mean_of(chosen.entropy, chosen.mask), mean_of(rejected.entropy, rejected.mask)),
        "logits/chosen": mean_of(chosen.mean_logits, chosen.mask),
        "logits/rejected": mean_of(rejected.mean_logits, rejected.mask),
        "mean_token_accuracy": mean_of(chosen.is_top1, chosen.mask),
        "rewards/chosen": mean_of(reward),
        "rewards/rejected": mean_of(rejected_reward),
        "rewards/accuracies": mean_of(reward > rejected_reward),
        MARGINS: mean_of(reward - rejected_reward),
        "logps/chosen": mean_of(pairs.chosen_logps),
        "logps/rejected": mean_of(pairs.rejected_logps),
    }


@torch.no_grad()
def unpaired_figures(
    answers: LabelledAnswers,
    kl: torch.Tensor,
    beta: float,
    *,
    mask: torch.Tensor,
    entropy: torch.Tensor,
    mean_logits: torch.Tensor,
) -> dict[str, Sum]:
    """Return the figures of KTOTrainer except the margin; desirable answers are its chosen ones.

    `mask` (true for targets), `entropy` and `mean_logits` are [answers, slots]. `kl` is the step's estimate, 0 without one.
    """
    rewards = beta * answers.logratios
    figures = {"kl": mean_of(kl.expand_as(rewards)), "entropy": mean_of(entropy, mask)}
    for side, own in (("chosen", answers.desirable), ("rejected", ~answers.desirable)):
        figures[f"logits/{side}"] = mean_of(mean_logits, mask & own.unsqueeze(1))
        figures[f"rewards/{side}"] = mean_of(rewards, own)
        figures[f"logps/{side}"] = mean_of(answers.logps, own)
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
    """Return a figure: the sum of the values where the mask is true, and their number."""
    values = values.double()
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    return Sum(masked(values, mask).sum(), mask.sum().double())


def _both(one: Sum, other: Sum) -> Sum:
    """Return both totals and both weights added up."""
    return Sum(one.total + other.total, one.weight + other.weight)
