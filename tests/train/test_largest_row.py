"""The largest micro-batch runs before step 1: memory that does not suffice shows there, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from here import ALONE, run_here
from running import LLAMA, Run, assert_same_bits, base_config, train

from packtrain.config.schema import Trainer
from packtrain.errors import UserError
from packtrain.objectives.sft.run import SFTLoss
from packtrain.train import run as run_module
from tests.train import forked

ROOM = 180
"""Tokens that the stand-in for a GPU's memory holds: less than the longest document has."""
DROPOUT = {"attention_dropout": 0.1}  # so that a change of the random state would show
NEEDS_DEEPSPEED = pytest.mark.skipif("deepspeed" not in forked.WARM, reason="needs deepspeed")


def config_of(folder: Path) -> dict[str, Any]:
    config = base_config(folder, trainer={"max_steps": 4})
    config["model"]["config"] = {**LLAMA, **DROPOUT}
    return config


def as_on_a_gpu(*given: Any) -> None:
    """The command, which tries the largest micro-batch on a CPU, too."""
    run_module.tries_largest = lambda *_: True
    forked.run(*given)


@pytest.mark.parametrize(
    ("strategy", "processes", "verb"),
    [
        ("ddp", 1, "sft"),
        pytest.param("ddp", 2, "dpo", marks=pytest.mark.exhaustive),
        pytest.param("fsdp2", 2, "sft", marks=pytest.mark.exhaustive),
        pytest.param("zero2", 2, "sft", marks=[NEEDS_DEEPSPEED, pytest.mark.exhaustive]),
        pytest.param("zero3", 2, "sft", marks=[NEEDS_DEEPSPEED, pytest.mark.exhaustive]),
    ],
)
def test_it_changes_no_bit_of_the_training(tmp_path: Path, strategy: str, processes: int, verb: str) -> None:
    config = config_of(tmp_path)
    if verb == "dpo":
        config["data"] |= {"train": "quickstart"}
        config["batch"] = {"examples_per_step": 4, "tokens_per_device": 512}
        config["model"]["config"] = LLAMA  # dpo switches dropout off
    runs = [
        train(tmp_path, config, f"strategy={strategy}", name=name, processes=processes, command=verb, begin=begin)
        for name, begin in (("plain", None), ("tried", as_on_a_gpu))
    ]
    assert_same_bits(*runs)


def cramped(monkeypatch: pytest.MonkeyPatch, room: int = ROOM, *, from_step: int = 0) -> None:
    """A forward pass in training of more than `room` tokens lacks memory."""

    def watched(own: Any) -> Any:
        def of(self: Any, model: Any, batch: Any, counts: Any) -> Any:
            if batch.slots > room and steps[0] > from_step:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return own(self, model, batch, counts)

        return of

    def counted(self: Any, batches: Any) -> None:
        steps[0] += 1

    steps = [int(from_step == 0)]
    monkeypatch.setattr(SFTLoss, "compute", watched(SFTLoss.compute))
    monkeypatch.setattr(SFTLoss, "open_step", counted)


def refused(folder: Path, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        run_here(folder, config_of(folder), *overrides)
    return caught.value


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["batch.tokens_per_device=256"], "batch.tokens_per_device", 200),  # all of the longest document
        (["batch.tokens_per_device=1024"], "batch.tokens_per_device", 420),  # half of the fullest row
        (["batch.tokens_per_device=null", "packing.mode=padding"], "batch.examples_per_device", 3),
        (["batch.tokens_per_device=200"], "data.max_length", None),
    ],
)
def test_a_lack_of_memory_shows_before_step_1_with_documents_and_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], key: str, value: int | None
) -> None:
    cramped(monkeypatch)
    monkeypatch.setattr(run_module, "tries_largest", lambda *_: True)
    (problem,) = refused(tmp_path, *overrides).problems
    assert all(part in problem.what for part in ("step 1", "data.jsonl:", "2.00 GiB"))
    assert problem.where == key and (value is None or f"{key}={value}," in problem.fix)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_without_it_the_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cramped(monkeypatch, room=0, from_step=2)
    (problem,) = refused(tmp_path).problems
    assert "step 3 (micro-batch 1)" in problem.what
    assert len(Run(tmp_path / "run").losses) == 2


def test_what_is_tried_is_what_no_other_micro_batch_exceeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    own = SFTLoss.compute

    def of(self: Any, model: Any, batch: Any, counts: Any) -> Any:
        if torch.is_grad_enabled():
            seen.append(batch.slots)
        return own(self, model, batch, counts)

    monkeypatch.setattr(SFTLoss, "compute", of)
    monkeypatch.setattr(run_module, "tries_largest", lambda *_: True)
    for mode in ("packed", "padding"):
        seen.clear()
        run_here(tmp_path, config_of(tmp_path), f"packing.mode={mode}", "trainer.resume=never", name=mode)
        assert seen[0] == seen[1] == max(seen[2:])


@pytest.mark.parametrize(
    ("device", "compiled", "tried"), [("cpu", False, False), ("cuda", False, True), ("cuda", True, False)]
)
def test_it_is_tried_on_gpus_unless_the_layers_are_compiled(device: str, compiled: bool, tried: bool) -> None:
    ranks = replace(ALONE, device=torch.device(device))
    assert run_module.tries_largest(Trainer(torch_compile=compiled), ranks) == tried
