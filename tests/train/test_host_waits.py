"""Between two logged lines a step asks the device for nothing: its process queues work and never waits for a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from host_waits import FIRST, LAST, Waits, answers, tiny_run, train_watched
from running import conversations
from tiny_dpo import Pairs

from packtrain.config.schema import Batch, Packing
from packtrain.packing.schedule import make_schedule
from packtrain.train.loader import step_loader
from packtrain.train.objectives.pairs_and_answers import PairSteps

LATE = {"packtrain/train/log/metrics.py::tolist": LAST - FIRST + 1}
"""The counts of each step, once its work is queued: they have arrived before its forward pass (LateCopy)."""
OF_TRANSFORMERS = {"transformers/masking_utils.py::_ignore_causal_mask_sdpa"}
"""Whether a batch with a mask needs it; flattened rows have none."""
MASKED = {"packing.mode=padding", "model.attention=per_document"}


@pytest.mark.sample(
    without=(
        "lora",
        "padding_free",
        "per_document",
    )
)
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


@pytest.mark.sample("dpo", "kto", "reward")
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dpo", []),
        ("dpo", ["packing.mode=padding"]),
        ("dpo", ["model.attention=per_document"]),
        ("dpo", ["objective.loss=[sigmoid,sft]", "objective.options={loss_weights: [1.0, 0.5]}"]),
        ("dpo", ["objective.loss=exo_pair", "objective.options={label_smoothing: 0.1}"]),
        ("kto", []),
        ("kto", ["objective.loss=apo_zero_unpaired"]),
        ("reward", []),
    ],
    ids=["dpo", "padding", "per_document", "sft", "exo_pair", "kto", "apo_zero_unpaired", "reward"],
)
def test_a_step_on_answers_waits_for_nothing(kind: str, changes: list[str], tmp_path: Path) -> None:
    waits = Waits()
    run = [*tiny_run(tmp_path, answers(kind, 24)), f"objective.kind={kind}", "batch.examples_per_step=4", *changes]
    train_watched([*run, "batch.examples_per_device=2"], tmp_path, watch=waits)
    theirs = OF_TRANSFORMERS if MASKED & {*changes} else set()
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
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 5 and {type(one) for one in tensors} == {Marked}
    for gpus in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus)
        loader = step_loader(steps)
        assert (loader.num_workers, loader.pin_memory) == (int(gpus), gpus)
