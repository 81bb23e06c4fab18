"""Waiting for what another process or thread does: for long, since the machine may be busy, and never for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LONG_S = 180
"""For what takes seconds: only what hangs takes longer."""
Found = TypeVar("Found")


def until(
    reached: Callable[[], Found], limit_s: float = LONG_S, said: Callable[[], object] = str, look_s: float = 0.05
) -> Found:
    """Return what `reached` returns as soon as it is true; fail with `said` where it is not within `limit_s`."""
    end = time.monotonic() + limit_s
    while not (found := reached()):
        assert time.monotonic() < end, said()
        time.sleep(look_s)
    return found
