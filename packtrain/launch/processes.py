"""Processes as the system sees them, beyond what they say of themselves: /proc and cgroups, where there are such (Linux).

Elsewhere (macOS) psutil tells less: whether a process is there, stopped, and what it has computed.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

HAS_PROC = os.path.isdir("/proc/self")
"""Whether the system tells of processes there; else psutil is asked."""
_LETTERS = {
    psutil.STATUS_STOPPED: "T",
    psutil.STATUS_ZOMBIE: "Z",
    psutil.STATUS_RUNNING: "R",
    psutil.STATUS_DISK_SLEEP: "D",
}
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_ENOUGH_FIELDS = 15
_KERNEL_LOG_BYTES = 2**20
_LONGEST_ENTRY = 200


@dataclass(frozen=True, slots=True)
class Sight:
    """One look at a process: `state` is R (runs), S (sleeps), D (waits for storage or a device), T (stopped), Z (dead), ""
    (gone); `cpu` the seconds it has computed, with those of children that it has waited for."""

    state: str
    cpu: float = 0.0


def sight(pid: int) -> Sight:
    """How the process is now."""
    found = _stat(pid)
    return Sight("") if found is None else Sight(found[1], found[2])


def moved(pid: int) -> int:
    """Bytes that the process has read and written so far, and memory that it has got or mapped from files; 0 where that is not
    told."""
    entries = (line.partition(": ") for line in text_of(f"/proc/{pid}/io").splitlines())
    fields = _fields(pid)  # a network file system counts no bytes for pages that are mapped: these are its page faults
    pages = int(fields[7]) + int(fields[9]) if len(fields) >= _ENOUGH_FIELDS else 0
    return (
        sum(int(value) for name, _, value in entries if name in ("rchar", "wchar", "read_bytes"))
        + pages * mmap.PAGESIZE
    )


def wakes(pid: int) -> int:
    """How often the process's main thread has waited for something and gone on; 0 where that is not told."""
    for line in text_of(f"/proc/{pid}/status").splitlines():
        name, _, value = line.partition(":")
        if name == "voluntary_ctxt_switches":
            return int(value)
    return 0


def families(roots: Iterable[int]) -> dict[int, list[int]]:
    """Each of `roots` → the processes that it and its children have started, in whatever session they are."""
    if not HAS_PROC:
        return {root: _children(root) for root in roots}
    children = defaultdict(list)
    for name in _listed("/proc"):
        if name.isdigit() and (found := _stat(int(name))):
            children[found[0]].append(int(name))
    reached = {}
    for root in roots:
        family = [root]
        for one in family:  # grows meanwhile
            family += children[one]
        reached[root] = family[1:]
    return reached


def oom_counter(pid: int) -> Path | None:
    """The file in which the system counts the processes of the cgroup of `pid` that it has killed for want of memory."""
    for line in text_of(f"/proc/{pid}/cgroup").splitlines():
        number, kinds, path = (*line.split(":", 2), "", "")[:3]
        v2 = number == "0" and not kinds
        if v2 or "memory" in kinds.split(","):
            root = Path("/sys/fs/cgroup") if v2 else Path("/sys/fs/cgroup/memory")
            name = "memory.events" if v2 else "memory.oom_control"
            # inside a container the path may be that of the host, and the container's own group the root
            for file in (root / path.lstrip("/") / name, root / name):
                if file.is_file():
                    return file
    return None


def oom_kills(counter: Path | None) -> int:
    """What an `oom_counter` says now; 0 where there is none."""
    for entry in text_of(str(counter)).splitlines() if counter else ():
        name, _, value = entry.partition(" ")
        if name == "oom_kill" and value.isdigit():
            return int(value)
    return 0


def killed_for_memory(pid: int) -> bool:
    """Whether the system's log says so; False where it may not be read."""
    words = f"Killed process {pid} "
    return any(words in entry for entry in _kernel_log())


def gpu_error(since: float, log: Iterable[str] | None = None) -> str:
    """The first error of an NVIDIA GPU (Xid) in the system's log (entries as in /dev/kmsg) after `since`, time.monotonic();
    "" where there is none, or the log may not be read."""
    for entry in _kernel_log() if log is None else log:
        head, _, text = entry.partition(";")
        when = head.split(",")[2:3]
        if "NVRM: Xid" in text and when and when[0].isdigit() and int(when[0]) / 1e6 >= since:
            return text.partition("\n")[0][:_LONGEST_ENTRY]
    return ""


def _kernel_log() -> Iterator[str]:
    """Entries of the system's log, oldest first: "priority,number,microseconds since its start,flags;text"."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    read = 0
    try:
        while read < _KERNEL_LOG_BYTES:
            entry = os.read(log, 8192)
            read += len(entry)
            yield entry.decode(errors="replace")
    except OSError:  # at its end, or overwritten meanwhile
        pass
    finally:
        os.close(log)


def text_of(path: str | Path) -> str:
    """What a file says; "" where it is not there, or cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _stat(pid: int) -> tuple[int, str, float] | None:
    """Parent, state, seconds of CPU time."""
    if not HAS_PROC:
        return _asked(pid)
    fields = _fields(pid)
    if len(fields) < _ENOUGH_FIELDS:
        return None
    return int(fields[1]), fields[0], sum(map(int, fields[11:15])) / _TICKS


def _fields(pid: int) -> list[str]:
    """Those of /proc/PID/stat from the third on: the second is the program's name in brackets, which may hold anything."""
    _, _, rest = text_of(f"/proc/{pid}/stat").rpartition(") ")
    return rest.split()


def _asked(pid: int) -> tuple[int, str, float] | None:
    """The same as psutil tells it."""
    try:
        one = psutil.Process(pid)
        times = one.cpu_times()
        return one.ppid(), _LETTERS.get(one.status(), "S"), times.user + times.system
    except psutil.ZombieProcess:
        return 0, "Z", 0.0
    except psutil.NoSuchProcess:
        return None
    except psutil.Error:  # it is there, and says nothing
        return 0, "S", 0.0


def _children(pid: int) -> list[int]:
    try:
        return [one.pid for one in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
