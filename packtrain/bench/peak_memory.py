"""The memory of a process: the peak since it was last asked for, and what a CPU run may take."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

SHARE = 0.7
"""Of the machine's free memory that may be filled: beyond, Linux ends processes."""
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def reset_peak(device: torch.device) -> None:
    """Begins a new peak; memory that earlier steps have freed is given back first."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):
            _CLEAR.write_text("5")  # the peak of the resident set is counted anew


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak: of a GPU what torch has allocated, else the resident set of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        return _kilobytes(_STATUS, "VmHWM") * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_memory(processes: int) -> int | None:
    """Bytes that each of the `processes` of this machine may take, what it has counted in; None if not known."""
    try:
        free = _kilobytes(Path("/proc/meminfo"), "MemAvailable") * 1024
        own = _kilobytes(_STATUS, "VmRSS") * 1024
    except (OSError, ValueError):
        return None
    most = [int(text) for file in _LIMITS if (text := _read(file)).isdigit()]
    return int(SHARE * (min([free // processes + own, *(one // processes for one in most)])))


def _kilobytes(file: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(f"{name}:"))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
