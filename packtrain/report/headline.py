"""Headline figures of a report, the time of its ranks, and comparisons of runs.

(Runs are compared by their differing config keys and by their answers to the same prompts.)"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from packtrain import wording
from packtrain.inspect.rendering import percent
from packtrain.report.run_record import Json, RunRecord
from packtrain.run_folder import losses_of_sets

SLOW = 1.2
"""A rank is slow if its forward passes and data loading take more than this many times the median."""
_TELLING_LINES = 8
_NONE = "–"


def number(value: float | None) -> str:
    """Format four significant digits: 7.580, 0.1720, 15,568, 3.0e-05; "–" for none."""
    if value is None or not math.isfinite(value):
        return _NONE
    size = abs(value)
    if value == int(value) and size < 1e15:
        return f"{int(value):,}"
    if size < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(size)))}f}"


def duration(seconds: float | None) -> str:
    """Format a duration. Examples: 1.8 ms, 0.823 s, 61.2 s, 4 min 05 s, 3 h 20 min."""
    if seconds is None or not math.isfinite(seconds):
        return _NONE
    if seconds < 119.5:
        return f"{1000 * seconds:.2g} ms" if 0 < seconds < 0.1 else f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


class Tile(NamedTuple):
    """Figure with a label and a remark."""

    label: str
    value: str
    note: str = ""


class RankTime(NamedTuple):
    """Mean seconds of a step in each phase of a rank."""

    rank: int
    seconds: Mapping[str, float]
    slow: bool


def tiles(run: RunRecord) -> list[Tile]:
    """Return the tiles with the outcome of a run."""
    metrics = run.metrics
    shown = [*_change(run, "Held-out loss", "eval_loss"), *_change(run, "Training loss", "loss")]
    for name in losses_of_sets(metrics.columns):
        shown += _change(run, f"Held-out loss of {name}", f"eval_{name}_loss")
    for figure in {figure.name: figure for figure in run.figures if figure.headline}.values():
        if (last := metrics.last(f"eval_{figure.name}")) is not None:
            value = percent(last) if figure.unit == "percent" else number(last)
            shown.append(Tile(f"Held-out {figure.words}", value, figure.note))
    if (tokens := metrics.last("tokens")) is not None:
        steps, planned, epoch = int(metrics.steps[-1]), run.batch.get("steps"), metrics.last("epoch")
        partial = run.status != "done" and isinstance(planned, int)
        words = f"{steps:,} of {planned:,} steps" if partial else wording.counted(steps, "steps")
        note = words if epoch is None else f"{words}, {epoch:.3g} epochs"
        shown.append(Tile("Tokens", f"{int(tokens):,}", note))
    if (speed := median(run, "tokens_per_second")) is not None:
        shown.append(Tile("Speed", f"{number(speed)} tokens/s", "median of the logged lines"))
    if (seconds := seconds_of(run)) is not None:
        devices = f", {run.processes} devices" if run.processes > 1 else ""
        note = f"{duration(cost_s(run))} per million tokens{devices}" if cost_s(run) is not None else ""
        shown.append(Tile("Duration", duration(seconds), note))
    if (mfu := median(run, "mfu")) is not None:
        shown.append(Tile("MFU", percent(mfu), "median; model FLOPs of the peak"))
    if (memory := metrics.points("memory_bytes")[1]).size:
        padding = percent(float(metrics.points("padding_fraction")[1].mean()))
        shown.append(Tile("Memory", wording.size(float(memory.max())), f"most of rank 0; {padding} padding"))
    return shown


def _change(run: RunRecord, label: str, key: str) -> list[Tile]:
    lines, values = run.metrics.points(key)
    if not len(values):
        return []
    lowest, first, last = int(np.argmin(values)), number(float(values[0])), number(float(values[-1]))
    note = f"lowest {number(float(values[lowest]))} at step {run.metrics.steps[lines[lowest]]:,}"
    return [Tile(label, f"{first} → {last}" if len(values) > 1 else first, note)]


def telling(lines: Sequence[str]) -> list[str]:
    """Return the most telling lines of packtrain doctor. A diagnosis up to its advice, or the end of a log."""
    if advice := [at for at, line in enumerate(lines) if line.startswith("  → ")]:
        return [*lines[: advice[0] + 1]]
    return [*lines] if len(lines) <= _TELLING_LINES else [lines[0], "    …", *lines[-_TELLING_LINES:]]


def median(run: RunRecord, key: str) -> float | None:
    """Return the median of the logged lines."""
    values = run.metrics.points(key)[1]
    return float(np.median(values)) if len(values) else None


def seconds_of(run: RunRecord) -> float | None:
    """Return the seconds of training, evaluations included. If they were not logged, return the time of the last process."""
    known, whole = run.metrics.last("seconds"), run.summary.get("seconds")
    return float(whole) if known is None and isinstance(whole, (int, float)) else known


def cost_s(run: RunRecord) -> float | None:
    """Return the seconds of the whole run per million tokens."""
    tokens, seconds = run.metrics.last("tokens"), seconds_of(run)
    return 1e6 * seconds / tokens if tokens and seconds is not None else None


def rank_times(run: RunRecord) -> list[RankTime]:
    """Return the times of the ranks from summary.json, or []. One process or an unfinished run has none."""
    times = run.summary.get("rank_seconds") or {}
    try:
        columns = zip(*times.values(), strict=True)
        by_rank = [{phase: float(value) for phase, value in zip(times, column, strict=True)} for column in columns]
    except (AttributeError, TypeError, ValueError):  # none, or edited by hand
        return []
    own = [sum(seconds.get(phase, 0.0) for phase in ("forward", "data")) for seconds in by_rank]
    usual = statistics.median_low(own) if own else 0.0
    return [RankTime(rank, seconds, own[rank] > SLOW * usual > 0) for rank, seconds in enumerate(by_rank)]


def compare_settings(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the config keys that differ between runs, with each run's value. Skips the run folder's own name."""
    names = dict.fromkeys(key for run in runs for key in run.settings if key != "trainer.output_dir")
    rows = [(key, [run.settings.get(key, (_NONE,))[0] for run in runs]) for key in names]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def answers(runs: Sequence[RunRecord]) -> dict[str, list[Json]]:
    """Return each run's answers by prompt, in the order of the first run. An answer has `before` and `after`, or is {} for a missing prompt."""
    lists = [asked if isinstance(asked := run.summary.get("answers"), list) else [] for run in runs]
    by_run = [{str(entry.get("prompt")): entry for entry in asked if isinstance(entry, Mapping)} for asked in lists]
    prompts = dict.fromkeys(prompt for by_prompt in by_run for prompt in by_prompt)
    return {prompt: [by_prompt.get(prompt, {}) for by_prompt in by_run] for prompt in prompts}
