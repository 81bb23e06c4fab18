"""Ranks as the operating system of their machine sees them: there, stopped or gone, and killed for want of memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A rank's process as its launcher knows it.

    `code` is its exit code, negative for a signal, None where it is not known; `told`: the worker has told it itself, before it
    ended. `lost` are its words where it ended only because others were gone, `crash` the stacks that a crash has left, `oom`
    that the system killed it for want of memory.
    """

    pid: int
    state: Literal["running", "stopped", "gone"] = "running"
    code: int | None = None
    told: bool = False
    lost: str = ""
    crash: str = ""
    oom: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain containers, for the channel."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ProcessState:
        """What `to_json` wrote. Raises TypeError for anything else."""
        return cls(**values)


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


class MemoryKills:
    """Whether the system has killed one of our processes for want of memory: by the counter of its cgroup (Linux)."""

    def __init__(self) -> None:
        self._first: dict[Path, int] = {}
        self._counters: dict[int, set[Path]] = {}

    def note(self, pid: int) -> None:
        """Remembers the cgroup of a process that is there; called while it runs."""
        for counter in _counters_of(pid):
            self._first.setdefault(counter, _kills(counter))
            self._counters.setdefault(pid, set()).add(counter)

    def killed(self, pid: int) -> bool:
        """Whether processes of its cgroup have been killed for it since `note`."""
        return any(_kills(one) > self._first[one] for one in self._counters.get(pid, ()))


def _counters_of(pid: int) -> list[Path]:
    """The files in which the system counts what it has killed in the memory cgroup of a process."""
    for line in _text_of(Path(f"/proc/{pid}/cgroup")).splitlines():
        number, kinds, path = (*line.split(":", 2), "", "")[:3]
        v2 = number == "0" and not kinds
        if v2 or "memory" in kinds.split(","):
            root = Path("/sys/fs/cgroup" if v2 else "/sys/fs/cgroup/memory")
            name = "memory.events" if v2 else "memory.oom_control"
            # inside a container the path may be that of the host, and the container's own group the root
            found = [file for file in (root / path.lstrip("/") / name, root / name) if file.is_file()]
            if found:
                return found[:1]
    return []


def _kills(counter: Path) -> int:
    entries = dict(line.split() for line in _text_of(counter).splitlines() if len(line.split()) == 2)
    return int(entries.get("oom_kill", 0))


def _text_of(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(errors="replace")
    return ""
