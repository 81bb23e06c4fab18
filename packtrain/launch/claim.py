"""One run at a time in a run folder: two would resume from each other's checkpoints, and both end well.

The lock is a file of this machine's temporary folder and not of the run's, which may be moved while it is held; the system
lets go of it when its process ends, however it ends. Runs of other machines on a shared disk are not seen.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packtrain.errors import UserError


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Inside the block no other packtrain on this machine runs in `folder`; raises UserError where one does already."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    name = hashlib.blake2b(f"{os.getuid()} {folder.resolve()}".encode(), digest_size=16).hexdigest()
    with open(Path(tempfile.gettempdir(), f"packtrain-{name}.lock"), "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"a run is going on in {folder}",
                where="trainer.output_dir",
                fix="Wait for its end, or name another folder.",
            ) from error
        except OSError:  # a file system without locks
            pass
        yield
