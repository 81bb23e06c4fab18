"""Whole models on the device: flash over flattened rows against their documents alone, and the choice of a backend."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from packtrain.attention import flash
from packtrain.attention.backends import attention_of, serve
from packtrain.attention.spec import BACKENDS
from packtrain.errors import CheckFailed
from packtrain.model.layers import compile_layers
from packtrain.packing.segments import Segments
from packtrain.plan.surroundings import lack_of_compiler
from packtrain.proof.choice import choose_attention
from packtrain.proof.isolation import prove_isolation

FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "gpt2", "phi", "cohere")
TREE = Segments((13, 7, 150, 21, 5, 1, 140, 9), (None, 0, 1, None, 3, 4, None, 2))


def alone(model: PreTrainedModel, ids: torch.Tensor, segments: Segments) -> torch.Tensor:
    """[T, vocabulary]: every segment behind its own copy of what is before it on its path, by the model's own attention."""
    outputs = []
    for number, length in enumerate(segments.lengths):
        outputs.append(model(ids[segments.tokens_along([number])][None], use_cache=False).logits[0, -length:])
    return torch.cat(outputs)


def gradients(model: PreTrainedModel, logits: torch.Tensor) -> torch.Tensor:
    """Of one fixed function of all logits, in float32, all parameters as one vector."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, logits.numel(), device=logits.device).reshape(logits.shape).sin()
    (logits.float() * weights).sum().backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def off(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative difference of two tensors, by their norms."""
    return ((ours.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("precision", ["weights", "autocast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_flash_is_as_near_to_float32_as_the_documents_alone_in_bfloat16(
    family: str, precision: str, device: torch.device
) -> None:
    """bfloat16 is off by itself: flash may be off from float32 by twice what the model's own attention is."""
    exact = tiny_model(family, max_position_embeddings=512).to(device)
    ids = torch.randint(3, 97, (TREE.tokens,), generator=torch.Generator().manual_seed(0)).to(device)
    outputs = alone(exact, ids, TREE)
    wanted = outputs.detach(), gradients(exact, outputs)
    model = exact.bfloat16() if precision == "weights" else exact
    half = torch.autocast("cuda", torch.bfloat16) if precision == "autocast" else nullcontext()
    batch: dict[str, Any] = {"input_ids": ids[None], "position_ids": TREE.position_ids().to(device)}
    with half:
        own = alone(model, ids, TREE)
    own_off = off(own, wanted[0]), off(gradients(model, own), wanted[1])
    with attention_of(model, flash.NAME), half:
        try:
            packed = model(**batch, segments=TREE, use_cache=False).logits[0]
        except CheckFailed as refusal:
            if family == "gemma2":  # torch's own kernel has no soft-cap
                pytest.skip(refusal.problems[0].what)
            raise
    assert off(packed, wanted[0]) <= 2 * own_off[0] + 1e-2
    assert off(gradients(model, packed), wanted[1]) <= 2 * own_off[1] + 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_takes_an_exact_backend_and_says_why_it_is_not_flash(family: str, device: torch.device) -> None:
    model = tiny_model(family).to(device, torch.bfloat16)
    decision = choose_attention("auto", model, device)
    print(family, decision.backend, decision.rejected)
    assert decision.proof and decision.proof.verdict == "exact"
    assert decision.backend.name == "flash" or decision.rejected[0][0] == "flash"


def test_a_proof_by_flash_sees_a_leak(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").to(device, torch.bfloat16)
    assert prove_isolation(model, "flash").verdict == "exact"
    blind = flash.attend_by_segments

    def leaking(kernel, q, k, v, segments, scoring, sinks):
        return blind(kernel, q, k, v, Segments((segments.tokens,)), scoring, sinks)

    monkeypatch.setattr(flash, "attend_by_segments", leaking)
    assert prove_isolation(model, "flash").verdict == "leaks"


def test_availability_names_the_kernel(device: torch.device) -> None:
    backend, model = BACKENDS["flash"], tiny_model("llama").to(device)
    assert serve(backend, model, device).kernel is None
    assert serve(backend, model, device, torch.bfloat16).kernel
    service = serve(backend, model.to(torch.bfloat16), device)
    assert service.kernel and service.why.startswith(service.kernel)


def test_compiled_layers_compute_the_same_around_flash(device: torch.device) -> None:
    """Compiled kernels are at most twice as far from float32 as the model's layers.

    Rows of other lengths and numbers of documents compile nothing anew."""
    if lack := lack_of_compiler():
        pytest.skip(lack)
    exact = tiny_model("llama").to(device).train()
    plain, fast = (tiny_model("llama").to(device, torch.bfloat16).train() for _ in range(2))
    compile_layers(fast)
    graphs = []
    for lengths in ((150, 7, 33), (5, 90), (64, 64, 64, 1), (200,), (3,) * 64):
        segments = Segments(lengths)
        ids = torch.randint(3, 97, (1, segments.tokens), generator=torch.Generator().manual_seed(0)).to(device)
        row: dict[str, Any] = {"input_ids": ids, "position_ids": segments.position_ids().to(device)}
        outputs = alone(exact, ids[0], segments)
        wanted, found = (outputs.detach(), gradients(exact, outputs)), []
        for model in (plain, fast):
            with attention_of(model, flash.NAME):
                logits = model(**row, segments=segments, use_cache=False).logits[0]
                found.append((logits.detach(), gradients(model, logits)))
        for own, compiled, right in zip(*found, wanted, strict=True):
            assert off(compiled, right) <= 2 * off(own, right) + 1e-2
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1] > 0
    torch.compiler.reset()


def test_ligers_fused_experts_are_as_near_to_float64_as_the_loop(device: torch.device) -> None:
    """In bfloat16: outputs, and gradients of inputs, of routers' weights and of both weights."""
    for package in ("liger_kernel", "triton"):
        pytest.importorskip(package)
    from liger_experts import nearer

    errors = nearer(str(device))
    assert all(fused <= 1.5 * loop for loop, fused in errors.values()), errors
