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


def options(group: str) -> list[str]:
    """The choices of a group that packtrain brings: names of files in configs/GROUP/, sorted."""
    return sorted(file.stem for file in (shipped("configs") / group).glob("*.yaml"))
