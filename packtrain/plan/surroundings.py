"""What this machine offers and says of itself, as a value: every decision of launch/ can then be tested on any machine.

`look_around` asks the machine once, before the plan; only its network is read later, when the plan knows the address of the
first machine. No torch, because importing it takes longer than everything else here.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from packtrain.plan.network.interfaces import Network, read_network

_RELEVANT = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "KUBERNETES_SERVICE_HOST")
_RELEVANT_PREFIXES = (
    *("LOCAL_", "MASTER_", "OMP_", "OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL", "PET_", "LWS_", "SLURM", "NCCL_", "GLOO_"),
)
_SMI_TIMEOUT_S = 20
_LEAST_PORT, _PORTS, _ATTEMPTS = 20_000, 10_000, 50
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a plan depends on beside the config: its environment variables, visible GPUs, CPU cores, paths, a free port.

    `gpu_memory` is that of the smallest GPU in bytes (None: not known, or none is visible), `driver` whether the machine has
    an NVIDIA driver at all, `load` the mean number of processes that wanted a core in the last minute. `network` tells the
    machine's network by the address of the first machine, which the plan finds out; None where it is not to be looked at.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    gpu_memory: int | None = None
    driver: bool = False
    cpus: int = 1
    load: float = 0.0
    host: str = "localhost"
    accelerate: str = "accelerate"
    python: str = "python"
    free_port: int = 29500
    network: Callable[[str | None], Network] | None = None


def look_around(gpus_of_machine: Sequence[int] | None = None) -> Surroundings:
    """The surroundings of this process. Takes a few milliseconds without GPUs, nvidia-smi's time with them.

    `gpus_of_machine` are bytes of memory of each GPU, 0 where not known, for a caller that has asked already.
    """
    beside = Path(sys.executable).with_name("accelerate")
    memory = _gpus_of_machine() if gpus_of_machine is None else gpus_of_machine
    gpus = visible_gpus(len(memory), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Surroundings(
        env={name: value for name, value in os.environ.items() if _is_relevant(name)},
        gpus=gpus,
        gpu_memory=min(memory) or None if gpus else None,
        driver=bool(memory) or shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        host=socket.gethostname(),
        accelerate=str(beside) if beside.is_file() else shutil.which("accelerate") or "accelerate",
        python=sys.executable,
        free_port=free_port(),
        network=read_network,
    )


def visible_gpus(machine: int, cuda_visible_devices: str | None) -> int:
    """How many of the machine's GPUs CUDA shows; a list ends, as in CUDA, at its first invalid entry."""
    if cuda_visible_devices is None:
        return machine
    visible = 0
    for name in cuda_visible_devices.split(","):
        name = name.strip()
        if not name or name.startswith("-") or (name.isdigit() and int(name) >= machine):
            break
        visible += 1
    return min(visible, machine)


def _is_relevant(name: str) -> bool:
    return name in _RELEVANT or name.startswith(_RELEVANT_PREFIXES)


def _gpus_of_machine() -> list[int]:
    """Bytes of memory of each GPU; 0 where it is not known."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return [0 for _ in Path("/dev").glob("nvidia[0-9]*")]
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) * _MIB if line.strip().isdigit() else 0 for line in listed.stdout.splitlines() if line.strip()]


def free_port() -> int:
    """A port that nobody has; below those that the system gives to whoever asks for any, who would have it before it is used."""
    for _ in range(_ATTEMPTS):
        port = _LEAST_PORT + secrets.randbelow(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
