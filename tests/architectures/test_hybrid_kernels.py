"""Hybrids run without mixers, exactly, if all their kernels know where documents begin.

The stand-ins need a process of their own: transformers looks for the packages once, as it imports the code of a model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from packtrain.attention import kernel_choice
from packtrain.attention.spec import BACKENDS
from packtrain.attention.varlen import from_package
from packtrain.proof.choice import choose_attention
from packtrain.proof.mixer_search import mixing_of
from tests.stand_in_hybrid_kernels import BLIND, CALLS, PACKAGES
from tests.stand_in_kernels import flash_attention_2
from tests.standin.site import triton_interpreter
from tests.train import forked

ROOT = Path(__file__).resolve().parents[2]
CASES = {
    "linear attention": ("qwen3_next", "", "segmented"),
    "a scan without borders": ("jamba", "", "mixers"),
    "flash: state space": ("bamba", "", "flash"),
    "flash: blind linear attention": ("qwen3_next", "fla", "mixers"),
}
"""Type, package that is blind, and the backend to be taken. The last two have a flash kernel."""


def have_a_flash_kernel() -> None:
    """From now on, on the CPU and in float32."""
    kernel_choice.CANDIDATES = (("FlashAttention 2", partial(from_package, "flash_attn")),)
    sys.modules["flash_attn"] = SimpleNamespace(flash_attn_varlen_func=flash_attention_2)  # type: ignore[assignment]
    BACKENDS.all()["flash"] = replace(BACKENDS["flash"], devices=("cpu",), formats=("float32",))


def largest_error_of_fla() -> float:
    """Compare its own kernel on a row, in Triton's interpreter, with transformers' function."""
    from fla.ops.common import chunk_delta_h
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from triton.runtime import autotuner, interpreter

    class Number(int):
        def to(self, dtype: Any) -> Any:  # loop counters are tensors in compiled kernels, and Python's here
            return interpreter._implicit_cvt(int(self)).to(dtype)

    def run_first(tuner: Any, *given: Any, run: Any = autotuner.Autotuner.run, **named: Any) -> Any:
        tuner.configs = tuner.configs[:1]  # there is no GPU to compare them on
        return run(tuner, *given, **named)

    triton_interpreter.install()
    autotuner.Autotuner.run = run_first
    chunk_delta_h.range = lambda *limits: map(Number, range(*map(int, limits)))
    borders, random = [0, 70, 73, 128], torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, borders[-1], 2, 16, generator=random)
    g, beta = torch.rand(2, 1, borders[-1], 2, generator=random)
    inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v, -g, beta)]
    settings: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": torch.tensor(borders, dtype=torch.int32)}
    both = [run(*inputs, **settings)[0] for run in (chunk_gated_delta_rule, PACKAGES["fla"].chunk_gated_delta_rule)]
    weights = torch.linspace(-1, 1, both[0].numel()).view_as(both[0])
    (ours, back), (exact, exact_back) = (
        (output, torch.autograd.grad((output * weights).sum(), inputs)) for output in both
    )
    pairs = zip((ours, *back), (exact, *exact_back), strict=True)
    return max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)


def outcome_in_this_process(name: str) -> dict[str, Any]:
    from sweep import WINDOW, outcome_of, quietly_on_one_thread
    from tiny import tiny_model

    model_type, blind, _ = CASES[name]
    BLIND.clear()
    BLIND.add(blind)
    if name.startswith("flash"):
        have_a_flash_kernel()
    with quietly_on_one_thread():
        outcome = outcome_of.__wrapped__(model_type)
        documents = CALLS[-1][1]  # packed comes last
        model = tiny_model(model_type, WINDOW)
        choose = partial(choose_attention, "auto", model, model.device, pairs=True)
        choices = [choose(), choose(must_share=True)] if name == "linear attention" else []
        attention = mixing_of(model).attention if outcome.path == "mixers" else ""
    exact = all(found.exact for found in outcome.modes.values()) and "packed" in outcome.modes
    shared = [(choice.backend.name, choice.why_not_shared) for choice in choices]
    return {"path": outcome.path, "exact": exact, "documents": documents, "shared": shared, "attention": attention}


def write_outcomes(file: Path) -> None:
    """Write the outcomes of all cases. This process must not have imported a model before."""
    sys.modules.update(PACKAGES)
    file.write_text(json.dumps({case: outcome_in_this_process(case) for case in CASES}))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    file = tmp_path_factory.mktemp("outcomes") / "outcomes.json"
    (process := forked.begun(write_outcomes, file)).join(300)
    assert process.exitcode == 0
    return json.loads(file.read_text())


def printed_by_another_process(**variables: str) -> list[Any]:
    folders = [ROOT, *(ROOT / "tests" / name for name in ("architectures", "train"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "tests.architectures.test_hybrid_kernels"]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("case", CASES)
def test_kernels_that_know_borders_run_rows_whole_and_others_get_documents(case: str, outcomes: dict[str, Any]) -> None:
    outcome, backend = outcomes[case], CASES[case][2]
    assert outcome["path"] == backend and outcome["exact"]
    assert outcome["documents"] == (1 if backend == "mixers" else 5), "of the last call"
    if backend == "mixers":
        assert outcome["attention"] == ("flash" if case.startswith("flash") else "segmented")


def test_borders_alone_do_not_tell_of_prefixes_so_mixers_share_them_if_they_must(outcomes: dict[str, Any]) -> None:
    (backend, why_not), must = outcomes["linear attention"]["shared"]
    assert backend == "segmented" and "pairs in a row differ" in why_not
    assert must == ["mixers", ""]


@pytest.mark.skipif(not (find_spec("fla") and find_spec("triton")), reason="flash-linear-attention is not installed")
def test_the_kernel_of_flash_linear_attention_keeps_documents_apart_in_tritons_interpreter() -> None:
    (error,) = printed_by_another_process(TRITON_INTERPRET="1")
    assert error < 1e-5


if __name__ == "__main__":
    print(json.dumps(largest_error_of_fla()))
