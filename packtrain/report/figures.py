"""Figures of a report: curves, headline figures, times of ranks, comparisons of runs.

Runs are compared by their differing config keys and by their answers to the same prompts.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np

from packtrain import wording
from packtrain.inspect.rendering import percent
from packtrain.objectives.spec import Examples
from packtrain.report.run_record import Json, Metrics, RunRecord, harmless
from packtrain.run_folder import losses_of_sets

SLOW = 1.2
"""A rank is slow if its forward passes and data loading take more than this many times the median."""
_TELLING_LINES = 8
_NONE = "–"
_IS_PICTURE = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/=]+").fullmatch
POINTS_OF_A_CURVE = 2000
POINTS_OF_A_PAGE = 60_000
"""Upper limits; a point takes about 15 bytes of the page."""
HELD_OUT = "eval_"
OF_SOURCES = "source_tokens/"
X_AXES = {"step": "Step", "tokens": "Tokens", "seconds": "Time"}
PHASES = {"forward": "Forward", "backward": "Backward", "data": "Loading data", "counts": "Waiting for others"}
_NOT_DRAWN = {
    *("epoch", "tokens", "examples", "seconds", "slowest_rank", "eval_tokens"),
    *(f"eval_{examples}" for examples in get_args(Examples)),
}


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
    if run.summary.get("best_value") is not None:
        shown.append(Tile("Weights", f"of step {run.summary.get('best_step')}", str(run.summary.get("best_by"))))
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


Prompt = tuple[str, tuple[str, ...]]
"""Text of a prompt, and its pictures as data URLs."""


def answers(runs: Sequence[RunRecord]) -> dict[Prompt, list[Json]]:
    """Return each run's answers by prompt, in the order of the first run. An answer has `before` and `after`, or is {} for a missing prompt."""
    lists = [asked if isinstance(asked := run.summary.get("answers"), list) else [] for run in runs]
    by_run = [{_prompt_of(entry): entry for entry in asked if isinstance(entry, Mapping)} for asked in lists]
    prompts = dict.fromkeys(prompt for by_prompt in by_run for prompt in by_prompt)
    return {prompt: [by_prompt.get(prompt, {}) for by_prompt in by_run] for prompt in prompts}


def _prompt_of(entry: Mapping[str, object]) -> Prompt:
    pictures = entry.get("pictures")
    shown = filter(_IS_PICTURE, map(str, pictures if isinstance(pictures, list) else []))
    return str(entry.get("prompt")), tuple(shown)


@dataclass(frozen=True, slots=True)
class Drawing:
    """One drawing: the keys of metrics.jsonl in it, each with its label. `kind` is number, percent, gib or seconds. Only `noisy` figures
    may be smoothed."""

    title: str
    keys: dict[str, str]
    group: str
    kind: str = "number"
    noisy: bool = True


def _phase(name: str, title: str) -> Drawing:
    words = {"max": "slowest", "median": "median", "min": "fastest"}
    keys = {f"{'wait' if name == 'counts' else name}_seconds/{part}": word for part, word in words.items()}
    return Drawing(title, keys, "Seconds of a step, over ranks", "seconds")


_LOSS = Drawing("Loss", {"loss": "training"}, "Learning")
_OTHERS = (
    Drawing("Learning rate", {"lr": "Learning rate"}, "Optimizer", noisy=False),
    Drawing("Gradient norm", {"grad_norm": "before clipping"}, "Optimizer"),
    Drawing("Updates that the model sees", {"updates_seen": "share"}, "Optimizer", "percent"),
    Drawing("Tokens per second", {"tokens_per_second": "of all devices"}, "Speed"),
    Drawing("Model FLOPs utilisation", {"mfu": "of the peak"}, "Speed", "percent"),
    Drawing("Padding", {"padding_fraction": "share of slots"}, "Speed", "percent"),
    Drawing("Waiting for data", {"data_fraction": "share of the time"}, "Speed", "percent"),
    Drawing("Memory", {"memory_bytes": "of rank 0"}, "Speed", "gib"),
    *(_phase(name, title) for name, title in PHASES.items()),
)


class Curve(NamedTuple):
    """Key of a run in a figure. `base` is its number in the figure; a `held_out` key has the number of its training key."""

    run: int
    key: str
    label: str
    base: int
    held_out: bool


def figures_of(runs: Sequence[RunRecord]) -> list[tuple[Drawing, list[Curve]]]:
    """Return the figures with numbers from any of the runs, and their curves. Keys unknown to packtrain come last."""
    drawings = [_LOSS, *_of_objectives(runs), *_OTHERS]
    known = {key for drawing in drawings for key in drawing.keys} | _NOT_DRAWN
    keys = dict.fromkeys(key for run in runs for key in run.metrics.columns if key not in known)
    # the held-out curve of a key is in that key's figure
    held_out = {key for key in keys if key.startswith(HELD_OUT) and key.removeprefix(HELD_OUT) in known | {*keys}}
    by_source = {key: key.removeprefix(OF_SOURCES) for key in keys if key.startswith(OF_SOURCES)}
    keys = {key: None for key in keys if not key.startswith(("source_examples/", OF_SOURCES))}
    of_data = Drawing("Tokens of each source", by_source, "Data", noisy=False)
    by_set: dict[str, dict[str, str]] = {}
    for name in sorted(losses_of_sets(dict.fromkeys(keys)), key=len, reverse=True):
        for key in [key for key in keys if key.startswith(f"{HELD_OUT}{name}_")]:
            del keys[key]
            by_set.setdefault(key.removeprefix(f"{HELD_OUT}{name}_"), {})[key] = name
    units = {figure.name: figure.unit for run in runs for figure in run.figures}
    of_sets = [
        Drawing(key, names, "Held-out sets", units.get(key, "number"), noisy=False)
        for key, names in by_set.items()
        if key in units or HELD_OUT + key not in _NOT_DRAWN
    ]
    drawings += [*of_sets, of_data, *(Drawing(key, {key: key}, "More") for key in keys if key not in held_out)]
    return [(drawing, curves) for drawing in drawings if (curves := list(_curves(drawing, runs)))]


def _of_objectives(runs: Sequence[RunRecord]) -> list[Drawing]:
    """Return a drawing for each title of the objectives' figures."""
    by_title: dict[str, Drawing] = {}
    for figure in (figure for run in runs for figure in run.figures):
        title = figure.title or figure.name
        drawing = by_title.setdefault(title, Drawing(title, {}, "Objective", figure.unit))
        drawing.keys.setdefault(figure.name, figure.label or title)
    return [*by_title.values()]


def _curves(drawing: Drawing, runs: Sequence[RunRecord]) -> Iterator[Curve]:
    for number, run in enumerate(runs):
        for base, (key, label) in enumerate(drawing.keys.items()):
            for prefix in ("", HELD_OUT):
                if len(run.metrics.points(prefix + key)[0]):
                    held_out = "held out" if len(drawing.keys) == 1 else f"{label}, held out"
                    yield Curve(number, prefix + key, held_out if prefix else label, base, bool(prefix))


def points_of(runs: Sequence[RunRecord]) -> Json:
    """Return all points of the page in plain containers, for page.js. {"runs": [name], "xs": [{axis: [x]}], "figures": [{"curves": …}]}

    A curve has its `y`, and the number of its x values in `xs`. Long curves are thinned (`thin`).
    """
    figures = figures_of(runs)
    most = max(min(POINTS_OF_A_CURVE, POINTS_OF_A_PAGE // max(sum(len(curves) for _, curves in figures), 1)), 100)
    axes = [_places(run.metrics) for run in runs]
    numbers: dict[tuple[int, bytes], int] = {}
    places: list[dict[str, list[float]]] = []

    def points(curve: Curve, scale: float) -> Json:
        lines, values = runs[curve.run].metrics.points(curve.key)
        kept = thin(values, most)
        at = numbers.setdefault((curve.run, lines[kept].tobytes()), len(numbers))
        if at == len(places):
            places.append({name: _shorten(column[lines[kept]]) for name, column in axes[curve.run].items()})
        label = {"run": curve.run, "label": harmless(curve.label), "base": curve.base, "heldOut": curve.held_out}
        return {**label, "x": at, "y": _shorten(values[kept] * scale)}

    plain = [
        {
            "title": harmless(figure.title),
            "kind": figure.kind,
            "group": figure.group,
            "noisy": figure.noisy,
            "curves": [points(curve, 1 / 2**30 if figure.kind == "gib" else 1.0) for curve in curves],
        }
        for figure, curves in figures
    ]
    known = {name: title for name, title in X_AXES.items() if all(name in axis for axis in axes)}
    return {"runs": [run.name for run in runs], "axes": known, "xs": places, "figures": plain}


def _places(metrics: Metrics) -> dict[str, np.ndarray]:
    """Return each line's place on every axis: float64 [lines]. Lines without tokens or seconds are interpolated."""
    places = {"step": metrics.steps.astype(np.float64)}
    for name in ("tokens", "seconds"):
        lines, values = metrics.points(name)
        if len(lines):
            places[name] = np.interp(places["step"], places["step"][lines], values, left=0.0)
            places[name][lines] = values
    return places


def _shorten(values: np.ndarray) -> list[float]:
    """Round numbers to seven digits, as many as float32 has."""
    return [int(x) if x == int(x) and abs(x) < 1e15 else float(f"{x:.7g}") for x in values.tolist()]


def thin(values: np.ndarray, most: int) -> np.ndarray:
    """Choose the points to draw from `values` (finite, float64 [points]): int64 [≤ most], in order.

    Cut the curve into `most` / 2 - 1 parts; keep the lowest and the highest point of each, and the curve's two ends. Peaks
    keep their exact value and place.
    """
    if len(values) <= most:
        return np.arange(len(values))
    inner = values[1:-1]
    width = -(-len(inner) // max(most // 2 - 1, 1))
    parts = np.pad(inner, (0, -len(inner) % width), mode="edge").reshape(-1, width)
    starts = 1 + width * np.arange(len(parts))
    return np.unique(np.concatenate([[0], starts + parts.argmin(1), starts + parts.argmax(1), [len(values) - 1]]))
