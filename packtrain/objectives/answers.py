"""Log-probabilities of answers: the arguments of every loss and figure. Sums of figures.

Shapes never depend on values, and nothing is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Sum(NamedTuple):
    """Total and weight of a mean: float64 scalars without a gradient.

    Add both up over the micro-batches and ranks of a logged line, then divide. (TRL divides each micro-batch, and averages the quotients.) A
    figure whose weight stays 0 has no value.
    """

    total: torch.Tensor
    weight: torch.Tensor


Inputs = dict[str, Any]
"""A micro-batch by name, on the device: arguments of the model and of the loss."""
Figures = dict[str, Sum | torch.Tensor]
"""Figures of a micro-batch by name: sums of means, scalars of extremes."""


@torch.no_grad()
def mean_of(values: torch.Tensor, mask: torch.Tensor | None = None) -> Sum:
    """Return the sum of the values where the mask is true, and their number."""
    values = values.double()
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    return Sum(torch.where(mask, values, 0).sum(), mask.sum().double())


class PairLogps(NamedTuple):
    """Log-probabilities of chosen and rejected answers, each [pairs]."""

    chosen: torch.Tensor
    rejected: torch.Tensor


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of a micro-batch's answers, [targets], answer by answer."""

    log_probs: torch.Tensor
    counts: torch.Tensor
    """int64 [answers]: targets of each answer."""
    log_sum_sq_probs: torch.Tensor | None = None
    """log Σ p² of the distribution at each target; only `use_weighting` needs it."""

    def per_answer(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of `values` [targets] over each answer, [answers]."""
        return torch.segment_reduce(
            values, "sum", lengths=self.counts, unsafe=True, initial=0
        )  # unsafe: no wait for the GPU

    def of_answers(self, values: torch.Tensor) -> torch.Tensor:
        """Return each answer's value, `values` [answers], at all its targets: [targets]."""
        return values.repeat_interleave(self.counts, output_size=len(self.log_probs))

    @property
    def logps(self) -> torch.Tensor:
        """[answers]: log-probability of each answer."""
        return self.per_answer(self.log_probs)

    @property
    def means(self) -> torch.Tensor:
        """[answers]: mean log-probability of each answer's targets."""
        return self.logps / self.counts.clamp(min=1)

    def logps_with_tail(self, shared: torch.Tensor, ld_alpha: float) -> torch.Tensor:
        """[answers]: log-probabilities with α for the targets after the first `shared` [answers]."""
        firsts = self.counts.cumsum(0) - self.counts
        numbers = torch.arange(len(self.log_probs), device=self.log_probs.device) - self.of_answers(firsts)
        in_tail = numbers >= self.of_answers(shared)
        return self.per_answer(torch.where(in_tail, ld_alpha * self.log_probs, self.log_probs))

    @torch.no_grad()
    def wpo_weights(self) -> torch.Tensor:
        """[answers]: exp of the mean of log p − log Σ p², Eq. 2 of WPO (arXiv 2406.11827), without a gradient."""
        if self.log_sum_sq_probs is None:
            raise ValueError("use_weighting needs log_sum_sq_probs")
        return torch.exp(self.per_answer(self.log_probs - self.log_sum_sq_probs) / self.counts.clamp(min=1))


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Outputs of the head at the targets of answers, [targets]."""

    chosen: torch.Tensor
    """bool: true for targets of chosen (or desirable) answers."""
    entropy: torch.Tensor
    mean_logits: torch.Tensor


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


def sum_answers(targets: Targets, ld_alpha: float | None) -> PairLogps:
    """Return the log-probabilities of pairs by the model or the reference. All chosen answers come first.

    With `ld_alpha` the targets of the longer answer past the shorter one's length count α (LD-DPO, arXiv 2409.06411).
    """
    if ld_alpha is None:
        return PairLogps(*targets.logps.chunk(2))
    shared = torch.minimum(*targets.counts.chunk(2)).repeat(2)
    return PairLogps(*targets.logps_with_tail(shared, ld_alpha).chunk(2))


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
