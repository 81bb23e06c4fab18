"""Reading and writing in the run folder by those who tell why a run stands still: its disk may be why, and is not waited for.

A thread that a file system does not let go of cannot be ended. It is left behind; what comes after it is done when it is over,
if ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

DISK_S = 3
_STALLED = "stalled disk"
_Found = TypeVar("_Found")


def in_time(work: Callable[[], _Found], otherwise: _Found) -> _Found:
    """What `work` returns; `otherwise` where it raises OSError or takes longer than DISK_S, or something before it still does."""
    found: list[_Found] = []
    earlier = [one for one in threading.enumerate() if one.name == _STALLED]

    def attempt() -> None:
        for one in earlier:
            one.join()
        with suppress(OSError):
            found.append(work())

    thread = threading.Thread(target=attempt, name="disk", daemon=True)
    thread.start()
    thread.join(0 if earlier else DISK_S)
    if thread.is_alive():
        thread.name = _STALLED
    return found[0] if found else otherwise
