"""What this machine offers, and what Slurm and other launchers have told this process in its environment; as values.

Every decision of plan/ and launch/ can then be tested on any machine. `look_around` asks the machine once, before the plan; only
its network is read later, when the plan knows the address of the first machine. Other launchers start one process for each
device (torchrun, accelerate launch, mpirun, a Slurm step with several tasks on a machine), which then trains, or one for each
machine (Kubernetes' training operator, LeaderWorkerSet), which then starts those of its devices. Slurm itself is not asked.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from packtrain.config.schema import Topology
from packtrain.errors import UserError
from packtrain.plan.interfaces import HostNetwork, read_network

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR")  # what torchrun gives each process
ALSO_NEEDED = ("LOCAL_RANK", "MASTER_PORT")
DEFAULT_PORT = 29500
# Rank, size, rank on the machine, size of the machine: Open MPI's, and those of MPICH, Intel MPI and others of the Hydra family.
OF_MPI = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_RELEVANT = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "KUBERNETES_SERVICE_HOST")
_RELEVANT_PREFIXES = (
    *("LOCAL_", "MASTER_", "OMP_", "OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL", "PET_", "LWS_", "SLURM", "NCCL_", "GLOO_"),
)
_SMI_TIMEOUT_S = 20
_LEAST_PORT, _PORTS, _ATTEMPTS = 20_000, 10_000, 50
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # numbers from here on are Slurm's own steps: batch, interactive, extern
_SLURM_PORTS = 15000, 10000  # first, and how many: below those that Linux gives to outgoing connections
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
    network: Callable[[str | None], HostNetwork] | None = None


def look_around(gpus_of_machine: Sequence[int] | None = None) -> Surroundings:
    """The surroundings of this process. Takes a few milliseconds without GPUs, nvidia-smi's time with them.

    `gpus_of_machine` are bytes of memory of each GPU, 0 where not known, for a caller that has asked already.
    """
    beside = Path(sys.executable).with_name("accelerate")
    memory = _gpus_of_machine() if gpus_of_machine is None else gpus_of_machine
    gpus = visible_gpus(len(memory), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Surroundings(
        env={name: os.environ[name] for name in os.environ if name in _RELEVANT or name.startswith(_RELEVANT_PREFIXES)},
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
    """A free port, below the range that the system gives out by itself, so that it is still free when it is used."""
    for port in (*(_LEAST_PORT + secrets.randbelow(_PORTS) for _ in range(_ATTEMPTS)), 0):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]
    raise UserError("no port of this machine is free", where="topology.main_port")


@dataclass(frozen=True, slots=True)
class Allocation:
    """The machines of a Slurm job (of its step, inside one) and where this process stands in it.

    `place` is a `task` of a step, a `machine` of the job (its batch script, or a shell there), or `outside` (the shell that
    salloc leaves one in on the login machine). `tasks` are those of the step on each machine. `gpus` is what each has of
    the job, None where Slurm does not say. `port` is the same for all tasks of a step, and another for the next.
    """

    job: str
    hosts: tuple[str, ...]
    place: Literal["task", "machine", "outside"]
    node: int
    rank: int
    local_rank: int
    tasks: tuple[int, ...]
    gpus: int | None
    port: int


def allocation_of(env: Mapping[str, str]) -> Allocation | None:
    """The job that this process is in, None outside one. Raises UserError where its variables cannot be read."""
    job = env.get("SLURM_JOB_ID")
    named = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if not job or not named:
        return None
    step = env.get("SLURM_STEP_ID", "")
    in_step = step.isdigit() and int(step) < _FIRST_SPECIAL_STEP
    if in_step:
        named = env.get("SLURM_STEP_NODELIST", named)
    asked = env.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[
        2
    ]  # `8`, `a100:8`: all that is known outside of the machines
    place = "task" if in_step else "machine" if "SLURM_NODEID" in env else "outside"
    return Allocation(
        job=job,
        hosts=expand(named),
        place=place,
        node=int_of(env, "SLURM_NODEID", 0),
        rank=int_of(env, "SLURM_PROCID", 0) if in_step else 0,
        local_rank=int_of(env, "SLURM_LOCALID", 0) if in_step else 0,
        tasks=repeated(env.get("SLURM_STEP_TASKS_PER_NODE", "1")) if in_step else (),
        gpus=int_of(env, "SLURM_GPUS_ON_NODE", 0) or (int(asked) if place == "outside" and asked.isdigit() else None),
        port=_SLURM_PORTS[0]
        + (int(re.sub(r"\D", "", job) or 0) * 131 + (int(step) if in_step else 0) * 17) % _SLURM_PORTS[1],
    )


def check_told(env: Mapping[str, str]) -> None:
    """Raises UserError where this is one of several processes or machines of a job that `allocation_of` does not find.

    A container that gets some of Slurm's variables is such a place; without this each process would train by itself.
    """
    missing = [name for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST") if not env.get(name)]
    if not missing or not (env.get("SLURM_JOB_ID") or env.get("SLURM_PROCID")):
        return
    counts = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    name, number = max(((name, int_of(env, name, 0)) for name in counts), key=lambda one: one[1])
    if number > 1:
        raise UserError(
            f"this is in a Slurm job of several ({name}={number}), of whose variables some are missing here "
            f"({', '.join(missing)}): each process would start its own run",
            where="environment",
            fix="Hand on all of Slurm's variables (to a container, too), or use topology=local for this machine alone.",
        )


def expand(hosts: str) -> tuple[str, ...]:
    """The names that a list of Slurm's means: `n[1-3,07],login` → n1, n2, n3, n07, login. Raises UserError."""
    try:
        if hosts.count("[") != hosts.count("]"):
            raise ValueError(hosts)
        return tuple(name for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts) for name in _expand_one(part))
    except ValueError as error:
        what = f"cannot read {hosts!r} as a list of hosts"
        raise UserError(what, where="environment variable SLURM_JOB_NODELIST") from error


def repeated(counts: str) -> tuple[int, ...]:
    """Slurm's short form of a number for each machine: `4(x2),3` → 4, 4, 3. Raises UserError."""
    numbers: list[int] = []
    for part in counts.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            what = f"cannot read {counts!r} as numbers of tasks"
            raise UserError(what, where="environment variable SLURM_STEP_TASKS_PER_NODE")
        numbers += [int(found[1])] * int(found[2] or 1)
    return tuple(numbers)


def _expand_one(name: str) -> Iterator[str]:
    before, bracket, rest = name.partition("[")
    if not bracket:
        yield name
        return
    inside, _, after = rest.partition("]")
    for part in inside.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for tail in _expand_one(after):
                yield f"{before}{number:0{len(first)}d}{tail}"


@dataclass(frozen=True, slots=True)
class LaunchedProcess:
    """This process is `rank` of `total`, of which `per_node` are on its machine; `env` is what torch still has to be told.

    `machines` is how many there are, where the launcher says so.
    """

    rank: int
    total: int
    per_node: int
    by: str
    env: Mapping[str, str]
    machines: int | None = None


@dataclass(frozen=True, slots=True)
class LaunchedMachine:
    """This process stands for machine `node` of `nodes`; `per_node` where the launcher says how many processes it has."""

    node: int
    nodes: int
    per_node: int | None
    main_address: str
    main_port: int
    by: str


def joined(topology: Topology, env: Mapping[str, str], allocation: Allocation | None) -> LaunchedProcess | None:
    """How another launcher has started one process per device; None where it has not.

    Raises UserError where it has said only half of what is needed.
    """
    if all(name in env for name in RENDEZVOUS) and machine_of(env) is None:
        return _of_torch(env)
    task = allocation is not None and allocation.place == "task"
    for names in OF_MPI:
        if int_of(env, names[1], 1) > 1 and not (task and names[2] not in env):  # srun, too, may set PMI_SIZE
            return _of_mpi(topology, env, names)
    if allocation is not None and task and sum(allocation.tasks) > len(allocation.tasks):
        return _of_slurm(topology, allocation)
    if machine_of(env) is None and int_of(env, "WORLD_SIZE", 1) > 1:
        raise incomplete(env)
    return None


def machine_of(env: Mapping[str, str]) -> LaunchedMachine | None:
    """The machine that Kubernetes has started this process for: its training operator (torchrun's PET_ variables, or a pod's)
    or a LeaderWorkerSet. Raises UserError where it has not said which of them it is."""
    if "LOCAL_RANK" in env:  # torchrun has started this process itself
        return None
    nodes = int_of({"PET_NNODES": env.get("PET_NNODES", "").split(":")[-1]}, "PET_NNODES", 1)  # MIN:MAX
    if "PET_NODE_RANK" in env and "PET_NNODES" in env:
        number = env.get("PET_NPROC_PER_NODE", "")
        return LaunchedMachine(
            node=int_of(env, "PET_NODE_RANK", 0),
            nodes=nodes,
            per_node=int(number) if number.isdigit() else None,  # or "auto", "gpu"
            main_address=env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR", ""),
            main_port=int_of(env, "PET_MASTER_PORT", int_of(env, "MASTER_PORT", DEFAULT_PORT)),
            by="torchrun's variables PET_NNODES and PET_NODE_RANK",
        )
    if nodes > 1:
        raise UserError(
            f"this is one of {nodes} machines (PET_NNODES), but which of them is not said (PET_NODE_RANK)",
            where="environment",
            fix="An elastic job numbers its machines while they run, and packtrain cannot: take elasticPolicy away, or use "
            "topology=manual with topology.node_rank.",
        )
    if "KUBERNETES_SERVICE_HOST" in env and all(name in env for name in RENDEZVOUS):
        port = int_of(env, "MASTER_PORT", DEFAULT_PORT)
        rank, size = int_of(env, "RANK", 0), int_of(env, "WORLD_SIZE", 1)
        return LaunchedMachine(rank, size, None, env["MASTER_ADDR"], port, "the pod's variables RANK and WORLD_SIZE")
    if int_of(env, "LWS_GROUP_SIZE", 1) > 1 and "LWS_WORKER_INDEX" in env:
        rank, size = int_of(env, "LWS_WORKER_INDEX", 0), int_of(env, "LWS_GROUP_SIZE", 1)
        by = "LeaderWorkerSet's variables LWS_WORKER_INDEX and LWS_GROUP_SIZE"
        return LaunchedMachine(rank, size, None, env.get("LWS_LEADER_ADDRESS", ""), DEFAULT_PORT, by)
    return None


def incomplete(env: Mapping[str, str]) -> UserError:
    """The error of a launch that does not say enough to be joined."""
    missing = [name for name in (*RENDEZVOUS, *ALSO_NEEDED) if name not in env]
    return UserError(
        f"to join a running launch, {', '.join(missing)} must be set too",
        where="environment",
        fix="Start packtrain with torchrun or accelerate launch, or unset WORLD_SIZE and use topology=local.",
    )


def int_of(env: Mapping[str, str], name: str, otherwise: int) -> int:
    """A variable as a whole number. Raises UserError where it is none."""
    value = env.get(name) or str(otherwise)
    if not value.isdigit():
        raise UserError(f"found {value!r}, a whole number is needed", where=f"environment variable {name}")
    return int(value)


def _of_torch(env: Mapping[str, str]) -> LaunchedProcess:
    if any(name not in env for name in ALSO_NEEDED):
        raise incomplete(env)
    local = int_of(env, "LOCAL_RANK", 0)
    int_of(env, "MASTER_PORT", 0)
    rank, total = int_of(env, "RANK", 0), int_of(env, "WORLD_SIZE", 1)
    if rank >= total:
        raise UserError(f"rank {rank} of {total} processes", where="environment variable RANK", fix="It starts at 0.")
    # DeepSpeed's launcher has another name for it
    per_node = max(int_of(env, "LOCAL_WORLD_SIZE", int_of(env, "LOCAL_SIZE", total)), 1)
    if local >= per_node:
        what = f"process {local} of {per_node} on this machine"
        raise UserError(what, where="environment variable LOCAL_RANK", fix="It starts at 0 on each machine.")
    machines = int_of(env, "GROUP_WORLD_SIZE", 0) or None  # torchrun's
    return LaunchedProcess(rank, total, per_node, "RANK, WORLD_SIZE and MASTER_ADDR are set", {}, machines)


def _of_mpi(topology: Topology, env: Mapping[str, str], names: tuple[str, ...]) -> LaunchedProcess:
    if missing := [name for name in names if name not in env]:
        raise UserError(
            f"mpirun has started {env[names[1]]} processes, but does not say which of them this is: "
            f"{', '.join(missing)} must be set too",
            where="environment",
            fix="Start packtrain by torchrun in place of mpirun, or once on each machine with topology=manual.",
        )
    rank, total, local, per_node = (int_of(env, name, 0) for name in names)
    address = topology.main_address or env.get("MASTER_ADDR") or ("127.0.0.1" if per_node == total else None)
    if address is None:
        what = f"mpirun has started {total} processes on several machines, and none of them knows the first one's name"
        raise UserError(what, where="topology.main_address", fix="Set it, or MASTER_ADDR (mpirun -x MASTER_ADDR=HOST).")
    port = topology.main_port or int_of(env, "MASTER_PORT", DEFAULT_PORT)
    told = _torch_variables(rank, total, local, per_node, address, port)
    return LaunchedProcess(rank, total, per_node or total, f"mpirun has started it ({names[0]})", told)


def _of_slurm(topology: Topology, allocation: Allocation) -> LaunchedProcess:
    if len(set(allocation.tasks)) > 1:
        each = ", ".join(f"{host}: {tasks}" for host, tasks in zip(allocation.hosts, allocation.tasks, strict=False))
        what = f"the machines of the step have different numbers of tasks ({each})"
        fix = "Start the same number on each: srun --ntasks-per-node=N, or one, which starts the others."
        raise UserError(what, where="environment variable SLURM_STEP_TASKS_PER_NODE", fix=fix)
    per_node, total = allocation.tasks[0], sum(allocation.tasks)
    port = topology.main_port or allocation.port
    told = _torch_variables(allocation.rank, total, allocation.local_rank, per_node, allocation.hosts[0], port)
    return LaunchedProcess(allocation.rank, total, per_node, f"srun has started {per_node} tasks on each machine", told)


def _torch_variables(rank: int, total: int, local: int, per_node: int, address: str, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": total, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_node}
    return {**{name: str(number) for name, number in numbers.items()}, "MASTER_ADDR": address, "MASTER_PORT": str(port)}
