"""TRL's own trainers on a stand-in GPU and on the CPU, with `attach`; each function runs in a process that has the GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from trl_trainers import STEPS, Ran, make, ran

PLACES: dict[str, dict[str, Any]] = {"cpu": {"use_cpu": True}, "cuda:0": {"use_cpu": False}}


def trained(kind: str, folder: Path, place: str, **given: Any) -> Ran:
    """What TRL's trainer of that kind does on that device, with `attach`."""
    trainer = make(kind, folder, bf16=True, **PLACES[place], **given)
    found = ran(trainer, attached=True)
    assert {weight.device for weight in trainer.model.parameters()} == {torch.device(place)}
    return found


def trains_as_on_the_cpu(kind: str, **given: Any) -> None:
    """The same losses and gradients, by flash attention, within the rounding of bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        there, here = (trained(kind, Path(folder), place, **given) for place in ("cuda:0", "cpu"))
    assert there.handle is not None and there.handle.stats.calls >= STEPS and not there.handle.stats.unchanged
    assert len(there.losses) == len(here.losses) >= STEPS
    assert there.losses == pytest.approx(here.losses, abs=2e-2)
    for ours, of_cpu in zip(there.gradients[:2], here.gradients[:2], strict=True):
        assert ours.device.type == "cuda" and ((ours.cpu() - of_cpu).norm() / of_cpu.norm()).item() < 0.05


def sft() -> None:
    trains_as_on_the_cpu("sft")


def dpo() -> None:
    trains_as_on_the_cpu("dpo")


def grpo() -> None:
    trains_as_on_the_cpu("grpo", beta=0.1)
