"""Rank processes: their state in the operating system, Python stacks, and pending collectives.

A rank's heartbeat thread reads its own stacks (`own_stacks`), even while the main thread waits in a collective, which releases
Python's lock (the GIL). SIGUSR2 makes its loader processes write theirs (`write_stacks_on_signal`, `dump`). Collectives come from
torch's flight recorder, which gloo and NCCL always keep.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

Life = Literal["running", "stopped", "gone"]
STACKS = "PACKTRAIN_STACKS"
"""Environment variable of a rank: the folder for stacks, one per launch and machine."""
DUMP_S = 1.0


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A rank's process as its launcher sees it.

    `code` is its exit code, negative for a signal, None if not known. `reported`: the worker reported the code before it ended. `lost` is
    the worker's message if it ended only because others were gone. `oom`: the kernel's out-of-memory killer has killed a process on
    that machine.
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


def free_memory() -> int:
    """Return the free memory in bytes. It is the machine's, or the tightest cgroup's (version 2) of this process if less."""
    free = psutil.virtual_memory().available
    with suppress(OSError):
        own = Path(Path("/proc/self/cgroup").read_text().partition("0::")[2].partition("\n")[0])
        for group in (own, *own.parents):
            folder = Path("/sys/fs/cgroup", str(group).strip("/"))
            with suppress(OSError, ValueError):  # "max", or no such file in the outermost group
                limit = int((folder / "memory.max").read_text())
                free = min(free, limit - int((folder / "memory.current").read_text()))
    return free


def count_oom_kills() -> int:
    """Count the kernel's out-of-memory kills on this machine, in all cgroups; 0 except on Linux."""
    with suppress(OSError):
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    return 0


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation. `number` counts in its process `group`, `what` is the data ("Float 4x8")."""

    name: str
    number: int
    group: str = ""
    what: str = ""

    def __str__(self) -> str:
        return f"{self.name} number {self.number}{f' ({self.what})' if self.what else ''}"


def write_stacks_on_signal() -> None:
    """Write this process's stacks into STACKS on SIGUSR2 and on a crash, from now on.
    The process is a rank or one of its loaders. Does nothing without STACKS."""
    if STACKS in os.environ:
        path = Path(os.environ[STACKS], f"{os.getpid()}.stacks")
        partial = path.with_suffix(".partial")
        with suppress(OSError):
            file = partial.open("a")
            faulthandler.enable(file)
            faulthandler.register(signal.SIGUSR2, file, all_threads=True, chain=False)
            # the final name only now: the signal would kill a process that has not registered for it yet
            partial.rename(path)


def own_stacks() -> str:
    """Return the stacks of all threads of this process, and of its loader processes."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    folder = Path(os.environ.get(STACKS, os.devnull))
    loaders = [stack for child in psutil.Process().children() if (stack := dump(folder, child.pid))]
    return "\n".join([*(f"-- a loader process\n{stack}" for stack in loaders), text])


def dump(folder: Path, pid: int) -> str:
    """Return the stacks of process `pid`. "" if it never called `write_stacks_on_signal`, or wrote none within DUMP_S (stopped, gone)."""
    file = folder / f"{pid}.stacks"
    with suppress(OSError):
        os.truncate(file, 0)  # fails if it has not called `write_stacks_on_signal`
        os.kill(pid, signal.SIGUSR2)
        end, before = time.monotonic() + DUMP_S, -1
        while time.monotonic() < end and not 0 < file.stat().st_size == before:
            before = file.stat().st_size
            time.sleep(0.05)
        return file.read_text(errors="replace")
    return ""


def crash_of(folder: Path, pid: int) -> str:
    """Return the stacks from a crash of process `pid`. "" if it did not crash, or never called `write_stacks_on_signal`."""
    with suppress(OSError):
        text = (folder / f"{pid}.stacks").read_text(errors="replace")
        return "".join(text.partition("Fatal Python error")[1:])
    return ""


def main_stack(text: str) -> tuple[str, ...]:
    """Return the main thread's calls in a faulthandler dump, innermost first. The dump has that thread last."""
    main = text.rpartition("(most recent call first):")[2]
    return tuple(line.strip() for line in main.splitlines() if line.startswith('  File "'))


def own_collectives() -> dict[str, Any]:
    """Return `last_collectives` of this process; {} without torch.

    torch has one flight recorder for all backends, and in builds with NCCL maybe one more.
    """
    if "torch.distributed" not in sys.modules:
        return {}
    c10d = importlib.import_module("torch._C._distributed_c10d")
    last: dict[str, Any] = {}
    for recorder in (getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")):
        recorded = last_collectives(json.loads(recorder())) if recorder is not None else {}
        last |= {name: entry for name, entry in recorded.items() if entry and not last.get(name)}
    return last


def last_collectives(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `pending` and `finished` operations of one flight recorder's dump.

    `pending` is the first that has not ended, `finished` the last that has; each has the fields of Collective, or is None. Point-to-point
    operations have numbers of their own: they are left out."""
    last: dict[str, Any] = {"pending": None, "finished": None}
    for entry in recorded.get("entries", ()):
        status = recorded.get("pg_status", {}).get(str(entry["pg_id"]), {})
        name, number = entry["profiling_name"], entry["collective_seq_id"]
        ended = entry["retired"] or number <= int(status.get("last_completed_collective", -1))
        if not entry["is_p2p"] and (ended or last["pending"] is None):
            sizes = zip(entry["input_dtypes"], entry["input_sizes"], strict=True)
            what = ", ".join(f"{dtype} {'x'.join(map(str, size)) or '1'}" for dtype, size in sizes)
            fields = {"name": name, "number": number, "group": str(entry["pg_id"]), "what": what[:200]}
            last["finished" if ended else "pending"] = fields
    return last
