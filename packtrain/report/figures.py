"""Curves of a report, and their points as the page draws them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np

from packtrain.objectives.spec import Examples
from packtrain.report.run_record import Json, Metrics, RunRecord, harmless
from packtrain.run_folder import losses_of_sets

POINTS_OF_A_CURVE = 2000
POINTS_OF_A_PAGE = 60_000
"""Upper limits; a point takes about 15 bytes of the page."""
HELD_OUT = "eval_"
OF_SOURCES = "source_tokens/"
X_AXES = {"step": "Step", "tokens": "Tokens", "seconds": "Time"}
PHASES = {"forward": "Forward", "backward": "Backward", "data": "Loading data", "counts": "Waiting for others"}
_NOT_DRAWN = {"epoch", "tokens", "examples", "seconds", "slowest_rank", "eval_tokens"}
_NOT_DRAWN |= {f"eval_{examples}" for examples in get_args(Examples)}


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
    of_sets = [
        Drawing(key, names, "Held-out sets", noisy=False)
        for key, names in by_set.items()
        if HELD_OUT + key not in _NOT_DRAWN
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
