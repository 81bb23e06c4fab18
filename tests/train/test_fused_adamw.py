"""The kernel of AdamW makes the plain step, bit for bit. Where triton is absent, torch stands in for the kernel's own work."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fused_steps
import pytest
import torch
from fused_steps import CPU, by_torch, taken_on_cpus
from here import run_here
from running import base_config

from packtrain.train.optim import fused_adamw

ROOT = Path(__file__).resolve().parents[2]
HOW = {"masters": [], "stochastic": ["optim.bf16_rounding=stochastic"]}
MASTERS = pytest.mark.parametrize("masters", [True, False], ids=list(HOW))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in by_torch().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fused_adamw, "find_spec", lambda name: name)


@MASTERS
def test_the_step_by_kernel_is_the_plain_one(kernel: None, masters: bool) -> None:
    fused_steps.steps_alike(masters=masters)


@MASTERS
def test_a_step_by_kernel_reads_nothing_from_the_device(kernel: None, masters: bool) -> None:
    assert fused_steps.reads_of_a_step(masters=masters) == [1, 0, 0, 1, 0], "but the count of a loaded state"


@pytest.mark.parametrize("how", HOW)
def test_runs_with_and_without_the_kernel_go_on_from_each_other(kernel: None, how: str, tmp_path: Path) -> None:
    ours, plain = fused_steps.runs_go_on_from_each_other(tmp_path, *HOW[how])
    assert "AdamW      one kernel for each weight" in ours.log and "AdamW      " not in plain.log


def test_a_kernel_with_other_bits_is_not_taken(monkeypatch: pytest.MonkeyPatch, kernel: None, tmp_path: Path) -> None:
    def off_by_one(tensors: list[torch.Tensor], *given: Any) -> None:
        fused_steps.adamw_(tensors, *given)
        tensors[2].view(torch.int32 if tensors[2].dtype == torch.float32 else torch.int16)[17] += 1

    def broken(*given: Any) -> None:
        raise RuntimeError("no compiler")

    config = base_config(tmp_path, trainer={"max_steps": 2})
    config["model"]["dtype"] = "bfloat16"
    for update, why in ((off_by_one, "its bits are not those of the CPU"), (broken, "RuntimeError: no compiler")):
        for name, module in by_torch(update).items():
            monkeypatch.setitem(sys.modules, name, module)
        for masters in (True, False):
            assert fused_adamw._refusal(CPU, masters=masters) == why
    with taken_on_cpus() as taken:
        run = run_here(tmp_path, config)
    assert f"AdamW      plain: {why}" in run.log and taken == [] and run.summary["status"] == "done"


def test_other_optimizers_have_no_kernel(kernel: None, tmp_path: Path) -> None:
    config = base_config(tmp_path, trainer={"max_steps": 1})
    config["model"]["dtype"] = "bfloat16"
    with taken_on_cpus() as taken:
        for changes in (["optim.name=adamw_torch"], ["optim.name=sgd"], ["optim.beta1=0.4"]):
            assert "AdamW      " not in run_here(tmp_path, config, *changes, name=changes[0]).log
    assert taken == []


@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
@pytest.mark.parametrize("how", HOW)
def test_tritons_kernel_is_the_plain_step_and_runs_go_on(how: str) -> None:
    """In its interpreter, in a process of its own, since Triton decides as it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    known = [str(ROOT), str(ROOT / "tests/train"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "fused_steps", *HOW[how]]
    environment["PYTHONPATH"] = os.pathsep.join(known)
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0 and ran.stdout.endswith("all alike\n"), ran.stderr
