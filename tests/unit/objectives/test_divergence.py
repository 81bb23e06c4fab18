"""Losses by a teacher's distributions equal TRL's and float64, and take little memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from trl.experimental.gkd import GKDTrainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss

from packtrain.model import forward
from packtrain.model.forward import compare_gradients, sum_losses
from packtrain.objectives.distill.divergence import Divergence, Readout, Taught, TaughtTokens

TOKENS, WORDS, WIDTH, WIDER = 75, 211, 16, 24
KINDS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.3}
PLAIN, BENT = Readout(), Readout(0.5, 3.0)


class Both:
    """A random student, a wider random teacher, and hidden states of some tokens."""

    def __init__(self, bias: bool = False) -> None:
        torch.manual_seed(0)
        self.hidden = (torch.randn(TOKENS, WIDTH) * 2).requires_grad_()
        self.its = torch.randn(TOKENS, WIDER) * 2
        self.head, self.its_head = nn.Linear(WIDTH, WORDS, bias=bias), nn.Linear(WIDER, WORDS, bias=bias)
        self.targets = torch.randint(0, WORDS, (TOKENS,))

    def loss(self, divergence: Divergence, readout: Readout = PLAIN, words: int = WORDS) -> TaughtTokens:
        def teacher(part: Any) -> Taught:
            with torch.no_grad():
                return Taught.whole(readout.logits(self.its_head(self.its[part])[:, :words]))

        return TaughtTokens(divergence, readout, self.targets, teacher)

    def step(self, total: torch.Tensor) -> list[torch.Tensor]:
        """The loss and all gradients."""
        tensors = [self.hidden, *self.head.parameters()]
        return [total.detach(), *torch.autograd.grad(total, tensors)]


def divergence_of(kind: str, temperature: float = 1.0, share: float = 0.0) -> Divergence:
    return Divergence(kind, temperature, KINDS["jsd"], share)


def assert_near(made: list[torch.Tensor], expected: list[torch.Tensor], within: float = 1e-6) -> None:
    for own, other in zip(made, expected, strict=True):
        assert (own - other).norm() <= within * max(1.0, other.norm().item())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("temperature", "readout", "bias"), [(1.0, PLAIN, False), (2.5, BENT, True)])
def test_losses_and_gradients_are_those_of_trls_distillation_trainer(
    monkeypatch: pytest.MonkeyPatch, kind: str, temperature: float, readout: Readout, bias: bool
) -> None:
    monkeypatch.setattr(forward, "_CPU_CHUNK", 32)
    both = Both(bias)
    made = both.step(sum_losses(both.hidden, both.head, both.loss(divergence_of(kind, temperature), readout)) / TOKENS)
    of_both: dict[str, Any] = {
        f"{who}_{name}": value
        for who in ("student", "teacher")
        for name, value in (("logit_scale", readout.scale), ("final_logit_softcapping", readout.cap))
    }
    loss, *_ = _chunked_divergence_loss(
        both.hidden[None],
        both.its[None],
        both.head.weight,
        both.its_head.weight,
        torch.ones(1, TOKENS, dtype=torch.bool),
        KINDS[kind],
        student_lm_head_bias=both.head.bias,
        teacher_lm_head_bias=both.its_head.bias,
        temperature=temperature,
        **of_both,
    )
    assert_near(made, both.step(loss))


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_trls_gkd_trainer_on_padded_batches(kind: str) -> None:
    both, labels = Both(), torch.full((3, 25), -100)
    for row, length in enumerate((25, 11, 18)):
        labels[row, 3:length] = 1
    trained = (labels != -100).flatten()
    logits, its = (
        head(states).view(3, 25, -1) for head, states in ((both.head, both.hidden), (both.its_head, both.its))
    )
    expected = both.step(
        GKDTrainer.generalized_jsd_loss(logits, its.detach(), labels, beta=KINDS[kind], temperature=1.7)
    )
    places = trained.nonzero()[:, 0]
    teacher: Any = both.loss(divergence_of(kind, 1.7)).teacher
    loss = TaughtTokens(divergence_of(kind, 1.7), PLAIN, both.targets[places], lambda part: teacher(places[part]))
    assert_near(both.step(sum_losses(both.hidden[places], both.head, loss) / len(places)), expected)


@pytest.mark.parametrize(
    ("kind", "temperature", "share", "readout", "words"),
    [
        *itertools.product(KINDS, [1.0], [0.0, 0.4], [PLAIN], [WORDS]),
        *itertools.product(KINDS, [0.7], [0.4], [BENT], [WORDS - 9]),
    ],
)
def test_losses_and_gradients_are_those_of_the_definition_in_float64(
    kind: str, temperature: float, share: float, readout: Readout, words: int
) -> None:
    """Rows that only the student has take no part, and get no gradient."""
    both = Both(bias=True)
    notes = list[torch.Tensor]()
    loss = both.loss(divergence_of(kind, temperature, share), readout, words)
    noting = TaughtTokens(
        loss.divergence, readout, both.targets % words, loss.teacher, lambda *given: notes.append(given[1])
    )
    made = both.step(sum_losses(both.hidden, both.head, noting))
    own = both.head.double()(both.hidden.double()) * readout.scale
    its = both.its_head.double()(both.its.double()) * readout.scale
    own, its = (one if readout.cap is None else torch.tanh(one / readout.cap) * readout.cap for one in (own, its))
    p, q = (one[:, :words].div(temperature).softmax(dim=-1) for one in (own, its.detach()))
    m = (1 - KINDS["jsd"]) * p + KINDS["jsd"] * q

    def kl(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one * (one / other).log()).sum(dim=-1)

    value = {
        "forward_kl": kl(q, p),
        "reverse_kl": kl(p, q),
        "jsd": KINDS["jsd"] * kl(q, m) + (1 - KINDS["jsd"]) * kl(p, m),
    }
    plain, taught = (one[:, :words].softmax(dim=-1) for one in (own, its.detach()))
    nll, its_nll = (-one.gather(1, both.targets[:, None] % words)[:, 0].log() for one in (plain, taught))
    total = ((1 - share) * value[kind] + share * nll).sum()
    expected = [total.detach(), *torch.autograd.grad(total, [both.hidden, *both.head.parameters()])]
    assert_near(made, [one.float() for one in expected])
    same = (plain.argmax(dim=-1) == taught.argmax(dim=-1)).double()
    torch.testing.assert_close(
        torch.cat(notes, dim=1).double(),
        torch.stack([kl(taught, plain), nll, its_nll, same]).detach(),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("readout", [PLAIN, BENT])
def test_the_proof_of_the_head_sees_these_losses(readout: Readout) -> None:
    both = Both()
    assert compare_gradients(both.hidden, both.head, both.loss(divergence_of("jsd"), readout)) < 1e-5
    without = TaughtTokens(divergence_of("jsd"), readout, both.targets, None)
    assert compare_gradients(both.hidden, both.head, without) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_has_the_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(forward, "_CPU_CHUNK", 16)
    monkeypatch.setattr("packtrain.objectives.distill.divergence.SLICE", 4)
    sizes = list[int]()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            sizes.extend(
                one.untyped_storage().nbytes() // 4
                for one in (made if isinstance(made, tuple) else [made])
                if isinstance(one, torch.Tensor)
            )
            return made

    both = Both()
    both.head.requires_grad_(False)
    with Watch():
        sum_losses(both.hidden, both.head, both.loss(divergence_of(kind, 2.0, 0.5))).backward()
    most = max(16 * (WORDS + 63), WIDER * WORDS)  # logits of a chunk; the head of the teacher
    assert max(sizes) <= most < TOKENS * WORDS / 3
