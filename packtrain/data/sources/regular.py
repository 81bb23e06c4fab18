"""Regular files alone: a FIFO would be waited for without end, and /dev/zero has none."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from packtrain.errors import UserError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path, where: str = "") -> None:
    """Raises UserError, at `where` or the path itself, for what is there and is no regular file, links followed."""
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except OSError:  # not there, or a loop of links: opening it says so
        return
    if kind != stat.S_IFREG:
        what = f"expected a file, found {_KINDS.get(kind, 'something else')}"
        raise UserError(f"{what}: {path}" if where else what, where=where or str(path), fix="Put a regular file there.")
