"""Divergences between the next-token distributions of a student and a teacher, and their gradients in place of the student's logits.

Forward and reverse KL, and the generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649, eq. 1). As in TRL there is no factor T².
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_SLICE = 128  # number of tokens with float32 logits at a time


@dataclass(frozen=True, slots=True)
class Readout:
    """What a model does to the product of its output head: it multiplies it by `scale`, and bends it by the softcap `cap`."""

    scale: float = 1.0
    cap: float | None = None

    @staticmethod
    def of(config: Any) -> Readout:
        """Read it from a model's config, as TRL does."""
        text = config.get_text_config()
        names = ("logit_scale", "output_multiplier", "lm_head_multiplier")
        scale = next((value for name in names if (value := getattr(text, name, None)) is not None), None)
        if scale is None and (scale := getattr(text, "logits_scaling", None)) is not None:
            scale = scale if text.model_type == "hyperclovax" else 1 / scale
        return Readout(1.0 if scale is None else scale, getattr(text, "final_logit_softcapping", None))

    def logits(self, product: torch.Tensor) -> torch.Tensor:
        """Return the model's logits, in float32."""
        logits = product.float() * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def back(self, gradient: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Turn the gradient of `logits` into the gradient of the product, in place."""
        if self.cap is not None:
            gradient *= 1 - (logits / self.cap).square()
        return gradient.mul_(self.scale)


@dataclass(frozen=True, slots=True)
class Divergence:
    """A loss of tokens: (1 - `nll_share`) · divergence + `nll_share` · -log p(token). Log-probabilities are [n, vocabulary]."""

    kind: str
    temperature: float = 1.0
    beta: float = 0.5
    nll_share: float = 0.0

    def value(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the divergence of each token, [n]."""
        if self.kind == "forward_kl":
            return kl(teacher, student)
        if self.kind == "reverse_kl":
            return kl(student, teacher)
        mixture = self._mixture(student, teacher)
        return self.beta * kl(teacher, mixture) + (1 - self.beta) * kl(student, mixture)

    def gradient(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the gradient of `value` by the student's logits, divided by the temperature."""
        if self.kind == "forward_kl":
            return student.exp() - teacher.exp()
        own = student.exp()
        away = student - (teacher if self.kind == "reverse_kl" else self._mixture(student, teacher))
        away -= (own * away).sum(dim=-1, keepdim=True)
        return away.mul_(own).mul_(1 if self.kind == "reverse_kl" else 1 - self.beta)

    def loss(self, student: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token by the models' logits, [n]. It is the definition, for autograd."""
        own, its = (logits.div(self.temperature).log_softmax(dim=-1) for logits in (student, teacher))
        nll = -student.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]
        return (1 - self.nll_share) * self.value(own, its) + self.nll_share * nll

    def _mixture(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        return torch.logaddexp(student + math.log(1 - self.beta), teacher + math.log(self.beta))


def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return KL(one ‖ other) of log-probabilities [n, vocabulary]: [n]."""
    return (one.exp() * (one - other)).sum(dim=-1)


@dataclass(frozen=True, slots=True)
class TaughtTokens:
    """The loss of `targets` int64 [n] for a student with this `readout`. See model/forward.py::TokenLoss.

    `teacher` returns the teacher's logits of the tokens in a slice, float32 [n, words]: rows of the vocabulary that both models
    have. The student's further ones take no part. Without a `teacher` the loss is plain -log p(token). `note` takes the losses [n] and the figures [4, n] of a slice: kl, nll,
    teacher_nll, agreement, at temperature 1.
    """

    divergence: Divergence
    readout: Readout
    targets: torch.Tensor
    teacher: Callable[[slice], torch.Tensor] | None
    note: Callable[[torch.Tensor, torch.Tensor | None], object] = lambda losses, figures: None

    def in_place(self, logits: torch.Tensor, part: slice, *, trains: bool) -> torch.Tensor:
        """See TokenLoss."""
        total = torch.zeros((), device=logits.device)
        for start in range(0, len(logits), _SLICE):
            rows = logits[start : start + _SLICE]
            at = slice(part.start + start, part.start + start + len(rows))
            teacher = None if self.teacher is None else self.teacher(at)
            own = self.readout.logits(rows if teacher is None else rows[:, : teacher.shape[1]])
            losses, gradient = self._losses(own, teacher, self.targets[at, None], trains=trains)
            total += losses.sum()
            if gradient is not None:
                rows[:, own.shape[1] :] = 0
                rows[:, : own.shape[1]] = self.readout.back(gradient, own)
        return total

    def definition(self, logits: torch.Tensor) -> torch.Tensor:
        """See TokenLoss."""
        own, teacher = self.readout.logits(logits), None
        if self.teacher is None:
            return -own.log_softmax(dim=-1).gather(1, self.targets[:, None]).sum()
        teacher = self.teacher(slice(0, len(own)))
        return self.divergence.loss(own[:, : teacher.shape[1]], teacher, self.targets).sum()

    def _losses(
        self, own: torch.Tensor, teacher: torch.Tensor | None, targets: torch.Tensor, *, trains: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the losses of a few tokens, [n], and the gradient of their sum if it `trains`."""
        student, share, gradient = own.log_softmax(dim=-1), 1.0, None
        losses = -student.gather(1, targets)[:, 0]
        figures = None
        if teacher is not None:
            divergence, temperature = self.divergence, self.divergence.temperature
            its, share = teacher.log_softmax(dim=-1), divergence.nll_share
            same = student.argmax(dim=-1) == its.argmax(dim=-1)
            figures = torch.stack([kl(its, student), losses, -its.gather(1, targets)[:, 0], same.float()])
            warm = student if temperature == 1 else own.div(temperature).log_softmax(dim=-1)
            its = its if temperature == 1 else teacher.div(temperature).log_softmax(dim=-1)
            losses = (1 - share) * divergence.value(warm, its) + share * losses
            if trains:
                gradient = divergence.gradient(warm, its).mul_((1 - share) / temperature)
        if trains and share:
            plain = student.exp_().scatter_add_(1, targets, -torch.ones_like(targets, dtype=student.dtype)).mul_(share)
            gradient = plain if gradient is None else gradient.add_(plain)
        self.note(losses, figures)
        return losses, gradient
