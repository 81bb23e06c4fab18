"""GPUs, cores and other facts of this machine, and the environment variables of Slurm and other launchers, as values.

So every decision of plan/ and launch/ can be tested on any machine. `look_around` reads them once, before the plan; only the
network is read later, when the plan knows the address of the first machine. Other launchers start one process for each device
(torchrun, accelerate launch, mpirun, a Slurm step with several tasks on a machine), which trains, or one for each machine
(Kubernetes' training operator), which starts the processes of its devices.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packtrain.config.schema import Topology
from packtrain.errors import UserError
from packtrain.plan.network_settings import HostNetwork, read_network
from packtrain.wording import shortened, whole

TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # which torchrun sets for each process
DEFAULT_PORT = 29500
# Rank, size, rank on the machine, size of the machine: Open MPI's, and those of MPICH, Intel MPI and others of the Hydra family.
_MPI = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_SMI_TIMEOUT_S = 20
_PORTS = 20_000, 10_000  # first, and how many; these and Slurm's are below Linux's range for outgoing connections
_SLURM_PORTS = 15_000, 10_000
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # numbers from here on are Slurm's own steps: batch, interactive, extern
_SLURM_SETS_IT = "Slurm sets it; outside a job: unset it."
_MOST_HOSTS = 20_000  # as of topology.nodes
INSTALL_CXX = "apt-get install g++ (or dnf install gcc-c++, conda install gxx_linux-64), or name one in CXX"
INSTALL = (
    "apt-get install gcc python3-dev (or dnf install gcc python3-devel, conda install gcc_linux-64), or name one in CC"
)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a plan depends on beside the config: environment variables, visible GPUs, CPU cores, paths, a free port.

    `gpu_memory` is the smallest GPU's in bytes (None: not known, or none is visible), `driver` whether the machine has an
    NVIDIA driver at all, `load` the load average of the last minute. `network` reads the machine's network, given the address
    of the first machine; None if it must not be read.
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

    `gpus_of_machine` are the bytes of memory of each GPU, 0 if not known, if the caller has them already.
    """
    beside = Path(sys.executable).with_name("accelerate")
    memory = _gpus_of_machine() if gpus_of_machine is None else gpus_of_machine
    gpus = visible_gpus(len(memory), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Surroundings(
        env=dict(os.environ),
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
    """How many of the machine's GPUs are visible to CUDA, which reads the list up to its first invalid entry."""
    if cuda_visible_devices is None:
        return machine
    visible = 0
    for name in cuda_visible_devices.split(","):
        name = name.strip()
        if not name or name.startswith("-") or ((number := whole(name)) is not None and number >= machine):
            break
        visible += 1
    return min(visible, machine)


def _gpus_of_machine() -> list[int]:
    """Bytes of memory of each GPU; 0 if not known."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return [0 for _ in Path("/dev").glob("nvidia[0-9]*")]
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
    except (OSError, UnicodeError, subprocess.SubprocessError):
        return []
    return [(whole(line.strip()) or 0) * 2**20 for line in listed.stdout.splitlines() if line.strip()]


def free_port() -> int:
    """A free port, below the range of outgoing connections, so that it is most likely still free when it is used."""
    for port in (*(_PORTS[0] + secrets.randbelow(_PORTS[1]) for _ in range(50)), 0):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]
    raise UserError("no port of this machine is free", where="topology.main_port")


def lack_of_compiler(env: Mapping[str, str] = os.environ) -> str:
    """What Triton lacks to compile its kernels on a GPU, in words; "" if nothing, or if there is no Triton.

    As in Triton's own search: the compiler is CC, else gcc or clang, and needs Python's headers.
    """
    if find_spec("triton") is None:
        return ""
    names = env.get("CC", "").split()[:1] or ["gcc", "clang"]
    if not any(shutil.which(name, path=env.get("PATH")) for name in names):
        return f"no C compiler ({' or '.join(names)}), so Triton cannot build its kernels for the GPU"
    headers = sorted({sysconfig.get_path(kind) for kind in ("include", "platinclude")})
    if not any(Path(folder, "Python.h").is_file() for folder in headers):
        return f"no Python.h in {' or '.join(headers)}, so Triton cannot build its kernels for the GPU"
    return ""


def lack_of_cxx(env: Mapping[str, str] = os.environ) -> str:
    """What torch.compile lacks to compile a model, in words; "" if nothing. As in torch's own search: CXX, else g++."""
    name = env.get("CXX") or "g++"
    return "" if shutil.which(name, path=env.get("PATH")) else f"no C++ compiler ({name})"


@dataclass(frozen=True, slots=True)
class Allocation:
    """The machines of a Slurm job, or inside a step those of the step, and the place of this process in it.

    `place` is a `task` of a step, a `machine` of the job (its batch script, or a shell there), or `outside` (salloc's shell on
    the login machine). `tasks` are the step's tasks on each machine. `gpus` is the job's number on each machine, None if Slurm
    does not say. `port` is the same for all tasks of a step, and differs between steps.
    """

    job: str
    hosts: tuple[str, ...]
    place: Literal["task", "machine", "outside"]
    node: int
    tasks: tuple[int, ...]
    gpus: int | None
    port: int


def allocation_of(env: Mapping[str, str]) -> Allocation | None:
    """The job that this process is in, None outside one. Raises UserError if its variables cannot be read."""
    job, hosts = env.get("SLURM_JOB_ID"), env.get("SLURM_JOB_NODELIST")
    if not job or not hosts:
        return None
    step = int_of(env, "SLURM_STEP_ID", _FIRST_SPECIAL_STEP)
    in_step = step < _FIRST_SPECIAL_STEP
    place = "task" if in_step else "machine" if "SLURM_NODEID" in env else "outside"
    gpus = int_of(env, "SLURM_GPUS_ON_NODE", 0)
    if place == "outside":  # there only this is set: `8`, `a100:8`
        gpus = whole(env.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]) or gpus
    number = int("".join(re.findall(r"[0-9]", job))[-12:] or 0) * 131 + (step if in_step else 0) * 17
    return Allocation(
        job=job,
        hosts=expand(env.get("SLURM_STEP_NODELIST", hosts) if in_step else hosts),
        place=place,
        node=int_of(env, "SLURM_NODEID", 0),
        tasks=repeated(env.get("SLURM_STEP_TASKS_PER_NODE", "1")) if in_step else (),
        gpus=gpus or None,
        port=_SLURM_PORTS[0] + number % _SLURM_PORTS[1],
    )


def expand(hosts: str) -> tuple[str, ...]:
    """The names in a Slurm host list: `n[1-3,07],login` → n1, n2, n3, n07, login. Raises UserError."""
    names: list[str] = []
    try:
        for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts):
            texts = re.split(r"\[(.*?)\]", name)  # `n[1-3]x` → "n", "1-3", "x": every second text is a range
            names += map(
                "".join, itertools.product(*(_numbers(item) if at % 2 else [item] for at, item in enumerate(texts)))
            )
        if not names or hosts.count("[") != hosts.count("]"):
            raise ValueError("no list")
    except ValueError as error:
        what = f"cannot read {shortened(hosts)} as a list of hosts: {error}"
        raise UserError(what, where="environment variable SLURM_JOB_NODELIST", fix=_SLURM_SETS_IT) from error
    return tuple(names)


def _numbers(ranges: str) -> list[str]:
    """The numbers of `1-3,07`, as they are written. Raises ValueError."""
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not int(first) <= int(last or first) < int(first) + _MOST_HOSTS:
            raise ValueError(f"{shortened(part)} is no range of machines")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return numbers


def repeated(counts: str) -> tuple[int, ...]:
    """Slurm's short form of a number for each machine: `4(x2),3` → 4, 4, 3. Raises UserError."""
    matches = [re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part) for part in counts.split(",")]
    parts = [(int(item[1]), int(item[2] or 1)) for item in matches if item]
    if len(parts) < len(matches) or sum(times for _, times in parts) > _MOST_HOSTS:
        what = f"cannot read {shortened(counts)} as numbers of tasks"
        raise UserError(what, where="environment variable SLURM_STEP_TASKS_PER_NODE", fix=_SLURM_SETS_IT)
    return tuple(number for number, times in parts for _ in range(times))


@dataclass(frozen=True, slots=True)
class LaunchedMachine:
    """Machine `node` of `nodes`, for which another launcher started this process; `per_node`: its processes, None if not said."""

    node: int
    nodes: int
    per_node: int | None
    main_address: str
    main_port: int
    by: str


def process_of(
    topology: Topology, env: Mapping[str, str], allocation: Allocation | None
) -> tuple[str, Mapping[str, str]] | None:
    """The launcher that has started one process per device, and the variables that torch still needs; None if none has.

    Raises UserError if the launcher set only some of the variables needed.
    """
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # each process reads them, launched or not
        int_of(env, name, 0)
    if all(env.get(name) for name in TORCH):
        return "RANK, WORLD_SIZE and MASTER_ADDR are set", {}
    task = allocation is not None and allocation.place == "task"
    for names in _MPI:
        if int_of(env, names[1], 1) > 1 and not (task and names[2] not in env):  # srun may set PMI_SIZE as well
            return _of_mpi(topology, env, names)
    if allocation is not None and sum(allocation.tasks) > len(allocation.tasks):
        return _of_slurm(topology, env, allocation)
    if machine_of(env) is None and int_of(env, "WORLD_SIZE", 1) > 1:
        require(env, TORCH)
    return None


def machine_of(env: Mapping[str, str]) -> LaunchedMachine | None:
    """The machine for which Kubernetes' training operator started this process, by torchrun's PET_ variables or the pod's."""
    if "LOCAL_RANK" in env:  # torchrun has started this process itself
        return None
    if env.get("PET_NNODES", "1") != "1" or "PET_NODE_RANK" in env:
        names, by = ("PET_NODE_RANK", "PET_NNODES"), "torchrun's variables PET_NNODES and PET_NODE_RANK"
        require(env, names)  # an elastic job's machines are not numbered
    elif "KUBERNETES_SERVICE_HOST" in env and all(env.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        names, by = ("RANK", "WORLD_SIZE"), "the pod's variables RANK and WORLD_SIZE"
    else:
        return None
    number = env.get("PET_NPROC_PER_NODE", "")
    return LaunchedMachine(
        node=int_of(env, names[0], 0),
        nodes=int_of(env, names[1], 1),
        per_node=whole(number),  # or "auto", "gpu"
        main_address=env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR", ""),
        main_port=int_of(env, "PET_MASTER_PORT", int_of(env, "MASTER_PORT", DEFAULT_PORT)),
        by=by,
    )


def require(env: Mapping[str, str], names: Sequence[str]) -> None:
    """Raises UserError if a launch has not set all `names`, the variables that number this process."""
    if missing := [name for name in names if not env.get(name)]:
        raise UserError(
            f"to join a running launch, {', '.join(missing)} must be set too",
            where="environment",
            fix="Start packtrain with torchrun or accelerate launch, or once on each machine with topology=manual.",
        )


def int_of(env: Mapping[str, str], name: str, otherwise: int) -> int:
    """A variable as a whole number, `otherwise` if it is not set. Raises UserError if it is not a number."""
    value = env.get(name) or str(otherwise)
    if (number := whole(value)) is None:
        fix = f"The launcher sets it; by hand: unset {name}."
        raise UserError(f"{shortened(value)} is no whole number", where=f"environment variable {name}", fix=fix)
    return number


def _of_mpi(topology: Topology, env: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    require(env, names)
    rank, total, local, per_node = (int_of(env, name, 0) for name in names)
    address = topology.main_address or env.get("MASTER_ADDR") or ("127.0.0.1" if per_node == total else None)
    if address is None:
        what = f"mpirun has started {total} processes on several machines, and the first one's name is not known"
        raise UserError(what, where="topology.main_address", fix="Set it, or MASTER_ADDR (mpirun -x MASTER_ADDR=HOST).")
    port = topology.main_port or int_of(env, "MASTER_PORT", DEFAULT_PORT)
    return f"mpirun has started it ({names[0]})", _torch_variables(rank, total, local, per_node, address, port)


def _of_slurm(topology: Topology, env: Mapping[str, str], allocation: Allocation) -> tuple[str, dict[str, str]]:
    if len(set(allocation.tasks)) > 1:
        what = f"the machines of the step have different numbers of tasks ({', '.join(map(str, allocation.tasks))})"
        fix = "Start the same number on each: srun --ntasks-per-node=N, or one, which starts the others."
        raise UserError(what, where="environment variable SLURM_STEP_TASKS_PER_NODE", fix=fix)
    rank, local, per_node = int_of(env, "SLURM_PROCID", 0), int_of(env, "SLURM_LOCALID", 0), allocation.tasks[0]
    address, port = allocation.hosts[0], topology.main_port or allocation.port
    variables = _torch_variables(rank, sum(allocation.tasks), local, per_node, address, port)
    return f"srun has started {per_node} tasks on each machine", variables


def _torch_variables(rank: int, total: int, local: int, per_node: int, address: str, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": total, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_node}
    return {**{name: str(number) for name, number in numbers.items()}, "MASTER_ADDR": address, "MASTER_PORT": str(port)}
