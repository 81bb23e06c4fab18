"""A teacher's most likely tokens beside the definition over outcomes, in float64."""

from __future__ import annotations

import pytest
import torch

from packtrain.objectives.distill.divergence import Divergence, Readout, Taught, TaughtTokens, pick

WORDS, BETA, SHARE = 50, 0.3, 0.25


def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.where(one > 0, one * (one / other).log(), 0).sum(dim=1)


def defined(kind: str, own: torch.Tensor, its: torch.Tensor) -> torch.Tensor:
    """The divergence of probabilities."""
    mixture = BETA * its + (1 - BETA) * own
    jsd = BETA * kl(its, mixture) + (1 - BETA) * kl(own, mixture)
    return {"forward_kl": kl(its, own), "reverse_kl": kl(own, its), "jsd": jsd}[kind]


def outcomes(probabilities: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The probabilities of these tokens, and of the rest."""
    rest = probabilities.scatter(1, ids, 0).sum(dim=1, keepdim=True)
    return torch.cat([probabilities.gather(1, ids), rest], dim=1)


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a student with 7 more words and of a teacher, and tokens.

    The first token is the teacher's choice, others hardly ever are.
    """
    torch.manual_seed(0)
    student, teacher = 2 * torch.randn(200, WORDS + 7), 3 * torch.randn(200, WORDS)
    targets = torch.randint(WORDS, (200,))
    targets[0] = teacher[0].argmax()
    return student, teacher, targets


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("k", [1, 8, WORDS - 1, WORDS, WORDS + 9])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_losses_figures_and_gradients_are_those_of_the_outcomes(logits, kind: str, k: int, temperature: float) -> None:
    student, teacher, targets = logits
    records = pick(teacher, targets, k, temperature)
    ids = records[:, : min(k + 1, WORDS)].long()
    assert (ids == targets[:, None]).any(dim=1).all() and torch.equal(ids[:, 0], teacher.argmax(dim=1))
    likely = teacher.topk(k if k < WORDS else WORDS).indices
    assert all({*one.tolist()} <= {*other.tolist()} for one, other in zip(likely, ids, strict=True))
    whole = student.double().requires_grad_()
    own, its = whole[:, :WORDS], teacher.double()
    warm = [outcomes((one / temperature).softmax(dim=1), ids) for one in (own, its)]
    nll = -own.log_softmax(dim=1).gather(1, targets[:, None])[:, 0]
    expected = (1 - SHARE) * defined(kind, *warm) + SHARE * nll
    (gradient,) = torch.autograd.grad(expected.sum(), whole)

    noted = list[tuple[torch.Tensor, torch.Tensor]]()
    divergence = Divergence(kind, temperature, BETA, SHARE)
    taught = lambda part: Taught.coarse(records[part], WORDS)  # noqa: E731
    tokens = TaughtTokens(divergence, Readout(), targets, taught, lambda *values: noted.append(values))
    made = student.clone()
    total = tokens.in_place(made, slice(0, len(made)), trains=True)
    losses, figures = torch.cat([one for one, _ in noted]), torch.cat([two for _, two in noted], dim=1)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(total, losses.sum())
    torch.testing.assert_close(made.double(), gradient, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(tokens.definition(student), total)
    plain = [outcomes(one.softmax(dim=1), ids) for one in (own, its)]
    same = (own.argmax(dim=1) == its.argmax(dim=1)).double()
    teachers = -its.log_softmax(dim=1).gather(1, targets[:, None])[:, 0]
    defined_figures = torch.stack([kl(plain[1], plain[0]), nll, teachers, same]).detach()
    torch.testing.assert_close(figures.double(), defined_figures, rtol=1e-5, atol=2e-6)
    fine = kl(its.softmax(dim=1), own.softmax(dim=1)).detach()
    assert (figures[0] <= fine + 1e-5).all()  # data processing
    if k >= WORDS:
        torch.testing.assert_close(figures[0].double(), fine, rtol=1e-5, atol=2e-6)
