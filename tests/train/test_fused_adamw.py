"""The kernel of AdamW makes the plain step, bit for bit. Where triton is absent, torch stands in for the kernel's own work."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fused_steps
import pytest
import torch
from fused_steps import CPU, HOW, by_torch, taken_on_cpus
from here import run_here
from running import LLAMA, assert_same_bits, base_config, train

from packtrain.train.optim import fused_adamw
from packtrain.train.optim.dither import Dither
from packtrain.train.optim.float32_step import stepping_in_float32
from tests.train import forked

ROOT = Path(__file__).resolve().parents[2]
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
    for update, why in ((off_by_one, "its bits differ from the CPU's"), (broken, "RuntimeError: no compiler")):
        for name, module in by_torch(update).items():
            monkeypatch.setitem(sys.modules, name, module)
        for masters in (True, False):
            assert fused_adamw._refusal(CPU, masters=masters) == why
    with taken_on_cpus() as taken:
        run = run_here(tmp_path, config)
    assert f"AdamW      plain: {why}" in run.log and taken == [] and run.summary["status"] == "done"


def test_other_optimizers_have_no_kernel(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_adamw, "_DEVICE", "cpu")
    weight = torch.nn.Parameter(torch.ones(8).bfloat16())
    names: dict[torch.Tensor, str] = {weight: "w"}
    said: list[str] = []
    for base, arguments, taken in (
        (torch.optim.AdamW, {"fused": True}, True),
        (torch.optim.AdamW, {"fused": False}, False),
        (torch.optim.AdamW, {"fused": True, "betas": (0.4, 0.9)}, False),
        (torch.optim.Adam, {"fused": True}, False),
        (torch.optim.SGD, {}, False),
    ):
        kind: Any = stepping_in_float32(base, masters=True, seed=0, names=names, dither=Dither())
        optimizer = kind([weight], lr=1e-3, **arguments)
        fused_adamw.step_by_kernel(optimizer, CPU, said.append)
        assert (optimizer.kernel is not None) == taken
    fused_adamw.step_by_kernel(torch.optim.AdamW([weight], fused=True), CPU, said.append)  # of float32 weights
    assert said == ["AdamW      one kernel for each weight"]


@pytest.mark.exhaustive
def test_shards_are_rounded_as_by_the_plain_step(tmp_path: Path) -> None:
    trainer = {"max_steps": 3, "checkpoint_every": 2, "keep_checkpoints": None}
    config = base_config(tmp_path, trainer=trainer, optim={"bf16_rounding": "stochastic", "weight_decay": 0.1})
    config["model"] |= {"dtype": "bfloat16", "config": {**LLAMA, "hidden_size": 64}}
    plain = train(tmp_path, config, "strategy=fsdp2", name="plain", processes=2)
    ours = train(tmp_path, config, "strategy=fsdp2", name="kernel", processes=2, begin=fused_steps.run)
    assert "AdamW      one kernel for each weight" in ours.log
    assert_same_bits(ours, plain)
    again = train(tmp_path, config, "strategy=fsdp2", ours.resume(2), name="again", processes=2)
    assert_same_bits(again, plain, after=2)


@pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed (1 GB)")
@pytest.mark.parametrize("what", ["steps", pytest.param("runs", marks=pytest.mark.exhaustive)])
def test_tritons_own_kernel_is_the_plain_step(what: str) -> None:
    """In its interpreter, in a process of its own."""
    (process := forked.begun(fused_steps.check_by_triton, what)).join(600)
    assert process.exitcode == 0
