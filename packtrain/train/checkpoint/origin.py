"""What a resumed run must share with the run that wrote its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from packtrain.errors import Problem, UserError

ORIGIN = "origin.json"
STRATEGY, PROCESSES = "strategy.name", "the number of processes"


def check_origin(checkpoint: Path, origin: dict[str, Any]) -> None:
    """Raises UserError if this run would not continue the steps of `checkpoint`.

    `origin` holds the plain values that must be equal (run.py, `origin_of`); the checkpoint holds those of its run.
    """
    written = origin_in(checkpoint)
    absent = [name for name in origin if name not in written]
    if absent:
        what = (
            f"the checkpoint {checkpoint.name} does not record this: an earlier packtrain made it, or another objective"
        )
        fix = "go on with what made it, or start over with trainer.resume=never"
        raise UserError(what, where=", ".join(absent), fix=fix)
    differing = [
        Problem(
            f"the checkpoint {checkpoint.name} was made with {written.get(name)}, this run has {value}",
            where=name,
            fix="set it back, or start over with trainer.resume=never",
        )
        for name, value in origin.items()
        if name not in (STRATEGY, PROCESSES) and written.get(name) != value
    ]
    if differing:
        raise UserError(differing)


def origin_in(checkpoint: Path) -> dict[str, Any]:
    """The origin of the run that wrote `checkpoint`."""
    return json.loads((checkpoint / ORIGIN).read_text())


def world_of(checkpoint: Path) -> tuple[str, int]:
    """The strategy.name that `checkpoint` was written by, and on how many processes."""
    origin = origin_in(checkpoint)
    return origin[STRATEGY], origin[PROCESSES]
