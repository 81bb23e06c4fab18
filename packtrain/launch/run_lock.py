"""One run at a time in a run folder: two would resume from each other's checkpoints, and both report success.

The lock is on a file in logs/, which always belongs to the run that goes on; the system releases it when the process ends, however
it ends. Machines that share the disk see it if the file system has locks (NFS, Lustre and local ones do).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from packtrain.errors import UserError
from packtrain.monitor.channel import PUBLISHED
from packtrain.run_folder import RunFolder, object_of

LOCK = "lock"
_TAKE_S = 1
_MOMENT_S = 0.3
"""For as long a lock may be that of another process that only looks: the machines of a run do so together at its start."""


@contextmanager
def locked(folder: Path, wait_s: float = 0) -> Iterator[None]:
    """Inside the block a run is going on in `folder`, whose logs/ exists. Raises UserError if one is already, after `wait_s`."""
    lock = FileLock(folder / "logs" / LOCK, mode=0o666)
    try:
        lock.acquire(timeout=wait_s)
    except Timeout as error:
        raise _goes_on(folder) from error
    except (OSError, NotImplementedError):  # a folder that is only read, or a file system without locks
        yield
        return
    try:
        yield
    finally:
        lock.release()


def is_locked(folder: Path) -> bool:
    """Whether a run is going on in `folder`."""
    # an unmarked folder may have someone's file of that name, which a lock would empty
    if not os.path.exists(folder / "logs" / LOCK) or not os.path.exists(RunFolder(folder).mark):
        return False
    try:
        with locked(folder, _MOMENT_S):
            return False
    except UserError:
        return True


class RunLock(ExitStack):
    """The lock of a run, which machine 0 has until the end; taken again at each launch, for logs/ may be another folder then."""

    held = False

    def take(self, folder: Path) -> None:
        """Locks `folder`, whose logs/ exists. Raises UserError if another run has."""
        self.close()
        self.enter_context(locked(folder, _TAKE_S))  # `is_locked` of another process has it for a moment
        self.held = True


def check_free(folder: Path) -> None:
    """Raises UserError if a run is going on in `folder`."""
    if is_locked(folder):
        raise _goes_on(folder)


def _goes_on(folder: Path | str) -> UserError:
    what = "a run"
    host = str(object_of(Path(folder, "logs", PUBLISHED)).get("host", ""))
    if host and host != socket.gethostname():
        what, folder = "a run of another machine", f"{folder} ({host})"
    fix = "Wait for its end, or name another folder."
    return UserError(f"{what} is going on in {folder}", where="trainer.output_dir", fix=fix)
