"""Checkpoints that are complete or absent.

A checkpoint is written into a hidden folder beside its place, listed in a manifest (size and BLAKE2 hash of every file),
synced to disk and renamed. A folder `step-…` is therefore whole, whatever killed the writer; one that was damaged later
fails against its manifest and the newest good one is taken instead.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from packtrain.errors import Problem, UserError

MANIFEST = "manifest.json"
ORIGIN = "origin.json"
STATE = "trainer_state.json"  # transformers' name
_NAME = re.compile(r"step-(\d+)")


def folder_of(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of `step` is, once it is complete."""
    return checkpoints / f"step-{step:06d}"


def staging_of(checkpoints: Path, step: int) -> Path:
    """Where it is while it is being written."""
    return checkpoints / f".step-{step:06d}.partial"


def step_of(checkpoint: Path) -> int:
    """The step that a complete checkpoint was written after, whatever its folder is called."""
    return int(json.loads((checkpoint / STATE).read_text())["global_step"])


def tidy(folder: Path) -> None:
    """Takes away what libraries leave beside the weights, and gives all files the rights that the umask means.

    training_args.bin is a pickle of this machine's paths that nothing reads, README.md an empty model card; safetensors
    writes files for their owner alone.
    """
    for name in ("training_args.bin", "README.md"):
        (folder / name).unlink(missing_ok=True)
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)


def complete(staging: Path, target: Path) -> None:
    """Seals `staging` with a manifest and moves it to `target`; called by one process when all have written."""
    tidy(staging)
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    manifest = {
        str(path.relative_to(staging)): {"bytes": path.stat().st_size, "blake2b": _hash(path)} for path in files
    }
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in (*files, staging / MANIFEST):
        _sync(path)
    _sync(staging)
    if target.exists():
        shutil.rmtree(target)
    staging.rename(target)
    _sync(target.parent)


def listed(checkpoints: Path) -> list[Path]:
    """The complete checkpoints, oldest first; folders of other names are the user's own."""
    return [path for _, path in _numbered(checkpoints)]


def set_aside(checkpoints: Path, after: int) -> list[str]:
    """Renames the checkpoints of later steps than `after`, which a run that goes on from there is about to make anew.

    They are damaged, or of steps that a resumed run has left. Under their own names they would count as the newest ones: kept in
    place of good ones, and resumed from. Returns remarks.
    """
    remarks = []
    for step, later in _numbered(checkpoints):
        if step > after:
            number = 1
            while (target := later.with_name(f"aside-{number}-{later.name}")).exists():
                number += 1
            remarks.append(f"checkpoint {later.name} is set aside: it is {later.rename(target).name} now")
    return remarks


def _numbered(checkpoints: Path) -> list[tuple[int, Path]]:
    found = [(int(name[1]), path) for path in checkpoints.glob("step-*") if (name := _NAME.fullmatch(path.name))]
    return [(step, path) for step, path in sorted(found) if (path / MANIFEST).is_file()]


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, by its manifest; None where nothing is."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
    except (OSError, ValueError):
        return f"{MANIFEST} is missing or unreadable"
    for name, entry in manifest.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"] or _hash(path) != entry["blake2b"]:
            return f"{name} is not as it was written"
    return None


def find_resume(resume: str, checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that `trainer.resume` (auto | never | folder) means, and remarks on damaged ones passed over.

    Raises UserError where a named folder is not a whole checkpoint.
    """
    if resume == "never":
        return None, []
    if resume != "auto":
        named = Path(resume).expanduser()
        wrong = damage(named)
        if wrong:
            raise UserError(f"{resume} is not a whole checkpoint: {wrong}", where="trainer.resume")
        return named, []
    remarks = []
    for checkpoint in reversed(listed(checkpoints)):
        wrong = damage(checkpoint)
        if wrong is None:
            return checkpoint, remarks
        remarks.append(f"checkpoint {checkpoint.name} is passed over: {wrong}")
    return None, remarks


def check_origin(checkpoint: Path, origin: dict[str, Any]) -> None:
    """Raises UserError where going on from `checkpoint` would not continue the same steps.

    `origin` is what the order of the data hangs on, as plain values; the checkpoint holds that of the run that wrote it.
    """
    written = json.loads((checkpoint / ORIGIN).read_text())
    differing = [
        Problem(
            f"the checkpoint {checkpoint.name} was made with {written.get(name)}, this run has {value}",
            where=name,
            fix="set it back, or start over with trainer.resume=never",
        )
        for name, value in origin.items()
        if written.get(name) != value
    ]
    if differing:
        raise UserError(differing)


def prune(checkpoints: Path, keep: int | None, best: Path | None) -> None:
    """Removes all but the newest `keep` checkpoints and the best one, and what interrupted writes left behind."""
    for leftover in checkpoints.glob(".step-*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    if keep is None:
        return
    for old in listed(checkpoints)[:-keep]:
        if best is None or old.resolve() != best.resolve():
            shutil.rmtree(old)


def _hash(path: Path) -> str:
    digest = hashlib.blake2b()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
