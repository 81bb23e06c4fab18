"""Divergences of a student from a teacher, with gradients in place of its logits.

Forward and reverse KL, and the generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649, eq. 1). There is no factor T², as in TRL.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SLICE = 256  # number of tokens with float32 logits at a time


@dataclass(frozen=True, slots=True)
class Readout:
    """Scale, then softcap, between an output head's product and logits."""

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
class Taught:
    """A teacher's distributions of n tokens over `words`. `first` int64 [n]: its first choices.

    `log_probs` takes the student's log-probabilities at a temperature, [n, words], and returns the teacher's there.
    """

    words: int
    first: torch.Tensor
    log_probs: Callable[[torch.Tensor, float], torch.Tensor]

    @staticmethod
    def whole(logits: torch.Tensor) -> Taught:
        """Take the distributions of `logits` [n, words]."""
        return Taught(logits.shape[1], logits.argmax(dim=-1), lambda _, heat: logits.div(heat).log_softmax(dim=-1))

    @staticmethod
    def coarse(records: torch.Tensor, words: int) -> Taught:
        """Take the tokens in `records`, with the rest as one more outcome. `records`: int32 [n, 2m + 2], by `pick`.

        Divergences over these outcomes are at most those over all tokens (data processing). A teacher that
        spreads its rest as the student does has the same ones, and the same gradients: only ratios of probabilities count, and the rest then has one.
        """
        m = records.shape[1] // 2 - 1
        ids, floats = records[:, :m].long(), records[:, m:].contiguous().view(torch.float32)

        def log_probs(student: torch.Tensor, temperature: float) -> torch.Tensor:
            rest = floats[:, m : m + 1] if temperature == 1 else floats[:, m + 1 :]
            outcomes = torch.cat([floats[:, :m] / temperature, rest], dim=1).log_softmax(dim=1)
            filled = student.scatter(1, ids, -torch.inf)
            filled += outcomes[:, m:] - filled.logsumexp(dim=1, keepdim=True)
            return filled.scatter_(1, ids, outcomes[:, :m])

        return Taught(words, ids[:, 0], log_probs)


def pick(logits: torch.Tensor, targets: torch.Tensor, k: int, temperature: float) -> torch.Tensor:
    """Return records of a teacher's `logits` [n, words] at `targets` int64 [n].

    They are int32 [n, 2m + 2]: the ids of the m = k + 1 most likely tokens, where a target that is not among them takes the last place, and the bits of float32
    numbers: their log-probabilities, and the log of the rest's mass, at temperature 1 and, not normalised, at `temperature`.
    """
    log_probs, goals = logits.log_softmax(dim=-1, dtype=torch.float32), targets[:, None]
    ids = log_probs.topk(min(k + 1, log_probs.shape[1])).indices
    ids[:, -1:] = torch.where((ids == goals).any(dim=1, keepdim=True), ids[:, -1:], goals)
    own = log_probs.gather(1, ids)
    log_probs.scatter_(1, ids, -torch.inf)
    rests = [(log_probs / heat).logsumexp(dim=1, keepdim=True) for heat in (1, temperature)]
    return torch.cat([ids.int(), torch.cat([own, *rests], dim=1).view(torch.int32)], dim=1)


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

    def loss(self, student: torch.Tensor, teacher: Taught, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token by the student's logits, [n]. It is the definition, for autograd."""
        own = student.div(self.temperature).log_softmax(dim=-1)
        its = teacher.log_probs(own.detach(), self.temperature)
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

    `teacher` returns the teacher's distributions of the tokens in a slice, over the rows of the vocabulary that both models have. The student's further ones take no part. Without a `teacher` the loss is plain -log p(token). `note` takes the losses [n] and the figures [4, n] of a slice: kl, nll,
    teacher_nll, agreement, at temperature 1.
    """

    divergence: Divergence
    readout: Readout
    targets: torch.Tensor
    teacher: Callable[[slice], Taught] | None
    note: Callable[[torch.Tensor, torch.Tensor | None], object] = lambda losses, figures: None

    def in_place(self, logits: torch.Tensor, part: slice, *, trains: bool) -> torch.Tensor:
        """See TokenLoss."""
        total = torch.zeros((), device=logits.device)
        for start in range(0, len(logits), SLICE):
            rows = logits[start : start + SLICE]
            at = slice(part.start + start, part.start + start + len(rows))
            teacher = None if self.teacher is None else self.teacher(at)
            own = self.readout.logits(rows if teacher is None else rows[:, : teacher.words])
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
        return self.divergence.loss(own[:, : teacher.words], teacher, self.targets).sum()

    def _losses(
        self, own: torch.Tensor, teacher: Taught | None, targets: torch.Tensor, *, trains: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the losses of tokens, [n], and the gradient of their sum if it `trains`."""
        student, share, gradient = own.log_softmax(dim=-1), 1.0, None
        losses = -student.gather(1, targets)[:, 0]
        figures = None
        if teacher is not None:
            divergence, temperature = self.divergence, self.divergence.temperature
            its, share = teacher.log_probs(student, 1), divergence.nll_share
            same = student.argmax(dim=-1) == teacher.first
            figures = torch.stack([kl(its, student), losses, -its.gather(1, targets)[:, 0], same.float()])
            warm = student if temperature == 1 else own.div(temperature).log_softmax(dim=-1)
            its = its if temperature == 1 else teacher.log_probs(warm, temperature)
            losses = (1 - share) * divergence.value(warm, its) + share * losses
            if trains:
                gradient = divergence.gradient(warm, its).mul_((1 - share) / temperature)
        if trains and share:
            plain = student.exp_().scatter_add_(1, targets, -torch.ones_like(targets, dtype=student.dtype)).mul_(share)
            gradient = plain if gradient is None else gradient.add_(plain)
        self.note(losses, figures)
        return losses, gradient
