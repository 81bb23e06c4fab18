"""The processes of ranks: their state in the operating system, the Python stacks of their threads, and pending collectives.

A rank's heartbeat thread reads its own stacks (`own_stacks`), also while the main thread waits in a collective, which releases
Python's lock (the GIL), and has its loader processes write theirs on SIGUSR2 (`write_stacks_on_signal`, `dump`). Collectives come from torch's
flight recorder, which gloo and NCCL always keep.
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
"""Environment variable of a rank: the folder that stacks are written into, one per launch and machine."""
DUMP_S = 1.0


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


def free_memory() -> int:
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


def count_oom_kills() -> int:
    """How many processes the kernel's out-of-memory killer has killed on this machine, in all cgroups; 0 except on Linux."""
    with suppress(OSError):
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    return 0


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation: its name, its number in its group of processes, and what it moves ("Float 4x8")."""

    name: str
    number: int
    group: str = ""
    what: str = ""

    def __str__(self) -> str:
        return f"{self.name} number {self.number}{f' ({self.what})' if self.what else ''}"


def write_stacks_on_signal() -> None:
    """From now on this process, a rank or a loader process of one, writes its stacks into STACKS on SIGUSR2 and on a crash. Does
    nothing without STACKS."""
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
    """The stacks of all threads of this process, and of its loader processes."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    folder = Path(os.environ.get(STACKS, os.devnull))
    loaders = [stack for child in psutil.Process().children() if (stack := dump(folder, child.pid))]
    return "\n".join([*(f"-- a loader process\n{stack}" for stack in loaders), text])


def dump(folder: Path, pid: int) -> str:
    """The stacks of process `pid`; "" if it has not called `write_stacks_on_signal`, or wrote none within DUMP_S (it is stopped or gone)."""
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
    """The stacks that a crash of process `pid` left; "" if it did not crash, or had not called `write_stacks_on_signal`."""
    with suppress(OSError):
        text = (folder / f"{pid}.stacks").read_text(errors="replace")
        return "".join(text.partition("Fatal Python error")[1:])
    return ""


def main_stack(text: str) -> tuple[str, ...]:
    """The main thread's calls in a dump of faulthandler, which writes that thread last; innermost call first."""
    main = text.rpartition("(most recent call first):")[2]
    return tuple(line.strip() for line in main.splitlines() if line.startswith('  File "'))


def own_collectives() -> dict[str, Any]:
    """`last_collectives` of this process; {} without torch.

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
    """From one flight recorder's dump, as fields of Collective or None: `pending`, the first operation that was begun and has
    not ended, and `finished`, the last that has. Point-to-point operations are left out: they have numbers of their own."""
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
