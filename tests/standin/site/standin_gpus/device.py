"""Which devices there are, which of them is current in this thread, and which threads have touched one."""

from __future__ import annotations

import ctypes
import json
import os
import threading
from typing import Any

_guard = ctypes.CDLL(os.environ["STANDIN_LIBRARY"], ctypes.RTLD_GLOBAL)
MEMORY = int(float(os.environ.get("STANDIN_GIB", "80")) * 2**30)
"""Bytes of each device."""
touched: dict[int, str] = {}
"""Devices that this process touched, and the thread that was first: on a GPU each costs a context of half a gigabyte."""
broken = ""
"""What a kernel did to the device, after which every call fails with it."""


pending = threading.local()
"""`error`: what a call of this thread has left behind, which the next kernel raises."""


def limit() -> float:
    """Return the bytes of tensors that fit on a device. They may be fewer than the memory that it reports."""
    return float(os.environ.get("STANDIN_LIMIT_MIB", "inf")) * 2**20


def register() -> None:
    """Put the stand-in's guard in place of the one that a CUDA build of torch has brought."""
    _guard.standin_register()


def check() -> None:
    """Raises what broke the device, as CUDA does from then on, or what is pending in this thread."""
    error, pending.error = getattr(pending, "error", ""), ""
    if broken or error:
        import torch

        raise torch.AcceleratorError(broken or error)


def register_host_memory(*_: object) -> int:
    """`cudaHostRegister`: refused where STANDIN_PINS=0, as containers and WSL do."""
    if os.environ.get("STANDIN_PINS") != "0":
        return 0
    pending.error = "CUDA error: out of memory"
    return 2


def count() -> int:
    return int(os.environ["STANDIN_GPUS"])


def current() -> int:
    """The current device of this thread: 0 in a new one; autograd sets that of its own threads."""
    return _guard.standin_current_device()


def make_current(index: int) -> None:
    _guard.standin_set_device(index)


def index_of(device: Any) -> int:
    """The index of a `cuda` device, which is the current one where it names none."""
    import torch

    device = torch.device(device)
    assert device.type == "cuda"
    return current() if device.index is None else device.index


def touch(index: int) -> None:
    """Notes that this process uses a device; in the report, too."""
    if index in touched:
        return
    touched[index] = threading.current_thread().name
    report(device=index, thread=touched[index])


def report(**what: Any) -> None:
    """Adds a line of JSON about this process to the file STANDIN_REPORT."""
    if path := os.environ.get("STANDIN_REPORT"):
        with open(path, "a") as file:
            file.write(json.dumps({"rank": int(os.environ.get("RANK", "0")), **what}) + "\n")
