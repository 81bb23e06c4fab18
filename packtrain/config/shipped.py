"""The folders that travel with packtrain: configs/, recipes/ and slurm/.

In a source checkout they are beside the package; the wheel holds them inside it, under `_shipped/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

PACKAGE = Path(__file__).resolve().parents[1]


def shipped(folder: Literal["configs", "recipes", "slurm"]) -> Path:
    """The absolute path of one of packtrain's own folders."""
    inside = PACKAGE / "_shipped" / folder
    return inside if inside.is_dir() else PACKAGE.parent / folder


def options(group: str, beside: Path | None = None) -> list[str]:
    """The choices of a group, sorted: names of files in the folder GROUP of configs/, and of the one `beside` the user's."""
    return sorted({file.stem for folder in _folders(beside) for file in (folder / group).glob("*.yaml")})


def find_choice(group: str, choice: str, beside: Path | None = None) -> Path | None:
    """The file of a choice ("" is the group of files that lie in no folder); the user's own comes before ours."""
    return next((path for one in _folders(beside) if (path := one / group / f"{choice}.yaml").is_file()), None)


def _folders(beside: Path | None) -> list[Path]:
    return [*([beside] if beside else []), shipped("configs")]
