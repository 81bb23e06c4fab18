"""Liger's fused product of experts trains as the loop does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from here import run_here
from matrix import SPARSE
from peft import LoraConfig, get_peft_model
from running import LLAMA, base_config, train
from test_experts import loss_and_gradients
from tiny_models import EXPERTS, gradient, off, tiny_model
from torch import nn

from packtrain.changes import experts
from packtrain.changes.experts import fuse_experts
from packtrain.errors import CheckFailed, UserError
from packtrain.model.layers import can_fuse, loop_over_experts, recompute
from packtrain.model.load import base_model
from packtrain.packing.segments import Segments
from packtrain.proof.upcast import in_float32
from tests.train import forked

ROW = Segments((17, 1, 33, 8))
DEEPSEEK = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16}
DEEPSEEK |= {
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
MIXTURES: dict[str, dict[str, Any]] = {"qwen3_moe": EXPERTS, "mixtral": EXPERTS, "deepseek_v3": EXPERTS | DEEPSEEK}

ON_EXPERTS = LoraConfig(
    target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"], init_lora_weights=False
)


class Product(torch.autograd.Function):
    """Liger's function in torch. `formats` lists the formats of its calls; `by` multiplies the gradient of the weights."""

    formats, by = list[tuple[torch.dtype, ...]](), 1.0

    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        assert given[3].dtype == torch.int32
        Product.formats.append(tuple(one.dtype for one in given))
        ctx.save_for_backward(*given)
        x, first, second, chosen, weights = given
        return multiplied(x, first, second, chosen, weights)

    @staticmethod
    def backward(ctx: Any, of_output: torch.Tensor) -> Any:
        x, first, second, chosen, weights = ctx.saved_tensors
        given = [one.detach().requires_grad_() for one in (x, first, second, weights)]
        with torch.enable_grad():
            output = multiplied(given[0], given[1], given[2], chosen, given[3])
            *others, of_weights = torch.autograd.grad(output, given, of_output)
        return *others, None, Product.by * of_weights


def multiplied(
    x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Run all experts on all tokens, and weigh those that are chosen."""
    gate, up = torch.einsum("th,eih->tei", x, first).chunk(2, -1)
    each = torch.einsum("tei,ehi->teh", nn.functional.silu(gate) * up, second)
    shares = torch.zeros(x.shape[0], len(first), dtype=weights.dtype).scatter_add(1, chosen.long(), weights)
    return (each * shares[..., None]).sum(1).to(x.dtype)


LIGER: dict[str, dict[str, Any]] = {"": {"__spec__": object()}, ".ops": {"LigerFusedMoEFunction": Product}}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Liger that is not there; its kernels run on this CPU."""
    for name, values in LIGER.items():
        monkeypatch.setitem(sys.modules, f"liger_kernel{name}", SimpleNamespace(**values))  # type: ignore[arg-type]
    monkeypatch.setattr(experts, "why_no_kernels", lambda device: "")
    monkeypatch.setattr(Product, "formats", [])
    return monkeypatch


@pytest.mark.parametrize(
    ("family", "policy", "adapters"),
    [*((family, "none", False) for family in MIXTURES), ("qwen3_moe", "full", True), ("qwen3_moe", "selective", False)],
)
@pytest.mark.usefixtures("kernel")
def test_losses_and_gradients_are_those_of_the_loop(family: str, policy: str, adapters: bool) -> None:
    model: Any = tiny_model(family, **MIXTURES[family]).double().train()
    loop_over_experts(model, "fused")
    if adapters:
        model = get_peft_model(model, ON_EXPERTS).double()
    if policy != "none":
        recompute(base_model(model), policy)
    loss, _ = loss_and_gradients(model, ROW)
    own, before = gradient(model), [dict(vars(module)) for module in model.modules()]
    undo = fuse_experts(base_model(model))
    ours, _ = loss_and_gradients(model, ROW)
    assert abs(ours - loss) <= 1e-6 * abs(loss) and off(gradient(model), own) <= 1e-6, "routers compute in float32"
    mixed = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    assert len(Product.formats) == len(mixed) * (1 if policy == "none" else 2)
    undo()
    assert loss_and_gradients(model, ROW)[0].equal(loss)
    assert [dict(vars(module)) for module in model.modules()] == before


@pytest.mark.usefixtures("kernel")
def test_weights_and_tokens_are_in_one_format() -> None:
    """Autocast decides the format, else the weights do. A proof in float32 gets float32."""
    model = tiny_model("qwen3_moe", **EXPERTS).train()
    exact, _ = loss_and_gradients(model, ROW)
    fuse_experts(model)
    loss, gradients = loss_and_gradients(model, ROW, torch.bfloat16)
    assert {one[:3] for one in Product.formats} == {(torch.bfloat16,) * 3} and abs(loss - exact) <= 0.05 * abs(exact)
    assert all(one.dtype == torch.float32 for one in gradients.values())
    for dtype, around in ((torch.bfloat16, nullcontext()), (torch.float32, in_float32(model, torch.bfloat16))):
        Product.formats.clear()
        with around:
            loss, _ = loss_and_gradients(model.bfloat16(), ROW)
        assert {one[:3] for one in Product.formats} == {(dtype,) * 3} and abs(loss - exact) <= 0.05 * abs(exact)


def test_a_run_takes_it_by_proof_and_only_if_asked(kernel: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 2})
    config["model"]["config"] = SPARSE
    auto = run_here(tmp_path, config, name="auto")
    assert "one grouped product" in auto.summary["changes"]["experts"] and not Product.formats
    fused = run_here(tmp_path, config, "model.experts=fused", name="fused")
    said = "all of a layer in Liger's fused product (loss off by "
    assert fused.summary["changes"]["experts"].startswith(said) and Product.formats
    assert fused.losses == pytest.approx(auto.losses, rel=1e-5)
    kernel.setattr(Product, "by", 1.05)
    with pytest.raises(CheckFailed, match=r"the gradient of input 2 of \w+Experts .*\[change-inexact\]"):
        run_here(tmp_path, config, "model.experts=fused", "model.dtype=bfloat16", name="wrong")


def stood_in(*given: Any) -> None:
    """A process of a run with this kernel."""
    for name, values in LIGER.items():
        sys.modules[f"liger_kernel{name}"] = SimpleNamespace(**values)  # type: ignore[assignment]
    experts.why_no_kernels = lambda device: ""
    forked.run(*given)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("policy", ["none", "full"])
def test_layers_that_fsdp2_gathers_take_it_too(tmp_path: Path, policy: str) -> None:
    trainer = {"max_steps": 2, "gradient_checkpointing": policy}
    config = base_config(tmp_path, strategy={"name": "fsdp2"}, trainer=trainer)
    config["model"]["config"] = SPARSE
    grouped, fused = (
        train(tmp_path, config, f"model.experts={way}", name=way, processes=2, begin=stood_in)
        for way in ("grouped", "fused")
    )
    assert fused.summary["changes"]["experts"].startswith("all of a layer in Liger's fused product (loss off by ")
    assert fused.losses == pytest.approx(grouped.losses, rel=1e-5)
    norms, others = ([line["grad_norm"] for line in one.lines] for one in (fused, grouped))
    assert norms == pytest.approx(others, rel=1e-5)


def test_where_it_cannot_be_it_is_said_why(kernel: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = base_config(tmp_path)
    for shape, code in (({}, "groupable"), ({"model_type": "gpt_oss", "num_local_experts": 2}, "fusable")):
        config["model"]["config"] = {**LLAMA, **shape}
        with pytest.raises(UserError, match=rf"model\.experts \(fused\): .*\[experts-not-{code}\]"):
            run_here(tmp_path, config, "model.experts=fused", name=code)
    config["model"]["config"] = SPARSE
    with pytest.raises(UserError, match=r"\[fused-experts-sum-in-any-order\]"):
        run_here(tmp_path, config, "model.experts=fused", "trainer.deterministic=true", name="deterministic")
    kernel.undo()
    if find_spec("liger_kernel"):
        asked = r"model\.experts \(fused\): .*need a GPU.*\[change-unavailable\]"
    else:
        asked = r"model\.experts: .*liger_kernel.*\[package-missing\]"
    with pytest.raises(UserError, match=asked):
        run_here(tmp_path, config, "model.experts=fused", name="neither")


def test_without_a_gpu_it_is_refused_before_the_first_proof(kernel: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernel.setattr(experts, "why_no_kernels", lambda device: "they need a GPU")
    config = base_config(tmp_path)
    config["model"]["config"] = SPARSE
    with pytest.raises(UserError, match=r"model\.experts \(fused\): .*they need a GPU.*\[change-unavailable\]"):
        run_here(tmp_path, config, "model.experts=fused")


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "relu", "custom"])
def test_only_experts_of_its_layout_are_given_to_it(family: str) -> None:
    model = tiny_model("gpt_oss" if family == "gpt_oss" else "qwen3_moe", **EXPERTS)
    found: Any = next(module for name, module in model.named_modules() if name.endswith("experts"))
    if family == "relu":
        found.act_fn = nn.ReLU()
    if family == "custom":
        found.__class__ = type("Clamped", (type(found),), {"_apply_gate": lambda self, both: both})
    assert can_fuse(found) == (family == "qwen3_moe")


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.exhaustive  # three minutes in the interpreter
@pytest.mark.skipif(
    not (find_spec("liger_kernel") and find_spec("triton")), reason="no liger-kernel: pip install -e '.[liger]'"
)
def test_ligers_own_kernel_computes_the_losses_and_gradients_of_the_loop() -> None:
    """Of inputs, routers' weights and both weights to 1e-5 in float32; in bfloat16 it is nearer to float64, and the proof accepts it."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "LIGER_FUSED_MOE_AUTOTUNE": "0"}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/train"), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, "-m", "liger_experts"]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    *exact, nearer, proof = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(exact) == len(MIXTURES) + 1 and proof["refusal"] == "" and "from float32" in proof["figures"], proof
    for errors in exact:
        assert max(errors.values()) <= 1e-5, errors
    assert all(fused <= loop for loop, fused in nearer.values()), nearer
