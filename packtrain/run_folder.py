"""The run folder: what is in it, under which name, and how it is written (whole or not at all).

A run begins in two steps, because most failing runs fail before their first step, on data or model, and must not replace an
earlier run in the folder. `open_attempt` makes only logs/, with config.yaml, plan.json and so on in logs/attempt/; `begin`,
when training can start, moves an earlier run away and these files to their places.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from packtrain.config.schema import Trainer

DISK_S = 3
_STALLED = "stalled disk"
_Found = TypeVar("_Found")
_REPORTED = (
    *("packtrain", "torch", "transformers", "trl", "accelerate", "datasets", "peft", "tokenizers", "deepspeed"),
    *("flash-attn", "liger-kernel"),
)


class _Entry:
    """A file or folder of a run folder, by its name: a descriptor, so that each path has a docstring (`doc`)."""

    def __init__(self, name: str, doc: str) -> None:
        self.name, self.__doc__ = name, doc

    def __get__(self, folder: RunFolder, owner: type) -> Path:
        return folder.root / self.name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths below `trainer.output_dir`."""

    config = _Entry("config.yaml", "The resolved config.")
    plan = _Entry("plan.json", "The launch plan.")
    accelerate = _Entry("accelerate.yaml", "accelerate's settings, where several processes are launched.")
    deepspeed = _Entry("deepspeed.json", "DeepSpeed's settings, where the strategy is one of its own.")
    environment = _Entry("env.json", "Versions and platform.")
    metrics = _Entry("metrics.jsonl", "One JSON line per logged step.")
    summary = _Entry("summary.json", "How the run ended, with its counts.")
    verification = _Entry(
        "verify.json", "What `packtrain verify` found; it has a folder of its own and leaves that of the run alone."
    )
    checkpoints = _Entry("checkpoints", "step-000123/ each.")
    final = _Entry("final", "The trained model (or adapters) and tokenizer, for from_pretrained.")
    logs = _Entry("logs", "What every process said, one file each.")

    root: Path

    @classmethod
    def of(cls, trainer: Trainer) -> RunFolder:
        """The run folder that a config names."""
        return cls(Path(trainer.output_dir).expanduser())

    @property
    def attempt(self) -> RunFolder:
        """The folder of config.yaml, plan.json, env.json and so on of a run that has not begun to train."""
        return RunFolder(self.logs / "attempt")

    @property
    def _earlier_logs(self) -> Path:
        """The logs of an earlier run, while logs/ belongs to a new run that will move the earlier one away."""
        return self.root / "logs-before"

    def log(self, rank: int) -> Path:
        """Log file of a rank."""
        return self.logs / f"rank-{rank:05d}.log"

    def status(self) -> str | None:
        """`status` of summary.json; None where no run ended here."""
        try:
            return json.loads(self.summary.read_text())["status"]
        except (OSError, ValueError, KeyError):
            return None

    def gives_way(self, resume: str) -> bool:
        """Whether the new run will move an earlier one away instead of resuming it; `resume` is trainer.resume.

        A finished run gives way, an unfinished one only to `never`; a folder that `resume` lies in stays.
        """
        ran = self.metrics.exists() or self.summary.exists() or self.checkpoints.exists()
        if resume not in ("auto", "never") and self.root.resolve() in Path(resume).expanduser().resolve().parents:
            return False
        return ran and (resume != "auto" or self.status() == "done")

    def open_attempt(self, resume: str) -> None:
        """Makes logs/ and logs/attempt/, nothing else. Raises OSError also if `begin` would later."""
        needed = [self.root] if self.root.exists() else []
        if self.gives_way(resume):
            needed.append(self.root.absolute().parent)
            if self.root.resolve() in (Path.cwd(), *Path.cwd().parents):
                raise OSError(errno.EBUSY, "it holds a run and cannot be moved from under this process", str(self.root))
            if self.logs.exists() and not self._earlier_logs.exists():
                self.logs.rename(self._earlier_logs)
                self._take_back_own_log()
        for place in needed:
            if not os.access(place, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        self.attempt.root.mkdir(parents=True, exist_ok=True)

    def _take_back_own_log(self) -> None:
        """Slurm opened the log of this job, and put its script there, before the run began: both stay in logs/."""
        if job := os.environ.get("SLURM_JOB_ID"):
            self.logs.mkdir()
            for file in [*self._earlier_logs.glob(f"slurm-{job}.*")]:
                file.rename(self.logs / file.name)

    def begin(self, resume: str) -> Path | None:
        """Makes this the folder of the attempt; an earlier run that gives way to it is moved, nothing is ever deleted.

        Returns the new name of what was moved: the first free `NAME.1`, `NAME.2`, … Open log files move along.
        """
        moved = self._make_room() if self.gives_way(resume) else None
        for file in list(self.attempt.root.iterdir()):
            os.replace(file, self.root / file.name)
        self.attempt.root.rmdir()
        return moved

    def _make_room(self) -> Path:
        number = 1
        while (target := self.root.with_name(f"{self.root.name}.{number}")).exists():
            number += 1
        self.root.rename(target)
        self.root.mkdir()
        earlier = RunFolder(target)
        earlier.logs.rename(self.logs)
        if earlier._earlier_logs.exists():
            earlier._earlier_logs.rename(earlier.logs)
        return target


def write_json(path: Path, content: Any) -> None:
    """Writes JSON aside and renames it, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    os.replace(aside, path)


def in_time(work: Callable[[], _Found], otherwise: _Found) -> _Found:
    """What `work` returns; `otherwise` if it raises OSError or takes longer than DISK_S, or an earlier call is still stuck.

    For diagnoses of a run that stands still: its disk may be the cause. A thread that is stuck in a file system cannot be ended;
    it is left behind, and later calls do their work after it, if it ever ends.
    """
    found: list[_Found] = []
    earlier = [one for one in threading.enumerate() if one.name == _STALLED]

    def attempt() -> None:
        for one in earlier:
            one.join()
        with suppress(OSError):
            found.append(work())

    thread = threading.Thread(target=attempt, name="disk", daemon=True)
    thread.start()
    thread.join(0 if earlier else DISK_S)
    if thread.is_alive():
        thread.name = _STALLED
    return found[0] if found else otherwise


def environment() -> dict[str, Any]:
    """Versions of the packages that results depend on; no host name, path or environment variable."""
    versions = {}
    for name in _REPORTED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {"python": platform.python_version(), "platform": platform.platform(), "versions": versions}
