"""Between two logged lines a step asks the device for nothing; and few files are gone through in a step and in a resume."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from here import run_here
from host_waits import FIRST, LAST, Waits, answers, tiny_run, train_watched
from running import base_config, conversations
from tiny_dpo import steps_of

import packtrain
from packtrain.train import run as training
from packtrain.train.checkpoint.state import Checkpoints
from packtrain.train.loader import step_loader
from packtrain.train.loop import StepTrainer
from tests.unit.test_layout import files_of_section

LATE = {"packtrain/train/log/metrics.py::read": LAST - FIRST + 1}
"""The counts of each step, once its work is queued: they have arrived before its forward pass (StepSums)."""
OF_TRANSFORMERS = {"transformers/masking_utils.py::_ignore_causal_mask_sdpa"}
"""Whether a batch with a mask needs it; flattened rows have none."""
MASKED = {"packing.mode=padding", "model.attention=per_document"}


CASES = {
    "packed": ("sft", []),
    "padding_free": ("sft", ["packing.mode=padding_free"]),
    "padding": ("sft", ["packing.mode=padding"]),
    "bf16": ("sft", ["trainer.mixed_precision=bf16"]),
    "lora": ("sft", ["peft=lora"]),
    "per_document": ("sft", ["model.attention=per_document"]),
    "dpo": ("dpo", []),
    "dpo padding": ("dpo", ["packing.mode=padding"]),
    "dpo per_document": ("dpo", ["model.attention=per_document"]),
    "two losses": ("dpo", ["objective.loss=[sigmoid,sft]", "objective.options={loss_weights: [1.0, 0.5]}"]),
    "exo_pair": ("dpo", ["objective.loss=exo_pair", "objective.options={label_smoothing: 0.1}"]),
    "kto": ("kto", []),
    "apo_zero_unpaired": ("kto", ["objective.loss=apo_zero_unpaired"]),
    "reward": ("reward", []),
}


@pytest.mark.sample("packed", "padding", "bf16", "dpo", "kto", "reward")
@pytest.mark.parametrize(("kind", "changes"), CASES.values(), ids=CASES)
def test_a_step_waits_for_nothing(kind: str, changes: list[str], tmp_path: Path) -> None:
    waits, rows = Waits(), conversations(24) if kind == "sft" else answers(kind, 24)
    few = [] if kind == "sft" else ["batch.examples_per_step=4", "batch.examples_per_device=2"]
    train_watched([*tiny_run(tmp_path, rows), f"objective.kind={kind}", *few, *changes], tmp_path, watch=waits)
    theirs = OF_TRANSFORMERS if MASKED & {*changes} else set()
    found = {place: n for place, n in waits.found.items() if place not in theirs}
    assert (found, theirs & waits.found.keys()) == (LATE, theirs)


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
    steps = steps_of("shared", 256, a_step=3)
    inputs = steps[0][0].pin_memory().inputs
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 5 and {type(one) for one in tensors} == {Marked}
    for gpus in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus)
        loader = step_loader(steps)
        assert (loader.num_workers, loader.pin_memory) == (int(gpus), gpus)


PACKAGE = Path(packtrain.__file__).parent
MOST, MOST_OF_A_RESUME = 18, 8
"""Files of a step that has no line, no evaluation and no checkpoint, and is not judged; of a resume on as many processes."""


def noting(files: set[str]) -> Callable[[FrameType, str, object], None]:
    """A profiler that adds the package's files whose functions are called."""

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(path.relative_to(PACKAGE).as_posix())

    return note


def test_a_step_goes_through_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: set[str] = set()
    next_batches = StepTrainer.next_batches

    def watched(self: StepTrainer, *given: Any) -> Any:
        sys.setprofile({3: noting(files), 5: None}.get(self.state.step, sys.getprofile()))
        return next_batches(self, *given)

    monkeypatch.setattr(StepTrainer, "next_batches", watched)
    try:
        run_here(tmp_path, base_config(tmp_path, trainer={"max_steps": 6, "log_every": 6}))
    finally:
        sys.setprofile(None)
    map_ = files_of_section(PACKAGE.parent / "docs/architecture.md", "One step of training")
    not_this_step = {"train/checkpoint/state.py", "train/spikes.py"}
    assert "train/loop.py" in map_ and map_ - not_this_step <= files
    assert len(files) <= MOST, "\n".join(sorted(files))


def test_a_resume_goes_through_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, files = (
        base_config(tmp_path, trainer={"max_steps": 4, "checkpoint_every": 2, "keep_checkpoints": None}),
        set[str](),
    )
    first = run_here(tmp_path, config)

    def watched(do: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            sys.setprofile(noting(files))
            try:
                return do(*given, **named)
            finally:
                sys.setprofile(None)

        return call

    for place, name in ((training, "find_resume"), (Checkpoints, "restore"), (Checkpoints, "restore_random_state")):
        monkeypatch.setattr(place, name, watched(getattr(place, name)))
    again = run_here(tmp_path, config, f"trainer.resume={first.folder}/checkpoints/step-000002", name="again")
    assert again.losses == first.losses[2:]
    assert len(files) <= MOST_OF_A_RESUME, "\n".join(sorted(files))
