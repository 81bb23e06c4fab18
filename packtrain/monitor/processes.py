"""The processes of ranks as the operating system sees them: running, stopped or gone; and whether memory ran out."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

Life = Literal["running", "stopped", "gone"]


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A rank's process as its launcher sees it.

    `code` is its exit code, negative for a signal, None if not known; `reported`: the worker reported it before it ended. `lost` is
    the worker's message if it ended only because others were gone, `oom` whether the kernel's out-of-memory killer has killed a
    process on that machine.
    """

    pid: int = 0
    state: Life = "running"
    code: int | None = None
    reported: bool = False
    lost: str = ""
    oom: bool = False


UNKNOWN = ProcessState()


def life_of(pid: int) -> Life:
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.Error:  # it exists, but belongs to another user
        return "running"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "running"


def memory_free() -> int:
    """Bytes of memory that are free on the machine, or in the tightest cgroup (version 2) that this process is in."""
    free = psutil.virtual_memory().available
    with suppress(OSError):
        own = Path(Path("/proc/self/cgroup").read_text().partition("0::")[2].partition("\n")[0])
        for group in (own, *own.parents):
            folder = Path("/sys/fs/cgroup", str(group).strip("/"))
            with suppress(OSError, ValueError):  # "max", or no such file in the outermost group
                limit = int((folder / "memory.max").read_text())
                free = min(free, limit - int((folder / "memory.current").read_text()))
    return free


def memory_kills() -> int:
    """How many processes the kernel's out-of-memory killer has killed on this machine, in all cgroups; 0 except on Linux."""
    with suppress(OSError):
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    return 0
