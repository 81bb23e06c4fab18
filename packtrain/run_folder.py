"""The run folder: what is in it, under which name, and how it is written (whole or not at all)."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packtrain.config.schema import RunConfig

_REPORTED = (
    "packtrain",
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "datasets",
    "peft",
    "tokenizers",
    "deepspeed",
    "flash-attn",
    "liger-kernel",
)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths below `trainer.output_dir`."""

    root: Path

    @classmethod
    def of(cls, config: RunConfig) -> RunFolder:
        """The run folder that a config names."""
        return cls(Path(config.trainer.output_dir).expanduser())

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.root / "config.yaml"

    @property
    def plan(self) -> Path:
        """The launch plan."""
        return self.root / "plan.json"

    @property
    def accelerate(self) -> Path:
        """accelerate's settings, where several processes are launched."""
        return self.root / "accelerate.yaml"

    @property
    def environment(self) -> Path:
        """Versions and platform."""
        return self.root / "env.json"

    @property
    def metrics(self) -> Path:
        """One JSON line per logged step."""
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """How the run ended, with its counts."""
        return self.root / "summary.json"

    @property
    def checkpoints(self) -> Path:
        """step-000123/ each."""
        return self.root / "checkpoints"

    @property
    def final(self) -> Path:
        """The trained model (or adapters) and tokenizer, for from_pretrained."""
        return self.root / "final"

    @property
    def logs(self) -> Path:
        """What every process said, one file each."""
        return self.root / "logs"

    def log(self, rank: int) -> Path:
        """Log file of a rank."""
        return self.logs / f"rank-{rank:05d}.log"

    def status(self) -> str | None:
        """`status` of summary.json; None where no run ended here."""
        try:
            return json.loads(self.summary.read_text())["status"]
        except (OSError, ValueError, KeyError):
            return None

    def make_room(self, resume: str) -> Path | None:
        """Moves an earlier run out of the way where the coming one does not go on from it; nothing is ever deleted.

        `resume` is trainer.resume. A finished run is moved, an unfinished one only by `never`; a folder that `resume`
        lies in stays. Returns the new name of what was moved: the first free `NAME.1`, `NAME.2`, …
        """
        ran = self.metrics.exists() or self.summary.exists() or self.checkpoints.exists()
        going_on = (
            resume not in ("auto", "never") and self.root.resolve() in Path(resume).expanduser().resolve().parents
        )
        if not ran or going_on or (resume == "auto" and self.status() != "done"):
            return None
        number = 1
        while (target := self.root.with_name(f"{self.root.name}.{number}")).exists():
            number += 1
        return self.root.rename(target)


def write_json(path: Path, content: Any) -> None:
    """Writes JSON aside and renames it, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    os.replace(aside, path)


def environment() -> dict[str, Any]:
    """Versions of what the result depends on; no host name, no path, no variable."""
    versions = {}
    for name in _REPORTED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {"python": platform.python_version(), "platform": platform.platform(), "versions": versions}
