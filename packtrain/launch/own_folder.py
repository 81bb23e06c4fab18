"""Folders that belong to a launch and are gone with it, also where it was killed: the next one sweeps them away."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MEMORY_DISK = "/dev/shm"
_PREFIX = "packtrain-heartbeats-"
_LOCK = "lock"
_NEW_S = 60


@contextmanager
def heartbeat_folder() -> Iterator[Path]:
    """A folder for the heartbeats of a launch, in memory where that can be; gone afterwards."""
    with own_folder(place_of_heartbeats("").parent, _PREFIX) as folder:
        yield folder


@contextmanager
def own_folder(place: Path, prefix: str) -> Iterator[Path]:
    """A folder of a launch in `place`, whose name begins with `prefix`; gone afterwards.

    Those of killed launchers are swept away by the next one: nobody holds their lock any more.
    """
    for old in place.glob(f"{prefix}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _NEW_S:  # else it may be about to be locked
                with held(old.parent):
                    shutil.rmtree(old.parent, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        own = tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(own))
        with contextlib.suppress(OSError):  # a file system without locks
            stack.enter_context(held(folder))
        yield folder


def place_of_heartbeats(name: str) -> Path:
    """A folder of this name for heartbeats, in memory where that can be."""
    place = _MEMORY_DISK if os.access(_MEMORY_DISK, os.W_OK | os.X_OK) else tempfile.gettempdir()
    return Path(place, f"{_PREFIX}{name}")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds a heartbeat folder's lock, which the system lets go of with this process. Raises OSError where somebody else does."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with (folder / _LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
