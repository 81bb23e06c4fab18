"""Ranks as the operating system of their machine sees them: there, stopped or gone; and whether memory has run out there."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A rank's process as its launcher knows it.

    `code` is its exit code, negative for a signal, None where it is not known; `told`: the worker has told it itself, before it
    ended. `lost` are its words where it ended only because others were gone, `oom` that the system has killed a process of that
    machine for want of memory.
    """

    pid: int = 0
    state: Literal["running", "stopped", "gone"] = "running"
    code: int | None = None
    told: bool = False
    lost: str = ""
    oom: bool = False


UNKNOWN = ProcessState()


def seen(pid: int) -> Literal["running", "stopped", "gone"]:
    """How the process is now."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.Error:  # it is there, and not ours to look at
        return "running"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "running"


def memory_kills() -> int:
    """How many processes the system of this machine has killed for want of memory, in all cgroups; 0 where it is not Linux."""
    with suppress(OSError):
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    return 0
