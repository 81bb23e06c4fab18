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
    with _locked(Path(tempfile.gettempdir(), f"packtrain-{name}.lock"), folder, "a run is going on in", passing=True):
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
def _locked(file: Path, folder: Path, what: str, *, passing: bool = False) -> Iterator[None]:
    """Holds the lock on `file`, which is taken away afterwards where it is `passing`."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    descriptor, held = None, False
    while not held:
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # a folder that is only read
            break
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            fix = "Wait for its end, or name another folder."
            raise UserError(f"{what} {folder}", where="trainer.output_dir", fix=fix) from error
        except OSError:  # a file system without locks
            break
        held = not passing or _is_at(descriptor, file)
        if not held:  # taken away since it was opened, by a run that has ended
            os.close(descriptor)
            descriptor = None
    try:
        yield
    finally:
        if held and passing:
            with suppress(OSError):
                file.unlink()  # who has opened it meanwhile sees that
        if descriptor is not None:
            os.close(descriptor)


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError:
        return False
