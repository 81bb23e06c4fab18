"""Hybrids whose kernels know where documents begin run packed without a wrapped module, and only if every kernel of theirs does.

The stand-ins need a process of their own: transformers looks for the packages once, as it imports the code of a model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packtrain.attention import kernel_choice
from packtrain.attention.spec import BACKENDS
from packtrain.attention.varlen import from_package
from packtrain.proof.choice import choose_attention
from packtrain.proof.mixer_search import mixing_of
from tests.stand_in_hybrid_kernels import BLIND, CALLS, PACKAGES
from tests.stand_in_kernels import flash_attention_2

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


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    folders = [ROOT, *(ROOT / "tests" / name for name in ("architectures", "train"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.architectures.test_hybrid_kernels"]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return dict(zip(CASES, map(json.loads, ran.stdout.splitlines()), strict=True))


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


if __name__ == "__main__":
    sys.modules.update(PACKAGES)
    for each in CASES:
        print(json.dumps(outcome_in_this_process(each)), flush=True)
