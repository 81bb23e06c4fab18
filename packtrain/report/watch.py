"""`packtrain report --watch`: the curves of a run as a line of bars each in the terminal, drawn anew while it goes on.

It only reads the run folder, so it works from another terminal, or another machine that sees the folder.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from packtrain.report.figures import HELD_OUT
from packtrain.report.run_record import RunRecord, read_run
from packtrain.run_folder import RunFolder

EVERY_S = 2.0
_BARS = "▁▂▃▄▅▆▇█"
_BESIDE = 60  # columns for the name, the extremes and the last value
_TITLES = {
    "loss": "loss",
    HELD_OUT + "loss": "held-out loss",
    "rewards/margins": "reward margin",
    "margin": "score margin",
    "lr": "learning rate",
    "tokens_per_second": "tokens a second",
    "grad_norm": "gradient norm",
}


def watch(place: str) -> int:
    """Draws the run in a folder until it ends, once where stdout is no terminal. Raises UserError where there is no run."""
    console, folder = Console(highlight=False), RunFolder(Path(os.path.expanduser(place)))
    run = read_run(folder)
    if not console.is_terminal:
        console.print(picture(run, console.width))
        return 0
    with Live(picture(run, console.width), console=console, auto_refresh=False) as live:
        while run.status in ("running", "stalled"):
            time.sleep(EVERY_S)
            run = read_run(folder)
            live.update(picture(run, console.width), refresh=True)
    return 0


def picture(run: RunRecord, width: int) -> RenderableType:
    """What the run is at, and its curves, in a terminal of `width` columns."""
    metrics, steps = run.metrics, run.batch.get("steps")
    head = Text(run.name, "bold", no_wrap=True, overflow="ellipsis").append(f" {run.status}", "green")
    if len(metrics.steps):
        head.append(f"  step {metrics.steps[-1]:,}" + (f" of {steps:,}" if isinstance(steps, int) else ""), "not bold")
    if (tokens := metrics.last("tokens")) is not None:
        head.append(f", {tokens:,.0f} tokens", "not bold")
    table = Table.grid(padding=(0, 2, 0, 0))
    for key, title in _TITLES.items():
        values = metrics.points(key)[1]
        if len(values):
            extremes = f"{values.min():.4g} to {values.max():.4g}"
            table.add_row(title, f"{values[-1]:.4g}", Text(bars(values, max(width - _BESIDE, 8)), "cyan"), extremes)
    remarks = [*run.why[:2], *([] if table.rows else ["no line in metrics.jsonl yet"])]
    return Group(head, *(Text(f"  {line}", "yellow") for line in remarks), table)


def bars(values: np.ndarray, most: int) -> str:
    """A bar for each of at most `most` equal parts of `values` (finite, float64 [points]): their means, the lowest the shortest."""
    means = np.array([part.mean() for part in np.array_split(values, min(most, len(values)))])
    span = np.ptp(means) or 1.0
    return "".join(_BARS[int(level)] for level in (means - means.min()) / span * (len(_BARS) - 1) + 0.5)
