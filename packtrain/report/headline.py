"""What one wants to know of a run first: its outcome in a few figures, and where the time of its ranks went."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtrain.report.run_record import RunRecord
from packtrain.report.units import duration, number, percent, size
from packtrain.wording import counted

SLOW = 1.2
"""A rank is slow whose forward passes and loading of data take so many times the median, as train/sync/rank_times.py has it."""

MOST_RANKS = 64
_TELLING_LINES = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure with what it is, and what else belongs to it."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class RankTime:
    """Mean seconds of a step in each phase of a rank."""

    rank: int
    seconds: Mapping[str, float]
    slow: bool

    @property
    def whole(self) -> float:
        """Seconds of all measured phases."""
        return sum(self.seconds.values())


def tiles(run: RunRecord) -> list[Tile]:
    """The outcome of a run."""
    metrics = run.metrics
    found = [_change(run, "Held-out loss", "eval_loss"), _change(run, "Training loss", "loss")]
    for accuracy, margins in (("eval_rewards/accuracies", "eval_rewards/margins"), ("eval_accuracy", "eval_margin")):
        if (right := metrics.last(accuracy)) is not None:
            margin = metrics.last(margins)
            found.append(Tile("Held-out pairs ranked right", percent(right), f"chance 50 %; margin {number(margin)}"))
    if (tokens := metrics.last("tokens")) is not None:
        found.append(Tile("Tokens", f"{int(tokens):,}", _counted_steps(run)))
    if speed(run) is not None:
        found.append(Tile("Speed", f"{number(speed(run))} tokens/s", "median of the logged lines"))
    if seconds_of(run) is not None:
        devices = f", {run.processes} devices" if run.processes > 1 else ""
        note = f"{duration(cost_s(run))} per million tokens{devices}" if cost_s(run) is not None else ""
        found.append(Tile("Duration", duration(seconds_of(run)), note))
    if (mfu := metrics.points("mfu")[1]).size:
        found.append(Tile("MFU", percent(float(np.median(mfu))), "median; model FLOPs of the peak"))
    memory = metrics.points("memory_bytes")[1]
    if memory.size:
        padding = metrics.points("padding_fraction")[1]
        found.append(
            Tile("Memory", size(float(memory.max())), f"most of rank 0; {percent(float(padding.mean()))} padding")
        )
    return [one for one in found if one is not None]


def telling(lines: Sequence[str]) -> list[str]:
    """Of what packtrain doctor says of a run the part to show first: a diagnosis up to its advice, or the error at the end of a log."""
    if advice := [number for number, line in enumerate(lines) if line.startswith("  → ")]:
        return [*lines[: advice[0] + 1]]
    plain = [line.strip() for line in lines]
    errors = [
        number for number, line in enumerate(plain) if line == "error:" or re.fullmatch(r"error: \d+ problems", line)
    ]
    if errors:
        error = textwrap.dedent("\n".join(lines[errors[-1] + 1 :])).splitlines()
        return [lines[0].split("; the end of ")[0], *error]
    return [*lines] if len(lines) <= _TELLING_LINES else [lines[0], "    …", *lines[-_TELLING_LINES:]]


def seconds_of(run: RunRecord) -> float | None:
    """How long the run has trained, evaluations included; of a run without that, how long its last process took."""
    known = run.metrics.last("seconds")
    if known is None and isinstance(run.summary.get("seconds"), (int, float)):
        return float(run.summary["seconds"])
    return known


def cost_s(run: RunRecord) -> float | None:
    """What a million tokens costs: seconds of the whole run."""
    tokens, seconds = run.metrics.last("tokens"), seconds_of(run)
    return 1e6 * seconds / tokens if tokens and seconds is not None else None


def speed(run: RunRecord) -> float | None:
    """Tokens per second of all devices, the median of the logged lines."""
    speeds = run.metrics.points("tokens_per_second")[1]
    return float(np.median(speeds)) if len(speeds) else None


def _change(run: RunRecord, label: str, key: str) -> Tile | None:
    lines, values = run.metrics.points(key)
    if not len(values):
        return None
    first, last, at = float(values[0]), float(values[-1]), int(np.argmin(values))
    note = f"lowest {number(float(values[at]))} at step {run.metrics.steps[lines[at]]:,}"
    return Tile(label, f"{number(first)} → {number(last)}" if len(values) > 1 else number(first), note)


def _counted_steps(run: RunRecord) -> str:
    steps = int(run.metrics.steps[-1])
    said = [counted(steps, "steps")]
    planned = run.batch.get("steps")
    if run.status != "done" and isinstance(planned, int):
        said = [f"{steps:,} of {planned:,} steps"]
    if (epoch := run.metrics.last("epoch")) is not None:
        said.append(f"{epoch:.3g} epochs")
    return ", ".join(said)


def rank_times(run: RunRecord) -> list[RankTime]:
    """The times of the ranks by summary.json, of many those of the MOST_RANKS slowest, [] of a run of one process and of one that has not ended."""
    times = run.summary.get("rank_seconds")
    if not isinstance(times, Mapping) or not times or not all(_are_numbers(one) for one in times.values()):
        return []
    ranks = range(min(map(len, times.values())))
    own = [sum(float(times.get(phase, [0] * len(ranks))[rank]) for phase in ("forward", "data")) for rank in ranks]
    usual = statistics.median_low(own) if own else 0.0
    shown = ranks if len(ranks) <= MOST_RANKS else sorted(sorted(ranks, key=lambda rank: -own[rank])[:MOST_RANKS])
    return [
        RankTime(rank, {phase: float(one[rank]) for phase, one in times.items()}, own[rank] > SLOW * usual > 0)
        for rank in shown
    ]


def _are_numbers(values: Any) -> bool:
    return isinstance(values, Sequence) and all(isinstance(one, (int, float)) and math.isfinite(one) for one in values)
