"""Reading metrics.jsonl into columns, whatever a killed run or a full disk has left in it."""

from __future__ import annotations

import io
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_BLOCK_BYTES = 8 << 20
_Columns = dict[str, np.ndarray]


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
        """How many lines of a run that logs `every` so many steps are not there, between its first and its last."""
        steps = self.steps[self.points("loss")[0]]
        if not len(steps):
            return 0
        due = np.arange((steps[0] // every + 1) * every, steps[-1], every)
        return int(len(due) - np.isin(due, steps).sum())


def read_metrics(path: Path) -> Metrics:
    """The metrics of a run; empty where there is no such file."""
    if not path.is_file():
        return Metrics()
    tables, skipped = [], 0
    for block in _blocks(path):
        columns, torn = _parsed(block)
        tables.append(columns)
        skipped += torn
    return _in_order(_joined(tables), skipped)


def _blocks(path: Path) -> Iterator[bytes]:
    """Whole lines, some megabytes at a time; the last block may end with a half line."""
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block + file.readline()


def _parsed(block: bytes) -> tuple[_Columns, int]:
    """The numbers of a block by key, and how many lines are none of a run.

    Arrow's reader takes half the time of Python's, and refuses a block with a torn line; for a short file its import takes longer.
    """
    if len(block) < _BLOCK_BYTES:
        return _parsed_by_line(block)
    import pyarrow as pa
    from pyarrow import json as arrow_json

    try:
        options = arrow_json.ReadOptions(block_size=len(block) + 1)
        table = arrow_json.read_json(io.BytesIO(block), read_options=options)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return _parsed_by_line(block)
    if len(set(table.column_names)) < len(table.column_names):
        return _parsed_by_line(block)
    numbers = [name for name in table.column_names if _is_number(table.schema.field(name).type)]
    return {name: table[name].to_numpy().astype(np.float64) for name in numbers}, 0


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)


def _parsed_by_line(block: bytes) -> tuple[_Columns, int]:
    rows, torn = [], 0
    for line in block.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # not UTF-8 is a ValueError too
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            torn += bool(line.strip())
    columns: dict[str, list[float]] = defaultdict(lambda: [math.nan] * len(rows))
    for number, row in enumerate(rows):
        for name, value in row.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                columns[name][number] = _as_float(value)
    table = {name: np.array(values, np.float64) for name, values in columns.items()}
    return table or {"step": np.full(len(rows), np.nan)}, torn


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _joined(tables: Iterable[_Columns]) -> _Columns:
    """The columns of all blocks one after the other."""
    tables = [one for one in tables if one]
    names = dict.fromkeys(name for one in tables for name in one)
    lengths = [len(next(iter(one.values()))) for one in tables]
    return {
        name: np.concatenate([one.get(name, np.full(n, np.nan)) for one, n in zip(tables, lengths, strict=True)])
        for name in names
    }


def _in_order(columns: _Columns, skipped: int) -> Metrics:
    """The lines that have a step, without those whose step a later line begins again: a run went on from before them."""
    if "step" not in columns:
        return Metrics(skipped=skipped + (len(next(iter(columns.values()))) if columns else 0))
    steps = columns["step"]
    known = np.isfinite(steps) & (steps >= 0) & (steps < 2**53)
    lines = steps[known]
    begun_again = np.where(np.diff(lines, prepend=-1) < 0, lines, np.inf)
    later = np.append(np.minimum.accumulate(begun_again[::-1])[::-1][1:], np.inf)[: len(lines)]
    kept = np.flatnonzero(known)[lines < later]
    rest = {name: values[kept] for name, values in columns.items() if name != "step"}
    return Metrics(steps[kept].astype(np.int64), rest, skipped + len(steps) - len(kept))
