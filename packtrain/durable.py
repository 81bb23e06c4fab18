"""Files and folders that a kill or a loss of power leaves whole or absent: written aside, synced, renamed, and their folder synced.
Otherwise a renamed file can come back empty."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path


def sync(path: Path) -> None:
    """Waits until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # file systems that cannot sync a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def aside(path: Path) -> Path:
    """Where a file or folder lies while it is written or removed."""
    return path.with_name(f".{path.name}.partial")


def write_text(path: Path, text: str) -> None:
    """Writes a file (UTF-8) that is the old one, or none, until it is this one whole."""
    try:
        aside(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:  # no room: nothing half stays, and the error names the file
        aside(path).unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    publish(aside(path), path)


def publish(staging: Path, target: Path) -> None:
    """Syncs a file, or a folder with all that is in it, and renames it to `target`, beside it or not."""
    for folder, _, files in os.walk(staging):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))
    if staging.is_file():
        sync(staging)
    os.replace(staging, target)
    sync(target.parent)


def remove(folder: Path) -> None:
    """Removes a folder, of which no part is ever seen under its name."""
    shutil.rmtree(aside(folder), ignore_errors=True)
    folder.rename(aside(folder))
    shutil.rmtree(aside(folder), ignore_errors=True)
