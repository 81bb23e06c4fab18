"""`torch.cuda.*` for the stand-in devices: streams and events that have nothing to wait for, memory that is counted."""

from __future__ import annotations

import contextlib
import time
import types
from collections import Counter
from typing import Any

import torch

from standin_gpus.device import MEMORY, check, count, current, index_of, make_current, register_host_memory, touch
from standin_gpus.tensor import Bytes, waits

_SIZES = {"total_memory": MEMORY, "L2_cache_size": 50 * 2**20, "shared_memory_per_block_optin": 232448, "warp_size": 32}
_SIZES |= {"max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 65536, "multi_processor_count": 132}
_OF = {
    "name": "NVIDIA H100 80GB HBM3 (stand-in)",
    "uuid": "GPU-standin",
    "major": 9,
    "minor": 0,
    "is_integrated": False,
}
PROPERTIES = types.SimpleNamespace(**_SIZES, **_OF)


class Stream:
    """A stream of the device that is current where it is made."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", current() if device is None else index_of(device))
        self.device_index, self.stream_id = self.device.index, 0
        touch(self.device.index)

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        waits.append("stream.synchronize")

    def record_event(self, event: Any = None) -> Event:
        event = event or Event()
        event.record()
        return event


class Event:
    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        waits.append("event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        return (other.time - self.time) * 1e3


class Device:
    """`with torch.cuda.device(d)`: d is the current device inside."""

    def __init__(self, device: Any) -> None:
        self.index = device if isinstance(device, int) else index_of(device)

    def __enter__(self) -> None:
        self.before = current()
        make_current(self.index)

    def __exit__(self, *_: Any) -> None:
        make_current(self.before)


def set_device(device: Any) -> None:
    from torch.cuda._utils import _get_device_index

    index = _get_device_index(device)  # raises for a device without an index, as CUDA's own does
    if index >= count():
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    if index >= 0:
        make_current(index)


def current_stream(device: Any = None) -> Stream:
    return Stream(device)


@contextlib.contextmanager
def _on_stream(_: Any):
    yield


def synchronize(device: Any = None) -> None:
    check()
    waits.append("synchronize")


def _random_state(device: Any = None) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8)  # random numbers are the CPU's


def _index(device: Any = None) -> int:
    return device if isinstance(device, int) else current() if device is None else index_of(device)


def _each(*names: str, of: Any) -> dict[str, Any]:
    """A function of its own for each name that returns what `of` does: torch's compiler tells functions apart by identity."""
    return {name: lambda *_, **__: of() for name in names}


def _by_device(*names: str, of: Counter[int]) -> dict[str, Any]:
    return {name: lambda device=None: of[_index(device)] for name in names}


def install() -> None:
    """Replaces what torch.cuda has by what is here."""
    cuda: Any = torch.cuda
    random = {
        "get_rng_state": _random_state,
        "get_rng_state_all": lambda: [_random_state()] * count(),
        **_each("set_rng_state", "set_rng_state_all", of=lambda: None),
    }
    memory = {
        "mem_get_info": lambda device=None: (MEMORY - Bytes.now[_index(device)], MEMORY),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: Bytes.reset(_index(device)),
        **_by_device("memory_allocated", "memory_reserved", of=Bytes.now),
        **_by_device("max_memory_allocated", "max_memory_reserved", of=Bytes.most),
    }
    values = {
        **random,
        **memory,
        **_each("init", "_lazy_init", "empty_cache", "ipc_collect", "manual_seed", "manual_seed_all", of=lambda: None),
        **_each("is_available", "is_initialized", "is_bf16_supported", "can_device_access_peer", of=lambda: True),
        **_each("is_current_stream_capturing", "_is_in_bad_fork", of=lambda: False),
        **_each("utilization", of=lambda: 0),
        **_each("get_device_properties", of=lambda: PROPERTIES),
        **_each("get_device_capability", of=lambda: (PROPERTIES.major, PROPERTIES.minor)),
        **_each("get_device_name", of=lambda: PROPERTIES.name),
        **{one.__name__: one for one in (set_device, synchronize, current_stream, Stream, Event)},
        "device_count": count,
        "current_device": current,
        "device": Device,
        "stream": _on_stream,
        "default_stream": lambda device=None: Stream(device),
        "nccl": types.SimpleNamespace(version=lambda: (2, 28, 3)),
        "cudart": lambda: types.SimpleNamespace(
            cudaHostRegister=register_host_memory,
            cudaHostUnregister=lambda *_: 0,
            cudaError=types.SimpleNamespace(success=0),
        ),
    }
    for name, value in values.items():
        setattr(cuda, name, value)
    for name, value in random.items():
        setattr(cuda.random, name, value)
    for name, value in _each("range_push", "range_pop", "mark", "range_start", "range_end", of=lambda: 0).items():
        setattr(cuda.nvtx, name, value)
    below: Any = torch._C
    below._cuda_getDevice, below._cuda_getDeviceCount = current, count
    below._cuda_getCurrentRawStream = lambda index: 0
    below._cuda_getCurrentStream = lambda index: (0, index, 1)
    below._cuda_isInBadFork = lambda: False
    torch.version.cuda = "13.0"
    torch.backends.cudnn.version = lambda: None  # torch asks it before each varlen call since 2.15
