"""Run folder as plain values, in any state: done, failed, running, or missing some files.

Texts contain no secrets, and show their control characters (`harmless`).
"""

from __future__ import annotations

import json
import math
import os
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from packtrain.config.keys import keys
from packtrain.diagnose.doctor import examine
from packtrain.errors import UserError
from packtrain.objectives.spec import OBJECTIVES, RIGHT_ANSWERS, Figure, task_figures
from packtrain.report.document_tables import tabulate_documents
from packtrain.run_folder import RunFolder, object_of, text_of
from packtrain.wording import Redactor, visible

Json = Mapping[str, Any]
"""An object of a JSON or YAML file."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """Lines of metrics.jsonl: ordered `steps` int64 [lines], and columns float64 [lines] by key.

    Values are NaN if a line has no number for the key. `skipped` counts torn lines, lines without a step, and lines that were written again.
    """

    steps: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    skipped: int = 0

    def points(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return line numbers int64 [points] and values float64 [points] of a key's finite values."""
        values = self.columns.get(key, np.full(len(self.steps), np.nan))
        lines = np.flatnonzero(np.isfinite(values))
        return lines, values[lines]

    def last(self, key: str) -> float | None:
        """Return the last finite value of a key."""
        values = self.points(key)[1]
        return float(values[-1]) if len(values) else None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run. `status` is done, stopped, failed, stalled, running or unknown. `why` explains it in lines. `later` explains a later
    attempt that ended before training. `started` is local time; `facts` were logged before step 1, by name; `settings` hold
    value and default of each config key (equal if unchanged); `results` are name and bytes of checkpoints and models. A
    restart has `when`, `step`, `machines` and `why` (lines). `documents` is by document_tables.py; None without a ledger or spikes."""

    name: str
    status: str
    why: Sequence[str] = ()
    later: Sequence[str] = ()
    started: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    settings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    summary: Json = field(default_factory=dict)
    batch: Json = field(default_factory=dict)
    processes: int = 1
    environment: Json = field(default_factory=dict)
    results: Sequence[tuple[str, int]] = ()
    restarts: Sequence[Json] = ()
    data: Json | None = None
    documents: Json | None = None

    @property
    def figures(self) -> list[Figure]:
        """The figures of its objective; of all objectives if its own is not installed."""
        known, kind = OBJECTIVES.all(), self.settings.get("objective.kind", ("",))[0]
        own = [figure for spec in ([known[kind]] if kind in known else known.values()) for figure in spec.figures]
        answers = [RIGHT_ANSWERS] if len({*self.settings.get("trainer.answers", ())}) > 1 else []
        return [*own, *answers, *task_figures(self.metrics.columns, own)]


def read_run(folder: RunFolder, *, over: bool = False) -> RunRecord:
    """Read the record of a run. `over`: it has ended, although its folder is still locked.

    Raises UserError if there is no run, or none has begun.
    """
    if not any(place.exists() for place in (folder.mark, folder.summary, folder.metrics)):
        what = "there is no run of packtrain" if folder.root.is_dir() else "no such folder"
        raise UserError(what, where=str(folder.root), fix="Name the folder that trainer.output_dir is.", code="no-run")
    redactor = Redactor(os.environ)

    def plain(value: Any) -> Any:
        return harmless(redactor.plain(value))

    summary = object_of(folder.summary)
    if folder.logs.is_dir() or folder.summary.exists():
        finding = examine(folder, over=over)
        status, why = finding.status, () if finding.status in ("done", "running") else finding.lines
    else:
        status, why = "unknown", ["this folder has neither logs nor a summary, which would say how the run ended"]
    began = folder.config.exists() or not folder.attempt.config.exists()
    later: Sequence[str] = ()
    if began and folder.attempt.root.is_dir() and folder.metrics.exists():
        status, why, later = str(summary.get("status", "failed")), (), why
    source = folder if began else folder.attempt
    plan, facts = object_of(source.plan), object_of(folder.facts)
    settings = _settings(plain(read_config(source.config)))
    return RunRecord(
        name=plain(folder.root.resolve().name),
        status=plain(status),
        why=plain(list(why)),
        later=plain(list(later)),
        started=plain(str(facts.get("started", ""))),
        facts={name: str(text) for name, text in plain(_mapping(facts.get("facts"))).items()},
        metrics=read_metrics(folder.metrics),
        settings=settings,
        summary=plain(summary),
        batch=_mapping(plan.get("batch")),
        processes=processes if isinstance(processes := plan.get("num_processes"), int) else 1,
        environment=plain(object_of(source.environment)),
        results=_results(folder),
        restarts=[_restart(plain(entry)) for entry in folder.restarts()],
        data=harmless(object_of(folder.data), redactor.text) or None,  # its `cut_tokens` are no secret
        documents=harmless(tabulate_documents(folder, settings), redactor.text),
    )


def harmless(value: Any, text: Callable[[str], str] = str) -> Any:
    """Apply `text` to the texts in plain containers, and show control characters as symbols. No terminal obeys the symbols."""
    if isinstance(value, str):
        return visible(text(value), whitespace=True)
    if isinstance(value, Mapping):
        return {harmless(str(name), text): harmless(inner, text) for name, inner in value.items()}
    return [harmless(inner, text) for inner in value] if isinstance(value, (list, tuple)) else value


def _settings(config: Json) -> dict[str, tuple[str, str]]:
    """Return value and default of every key of a resolved config."""
    known, settings = keys(), {}
    for group, values in config.items():
        for name, value in values.items() if isinstance(values, Mapping) else [("", values)]:
            path = f"{group}.{name}" if name else str(group)
            default = known[path].default if path in known else None
            settings[path] = (_as_text(value), _as_text(value if value == default else default))
    return settings


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _restart(entry: Json) -> Json:
    machines, why = (value if isinstance(value := entry.get(name), list) else [] for name in ("machines", "why"))
    return {"when": None, "step": None, **entry, "machines": ", ".join(map(str, machines)), "why": [*map(str, why)]}


def _results(folder: RunFolder) -> list[tuple[str, int]]:
    places = [*sorted(folder.checkpoints.glob("step-[0-9]*")), folder.final, folder.adapters, folder.merged]
    return [(str(place.relative_to(folder.root)), _size(place)) for place in places if place.is_dir()]


def _size(place: Path) -> int:
    """Return the bytes of all files below a folder; 0 if it changes meanwhile."""
    with suppress(OSError):
        return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    return 0


def read_config(file: Path) -> Json:
    """Return the config of a run; empty if it is missing or torn."""
    with suppress(ValueError, RecursionError, yaml.YAMLError):
        return _mapping(yaml.safe_load(text_of(file)))
    return {}


def _mapping(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}


def read_metrics(path: Path) -> Metrics:
    """Read the metrics of a run, even from a torn file; empty without a file. Kills and full disks tear files."""
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
                    # an int may be larger than a float
                    column.append(value if abs(value) <= sys.float_info.max else math.inf)
            count += 1
    for column in columns.values():
        column.extend([math.nan] * (count - len(column)))
    arrays = {name: np.frombuffer(column) for name, column in columns.items()}
    return _in_order(arrays.pop("step", np.full(count, np.nan)), arrays, torn)


def _in_order(steps: np.ndarray, columns: dict[str, np.ndarray], torn: int) -> Metrics:
    """Keep the lines with a step, except lines that a resumed run has written again."""
    known = np.flatnonzero(np.isfinite(steps) & (steps >= 0) & (steps < 2**53))
    lines = steps[known]
    begun_again = np.where(np.diff(lines, prepend=-1) < 0, lines, np.inf)
    later = np.append(np.minimum.accumulate(begun_again[::-1])[::-1][1:], np.inf)[: len(lines)]
    kept = known[lines < later]
    rest = {name: values[kept] for name, values in columns.items()}
    return Metrics(steps[kept].astype(np.int64), rest, torn + len(steps) - len(kept))
