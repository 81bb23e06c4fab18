"""Which processes train: what the machine offers, and the choice that topology.kind makes of it.

`look_around` is the only function of launch/ that asks the machine anything before a run; no torch, because importing it
takes longer than everything else here. Its answers are a value, so that every decision can be tested on any machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packtrain.config.schema import Topology
from packtrain.errors import UserError

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR")  # what a launcher gives each process
ALSO_NEEDED = ("LOCAL_RANK", "MASTER_PORT")
_RELEVANT = (
    *RENDEZVOUS,
    *ALSO_NEEDED,
    "LOCAL_WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
)
_SMI_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a plan depends on beside the config: environment variables, visible GPUs, CPU cores, paths, a free port.

    `load` is the mean number of processes that wanted a core in the last minute.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    cpus: int = 1
    load: float = 0.0
    host: str = "localhost"
    accelerate: str = "accelerate"
    python: str = "python"
    free_port: int = 29500


@dataclass(frozen=True, slots=True)
class Processes:
    """`total` processes on `nodes` machines, `per_node` on each; `joins` where another launcher has started them all."""

    total: int
    nodes: int
    per_node: int
    joins: bool
    reason: str


def look_around() -> Surroundings:
    """The surroundings of this process. Takes a few milliseconds without GPUs, nvidia-smi's time with them."""
    beside = Path(sys.executable).with_name("accelerate")
    return Surroundings(
        env={name: os.environ[name] for name in _RELEVANT if name in os.environ},
        gpus=visible_gpus(_gpus_of_machine(), os.environ.get("CUDA_VISIBLE_DEVICES")),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        host=socket.gethostname(),
        accelerate=str(beside) if beside.is_file() else shutil.which("accelerate") or "accelerate",
        python=sys.executable,
        free_port=_free_port(),
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


def choose_processes(topology: Topology, surroundings: Surroundings) -> Processes:
    """The processes that `topology` means here. Raises UserError where the machine cannot give them."""
    started = _started_by_other(surroundings)
    if topology.kind == "env" or (topology.kind == "auto" and started):
        return _join(surroundings)
    if started and int(surroundings.env["WORLD_SIZE"]) > 1:
        raise UserError(
            f"this process is one of {surroundings.env['WORLD_SIZE']} of a running launch; each would start its own run",
            where="topology.kind",
            fix="Use topology=env (or auto) to join the launch, or start packtrain without a launcher.",
        )
    wanted = topology.gpus_per_node
    if topology.kind == "single":
        return Processes(1, 1, 1, False, "topology=single: one process")
    if wanted is not None and surroundings.gpus and wanted > surroundings.gpus:
        raise UserError(
            f"{wanted} processes, but {surroundings.gpus} visible GPUs",
            where="topology.gpus_per_node",
            fix=f"Set it to at most {surroundings.gpus}, and look at CUDA_VISIBLE_DEVICES.",
        )
    if wanted is not None:
        what = f"{surroundings.gpus} GPUs" if surroundings.gpus else f"{surroundings.cpus} CPU cores"
        return Processes(
            wanted, 1, wanted, False, f"topology.gpus_per_node={wanted}, on {surroundings.host} with {what}"
        )
    if topology.kind == "local" and not surroundings.gpus:
        raise UserError(
            "no GPU is visible, so the number of processes is not known",
            where="topology.gpus_per_node",
            fix="Set topology.gpus_per_node (processes on this machine), or topology=single.",
        )
    if surroundings.gpus:
        number = surroundings.gpus
        return Processes(number, 1, number, False, f"one process per visible GPU of {surroundings.host}")
    return Processes(1, 1, 1, False, f"no GPU is visible on {surroundings.host}: one process on the CPU")


def _started_by_other(surroundings: Surroundings) -> bool:
    """Whether a launcher such as torchrun has started this process; half of its variables is an error, not a no."""
    env = surroundings.env
    if all(name in env for name in RENDEZVOUS):
        return True
    size = env.get("WORLD_SIZE", "1")
    if size.isdigit() and int(size) > 1:
        raise _incomplete(surroundings)
    return False


def _join(surroundings: Surroundings) -> Processes:
    env = surroundings.env
    if any(name not in env for name in (*RENDEZVOUS, *ALSO_NEEDED)):
        raise _incomplete(surroundings)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not env.get(name, "0").isdigit():
            raise UserError(f"found {env[name]!r}, a whole number is needed", where=f"environment variable {name}")
    rank, total = int(env["RANK"]), int(env["WORLD_SIZE"])
    if rank >= total:
        raise UserError(f"rank {rank} of {total} processes", where="environment variable RANK", fix="It starts at 0.")
    per_node = int(env.get("LOCAL_WORLD_SIZE", str(total)))
    reason = f"joins a running launch as rank {rank} of {total} (RANK, WORLD_SIZE and MASTER_ADDR are set)"
    return Processes(total, max(total // max(per_node, 1), 1), per_node, True, reason)


def _incomplete(surroundings: Surroundings) -> UserError:
    missing = [name for name in (*RENDEZVOUS, *ALSO_NEEDED) if name not in surroundings.env]
    return UserError(
        f"to join a running launch, {', '.join(missing)} must be set too",
        where="environment",
        fix="Start packtrain with torchrun or accelerate launch, or unset WORLD_SIZE and use topology=local.",
    )


def _gpus_of_machine() -> int:
    command = shutil.which("nvidia-smi")
    if command is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    try:
        listed = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
