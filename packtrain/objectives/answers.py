"""Log-probabilities of answers: the arguments of every loss and figure.

Shapes never depend on values, and nothing is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Sum(NamedTuple):
    """Total and weight of a mean: scalars to add up before the division."""

    total: torch.Tensor
    weight: torch.Tensor


class PairLogps(NamedTuple):
    """Log-probabilities of chosen and rejected answers, each [pairs]."""

    chosen: torch.Tensor
    rejected: torch.Tensor


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the values where the mask is true, and 0 elsewhere."""
    return torch.where(mask, values, 0)


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of answers, one answer a row, [answers, slots]."""

    log_probs: torch.Tensor
    mask: torch.Tensor
    """bool: true for targets. Everything else is ignored."""
    log_sum_sq_probs: torch.Tensor | None = None
    """log Σ p² of the distribution at each target; only `use_weighting` needs it."""

    @property
    def counts(self) -> torch.Tensor:
        """int64 [answers]: targets of each answer."""
        return self.mask.sum(dim=1)

    @property
    def logps(self) -> torch.Tensor:
        """[answers]: log-probability of each answer."""
        return masked(self.log_probs, self.mask).sum(dim=1)

    def logps_with_tail(self, shared: torch.Tensor, ld_alpha: float) -> torch.Tensor:
        """[answers]: log-probabilities with α for the targets after the first `shared` [answers]."""
        in_tail = self.mask.cumsum(dim=1) > shared.unsqueeze(1)
        weighted = torch.where(in_tail, ld_alpha * self.log_probs, self.log_probs)
        return masked(weighted, self.mask).sum(dim=1)

    @torch.no_grad()
    def wpo_weights(self) -> torch.Tensor:
        """[answers]: exp of the mean of log p − log Σ p², Eq. 2 of WPO (arXiv 2406.11827), without a gradient."""
        if self.log_sum_sq_probs is None:
            raise ValueError("use_weighting needs log_sum_sq_probs")
        aligned = masked(self.log_probs - self.log_sum_sq_probs, self.mask)
        return torch.exp(aligned.sum(dim=1) / self.counts.clamp(min=1))


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of a micro-batch, with the names of TRL's trainer, all [pairs]."""

    chosen_logps: torch.Tensor
    rejected_logps: torch.Tensor
    ref_chosen_logps: torch.Tensor
    ref_rejected_logps: torch.Tensor
    chosen_tokens: torch.Tensor
    """int64: targets of the chosen answer."""
    rejected_tokens: torch.Tensor
    chosen_nll: torch.Tensor
    """Σ of the chosen answer's token losses, without `ld_alpha`."""
    weights: torch.Tensor
    """Weights by WPO, or ones."""

    @property
    def chosen_logratios(self) -> torch.Tensor:
        """[pairs]: log t of the chosen answers."""
        return self.chosen_logps - self.ref_chosen_logps

    @property
    def rejected_logratios(self) -> torch.Tensor:
        """[pairs]: log t of the rejected answers."""
        return self.rejected_logps - self.ref_rejected_logps


def sum_answers(chosen: Targets, rejected: Targets, ld_alpha: float | None) -> PairLogps:
    """Return the log-probabilities of answers, of the model or of the reference.

    With `ld_alpha` the targets of the longer answer past the shorter one's length count α (LD-DPO, arXiv 2409.06411).
    """
    if ld_alpha is None:
        return PairLogps(chosen.logps, rejected.logps)
    shared = torch.minimum(chosen.counts, rejected.counts)
    return PairLogps(chosen.logps_with_tail(shared, ld_alpha), rejected.logps_with_tail(shared, ld_alpha))


@dataclass(frozen=True, slots=True)
class LabelledAnswers:
    """Answers of a micro-batch with labels, all [answers]."""

    logps: torch.Tensor
    ref_logps: torch.Tensor
    desirable: torch.Tensor
    """bool: the label."""

    @property
    def logratios(self) -> torch.Tensor:
        """[answers]: log t."""
        return self.logps - self.ref_logps
