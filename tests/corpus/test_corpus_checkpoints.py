"""Checkpoints in which someone, or another tool, has changed a file and its entry in the manifest: values of other types."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.case import Case, carry_out, check, sampled
from tests.corpus.tiny_run import trains

STATE, ORIGIN, SPIKES, NEWEST = "trainer_state.json", "origin.json", "spikes.json", "run/checkpoints/step-000002"
ARGUMENTS = ("trainer.checkpoint_every=1", "trainer.max_steps=3", "trainer.on_spike=skip")
OTHER: dict[str, Any] = {
    "a text": "x",
    "a number in a text": "2",
    "null": None,
    "a list": [1],
    "an object": {"a": 1},
    "a part": 1.5,
    "NaN": float("nan"),
    "negative": -3,
    "10^30": 10**30,
}
READ = ("global_step", "log_history", "stateful_callbacks", "best_metric", "best_global_step", "best_model_checkpoint")
UNREAD = ("epoch", "total_flos", "max_steps", "trial_params", "is_world_process_zero", "num_input_tokens_seen")
TEXTS = {"null": "null", "a list": "[1]", "nothing": "", "half": "{", "bytes": b"\xff", "deep": "[" * 10**5}
FIGURES = {
    "a number": 5,
    "numbers": [1, 2],
    "texts": [["a", "b"]] * 40,
    "short ones": [[1.0]] * 40,
    "an object": {"ab": 1},
}
PASSED_OVER = ("is passed over", "cannot be read")


def resumed(name: str, file: str, change: Callable[[Any], Any], **more: Any) -> Case:
    """A run that finds a checkpoint whose `file` says something else, which has a right place in the manifest."""
    files = {"run": partial(_put, file, change)}
    expect = more.pop("expect", (0, 2))
    return trains(f"{file}, {name}", files, *ARGUMENTS, writes=("run*",), expect=expect, **more)


def _put(file: str, change: Callable[[Any], Any], at: Path) -> None:
    shutil.copytree(Path(_kept().name), at)
    found = at.parent / NEWEST / file
    said = change(json.loads(found.read_bytes()))
    found.write_bytes(
        said if isinstance(said, bytes) else said.encode() if isinstance(said, str) else json.dumps(said).encode()
    )
    manifest = found.with_name("manifest.json")
    sealed = {"bytes": found.stat().st_size, "blake2b": hashlib.blake2b(found.read_bytes()).hexdigest()}
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), file: sealed}))


@cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    """The folder of a run that was killed after its second step of three: made when the first case runs."""
    kept = tempfile.TemporaryDirectory()
    with tempfile.TemporaryDirectory() as folder:
        whole = carry_out(trains("a run", {}, *ARGUMENTS, expect=(0,)), Path(folder))
        assert whole.code == 0, whole.stderr
        for result in ("final", "summary.json"):
            left = Path(folder, "work/run", result)
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        shutil.copytree(Path(folder, "work/run"), kept.name, dirs_exist_ok=True)
    shutil.rmtree(Path(kept.name, "checkpoints/step-000003"))
    return kept


def cases() -> Iterator[Case]:
    whole = [("global_step", 2), ("log_history", []), ("best_metric", 0.5)]
    for key, value in whole:
        yield resumed(
            f"not hostile: {key} is {value}", STATE, lambda state, k=key, v=value: {**state, k: v}, expect=(0,)
        )
    for key, (name, value) in ((key, one) for one in OTHER.items() for key in (*READ, *UNREAD)):
        yield resumed(f"{key} is {name}", STATE, lambda state, k=key, v=value: {**state, k: v})
    for name, (key, value) in {
        "a step of text": ("global_step", "x"),
        "no list of lines": ("log_history", {}),
        "a line of no kind": ("log_history", [None]),
        "a line without a step": ("log_history", [{"loss": 1.0}]),
        "callbacks in a list": ("stateful_callbacks", [1]),
        "a best loss in a list": ("best_metric", [1]),
        "a key of another version": ("unheard_of", 1),
    }.items():
        yield resumed(
            name, STATE, lambda state, k=key, v=value: {**state, k: v}, expect=(0,), says=(*PASSED_OVER, STATE)
        )
    yield resumed("no step", STATE, lambda state: {"epoch": 1.0}, expect=(0,), says=PASSED_OVER)
    for file in (STATE, ORIGIN, SPIKES):
        for name, text in TEXTS.items():
            yield resumed(
                f"{name} in place of it", file, lambda _, one=text: one, expect=(0,), says=(*PASSED_OVER, file)
            )
    for name, figures in FIGURES.items():
        yield resumed(name, SPIKES, lambda _, one=figures: one, expect=(0,), says=(*PASSED_OVER, SPIKES))
    for key in (
        "strategy.name",
        "the number of processes",
        "model.dtype",
        "trainer.mixed_precision",
        "trainer.resume_despite",
    ):
        for name in ("null", "a list", "an object", "a part"):
            yield resumed(f"{key} is {name}", ORIGIN, lambda origin, k=key, v=OTHER[name]: {**origin, k: v})
        yield resumed(
            f"no {key}", ORIGIN, lambda origin, k=key: {name: one for name, one in origin.items() if name != k}
        )
    by_name = {"run": partial(_put, STATE, lambda _: "[1]")}
    yield trains(
        "named by trainer.resume", by_name, *ARGUMENTS, f"trainer.resume={NEWEST}", says=("trainer.resume", STATE)
    )


CASES = [*cases()]


@pytest.mark.parametrize("case", sampled(CASES, one_in=24))
def test_case(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)
