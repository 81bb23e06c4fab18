"""A step of training makes the GPU's process wait nowhere, by torch's own count: as tests/train/test_host_waits.py, on the device."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from host_waits import answers, place_of, tiny_run, train_watched
from running import conversations

from packtrain.model.spread import Ranks


class SyncWarnings(warnings.catch_warnings):
    """Counts what torch warns of as synchronising, by file."""

    def __init__(self) -> None:
        super().__init__(record=True)
        self.found: Counter[str] = Counter()

    def __enter__(self) -> Any:
        self._noted: Any = super().__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        for one in self._noted:
            if "called a synchronizing" in str(
                one.message
            ):  # not torch's notice, given once, that this mode misses some
                self.found[place_of(one.filename) or one.filename] += 1
        super().__exit__(*error)


@pytest.mark.parametrize("verb", ["sft", "dpo", "kto", "reward"])
@pytest.mark.parametrize("mode", ["packed", "padding_free", "padding"])
def test_a_step_waits_for_nothing(mode: str, verb: str, tmp_path: Path, device: torch.device) -> None:
    rows = conversations(24) if verb == "sft" else answers(verb, 24)
    changes = [f"objective.kind={verb}", f"packing.mode={mode}", "trainer.mixed_precision=bf16"]
    watch = SyncWarnings()
    train_watched([*tiny_run(tmp_path, rows), *changes], tmp_path, Ranks(0, 1, device), watch=watch)
    theirs = {"transformers/masking_utils.py", "trl/trainer/utils.py"} if mode == "padding" else set()
    assert {place: n for place, n in watch.found.items() if place not in theirs} == {}


def test_the_counter_sees_what_waits(device: torch.device) -> None:
    with SyncWarnings() as watch:
        torch.ones(3, device=device).sum().item()
    assert sum(watch.found.values()) == 1
