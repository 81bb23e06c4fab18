"""What a reader wants to know first: the outcome of a run in a few figures, where the time of its ranks went, and several runs
beside each other (what differs in their configs, their answers to the same prompts)."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packtrain import wording
from packtrain.report.run_record import RunRecord

SLOW = 1.2
"""A rank is slow whose forward passes and loading of data take so many times the median, as train/sync/rank_times.py has it."""
MOST_RANKS = 64
_TELLING_LINES = 8
_NONE = "–"


def number(value: float | None) -> str:
    """Four significant digits: 7.580, 0.1720, 15,568, 3.0e-05; "–" for none."""
    if value is None or not math.isfinite(value):
        return _NONE
    size = abs(value)
    if value == int(value) and size < 1e15:
        return f"{int(value):,}"
    if size < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(size)))}f}"


def percent(share: float | None) -> str:
    """0.4167 as 41.7 %, 0.0000123 as 0.0012 %."""
    if share is None or not math.isfinite(share):
        return _NONE
    return f"{100 * share:.1f} %" if share == 0 or abs(share) >= 0.0005 else f"{100 * share:.2g} %"


def duration(seconds: float | None) -> str:
    """1.8 ms, 0.82 s, 61 s, 4 min 05 s, 3 h 20 min, 2 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return _NONE
    if 0 < seconds < 0.1:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 10:
        return f"{seconds:.2g} s"
    if (whole := round(seconds)) < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02} s"
    if (minutes := round(seconds / 60)) < 2880:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


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
    shown = [*_change(run, "Held-out loss", "eval_loss"), *_change(run, "Training loss", "loss")]
    for accuracy, margins in (("eval_rewards/accuracies", "eval_rewards/margins"), ("eval_accuracy", "eval_margin")):
        if (right := metrics.last(accuracy)) is not None:
            note = f"chance 50 %; margin {number(metrics.last(margins))}"
            shown.append(Tile("Held-out pairs ranked right", percent(right), note))
    if (tokens := metrics.last("tokens")) is not None:
        steps, planned, epoch = int(metrics.steps[-1]), run.batch.get("steps"), metrics.last("epoch")
        partial = run.status != "done" and isinstance(planned, int)
        words = f"{steps:,} of {planned:,} steps" if partial else wording.counted(steps, "steps")
        note = words if epoch is None else f"{words}, {epoch:.3g} epochs"
        shown.append(Tile("Tokens", f"{int(tokens):,}", note))
    if speed(run) is not None:
        shown.append(Tile("Speed", f"{number(speed(run))} tokens/s", "median of the logged lines"))
    if seconds_of(run) is not None:
        devices = f", {run.processes} devices" if run.processes > 1 else ""
        note = f"{duration(cost_s(run))} per million tokens{devices}" if cost_s(run) is not None else ""
        shown.append(Tile("Duration", duration(seconds_of(run)), note))
    if (mfu := metrics.points("mfu")[1]).size:
        shown.append(Tile("MFU", percent(float(np.median(mfu))), "median; model FLOPs of the peak"))
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
    """What to show first of what packtrain doctor says: a diagnosis up to its advice, or the error at the end of a log."""
    if advice := [at for at, line in enumerate(lines) if line.startswith("  → ")]:
        return [*lines[: advice[0] + 1]]
    if errors := [at for at, line in enumerate(lines) if re.fullmatch(r"\s*error:( \d+ problems)?\s*", line)]:
        error = textwrap.dedent("\n".join(lines[errors[-1] + 1 :])).splitlines()
        return [lines[0].split("; the end of ")[0], *error]
    return [*lines] if len(lines) <= _TELLING_LINES else [lines[0], "    …", *lines[-_TELLING_LINES:]]


def seconds_of(run: RunRecord) -> float | None:
    """How long the run has trained, evaluations included; of a run without that, how long its last process took."""
    known, whole = run.metrics.last("seconds"), run.summary.get("seconds")
    return float(whole) if known is None and isinstance(whole, (int, float)) else known


def cost_s(run: RunRecord) -> float | None:
    """What a million tokens costs: seconds of the whole run."""
    tokens, seconds = run.metrics.last("tokens"), seconds_of(run)
    return 1e6 * seconds / tokens if tokens and seconds is not None else None


def speed(run: RunRecord) -> float | None:
    """Tokens per second of all devices, the median of the logged lines."""
    speeds = run.metrics.points("tokens_per_second")[1]
    return float(np.median(speeds)) if len(speeds) else None


def rank_times(run: RunRecord) -> list[RankTime]:
    """The times of the ranks by summary.json (of many, the MOST_RANKS slowest); [] of a run of one process or one that has not ended."""
    times = run.summary.get("rank_seconds")
    if not isinstance(times, Mapping) or not times or not all(map(_are_numbers, times.values())):
        return []
    ranks = range(min(map(len, times.values())))
    own = [sum(float(times[phase][rank]) for phase in ("forward", "data") if phase in times) for rank in ranks]
    usual = statistics.median_low(own) if own else 0.0
    return [
        RankTime(rank, {phase: float(seconds[rank]) for phase, seconds in times.items()}, own[rank] > SLOW * usual > 0)
        for rank in sorted(sorted(ranks, key=lambda rank: -own[rank])[:MOST_RANKS])
    ]


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(one, (int, float)) and math.isfinite(one) for one in values)


def differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """The config keys that do not have one value in all runs, with the value of each, except the run folder's own name."""
    configs = [{setting.key: setting.value for setting in run.settings} for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if key != "trainer.output_dir")
    rows = [(key, [config.get(key, _NONE) for config in configs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


@dataclass(frozen=True, slots=True)
class Answers:
    """A prompt, the untrained model's answers and those after training, by run; None where a run was not asked it."""

    prompt: str
    before: Sequence[str | None]
    after: Sequence[str | None]

    @property
    def same_before(self) -> bool:
        """Whether all runs that were asked began with the same answer."""
        return len({answer for answer in self.before if answer is not None}) < 2


def answers(runs: Sequence[RunRecord]) -> list[Answers]:
    """Every prompt that a run was asked, in the order of the first one."""
    entries = [asked if isinstance(asked := run.summary.get("answers"), list) else [] for run in runs]
    by_run = [{str(entry.get("prompt")): entry for entry in one if isinstance(entry, Mapping)} for one in entries]
    prompts = dict.fromkeys(prompt for by_prompt in by_run for prompt in by_prompt)

    def given(prompt: str, when: str) -> list[str | None]:
        found = [by_prompt.get(prompt, {}) for by_prompt in by_run]
        return [str(entry[when]) if when in entry else None for entry in found]

    return [Answers(prompt, given(prompt, "before"), given(prompt, "after")) for prompt in prompts]


def distinct_names(places: Sequence[Path]) -> list[str]:
    """A name for each folder: its own, with as many of its parents as it takes to tell it from the others."""
    parts = [place.resolve().parts for place in places]
    names = [part[-1] for part in parts]
    for depth in range(2, max(map(len, parts)) + 1):
        twice = {name for name in names if names.count(name) > 1}
        names = ["/".join(part[-depth:]) if name in twice else name for part, name in zip(parts, names, strict=True)]
    return names
