"""`packtrain report --watch`: the curves of a run as text in the terminal, drawn anew while it goes on.

It only reads the run folder, so it works from another terminal, or another machine that sees the folder. plotille draws the dots.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

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
_COLOURS = {"running": "green", "done": "bold green", "stalled": "bold yellow", "stopped": "yellow"}


class Drawing(NamedTuple):
    """A picture of a key of metrics.jsonl and its held-out one; `form` writes a value."""

    title: str
    key: str
    colour: str
    form: str = ".4g"


_DRAWINGS = (
    Drawing("loss", "loss", "cyan"),
    Drawing("reward margin", "rewards/margins", "cyan"),
    Drawing("score margin", "margin", "cyan"),
    Drawing("learning rate", "lr", "magenta", ".2e"),
    Drawing("tokens a second", "tokens_per_second", "green", ",.0f"),
    Drawing("gradient norm", "grad_norm", "blue"),
)
_MOST_DRAWINGS = 4


def watch(folder: RunFolder) -> int:
    """Draws the run until it ends, once where stdout is no terminal. Returns 0; raises UserError where there is no run."""
    console = Console(highlight=False)
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
    known = [drawing for drawing in _DRAWINGS if {drawing.key, HELD_OUT + drawing.key} & {*columns}][:_MOST_DRAWINGS]
    dots = (height - 3) // max(-(-len(known) // across), 1) - 2
    curves = [_draw(drawing, run.metrics, width // across - _GAP, min(max(dots, _LOW), _HIGH)) for drawing in known]
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    for at in range(0, len(curves), across):
        grid.add_row(*curves[at : at + across])
    why = [Text(f"  {line}", "yellow") for line in run.why[:2]]
    waiting = [] if curves else [Text("no line in metrics.jsonl yet", "dim")]
    return Group(_head(run), *why, *waiting, grid)


def _head(run: RunRecord) -> Text:
    """One line: name, status, steps, tokens, the last figures."""
    metrics, steps = run.metrics, run.batch.get("steps")
    parts = []
    if len(metrics.steps):
        whole = f" of {steps:,}" if isinstance(steps, int) else ""
        parts.append(f"step {metrics.steps[-1]:,}{whole}")
    for key, form in (("tokens", "{:,.0f} tokens"), ("padding_fraction", "{:.1%} padding"), ("mfu", "{:.1%} MFU")):
        if (value := metrics.last(key)) is not None:
            parts.append(form.format(value))
    head = Text(run.name, "bold", no_wrap=True, overflow="ellipsis")
    head.append(" ").append(run.status, _COLOURS.get(run.status, "bold red"))
    return head.append(f"  {', '.join(parts)}" if parts else "", "not bold")


def _draw(drawing: Drawing, metrics: Metrics, width: int, height: int) -> Text:
    """A title with the last value, dots with the largest and smallest value beside them, the first and last step below."""
    text, curves = Text(no_wrap=True, overflow="crop").append(f"{drawing.title} ", "bold"), []
    for prefix, name, colour in (("", "", drawing.colour), (HELD_OUT, "held out ", "yellow")):
        lines, values = metrics.points(prefix + drawing.key)
        if len(lines):
            text.append(f"{', ' if curves else ''}{name}{_write(values[-1], drawing.form)}", colour)
            curves.append((metrics.steps[lines].astype(float), values, colour))
    if not curves:
        return text
    first, last = (float(end(np.concatenate([steps for steps, _, _ in curves]))) for end in (np.min, np.max))
    low, high = (float(end(np.concatenate([values for _, values, _ in curves]))) for end in (np.min, np.max))
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
    labels = {0: _write(high, drawing.form), len(rows) - 1: _write(low, drawing.form)}
    for number, row in enumerate(rows):
        text.append(f"\n{labels.get(number, ''):>{_AXIS - 1}} ", "dim").append_text(Text.from_ansi(row))
    ends = f"{first:,.0f}", f"{last:,.0f}"
    return text.append(f"\n{'':{_AXIS}}{ends[0]}{ends[1]:>{max(cells - len(ends[0]), 0)}}", "dim")


def _write(value: float, form: str) -> str:
    """A value as it fits beside a curve."""
    text = format(value, form)
    return text if len(text) < _AXIS else f"{value:.2g}"
