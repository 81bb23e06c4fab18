"""bfloat16 on a CPU: the losses and gradients of float32 within its rounding, by its own output head and one cast a step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from packtrain.data.dataset import Document
from packtrain.model import bf16_head, forward
from packtrain.model.forward import add_loss_sum
from packtrain.model.precision import weights_cast_once
from packtrain.packing.collate import collate_padded

LOSS, GRADIENT = 1e-2, 5e-2
"""How far bfloat16 may be from float32: losses, and gradients relative to their norm."""


def documents(seed: int) -> list[Document]:
    rng = np.random.default_rng(seed)
    return [Document(rng.integers(3, 97, n, dtype=np.int32), rng.random(n) < 0.7) for n in (17, 33, 64, 5)]


def loss_sum_model(family: str, **overrides) -> PreTrainedModel:
    model = tiny_model(family, **overrides)
    for weight in model.parameters():  # as wide as those of real models, whose rounding errors average out
        weight.data *= 0.5 if weight.dim() > 1 else 1
    add_fused_lm_head(model)
    add_loss_sum(model)
    return model


def step(model: PreTrainedModel, *, bf16: bool, keep: bool = False) -> tuple[float, torch.Tensor]:
    """The loss and all gradients over three padded micro-batches."""
    model.zero_grad()
    total = 0.0
    with weights_cast_once() if keep else nullcontext():
        for seed in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**collate_padded(documents(seed), 0), loss_sum=True)
            (loss / 300).backward()
            total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "cohere", "gemma2"])
def test_losses_and_gradients_are_those_of_float32(family: str) -> None:
    model = loss_sum_model(family)
    loss, gradient = step(model, bf16=False)
    ours, rounded = step(model, bf16=True, keep=True)
    assert ours == pytest.approx(loss, rel=LOSS)
    assert (rounded - gradient).norm() <= GRADIENT * gradient.norm()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_the_head_gives_loss_and_gradients_of_full_logits(weights: torch.dtype, bias: bool, monkeypatch) -> None:
    monkeypatch.setattr(bf16_head, "CHUNK", 40)  # several chunks, the last of them and its last rows not full
    torch.manual_seed(0)
    hidden, matrix, offset = torch.randn(100, 32), torch.randn(500, 32) * 0.3, torch.randn(500)
    labels = torch.randint(0, 500, (100,))
    leaves = [one.to(weights).requires_grad_() for one in (hidden, matrix, offset)]
    exact = [one.detach().float().requires_grad_() for one in leaves]
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
        assert bf16_head.computes_in_bf16(leaves[1])
        ours = bf16_head.nll_sum(leaves[0], leaves[1], leaves[2] if bias else None, labels)
    theirs = F.cross_entropy(F.linear(exact[0], exact[1], exact[2] if bias else None), labels, reduction="sum")
    (ours * 0.1).backward()
    (theirs * 0.1).backward()
    assert (ours.dtype, ours.item()) == (torch.float32, pytest.approx(theirs.item(), rel=1e-3))
    for one, other in zip(leaves[: 2 + bias], exact, strict=False):
        assert one.grad is not None and other.grad is not None and one.grad.dtype == weights
        assert (one.grad.float() - other.grad).norm() <= 1e-2 * other.grad.norm()


class Float32Products(TorchDispatchMode):
    """Counts products of float32 matrices."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.count += all(one.dtype == torch.float32 for one in args if isinstance(one, torch.Tensor))
        return func(*args, **(kwargs or {}))


def test_the_head_of_pairs_multiplies_in_bfloat16() -> None:
    model: Any = tiny_model("llama")
    for weight in model.parameters():
        weight.data *= 0.5 if weight.dim() > 1 else 1
    ids = torch.randint(3, 97, (4, 40), generator=torch.Generator().manual_seed(0))
    head = forward._LabelledHead(model, ("log_probs", "entropy"))
    hidden = model.base_model(ids).last_hidden_state.detach()

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        model.to(dtype)
        leaves = [hidden.to(dtype, copy=True).requires_grad_(), model.get_output_embeddings().weight]
        scores: Any = head.score(leaves[0], ids, torch.arange(ids.numel()))
        return [one.float() for one in torch.autograd.grad(scores.log_probs.sum(), leaves)]

    exact = gradients(torch.float32)
    with Float32Products() as products:
        ours = gradients(torch.bfloat16)
    assert not products.count
    for one, other in zip(ours, exact, strict=True):
        assert (one - other).norm() <= 1e-2 * other.norm()


def test_a_confident_head_loses_nothing_to_rounding() -> None:
    hidden, matrix = torch.eye(8) * 12, torch.eye(8)
    labels = torch.arange(8)
    expected = F.cross_entropy(
        hidden @ matrix.T, labels, reduction="sum"
    ).item()  # 3e-4 nats, less than bfloat16's step at 1
    with torch.autocast("cpu", torch.bfloat16):
        assert bf16_head.nll_sum(hidden, matrix, None, labels).item() == pytest.approx(expected, rel=1e-2)


class Casts(TorchDispatchMode):
    """Counts how often a tensor of one of `shapes` is cast to bfloat16."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes, self.count = shapes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].shape in self.shapes:
            self.count += (kwargs or {}).get("dtype") == torch.bfloat16
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_weights_are_cast_once_a_step_with_the_same_gradients(checkpointing: bool) -> None:
    model = loss_sum_model("llama").train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    layers = [module.weight for name, module in model.named_modules() if name.endswith("_proj")]
    loss, gradient = step(model, bf16=True)
    with Casts({weight.shape for weight in layers}) as casts:
        again, same = step(model, bf16=True, keep=True)
    assert (again, casts.count) == (loss, len(layers))
    assert torch.equal(same, gradient)
    with torch.no_grad():
        layers[0].mul_(1.5)
    assert step(model, bf16=True, keep=True)[0] != loss  # what an optimizer did between two steps is seen
