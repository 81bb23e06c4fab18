"""Sums inside the norms after them: equal losses and gradients, fewer operators."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from here import run_here
from peft import LoraConfig, get_peft_model
from running import base_config, train
from test_linears import Work
from tiny_models import EXPERTS, gradient, tiny_model
from torch import nn

from packtrain.changes import liger
from packtrain.changes.residual import carry_in
from packtrain.changes.residual_norm import layers_with_sums, sum_in_norms
from packtrain.model.layers import loop_over_experts, recompute
from packtrain.model.load import base_model
from tests.train import forked

ROW = torch.arange(40)[None] * 7 % 94 + 3


class Sum(torch.autograd.Function):
    """Liger's kernel, by torch. `calls` counts its calls, and `by` multiplies its gradient of the sum."""

    calls, by = 0, 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, r: torch.Tensor, weight: torch.Tensor, *how: Any) -> Any:
        Sum.calls += 1
        ctx.how = how
        ctx.save_for_backward(total := x + r, weight)
        return normed(total, weight, *how), total

    @staticmethod
    def backward(ctx: Any, of_norm: torch.Tensor, of_sum: torch.Tensor) -> Any:
        given = [one.detach().requires_grad_() for one in ctx.saved_tensors]
        with torch.enable_grad():
            of_total, of_weight = torch.autograd.grad(normed(*given, *ctx.how), given, of_norm)
        return (total := of_total + Sum.by * of_sum), total, of_weight, None, None, None, None


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, casting: str, in_place: bool) -> Any:
    one = x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    if casting == "gemma":
        return (one * (offset + weight.float())).to(x.dtype)
    return (one.to(x.dtype) * (offset + weight)).to(x.dtype)


def take_norms(model: Any, **_: bool) -> None:
    """Give norms Liger's attributes, and another forward, as Liger does."""
    inner: Any = base_model(model).base_model
    for norm in [one for one in inner.layers.modules() if type(one).__name__.endswith("RMSNorm")]:
        gemma = "Gemma" in type(norm).__name__
        norm.offset, norm.casting_mode, norm.in_place = (1.0, "gemma", False) if gemma else (0.0, "llama", True)
        norm.variance_epsilon = norm.eps if gemma else norm.variance_epsilon
        how = norm.variance_epsilon, norm.offset, norm.casting_mode, norm.in_place
        norm.forward = lambda x, norm=norm, how=how: normed(x, norm.weight, *how)


def modules() -> dict[str, dict[str, Any]]:
    """The modules of a Liger that is not there."""
    patch = {"_apply_liger_kernel_to_instance": take_norms, "MODEL_TYPE_TO_APPLY_LIGER_FN": {"llama": None}}
    kernels = {".ops": {"LigerFusedAddRMSNormFunction": Sum}, ".transformers": {"LigerRMSNorm": nn.RMSNorm}}
    return {"": {"__spec__": object()}, **kernels, ".transformers.monkey_patch": patch}


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, values in modules().items():
        monkeypatch.setitem(sys.modules, f"liger_kernel{name}", SimpleNamespace(**values))  # type: ignore[arg-type]
    monkeypatch.setattr(Sum, "calls", 0)
    return monkeypatch


def run(model: Any, *, autocast: bool = False) -> tuple[float, torch.Tensor, Work]:
    model.zero_grad()
    with Work() as work:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ROW, labels=ROW, use_cache=False).loss
        loss.backward()
    return loss.item(), gradient(model), work


def state(model: nn.Module) -> list[tuple[type, dict[str, Any]]]:
    return [(type(module), dict(vars(module))) for module in model.modules()]


FAMILIES = ["llama", "qwen3", "gemma2", "gemma3_text", "glm4", "granite", "phi3", "qwen3_moe"]


@pytest.mark.parametrize(
    ("family", "policy", "adapters"),
    [
        *((family, "none", False) for family in FAMILIES),
        *(("llama", policy, adapters) for policy, adapters in (("full", False), ("selective", True), ("none", True))),
    ],
)
def test_losses_and_gradients_are_the_models_own(family: str, policy: str, adapters: bool) -> None:
    model: Any = tiny_model(family, **(EXPERTS if family == "qwen3_moe" else {})).double().train()
    loop_over_experts(model, "auto")
    if adapters:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False)).double()
    if policy != "none":
        recompute(base_model(model), policy)
    own, base = run(model), base_model(model)
    assert not [*layers_with_sums(base)], "norms are not Liger's"
    take_norms(model)
    before = state(model)
    undo = sum_in_norms(base)
    ours = run(model)
    undo()
    assert abs(ours[0] - own[0]) <= 1e-12 * abs(own[0])
    assert (ours[1] - own[1]).norm() <= 1e-6 * own[1].norm(), "norms compute in float32"
    assert Sum.calls == base.config.num_hidden_layers * (1 if policy == "none" else 2)
    assert state(model) == before


@pytest.mark.parametrize("stream", ["float32", "bfloat16"])
def test_the_stream_keeps_its_format_under_autocast(stream: str) -> None:
    """The kernel would give a float32 stream bfloat16 sums."""
    model = tiny_model("llama").train()
    if stream == "bfloat16":
        carry_in(model, torch.bfloat16)
    take_norms(model)
    own = run(model, autocast=True)
    sum_in_norms(model)
    ours = run(model, autocast=True)
    assert Sum.calls == (3 if stream == "bfloat16" else 0)
    assert ours[0] == own[0] and (ours[1] - own[1]).norm() <= 2e-2 * own[1].norm()


def test_layers_that_norm_no_sum_or_by_another_norm_keep_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("olmo2", "gpt2"):  # it norms what is added; LayerNorm
        assert not [*layers_with_sums(tiny_model(family))]
    model: Any = tiny_model("llama")
    take_norms(model)
    assert len([*layers_with_sums(model)]) == 3
    del model.model.layers[1].post_attention_layernorm.casting_mode
    assert len([*layers_with_sums(model)]) == 2


def test_a_run_takes_it_by_proof(kernel: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel.setattr(liger, "why_no_liger", lambda model, device: "")
    config = base_config(tmp_path, trainer={"max_steps": 2})
    plain = run_here(tmp_path, config, "model.kernels=none", name="plain")
    assert "sums" not in plain.summary["changes"] and not Sum.calls
    fused = run_here(tmp_path, config, "model.kernels=liger", name="fused")
    said = "sums of the stream and their norms by one of Liger's kernels (loss off by 0"
    assert fused.summary["changes"]["sums"].startswith(said) and Sum.calls
    assert fused.losses == pytest.approx(plain.losses, rel=1e-6)
    kernel.setattr(Sum, "by", 1.01)
    wrong = run_here(tmp_path, config, "model.kernels=liger", name="wrong")
    assert wrong.summary["changes"]["sums"].startswith("as the model comes; ")
    assert wrong.losses == pytest.approx(plain.losses, rel=1e-6)


def stood_in(*given: Any) -> None:
    """A process of a run with these kernels."""
    for name, values in modules().items():
        sys.modules[f"liger_kernel{name}"] = SimpleNamespace(**values)  # type: ignore[assignment]
    liger.why_no_liger = lambda model, device: ""
    forked.run(*given)


@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["none", "full"])
def test_layers_that_fsdp2_gathers_take_it_too(tmp_path: Path, policy: str) -> None:
    trainer = {"max_steps": 2, "gradient_checkpointing": policy}
    config = base_config(tmp_path, strategy={"name": "fsdp2"}, trainer=trainer)
    plain, fused = (
        train(tmp_path, config, f"model.kernels={kernels}", name=kernels, processes=2, begin=stood_in)
        for kernels in ("none", "liger")
    )
    assert fused.summary["changes"]["sums"].startswith("sums of the stream and their norms by one of Liger's kernels (")
    assert fused.losses == pytest.approx(plain.losses, rel=1e-6)
    norms, others = ([line["grad_norm"] for line in one.lines] for one in (fused, plain))
    assert norms == pytest.approx(others, rel=1e-5)
    for name, weight in plain.weights().items():
        torch.testing.assert_close(fused.weights()[name], weight, rtol=1e-5, atol=1e-5)  # AdamW enlarges rounding
