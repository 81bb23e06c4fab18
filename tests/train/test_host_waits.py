"""Between two logged lines a step asks the device for nothing: its process queues work and never waits for a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from host_waits import FIRST, LAST, Waits, tiny_run, train_watched
from running import conversations
from tiny_dpo import Pairs

from packtrain.config.schema import Batch, Packing
from packtrain.packing.schedule import make_schedule
from packtrain.train.loader import PairSteps, step_loader

LATE = {"packtrain/train/log/metrics.py::tolist": LAST - FIRST + 1}
"""The counts of each step, once its work is queued: they have arrived before its forward pass (LateCopy)."""


OF_TRL = {"trl/trainer/dpo_trainer.py::_compute_loss"}
"""Figures of each micro-batch of pairs."""
OF_TRANSFORMERS = {"transformers/masking_utils.py::_ignore_causal_mask_sdpa"}
"""Whether a batch with a mask needs it; flattened rows have none."""
MASKED = {"packing.mode=padding", "model.attention=per_document"}


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["packing.mode=padding_free"],
        ["packing.mode=padding"],
        ["trainer.mixed_precision=bf16"],
        ["peft=lora"],
        ["model.attention=per_document"],
    ],
    ids=["packed", "padding_free", "padding", "bf16", "lora", "per_document"],
)
def test_a_step_on_documents_waits_for_nothing(changes: list[str], tmp_path: Path) -> None:
    waits = Waits()
    train_watched([*tiny_run(tmp_path, conversations(24)), *changes], tmp_path, watch=waits)
    theirs = OF_TRANSFORMERS if MASKED & {*changes} else set()
    assert split(waits, theirs) == (LATE, theirs)


@pytest.mark.parametrize(
    "changes",
    [[], ["packing.mode=padding"], ["model.attention=per_document"]],
    ids=["packed", "padding", "per_document"],
)
def test_a_step_on_pairs_waits_for_nothing_but_the_figures_of_trl(changes: list[str], tmp_path: Path) -> None:
    waits = Waits()
    rows = [
        {"prompt": "Say it: ", "chosen": " river" * (n % 7 + 1), "rejected": " stone" * (n % 3 + 1)} for n in range(24)
    ]
    run = [*tiny_run(tmp_path, rows), "objective.kind=dpo", "batch.examples_per_step=3", *changes]
    train_watched(run, tmp_path, watch=waits)
    theirs = OF_TRL | OF_TRANSFORMERS if MASKED & {*changes} else OF_TRL
    assert split(waits, theirs) == (LATE, theirs)


def split(waits: Waits, theirs: set[str]) -> tuple[dict[str, int], set[str]]:
    """The waits that are not at the places `theirs`, and those of these places where there were any."""
    return {place: n for place, n in waits.found.items() if place not in theirs}, theirs & waits.found.keys()


def test_the_counter_sees_what_waits() -> None:
    values, mask = torch.arange(4.0, requires_grad=True), torch.tensor([True, False, True, True])
    with Waits() as waits:
        (values[mask] * 2).sum().backward()  # and in the backward pass
        float(values[0]), values.tolist(), bool(mask[1]), mask.nonzero(), values.masked_select(mask)
        torch.where(mask, values, 0.0)[torch.tensor([0, 3])].sum()  # waits for nothing
    assert sum(waits.found.values()) >= 7


def test_on_a_gpu_a_process_loads_ahead_into_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Marked(torch.Tensor):
        """What stands for a pinned copy."""

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self.as_subclass(Marked))
    data: Any = Pairs()
    steps = PairSteps(data, make_schedule(data.lengths, Packing(), Batch(examples_per_step=3)), "shared", 0)
    inputs = steps[0][0].pin_memory().inputs
    layout = inputs.pop("layout")
    tensors = [*inputs.values(), layout.rows, layout.columns, layout.inside]
    assert len(tensors) == 6 and {type(one) for one in tensors} == {Marked}
    for gpus in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus)
        loader = step_loader(steps)
        assert (loader.num_workers, loader.pin_memory) == (int(gpus), gpus)
