"""Reading metrics.jsonl into columns, whatever a killed run or a full disk has left in it."""

from __future__ import annotations

import json
import math
import os
import sys
from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class Metrics:
    """The lines of metrics.jsonl: `steps` int64 [lines], in order, and float64 [lines] by key, NaN where a line has no number.

    `skipped` counts torn lines, lines without a step, and those of steps that later lines repeat.
    """

    steps: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    skipped: int = 0

    def points(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Line numbers int64 [points] and values float64 [points] of a key, where it has finite ones."""
        values = self.columns.get(key, np.full(len(self.steps), np.nan))
        lines = np.flatnonzero(np.isfinite(values))
        return lines, values[lines]

    def last(self, key: str) -> float | None:
        """The last finite value of a key."""
        values = self.points(key)[1]
        return float(values[-1]) if len(values) else None

    def lines_missing(self, every: int) -> int:
        """How many lines of a run that logs `every` so many steps are missing, between its first and its last."""
        steps = self.steps[self.points("loss")[0]]
        if not len(steps):
            return 0
        due = np.arange((steps[0] // every + 1) * every, steps[-1], every)
        return int(len(due) - np.isin(due, steps).sum())


def read_metrics(path: Path) -> Metrics:
    """The metrics of a run; empty where there is no such file."""
    columns: dict[str, array[float]] = defaultdict(lambda: array("d"))
    count, torn = 0, 0
    with path.open("rb") if path.is_file() else open(os.devnull, "rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # not UTF-8 is a ValueError too
                row = None
            if not isinstance(row, dict):
                torn += bool(line.strip())
                continue
            for name, value in row.items():
                if type(value) in (int, float):
                    column = columns[name]
                    column.extend([math.nan] * (count - len(column)))
                    column.append(
                        value if abs(value) <= sys.float_info.max else math.inf
                    )  # an int may be larger than a float
            count += 1
    for column in columns.values():
        column.extend([math.nan] * (count - len(column)))
    arrays = {name: np.frombuffer(column) for name, column in columns.items()}
    return _in_order(arrays.pop("step", np.full(count, np.nan)), arrays, torn)


def _in_order(steps: np.ndarray, columns: dict[str, np.ndarray], torn: int) -> Metrics:
    """The lines that have a step, without those whose step a later line begins again: a run went on from before them."""
    known = np.flatnonzero(np.isfinite(steps) & (steps >= 0) & (steps < 2**53))
    lines = steps[known]
    begun_again = np.where(np.diff(lines, prepend=-1) < 0, lines, np.inf)
    later = np.append(np.minimum.accumulate(begun_again[::-1])[::-1][1:], np.inf)[: len(lines)]
    kept = known[lines < later]
    rest = {name: values[kept] for name, values in columns.items()}
    return Metrics(steps[kept].astype(np.int64), rest, torn + len(steps) - len(kept))
