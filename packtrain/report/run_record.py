"""A run folder as plain values, whatever state it is in: done, stopped, failed, going on, or with half of its files.

Texts come without secrets and with their control characters shown (`harmless`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from packtrain.config.keys import keys
from packtrain.diagnose.doctor import examine
from packtrain.errors import UserError
from packtrain.redact import Redactor
from packtrain.report.metrics_file import Metrics, read_metrics
from packtrain.run_folder import RunFolder, object_of, text_of
from packtrain.wording import visible, whole

_CHECKPOINT = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class Result:
    """A checkpoint, or final/: its name, size, and the step it is of (None: the last)."""

    name: str
    size_bytes: int
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """A config key; `changed` where it has not its default."""

    key: str
    value: str
    default: str
    changed: bool


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run. `status` is done, stopped, failed, stalled, running or unknown; `said` why, in lines; `later` the same of a later
    attempt that did not begin to train. `started` is local time; `facts` are what it logged before step 1, by name; a restart has
    `when`, `step`, `machines` and `why` (lines)."""

    name: str
    status: str
    said: Sequence[str] = ()
    later: Sequence[str] = ()
    started: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    settings: Sequence[Setting] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    batch: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    environment: Mapping[str, Any] = field(default_factory=dict)
    results: Sequence[Result] = ()
    restarts: Sequence[Mapping[str, Any]] = ()
    data: Mapping[str, Any] | None = None

    def setting(self, key: str) -> str:
        """The value of a config key as text, "" where it is not known."""
        return next((setting.value for setting in self.settings if setting.key == key), "")

    @property
    def log_every(self) -> int:
        """Steps between logged lines."""
        return whole(self.setting("trainer.log_every")) or 1


def read_run(folder: RunFolder, *, over: bool = False) -> RunRecord:
    """The record of a run. `over`: it has ended, although its folder is still locked.

    Raises UserError where there is no run, or none has begun.
    """
    if not any(place.exists() for place in (folder.mark, folder.summary, folder.metrics)):
        what = "there is no run of packtrain" if folder.root.is_dir() else "no such folder"
        raise UserError(what, where=str(folder.root), fix="Name the folder that trainer.output_dir is.")
    redactor = Redactor(os.environ)

    def plain(value: Any) -> Any:
        return harmless(redactor.plain(value))

    summary = object_of(folder.summary)
    status, said = _state(folder, over=over)
    began = folder.config.exists() or not folder.attempt.config.exists()
    later: Sequence[str] = ()
    if began and folder.attempt.root.is_dir() and folder.metrics.exists():
        status, said, later = str(summary.get("status", "failed")), (), said
    source = folder if began else folder.attempt
    plan = object_of(source.plan)
    facts = object_of(folder.facts)
    return RunRecord(
        name=plain(folder.root.resolve().name),
        status=plain(status),
        said=plain(list(said)),
        later=plain(list(later)),
        started=plain(str(facts.get("started", ""))),
        facts={name: str(text) for name, text in plain(_mapping(facts.get("facts"))).items()},
        metrics=read_metrics(folder.metrics),
        settings=_settings(plain(_read_config(source.config))),
        summary=plain(summary),
        batch=_mapping(plan.get("batch")),
        processes=processes if isinstance(processes := plan.get("num_processes"), int) else 1,
        environment=plain(object_of(source.environment)),
        results=_results(folder),
        restarts=[_restart(plain(one)) for one in folder.restarts()],
        data=harmless(object_of(folder.data), redactor.text) or None,  # its `cut_tokens` are no secret
    )


def harmless(value: Any, text: Callable[[str], str] = str) -> Any:
    """Plain containers with `text` of their texts, in which control characters are symbols: none is obeyed."""
    if isinstance(value, str):
        return visible(text(value), whitespace=True)
    if isinstance(value, Mapping):
        return {harmless(str(name), text): harmless(inner, text) for name, inner in value.items()}
    return [harmless(inner, text) for inner in value] if isinstance(value, (list, tuple)) else value


def _state(folder: RunFolder, *, over: bool) -> tuple[str, Sequence[str]]:
    """Status and the lines of `packtrain doctor`."""
    if not folder.logs.is_dir() and not folder.summary.exists():
        return "unknown", ["this folder has neither logs nor a summary, which would say how the run ended"]
    finding = examine(folder, over=over)
    return finding.status, finding.lines if finding.status not in ("done", "running") else ()


def _settings(config: Mapping[str, Any]) -> list[Setting]:
    """Every key of a resolved config, with its default."""
    known, settings = keys(), []
    for group, values in config.items():
        for name, value in values.items() if isinstance(values, Mapping) else [("", values)]:
            path = f"{group}.{name}" if name else str(group)
            default = known[path].default if path in known else None
            text, usual = _as_text(value), _as_text(default)
            settings.append(Setting(path, text, usual, changed=text != usual and value != default))
    return settings


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _restart(entry: Mapping[str, Any]) -> dict[str, Any]:
    machines, why = (value if isinstance(value := entry.get(name), list) else [] for name in ("machines", "why"))
    return {"when": None, "step": None, **entry, "machines": ", ".join(map(str, machines)), "why": [*map(str, why)]}


def _results(folder: RunFolder) -> list[Result]:
    results = []
    with suppress(OSError):
        for place in sorted(folder.checkpoints.iterdir()):
            if name := _CHECKPOINT.fullmatch(place.name):
                results.append(Result(f"checkpoints/{place.name}", _size(place), int(name[1])))
    models = [place for place in (folder.final, folder.adapters, folder.merged) if place.is_dir()]
    return results + [Result(place.name, _size(place)) for place in models]


def _size(place: Path) -> int:
    """Bytes of all files below a folder, 0 where it changes meanwhile."""
    with suppress(OSError):
        return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    return 0


def _read_config(file: Path) -> Mapping[str, Any]:
    with suppress(ValueError, RecursionError, yaml.YAMLError):
        text = text_of(file)
        events = yaml.parse(text, yaml.SafeLoader)
        if not any(isinstance(event, yaml.AliasEvent) for event in events):  # few may stand for gigabytes
            return _mapping(yaml.safe_load(text))
    return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
