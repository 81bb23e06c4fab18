"""Atomic writes of files and folders: whole or absent after a kill or power failure. They are written under another name, synced
and renamed, and the parent folder is synced; otherwise a renamed file can come back empty. `hash_of` shows whether one has changed."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems cannot sync a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def hash_of(path: Path, digest_size: int = 64) -> str:
    """Return BLAKE2 of the bytes of a file."""
    digest = hashlib.blake2b(digest_size=digest_size)
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def aside(path: Path) -> Path:
    """Return the path of a file or folder while it is being written or removed."""
    return path.with_name(f".{path.name}.partial")


def write_text(path: Path, text: str) -> None:
    """Write a file (UTF-8) atomically."""
    try:
        aside(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:  # no space: remove the part that was written, and name the file
        aside(path).unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    publish(aside(path), path)


def publish(staging: Path, target: Path) -> None:
    """Sync a file, or a folder with all its files, and rename it to `target`."""
    for folder, _, files in os.walk(staging):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))
    if staging.is_file():
        sync(staging)
    os.replace(staging, target)
    sync(target.parent)


def remove(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that no part of it is ever seen under its name."""
    shutil.rmtree(aside(folder), ignore_errors=True)
    folder.rename(aside(folder))
    shutil.rmtree(aside(folder), ignore_errors=True)
