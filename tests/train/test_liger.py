"""model.kernels: Liger's kernels are taken in and out whole; where they are, losses and gradients are the model's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from answer_runs import preferences
from here import run_here
from running import assert_same_bits, base_config, write_jsonl
from tiny_models import tiny_model
from torch import nn
from transformers.models.llama import modeling_llama

from packtrain.changes import liger as kernels
from packtrain.changes.liger import fuse_by_liger, why_no_liger
from packtrain.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
needs_liger = pytest.mark.skipif(
    not (find_spec("liger_kernel") and find_spec("triton")), reason="no liger-kernel: pip install -e '.[liger]'"
)
patched: list[Any] = []


class Norm(nn.RMSNorm):
    """In the place of Liger's class."""


def patch(model: Any, *, by: float = 1.0, **off: bool) -> None:
    """What Liger's function for Llama does to a model and to transformers' file, by torch."""
    assert off == {"cross_entropy": False, "fused_linear_cross_entropy": False}
    patched.append(model)
    rotate = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = lambda *given, **named: rotate(*given, **named)
    modeling_llama.LlamaRMSNorm = Norm  # type: ignore[misc]
    for layer in model.base_model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.offset = 0.0
            norm.forward = lambda x, own=norm.forward: own(x) * by
    if by < 0:
        raise RuntimeError("no kernel for this device")


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Liger that is not there, for the type llama alone; `auto` takes this CPU for a GPU."""
    named = {"_apply_liger_kernel_to_instance": patch, "MODEL_TYPE_TO_APPLY_LIGER_FN": {"llama": None}}
    top = types.SimpleNamespace(LigerRMSNorm=Norm)
    of = {
        "": types.SimpleNamespace(__spec__=object()),  # by which it counts as installed
        ".transformers": top,
        ".transformers.monkey_patch": types.SimpleNamespace(**named),
    }
    for name, module in of.items():
        monkeypatch.setitem(sys.modules, f"liger_kernel{name}", module)  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    own = why_no_liger
    monkeypatch.setattr(kernels, "why_no_liger", lambda model, device: own(model, CUDA))
    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm"):
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    patched.clear()
    return monkeypatch


def state(model: nn.Module) -> list[dict[str, Any]]:
    return [dict(vars(place)) for place in (*model.modules(), modeling_llama)]


@pytest.mark.parametrize("by", [1.0, -1.0], ids=["asked to", "after an error"])
def test_undone_everything_is_as_before(liger: pytest.MonkeyPatch, by: float) -> None:
    model = tiny_model("llama")
    before = state(model)
    liger.setattr(sys.modules["liger_kernel.transformers.monkey_patch"], "_apply_liger_kernel_to_instance",
                  lambda model, **off: patch(model, by=by, **off))  # fmt: skip
    if by < 0:
        with pytest.raises(RuntimeError, match="no kernel for this device"):
            fuse_by_liger(model)
    else:
        undo = fuse_by_liger(model)
        assert modeling_llama.LlamaRMSNorm is not Norm, "models loaded later are as they come"
        assert state(model) != before
        undo()
    assert state(model) == before


def test_where_they_cannot_be_it_is_said_why(liger: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    assert why_no_liger(model, CPU) == "they need a GPU"
    assert why_no_liger(model, CUDA) == ""
    assert why_no_liger(tiny_model("gpt2"), CUDA) == "liger-kernel has none for gpt2"
    liger.setattr(kernels, "find_spec", lambda name: None)
    assert "pip install 'packtrain[liger]'" in why_no_liger(model, CUDA)


def test_a_run_takes_them_by_proof_and_its_reference_as_well(liger: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = base_config(tmp_path, objective={"kind": "dpo"}, trainer={"max_steps": 2}, data={"max_length": 128})
    config["data"]["train"] = str(write_jsonl(tmp_path / "pairs.jsonl", preferences(12, seed=0)))
    plain = run_here(tmp_path, config, "model.kernels=none", name="plain")
    assert not patched and plain.summary["changes"] == {}
    assert run_here(tmp_path, config, name="auto").summary["changes"] == {} and not patched, "no GPU: not tried"
    run = run_here(tmp_path, config, "model.kernels=liger", name="liger")
    assert run.summary["changes"]["kernels"].startswith(
        "norms, rotation and activations by Liger's kernels (loss off by 0"
    )
    assert_same_bits(run, plain)
    assert len({id(model) for model in patched}) == 2


def test_asked_for_by_name_where_they_cannot_be_the_run_ends(liger: pytest.MonkeyPatch, tmp_path: Path) -> None:
    liger.setattr(kernels, "why_no_liger", why_no_liger)
    with pytest.raises(UserError, match="not available, they need a GPU") as refused:
        run_here(tmp_path, base_config(tmp_path), "model.kernels=liger")
    assert refused.value.problems[0].where == "model.kernels"


@needs_liger
def test_ligers_own_kernels_compute_the_models_losses_and_gradients_and_leave_no_trace() -> None:
    """In float32 to 1e-4, in bfloat16 to 5e-2; with gradient checkpointing, and with adapters; experts stay the model's own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/train")])}
    command = [sys.executable, "-m", "liger_models"]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(results) == 5
    for number, result in enumerate(results):
        assert result["refusal"] == "" and result["inside"] == [True, number < 4], result
        assert result["after"] == [False, False] and result["rotation"].startswith("transformers."), result
