"""`packtrain report --watch`: the curves of a run as text in the terminal, drawn anew while it goes on.

It only reads the run folder, so it works from another terminal, or another machine that sees the folder. plotille draws the dots.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import plotille
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from packtrain.report.figures import HELD_OUT, thin
from packtrain.report.run_record import Metrics, RunRecord, read_run
from packtrain.run_folder import RunFolder

EVERY_S = 2.0
_BUSY = 5
"""The share of the time that reading may take is one in so many: a run of a million lines is read less often."""
_AXIS, _GAP = 9, 2
_TWO_BESIDE, _LOW, _HIGH = 80, 4, 12
_TITLES = {
    "loss": "loss",
    "rewards/margins": "reward margin",
    "margin": "score margin",
    "lr": "learning rate",
    "tokens_per_second": "tokens a second",
    "grad_norm": "gradient norm",
}
_MOST_DRAWINGS = 4


def watch(place: str) -> int:
    """Draws the run in a folder until it ends, once where stdout is no terminal. Raises UserError where there is no run."""
    console, folder = Console(highlight=False), RunFolder(Path(os.path.expanduser(place)))
    run = read_run(folder)
    if not console.is_terminal:
        console.print(picture(run, console.width))
        return 0
    pause_s = EVERY_S
    first = picture(run, console.width, console.height)
    with Live(first, console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while run.status in ("running", "stalled"):
            time.sleep(pause_s)
            started = time.monotonic()
            run = read_run(folder)
            pause_s = max(EVERY_S, _BUSY * (time.monotonic() - started))
            live.update(picture(run, console.width, console.height), refresh=True)
    return 0


def picture(run: RunRecord, width: int, height: int = 100) -> RenderableType:
    """What the run is at, and its curves, in a terminal of `width` cells and `height` lines."""
    across = 2 if width >= _TWO_BESIDE else 1
    columns = run.metrics.columns
    known = [key for key in _TITLES if {key, HELD_OUT + key} & {*columns}][:_MOST_DRAWINGS]
    dots = (height - 3) // max(-(-len(known) // across), 1) - 2
    curves = [_draw(key, run.metrics, width // across - _GAP, min(max(dots, _LOW), _HIGH)) for key in known]
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    for at in range(0, len(curves), across):
        grid.add_row(*curves[at : at + across])
    waiting = [] if curves else ["no line in metrics.jsonl yet"]
    return Group(_head(run), *(Text(f"  {line}", "yellow") for line in [*run.why[:2], *waiting]), grid)


def _head(run: RunRecord) -> Text:
    """One line: name, status, steps, tokens, the last figures."""
    metrics, steps = run.metrics, run.batch.get("steps")
    head = Text(run.name, "bold", no_wrap=True, overflow="ellipsis").append(f" {run.status}", "green")
    if len(metrics.steps):
        head.append(f"  step {metrics.steps[-1]:,}" + (f" of {steps:,}" if isinstance(steps, int) else ""), "not bold")
    if (tokens := metrics.last("tokens")) is not None:
        head.append(f", {tokens:,.0f} tokens", "not bold")
    return head


def _draw(key: str, metrics: Metrics, width: int, height: int) -> Text:
    """A title with the last value, dots with the largest and smallest value beside them, the first and last step below."""
    text, curves = Text(no_wrap=True, overflow="crop").append(f"{_TITLES[key]} ", "bold"), []
    for prefix, name, colour in (("", "", "cyan"), (HELD_OUT, "held out ", "yellow")):
        lines, values = metrics.points(prefix + key)
        if len(lines):
            text.append(f"{', ' if curves else ''}{name}{values[-1]:.4g}", colour)
            curves.append((metrics.steps[lines].astype(float), values, colour))
    if not curves:
        return text
    steps, values = (np.concatenate(parts) for parts in list(zip(*curves, strict=True))[:2])
    first, last, low, high = (float(end) for end in (steps.min(), steps.max(), values.min(), values.max()))
    margin = (high - low) / 20 or abs(high) / 20 or 1.0
    cells = max(width - _AXIS, 8)
    bounds: dict[str, Any] = {"xmin": first, "xmax": max(last, first + 1), "ymin": low - margin, "ymax": high + margin}
    canvas = plotille.Canvas(cells, height, **bounds)
    for steps, values, colour in curves:
        kept = thin(values, 4 * cells)
        xs, ys = steps[kept].tolist(), values[kept].tolist()
        canvas.point(xs[0], ys[0], color=colour)
        for at in range(1, len(xs)):
            canvas.line(xs[at - 1], ys[at - 1], xs[at], ys[at], color=colour)
    rows = canvas.plot().split("\n")
    labels = {0: f"{high:.3g}", len(rows) - 1: f"{low:.3g}"}
    for number, row in enumerate(rows):
        text.append(f"\n{labels.get(number, ''):>{_AXIS - 1}} ", "dim").append_text(Text.from_ansi(row))
    ends = f"{first:,.0f}", f"{last:,.0f}"
    return text.append(f"\n{'':{_AXIS}}{ends[0]}{ends[1]:>{max(cells - len(ends[0]), 0)}}", "dim")
