"""bfloat16 on a CPU: the losses and gradients of float32 within its rounding, by a float32 output head and one cast a step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from packtrain.data.dataset import Document
from packtrain.model.forward import add_loss_sum
from packtrain.packing.collate import collate_padded
from packtrain.train.engine import weights_cast_once

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


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_the_head_computes_in_float32(weights: torch.dtype) -> None:
    model = loss_sum_model("phi").to(weights)  # its head has a bias
    batch = collate_padded(documents(0), 0)
    seen: list[torch.Tensor] = []
    cast(Any, model.base_model).register_forward_hook(lambda *given: seen.append(given[-1].last_hidden_state))
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
        loss = model(**batch, loss_sum=True)
    loss.backward()
    head: Any = model.get_output_embeddings()
    logits = F.linear(seen[0].float(), head.weight.float(), head.bias.float())
    expected = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")
    assert (loss.dtype, loss.item()) == (torch.float32, pytest.approx(expected.item(), rel=1e-5))
    assert head.weight.grad.dtype == weights


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
