"""The head that sums losses and makes its gradients in the forward pass: those of full logits, on each way that it takes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_model
from torch import nn
from trl.kernels import chunked_logprob as kernels
from trl.trainer.utils import add_fused_lm_head

import packtrain.attention.segmented  # noqa: F401  # registers its attention
from packtrain.data.dataset import Document
from packtrain.model import forward
from packtrain.model.forward import add_loss_sum, choose_head, compare_gradients, sum_losses
from packtrain.objectives.sft.spec import TOKEN_WEIGHTS
from packtrain.objectives.spec import equal_weights
from packtrain.packing.collate import collate_flat

ROWS, WIDTH, WORDS = 70, 24, 211


def inputs(bias: bool = True, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, nn.Linear]:
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(WIDTH, WORDS, bias=bias)
    for weight in head.parameters():
        weight.data.normal_(generator=generator)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, requires_grad=True)
    return hidden, torch.randint(WORDS, (ROWS,), generator=generator), head


def by_full_logits(hidden: torch.Tensor, targets: torch.Tensor, head: nn.Linear, loss: str) -> torch.Tensor:
    losses = F.cross_entropy(head(hidden).double(), targets, reduction="none")
    return (losses * (-losses).exp().detach() if loss == "dft" else losses).sum()


def loss_and_gradients(total: torch.Tensor, hidden: torch.Tensor, head: nn.Linear) -> list[torch.Tensor]:
    """The loss of a step that divides it by a number of tokens, and its gradients."""
    hidden.grad = None
    head.zero_grad()
    (total * 0.37).backward()
    return [total.detach(), *(tensor.grad for tensor in (hidden, *head.parameters()) if tensor.grad is not None)]


def as_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's functions in torch, of the same arguments, in place of its kernels."""

    class Launched:
        def __init__(self, function: Any) -> None:
            self.function = function

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self.function

    monkeypatch.setattr(kernels, "_use_triton", lambda device: True)
    monkeypatch.setattr(kernels, "_forward_kernel", Launched(kernels._forward_tile))
    monkeypatch.setattr(kernels, "_backward_kernel", Launched(kernels._backward_tile))


@pytest.mark.parametrize("loss", ["nll", "dft"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("triton", [False, True])
def test_losses_and_gradients_are_those_of_full_logits(
    monkeypatch: pytest.MonkeyPatch, loss: Any, bias: bool, triton: bool
) -> None:
    monkeypatch.setattr(forward, "_CPU_CHUNK", 32)  # three chunks, the last one smaller
    if triton:
        as_triton(monkeypatch)
    hidden, targets, head = inputs(bias)
    expected = loss_and_gradients(by_full_logits(hidden, targets, head, loss), hidden, head)
    made = loss_and_gradients(sum_losses(hidden, targets, head, TOKEN_WEIGHTS[loss]), hidden, head)
    assert len(made) == len(expected) == 3 + bias
    for own, other in zip(made, expected, strict=True):
        torch.testing.assert_close(own, other.float(), rtol=1e-5, atol=1e-5)


def test_it_makes_the_gradients_that_are_asked_for_and_no_others() -> None:
    hidden, targets, head = inputs()
    head.requires_grad_(False)  # as beside adapters
    sum_losses(hidden, targets, head, equal_weights).backward()
    assert hidden.grad is not None and head.weight.grad is None
    with torch.no_grad():
        assert not sum_losses(hidden, targets, head, equal_weights).requires_grad


def test_a_second_backward_pass_is_refused() -> None:
    """Its gradients were changed in place by the first."""
    hidden, targets, head = inputs()
    total = sum_losses(hidden, targets, head, equal_weights)
    total.backward(retain_graph=True)
    with pytest.raises(TypeError):
        total.backward()


def test_the_measured_difference_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, targets, head = inputs()
    assert compare_gradients(hidden, targets, head, equal_weights) < 1e-5
    right = forward._loss_in_place

    def wrong(logits: torch.Tensor, *given: Any, **how: Any) -> torch.Tensor:
        total = right(logits, *given, **how)
        logits *= 1.01
        return total

    monkeypatch.setattr(forward, "_loss_in_place", wrong)
    assert compare_gradients(hidden, targets, head, equal_weights) == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize("fault", ["gradients", "refused", "renamed", "gone"])
def test_a_summed_head_that_is_wrong_gives_way_to_that_of_single_tokens(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    model = tiny_model("llama")
    add_fused_lm_head(model)
    head = add_loss_sum(model)
    batch = collate_flat([Document(torch.arange(3, 60).numpy(), torch.ones(57, dtype=torch.bool).numpy())])
    model.set_attn_implementation("packtrain_segmented")
    assert choose_head(model, head, dict(batch)) < 1e-5 and (head.kind, head.refusal) == ("summed", "")
    expected = model(**batch, loss_sum=True)

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise TypeError("_forward_kernel() takes other arguments")

    match fault:
        case "refused":
            monkeypatch.setattr(forward, "_loss_in_place", refuse)
        case "gradients":
            monkeypatch.setattr(
                forward, "_loss_in_place", lambda logits, *_, **__: forward._by_torch(logits * 1, *_, **__)
            )
        case "renamed":  # in another version of TRL
            monkeypatch.delattr(kernels, "_addmm_fp32")
        case "gone":
            monkeypatch.setattr(forward, "_kernels", lambda: importlib.import_module("trl.kernels.elsewhere"))
    assert choose_head(model, head, dict(batch)) < 1e-5 and head.kind == "by token"
    said = {"refused": "takes other arguments", "gradients": "gradients by", "renamed": "_addmm_fp32"}
    assert said.get(fault, "No module named") in head.refusal
    torch.testing.assert_close(model(**batch, loss_sum=True), expected)


def test_in_bfloat16_the_loss_and_the_weights_gradient_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: of many chunks, which bfloat16 sums would round at every step."""
    monkeypatch.setattr(forward, "_compute_dtype", lambda hidden: hidden.dtype)
    monkeypatch.setattr(forward, "_CPU_CHUNK", 2)
    hidden, targets, head = inputs(bias=False)
    exact = loss_and_gradients(by_full_logits(hidden, targets, head, equal_weights), hidden, head)
    rounded, head16 = hidden.detach().bfloat16().requires_grad_(), nn.Linear(WIDTH, WORDS, bias=False).bfloat16()
    head16.weight.data = head.weight.data.bfloat16()
    total, _, of_weight = loss_and_gradients(sum_losses(rounded, targets, head16, equal_weights), rounded, head16)
    assert total.dtype == torch.float32 and total.item() == pytest.approx(exact[0].item(), rel=2e-3)
    assert of_weight.dtype == torch.bfloat16
    assert (of_weight.float() - exact[2]).norm() < 1e-2 * exact[2].norm()
