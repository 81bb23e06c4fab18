"""The run folder: the names of its files, and their atomic writing.

Most failures come before the first step and must not replace an earlier run: `open_attempt` makes only logs/, with config.yaml,
plan.json and so on in logs/attempt/. When training can start, `begin` moves an earlier run away and these files into place.

Files of the user are never replaced, moved or removed: a folder is packtrain's if it has the mark, which `open_attempt` sets only
if nothing else in the folder has one of packtrain's names. An earlier run is moved, never removed.
"""

from __future__ import annotations

import errno
import filecmp
import json
import os
import platform
import re
import shlex
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from packtrain.config.schema import Trainer
from packtrain.errors import Json, Problem, UserError
from packtrain.strategies.spec import packages_of_strategies
from packtrain.system import sync, write_text

if TYPE_CHECKING:
    from pydantic import TypeAdapter

REPLACED_LOGS = ("attempt", "lock", "channel.json", "ranks.json", "diagnosis.txt", "restarts.json", "stacks-rank-*")
"""Files in logs/ that a run replaces; it appends to all others."""
DECISIVE_PACKAGES = (
    *("packtrain", "torch", "transformers", "trl", "accelerate", "datasets", "peft", "tokenizers"),
    *("flash-attn", "flash-attn-4", "kernels", "liger-kernel", "flash-linear-attention", "causal-conv1d", "mamba-ssm"),
)
"""Packages that results depend on. Strategies add theirs."""


_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class _Entry:
    """A file or folder of a run folder, by its name (a descriptor). `result`: only runs that began to train write it."""

    name: str
    result: bool = False

    def __get__(self, folder: RunFolder, owner: type) -> Path:
        return folder.root / self.name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths below `trainer.output_dir`."""

    mark = _Entry(".packtrain")  # says that packtrain made the folder
    config = _Entry("config.yaml")  # resolved
    plan = _Entry("plan.json")
    accelerate = _Entry("accelerate.yaml")  # if several processes are launched
    engine = _Entry("deepspeed.json")  # if the strategy has an engine with settings
    environment = _Entry("env.json")  # versions and platform
    metrics = _Entry("metrics.jsonl", result=True)  # a line per logged step
    spikes = _Entry("spikes.jsonl", result=True)  # a line for each step that was a spike, with its documents
    ledger = _Entry("ledger.jsonl", result=True)  # a line for each document of each step, with its loss
    summary = _Entry("summary.json", result=True)  # how the run ended, with its counts
    report = _Entry("report.html")  # by packtrain/report/
    data = _Entry("data.json")  # a description of the data, for the report
    facts = _Entry("facts.json")  # start time and records from before step 1, for the report
    verification = _Entry("verify.json")  # of `packtrain verify`, in a folder of its own
    checkpoints = _Entry("checkpoints", result=True)  # step-000123/ each
    final = _Entry("final", result=True)  # the trained model (or adapters) and tokenizer, for from_pretrained
    average = _Entry("final-ema", result=True)  # if trainer.ema averages the weights
    adapters = _Entry("final-adapters", result=True)  # if final/ has the merged model
    merged = _Entry("final-merged", result=True)  # if final/ has the adapters
    tensorboard = _Entry("tensorboard", result=True)
    logs = _Entry("logs")  # one file per process
    logs_before = _Entry("logs-before")  # an earlier run's logs/, until a new run moves the earlier one away

    root: Path

    @classmethod
    def of(cls, trainer: Trainer) -> RunFolder:
        """Return the run folder of a config."""
        return cls(Path(os.path.expanduser(trainer.output_dir)))

    @property
    def attempt(self) -> RunFolder:
        """The folder of config.yaml, plan.json, env.json and so on until training begins."""
        return RunFolder(self.logs / "attempt")

    @property
    def finals(self) -> list[Path]:
        """Folders of the trained model, in all forms that a run may leave."""
        return [self.final, self.average, self.adapters, self.merged]

    @property
    def records(self) -> list[Path]:
        """Files of lines by step. A checkpoint needs the lines up to its step: a resumed run adds to them."""
        return [self.metrics, self.spikes, self.ledger]

    @property
    def restarted(self) -> Path:
        """The list of the run's restarts (trainer.restarts), if there were any."""
        return self.logs / "restarts.json"

    def log(self, rank: int) -> Path:
        """Return the log file of a rank."""
        return self.logs / f"rank-{rank:05d}.log"

    def restarts(self) -> list[Json]:
        """Return the restarts so far (launch/coordinator.py::Restarts), in summary.json's form."""
        return [restart for restart in _content_of(self.restarted, list) if isinstance(restart, dict)]

    def status(self) -> str | None:
        """Return `status` of summary.json; None if no run has ended here."""
        status = object_of(self.summary).get("status")
        return status if isinstance(status, str) else None

    def check_ours(self, inputs: Iterable[tuple[str, str]] = ()) -> None:
        """Raise UserError if a run would replace or move files that are not its own.

        They are files that packtrain did not make, or that the run reads: `inputs`, as pairs of config key and path.
        """
        marked, where = os.path.exists(self.mark), f"trainer.output_dir ({self.root})"
        places = {os.path.realpath(entry): entry.name for entry in self.entries()}
        if marked and os.path.exists(self.plan):  # then config.yaml is a run's: it may be run again, and is kept
            places.pop(os.path.realpath(self.config), None)
        taken, fix = [], "Name another folder, or copy it elsewhere."
        for key, path in inputs:
            real = Path(os.path.realpath(os.path.expanduser(path)))
            if own := next((places[str(place)] for place in (real, *real.parents) if str(place) in places), None):
                what = f"{key} ({path}) lies where the run writes its own {own}"
                taken.append(Problem(what, where, fix, code="input-in-run-folder"))
        if taken:
            raise UserError(taken)
        # in a foreign logs/ only files that a run would replace count
        logs = [path for name in REPLACED_LOGS for path in self.logs.glob(name)]
        entries = [entry for entry in self.entries() if entry != self.logs or not self.logs.is_dir()]
        if not marked and (foreign := [entry for entry in (*entries, *logs) if _holds_something(entry)]):
            more = f" and {len(foreign) - 1} more" if foreign[1:] else ""
            touch = f"If an earlier packtrain made this one: touch {shlex.quote(str(self.mark))}"
            fix = f"Name another folder, or move it away. {touch}"
            what = f"packtrain did not make {foreign[0]}{more} and will not overwrite it"
            raise UserError(what, where=where, fix=fix, code="not-made-by-packtrain")

    def gives_way(self, resume: str) -> bool:
        """Return whether the new run will move an earlier one away instead of resuming it.

        `resume` is trainer.resume. A finished run is moved, and one without checkpoints; an unfinished one only for `never`. The folder that
        holds the checkpoint `resume` is kept.
        """
        if resume not in ("auto", "never"):
            return self._ran() and not self._has(Path(os.path.expanduser(resume)))
        goes_on = resume == "auto" and self.status() != "done" and any(self.checkpoints.glob("step-*"))
        return self._ran() and not goes_on

    def open_attempt(self, resume: str, inputs: Iterable[tuple[str, str]] = ()) -> None:
        """Make the mark, logs/ and logs/attempt/, nothing else. Raises UserError like `check_ours`, and OSError if `begin` would."""
        self.check_ours(inputs)
        if self.root.exists() and not os.access(self.root, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.root))
        gives_way = self.gives_way(resume)
        self.set_mark()
        if gives_way and self.logs.exists() and not self.logs_before.exists():
            self.logs.rename(self.logs_before)
            if job := os.environ.get("SLURM_JOB_ID"):  # Slurm has put the log and script of this job there
                self.logs.mkdir()
                for file in [*self.logs_before.glob(f"slurm-{job}.*")]:
                    file.rename(self.logs / file.name)
        self.attempt.root.mkdir(parents=True, exist_ok=True)

    def begin(self, checkpoint: Path | None) -> Path | None:
        """Move the attempt's files into place, for a run from `checkpoint`. Returns the folder of moved files, if any.

        It is the first free NAME.1, NAME.2, … A new run moves the whole earlier run there; a resumed run moves its final model and summary,
        and a copy of its metrics.
        """
        moved = None
        if checkpoint is None or not self._has(checkpoint):
            if self._ran():
                # its checkpoints first: after a kill here no run must resume from them
                moved = self._move([self.checkpoints, *(set(self.entries()) - {self.logs, self.checkpoints})])
        elif self.final.exists() or self.status() == "done":
            moved = self._move([*self.finals, self.summary])
            if self.metrics.exists():  # the resumed run cuts off the lines after its checkpoint
                shutil.copy2(self.metrics, moved)
        for file in list(self.attempt.root.iterdir()):
            place = self.root / file.name
            if place.exists() and not filecmp.cmp(file, place, shallow=False):
                place.rename(self.logs / f"{time.strftime('%Y%m%d-%H%M%S')}-{file.name}")
            os.replace(file, place)
        self.attempt.root.rmdir()
        return moved

    def entries(self) -> list[Path]:
        """Return all paths that a run writes, replaces or moves, existing or not."""
        others = {self.mark, self.verification}
        return [path for kind in _entries() if (path := self.root / kind.name) not in others]

    def _ran(self) -> bool:
        return any(_holds_something(self.root / kind.name) for kind in _entries() if kind.result)

    def _has(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint belongs to the run in this folder. A run in a subfolder is another run."""
        real = os.path.realpath(checkpoint)
        inside = Path(real).is_relative_to(os.path.realpath(self.checkpoints))
        return inside or os.path.dirname(real) == os.path.realpath(self.root)

    def set_mark(self) -> None:
        """Make the folder, if need be, and the mark that says whose it is."""
        self.root.mkdir(parents=True, exist_ok=True)
        if not self.mark.exists():  # if a power failure lost it, the checkpoints would seem foreign
            write_text(self.mark, "packtrain made this folder: a new run may move what earlier ones wrote here.\n")
            sync(Path(os.path.realpath(self.root)).parent)

    def _move(self, entries: Iterable[Path]) -> Path:
        """Move existing `entries` into a new folder; return it. The folder is beside this one.
        It is inside this one if nothing can be moved there (a mounted volume, another user's parent folder)."""
        root, number = Path(os.path.realpath(self.root)), 1
        beside = os.access(root.parent, os.W_OK | os.X_OK) and root.parent.stat().st_dev == root.stat().st_dev
        while os.path.lexists(target := (root.parent if beside else root) / f"{root.name}.{number}"):
            number += 1
        moved = RunFolder(target)
        moved.set_mark()
        for entry in entries:
            if os.path.lexists(entry):
                entry.rename(moved.logs if entry == self.logs_before else target / entry.name)
        return target


def _entries() -> list[_Entry]:
    return [kind for kind in vars(RunFolder).values() if isinstance(kind, _Entry)]


@cache
def _adapter_of(kind: type[_Kind]) -> TypeAdapter[_Kind]:
    from pydantic import TypeAdapter  # slow to import, and only needed between processes

    return TypeAdapter(kind)


def as_type(value: object, kind: type[_Kind]) -> _Kind:
    """Return a value from JSON as `kind`, a dataclass or other annotated type. Raises ValueError for anything else."""
    return _adapter_of(kind).validate_json(json.dumps(value), strict=True)


def read_as(file: Path, content: object, kind: type[_Kind]) -> _Kind:
    """Apply `as_type` to a file of a run folder, which may have been edited. Raises UserError for a wrong type."""
    from pydantic import ValidationError

    try:
        return as_type(content, kind)
    except ValidationError as error:
        first = error.errors()[0]
        what = ": ".join([*map(str, first["loc"]), first["msg"]])
        fix = "It was edited, or another version of packtrain wrote it; move it away, and it is not read."
        what = f"this is not what packtrain writes: {what}"
        raise UserError(what, where=str(file), fix=fix, code="record-unreadable") from error


def text_of(file: Path) -> str:
    """Return the text of a file in a run folder, "" without a regular file."""
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return ""


def object_of(file: Path) -> Json:
    """Return the JSON object in a run folder's file. Empty if it is missing or invalid."""
    return _content_of(file, dict)


def _content_of(file: Path, kind: type[_Kind]) -> _Kind:
    with suppress(ValueError, RecursionError):
        if isinstance(content := json.loads(text_of(file)), kind):
            return content
    return kind()


def losses_of_sets(line: Mapping[str, _Kind]) -> dict[str, _Kind]:
    """Return the loss of each named set of data.eval (`eval_NAME_loss`) in a line of metrics.jsonl."""
    return {named[1]: value for key, value in line.items() if (named := re.fullmatch(r"eval_(.+)_loss", key))}


def _holds_something(path: Path) -> bool:
    """Return whether there is a file, a broken link, or a folder with entries."""
    with suppress(OSError):  # not a folder, or not readable
        return any(path.iterdir())
    return os.path.lexists(path)


def write_json(path: Path, content: object) -> None:
    """Write a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def environment() -> Json:
    """Return versions of the packages that results depend on. They have no host name, path or environment variable."""
    versions = {name: installed_version(name) for name in (*DECISIVE_PACKAGES, *packages_of_strategies())}
    return {"python": platform.python_version(), "platform": platform.platform(), "versions": versions}


@cache
def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None
