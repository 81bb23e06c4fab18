"""One run at a time in a run folder: two would resume from each other's checkpoints, and both end well.

There are two locks, of which the system lets go when their process ends, however it ends. One is a file of this machine's
temporary folder, because the run's may be moved while it is held. The other is in logs/, which always is the folder of the
run that goes on: machines that share a disk see it, as far as the file system tells them of locks (NFS, Lustre and local ones
do).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from packtrain.errors import UserError

LOCK = "lock"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Inside the block no other packtrain on this machine runs in `folder`.

    Raises UserError where one does already, here or, by the lock in its logs/, on another machine.
    """
    name = hashlib.blake2b(f"{os.getuid()} {folder.resolve()}".encode(), digest_size=16).hexdigest()
    with _locked(Path(tempfile.gettempdir(), f"packtrain-{name}.lock"), folder, "a run is going on in"):
        if (folder / "logs" / LOCK).exists():
            with claimed_for_others(folder):
                pass
        yield


@contextmanager
def claimed_for_others(folder: Path) -> Iterator[None]:
    """Inside the block machines that share the disk see that a run is going on in `folder`, which has its logs/ by now.

    Raises UserError where another machine has been quicker.
    """
    with _locked(folder / "logs" / LOCK, folder, "a run of another machine is going on in"):
        yield


@contextmanager
def _locked(file: Path, folder: Path, what: str) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    descriptor = None
    with suppress(OSError):  # a folder that is only read
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    if descriptor is None:
        yield
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        fix = "Wait for its end, or name another folder."
        raise UserError(f"{what} {folder}", where="trainer.output_dir", fix=fix) from error
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(descriptor)
