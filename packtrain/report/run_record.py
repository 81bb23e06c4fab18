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
class Saved:
    """A checkpoint, or final/: its name, size, and the step it is of (None: the last)."""

    name: str
    size_bytes: int
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Restarted:
    """A restart of a run: the step that it goes on from, on which machines, and why, in lines."""

    when: str
    step: str
    machines: str
    why: Sequence[str]


@dataclass(frozen=True, slots=True)
class Setting:
    """A config key; `changed` where it has not its default."""

    key: str
    value: str
    default: str
    changed: bool


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run. `status` is done, stopped, failed, stalled, running or unknown; `said` why, in lines; `later` the same of an attempt that came
    after it and did not begin to train. `started` is local time; `facts` are what it said of itself before
    step 1, by their names in its log."""

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
    saved: Sequence[Saved] = ()
    restarts: Sequence[Restarted] = ()
    data: Mapping[str, Any] | None = None

    def setting(self, key: str) -> str:
        """The value of a config key as text, "" where it is not known."""
        return next((one.value for one in self.settings if one.key == key), "")

    @property
    def log_every(self) -> int:
        """Steps between logged lines."""
        return whole(self.setting("trainer.log_every")) or 1


def read_run(folder: RunFolder, *, over: bool = False) -> RunRecord:
    """The record of a run. `over`: it has ended, although its folder is still locked.

    Raises UserError where there is no run, or none has begun.
    """
    if not folder.root.is_dir():
        raise UserError("no such folder", where=str(folder.root), fix="Name the folder that trainer.output_dir is.")
    if not any(place.exists() for place in (folder.mark, folder.summary, folder.metrics)):
        fix = "Name the folder that trainer.output_dir is."
        raise UserError("there is no run of packtrain", where=str(folder.root), fix=fix)
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
        saved=_saved(folder),
        restarts=[_restarted(plain(one)) for one in folder.restarts()],
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
    found = examine(folder, over=over)
    return found.status, found.lines if found.status not in ("done", "running") else ()


def _settings(config: Mapping[str, Any]) -> list[Setting]:
    """Every key of a resolved config, with its default."""
    known, found = keys(), []
    for group, values in config.items():
        for name, value in values.items() if isinstance(values, Mapping) else [("", values)]:
            path = f"{group}.{name}" if name else str(group)
            default = known[path].default if path in known else None
            text, usual = _as_text(value), _as_text(default)
            found.append(Setting(path, text, usual, changed=text != usual and value != default))
    return found


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _restarted(one: Mapping[str, Any]) -> Restarted:
    machines, why = (value if isinstance(value := one.get(name), list) else [] for name in ("machines", "why"))
    return Restarted(str(one.get("when")), str(one.get("step")), ", ".join(map(str, machines)), [*map(str, why)])


def _saved(folder: RunFolder) -> list[Saved]:
    found = []
    with suppress(OSError):
        for place in sorted(folder.checkpoints.iterdir()):
            if name := _CHECKPOINT.fullmatch(place.name):
                found.append(Saved(f"checkpoints/{place.name}", _size(place), int(name[1])))
    return found + [
        Saved(one.name, _size(one)) for one in (folder.final, folder.adapters, folder.merged) if one.is_dir()
    ]


def _size(place: Path) -> int:
    """Bytes of all files below a folder."""
    total = 0
    for folder, _, files in os.walk(place):
        for name in files:
            with suppress(OSError):
                total += os.path.getsize(os.path.join(folder, name))
    return total


def _read_config(file: Path) -> Mapping[str, Any]:
    with suppress(ValueError, RecursionError, yaml.YAMLError):
        text = text_of(file)
        if not any(
            isinstance(one, yaml.AliasEvent) for one in yaml.parse(text, yaml.SafeLoader)
        ):  # few may stand for gigabytes
            return _mapping(yaml.safe_load(text))
    return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
