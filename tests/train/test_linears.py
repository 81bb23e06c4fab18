"""Gradients of inputs, added up in products: equal losses and gradients, fewer operators and bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import EXPERTS, tiny_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from packtrain.changes.linears import add_in_products, linears_together
from packtrain.changes.residual import carry_in
from packtrain.changes.tiles import tile_mlps
from packtrain.model.layers import loop_over_experts, recompute
from packtrain.model.load import base_model

ROW = torch.arange(40)[None] * 7 % 94 + 3
Gradients = dict[str, torch.Tensor]


class Work(TorchDispatchMode):
    """Operators that run, by name, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.bytes = Counter[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.count[func.name().removeprefix("aten::").partition(".")[0]] += 1
            tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, torch.Tensor)]
            self.bytes += sum(one.numel() * one.element_size() for one in tensors)
        return result


def run(model: Any, *, autocast: bool = False) -> tuple[float, Gradients, Work]:
    model.zero_grad()
    with Work() as work:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ROW, labels=ROW, use_cache=False).loss
        loss.backward()
    return loss.item(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}, work


def assert_equal(model: PreTrainedModel, products: int) -> None:
    """It trains as without the change. So many products add to a gradient that is there."""
    loss, expected, _ = run(model)
    undo = add_in_products(base_model(model))
    ours, gradients, work = run(model)
    undo()
    assert abs(ours - loss) <= 1e-12 * abs(loss) and gradients.keys() == expected.keys()
    assert all((one - expected[name]).norm() <= 1e-12 * expected[name].norm() for name, one in gradients.items())
    assert work.count["addmm_"] == products and run(model)[2].count["addmm_"] == 0


@pytest.mark.parametrize(
    ("family", "policy", "each"),
    [
        *(("llama", policy, 3) for policy in ("none", "full", "selective")),
        ("qwen2", "tiles", 5),  # gate and up for three tiles
        *(("gemma2", "none", 3), ("gpt_oss", "selective", 2), ("qwen3_moe", "none", 2), ("phi", "none", 2)),
    ],
)
def test_losses_and_gradients_are_the_models_own(family: str, policy: str, each: int) -> None:
    """`each`: products of a layer that add to a gradient."""
    model = tiny_model(family, **(EXPERTS if family == "qwen3_moe" else {})).double().train()
    loop_over_experts(model, "auto")
    if policy == "tiles":
        tile_mlps(model, 16)
    elif policy != "none":
        recompute(model, policy)
    assert_equal(model, each * model.config.num_hidden_layers)


def test_adapted_layers_and_frozen_ones_train_as_before() -> None:
    model: Any = get_peft_model(tiny_model("llama").double(), LoraConfig(target_modules=["q_proj", "up_proj"])).double()
    assert [len(layers) for _, layers in linears_together(base_model(model))] == [2] * 3  # k and v
    assert_equal(model, 2)  # the first layer's input needs no gradient
    assert not linears_together(get_peft_model(tiny_model("llama"), LoraConfig(target_modules="all-linear")))
    assert not linears_together(tiny_model("gpt2"))  # one module for all three


def test_a_linear_layer_with_code_of_its_own_keeps_it() -> None:
    model: Any = tiny_model("llama").double()
    for layer in model.model.layers:
        layer.self_attn.v_proj.forward = lambda x, own=layer.self_attn.v_proj: nn.functional.linear(x, 2 * own.weight)
    assert [len(layers) for _, layers in linears_together(model)] == [2] * 6
    assert_equal(model, 2 * 3)


class Odd(nn.Module):
    """q reads another tensor than k, and v is not used if `drops`."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, width, dtype=torch.float64) for width in (6, 6, 5))
        self.drops = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        k, q, v = self.k_proj(hidden), self.q_proj(hidden.sin()), self.v_proj(hidden)
        twice = self.k_proj(hidden)
        return (k * q * twice).sum() + (0 if self.drops else v.square().sum())


@pytest.mark.parametrize("drops", [False, True])
def test_any_of_them_may_be_left_out_read_another_tensor_or_run_backward_twice(
    monkeypatch: pytest.MonkeyPatch, drops: bool
) -> None:
    monkeypatch.setattr("packtrain.changes.linears.language_layers", lambda model: [model])
    torch.manual_seed(0)
    odd, tensor = Odd(), torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    odd.drops = drops
    inputs = [tensor, *(weight for layer in (odd.q_proj, odd.k_proj) for weight in layer.parameters())]
    expected = torch.autograd.grad(odd(tensor), inputs)
    add_in_products(odd)
    loss = odd(tensor)
    part = torch.autograd.grad(loss, inputs[1:], retain_graph=True)  # not through the tensor's own node
    for own in (torch.autograd.grad(loss, inputs, retain_graph=True), torch.autograd.grad(loss, inputs), (None, *part)):
        for one, other in zip(own, expected, strict=True):
            assert one is None or (one - other).norm() <= 1e-12 * other.norm()
    with torch.no_grad():
        assert not odd(tensor).requires_grad
    assert odd(tensor.detach()).requires_grad


@pytest.mark.parametrize(("dtype", "operators", "bytes_each"), [("bfloat16", 3, 12), ("float32", 9, 66)])
def test_a_layer_takes_fewer_operators_and_bytes(dtype: str, operators: int, bytes_each: int) -> None:
    """`bytes_each`: per token and number of the hidden width. Autocast over float32 casts it five times."""

    def of_a_layer(change: bool) -> tuple[int, int]:
        found: list[Work] = []
        for layers in (1, 2):
            model = tiny_model("llama", num_hidden_layers=layers).to(getattr(torch, dtype)).train()
            carry_in(model, torch.bfloat16)
            if change:
                add_in_products(model)
            found.append(run(model, autocast=dtype == "float32")[2])
        one, two = found
        return two.count.total() - one.count.total(), two.bytes - one.bytes

    before, after = of_a_layer(False), of_a_layer(True)
    assert before[0] - after[0] == operators
    assert before[1] - after[1] == bytes_each * ROW.numel() * 64


def test_in_bfloat16_it_is_as_close_to_float32_as_the_models_own() -> None:
    model = tiny_model("qwen3").train()
    _, exact, _ = run(model)
    _, own, _ = run(model, autocast=True)
    add_in_products(model)
    _, ours, _ = run(model, autocast=True)
    for name, expected in exact.items():
        assert (ours[name] - expected).norm() <= 1.2 * (own[name] - expected).norm() + 1e-6, name
