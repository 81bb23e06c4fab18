"""What a process leaves that crashes: its signal, when, and the stacks of its threads, by Python's faulthandler.

No parent of ours sees how a rank ends: torchrun does, or another launcher. And where one rank is gone, NCCL has the others
abort: by this it is known who did so, and who crashed by himself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packtrain.launch.processes import text_of
from packtrain.monitor.old.stacks import Frame, main_stack

_SAID = re.compile(r"^Fatal Python error: (.*)$", re.MULTILINE)
_SIGNALS = {
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": getattr(signal, "SIGBUS", signal.SIGSEGV),
    "Illegal instruction": signal.SIGILL,
    "Floating-point exception": signal.SIGFPE,
}
_TORCHRUN_SAYS = re.compile(r"exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)")


@dataclass(frozen=True, slots=True)
class Crash:
    """The number of the signal, when (seconds, as files are dated), the main thread's stack (innermost first), and all of it."""

    signal: int
    at: float
    stack: tuple[Frame, ...]
    text: str


def leave_crashes(folder: Path, name: str) -> None:
    """From now on a crash of this process is left in `folder`."""
    if faulthandler.is_enabled() and not name.isdigit():
        faulthandler.disable()  # a rank's, of which this loader process is a fork
    with contextlib.suppress(OSError):
        faulthandler.enable((folder / f"{name}.crash").open("w"))  # kept open by faulthandler


def crash_of(folder: Path, name: str) -> Crash | None:
    """What `name` has left; None where it has not crashed, or was killed."""
    file = folder / f"{name}.crash"
    text = text_of(file)
    said = [_SIGNALS[one] for one in _SAID.findall(text) if one in _SIGNALS]
    try:
        return Crash(int(said[-1]), file.stat().st_mtime, main_stack(text), text) if said else None
    except OSError:
        return None


def ends_of(folder: Path, pids: Mapping[int, int], log: str) -> dict[int, int]:
    """By which signals (negative), or with which exit codes, the ranks whose processes were `pids` ended, by torchrun's `log` or
    what they have left."""
    said = {int(pid): int(code) for code, pid in _TORCHRUN_SAYS.findall(log)}
    crashes = {rank: crash_of(folder, str(rank)) for rank in pids}
    by_log = {rank: said[pid] for rank, pid in pids.items() if pid in said}
    return {**{rank: -crash.signal for rank, crash in crashes.items() if crash}, **by_log}
