"""`packtrain report --watch`: the curves of a run as text in the terminal, drawn anew while it goes on.

It only reads the run folder, so it works from another terminal, or another machine that sees the folder. plotille draws the dots.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotille
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from packtrain.report.figures import HELD_OUT, thinned
from packtrain.report.metrics_file import Metrics
from packtrain.report.run_record import RunRecord, read_run
from packtrain.run_folder import RunFolder

EVERY_S = 2.0
_BUSY = 5
"""The share of the time that reading may take is one in so many: a run of a million lines is read less often."""
_GOING_ON = ("running", "stalled")
_AXIS, _GAP = 9, 2
_MOST = 1e150
"""Of what is drawn: beyond, differences are no numbers any more."""
_TWO_BESIDE, _LOW, _HIGH = 80, 4, 12
_COLOURS = {"running": "green", "done": "bold green", "stalled": "bold yellow", "stopped": "yellow"}


@dataclass(frozen=True, slots=True)
class Drawing:
    """The curves in one picture: a key of metrics.jsonl with its colour, and its held-out one; `form` writes a value."""

    title: str
    key: str
    colour: str
    form: str = ".4g"

    @property
    def curves(self) -> list[tuple[str, str, str]]:
        """Key, name and colour of each."""
        return [(self.key, "", self.colour), (HELD_OUT + self.key, "held out ", "yellow")]


_DRAWINGS = (
    Drawing("loss", "loss", "cyan"),
    Drawing("reward margin", "rewards/margins", "cyan"),
    Drawing("score margin", "margin", "cyan"),
    Drawing("learning rate", "lr", "magenta", ".2e"),
    Drawing("tokens a second", "tokens_per_second", "green", ",.0f"),
    Drawing("gradient norm", "grad_norm", "blue"),
)
_MOST_DRAWINGS = 4


def watch(folder: RunFolder, console: Console | None = None) -> int:
    """Draws the run until it ends, once where stdout is no terminal. Returns 0; raises UserError where there is no run."""
    console = console or Console(highlight=False)
    run = read_run(folder)
    if not console.is_terminal:
        console.print(picture(run, console.width, _HIGH))
        return 0
    pause_s = EVERY_S
    with Live(_fitting(run, console), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while run.status in _GOING_ON:
            time.sleep(pause_s)
            started = time.monotonic()
            run = read_run(folder)
            pause_s = max(EVERY_S, _BUSY * (time.monotonic() - started))
            live.update(_fitting(run, console), refresh=True)
    return 0


def _fitting(run: RunRecord, console: Console) -> RenderableType:
    """The picture, as high as the terminal allows."""
    across = 2 if console.width >= _TWO_BESIDE else 1
    number = max(len(_known(run.metrics)), 1)
    rows = -(-number // across)
    return picture(run, console.width, (console.height - 3) // rows - 2)


def picture(run: RunRecord, width: int, height: int) -> RenderableType:
    """What the run is at, and its curves with `height` lines of dots each, in a terminal `width` cells wide."""
    across = 2 if width >= _TWO_BESIDE else 1
    cells = width // across - _GAP
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    drawn = [_curves(one, run.metrics, cells, min(max(height, _LOW), _HIGH)) for one in _known(run.metrics)]
    for at in range(0, len(drawn), across):
        grid.add_row(*drawn[at : at + across])
    said = [Text(f"  {line}", "yellow") for line in run.said[:2]]
    waiting = [] if drawn else [Text("no line in metrics.jsonl yet", "dim")]
    return Group(_head(run), *said, *waiting, grid)


def _head(run: RunRecord) -> Text:
    """One line: name, status, steps, tokens, the last figures."""
    metrics, steps = run.metrics, run.batch.get("steps")
    parts = []
    if len(metrics.steps):
        whole = f" of {steps:,}" if isinstance(steps, int) else ""
        parts.append(f"step {metrics.steps[-1]:,}{whole}")
    for key, form, unit in (
        ("tokens", ",.0f", " tokens"),
        ("padding_fraction", ".1%", " padding"),
        ("mfu", ".1%", " MFU"),
    ):
        if (value := metrics.last(key)) is not None:
            parts.append(f"{value:{form}}{unit}")
    head = Text(run.name, "bold", no_wrap=True, overflow="ellipsis")
    head.append(" ").append(run.status, _COLOURS.get(run.status, "bold red"))
    return head.append(f"  {', '.join(parts)}" if parts else "", "not bold")


def _known(metrics: Metrics) -> list[Drawing]:
    """What the run has figures for, no more than a screen holds."""
    return [one for one in _DRAWINGS if any(len(metrics.points(key)[0]) for key, _, _ in one.curves)][:_MOST_DRAWINGS]


def _curves(drawing: Drawing, metrics: Metrics, width: int, height: int) -> Text:
    """A title with the last value, dots with the largest and smallest value beside them, the first and last step below."""
    text, curves = Text(no_wrap=True, overflow="crop").append(f"{drawing.title} ", "bold"), []
    for key, name, colour in drawing.curves:
        lines, values = metrics.points(key)
        if len(lines):
            text.append(f"{', ' if curves else ''}{name}{_written(values[-1], drawing.form)}", colour)
            curves.append((metrics.steps[lines].astype(float), values.clip(-_MOST, _MOST), colour))
    first, last = (float(end(np.concatenate([steps for steps, _, _ in curves]))) for end in (np.min, np.max))
    low, high = (float(end(np.concatenate([values for _, values, _ in curves]))) for end in (np.min, np.max))
    margin = (high - low) / 20 or abs(high) / 20 or 1.0
    cells = max(width - _AXIS, 8)
    bounds: dict[str, Any] = {"xmin": first, "xmax": max(last, first + 1), "ymin": low - margin, "ymax": high + margin}
    canvas = plotille.Canvas(cells, height, **bounds)
    for steps, values, colour in curves:
        kept = thinned(values, 4 * cells)
        xs, ys = steps[kept].tolist(), values[kept].tolist()
        canvas.point(xs[0], ys[0], color=colour)
        for at in range(1, len(xs)):
            canvas.line(xs[at - 1], ys[at - 1], xs[at], ys[at], color=colour)
    rows = canvas.plot().split("\n")
    labels = {0: _written(high, drawing.form), len(rows) - 1: _written(low, drawing.form)}
    for number, row in enumerate(rows):
        text.append(f"\n{labels.get(number, ''):>{_AXIS - 1}} ", "dim").append_text(Text.from_ansi(row))
    ends = f"{first:,.0f}", f"{last:,.0f}"
    return text.append(f"\n{'':{_AXIS}}{ends[0]}{ends[1]:>{max(cells - len(ends[0]), 0)}}", "dim")


def _written(value: float, form: str) -> str:
    """A value as it fits beside a curve."""
    text = format(value, form)
    return text if len(text) < _AXIS else f"{value:.2g}"
