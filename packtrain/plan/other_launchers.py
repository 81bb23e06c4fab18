"""Other launchers, by the variables that they set: one process for each device, or one for each machine. Pure.

torchrun and accelerate launch, mpirun, a Slurm step with several tasks on a machine: each process trains. Kubernetes' training
operator and LeaderWorkerSet start one process on each machine, which then starts those of its devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from packtrain.config.schema import Topology
from packtrain.errors import UserError
from packtrain.plan.slurm import Allocation

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR")  # what torchrun gives each process
ALSO_NEEDED = ("LOCAL_RANK", "MASTER_PORT")
DEFAULT_PORT = 29500
BY_HAND = "by-hand"
# Rank, size, rank on the machine, size of the machine: Open MPI's, and those of MPICH, Intel MPI and their kin (Hydra).
_OF_MPI = (
    tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)

# Those that start a process for each rank, the first of them first: its variables for rank, size and rank on the machine, and
# those that tell a launch from others on the machine; the process that has started it where there are none.
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_LAUNCHES = (
    (_OF_MPI[0][:3], ("PMIX_NAMESPACE",)),
    (_OF_MPI[1][:3], ()),
    (
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
)


@dataclass(frozen=True, slots=True)
class Joined:
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
class Machine:
    """This process stands for machine `node` of `nodes`; `per_node` where the launcher says how many processes it has."""

    node: int
    nodes: int
    per_node: int | None
    main_address: str
    main_port: int
    by: str


def joined(topology: Topology, env: Mapping[str, str], allocation: Allocation | None) -> Joined | None:
    """How another launcher has started one process per device; None where it has not.

    Raises UserError where it has said only half of what is needed.
    """
    if all(name in env for name in RENDEZVOUS) and machine_of(env) is None:
        return _of_torch(env)
    task = allocation is not None and allocation.place == "task"
    for names in _OF_MPI:
        if int_of(env, names[1], 1) > 1 and not (task and names[2] not in env):  # srun, too, may set PMI_SIZE
            return _of_mpi(topology, env, names)
    if allocation is not None and task and sum(allocation.tasks) > len(allocation.tasks):
        return _of_slurm(topology, allocation)
    if machine_of(env) is None and int_of(env, "WORLD_SIZE", 1) > 1:
        raise incomplete(env)
    return None


def machine_of(env: Mapping[str, str]) -> Machine | None:
    """The machine that Kubernetes has started this process for: its training operator (torchrun's PET_ variables, or a pod's)
    or a LeaderWorkerSet. Raises UserError where it has not said which of them it is."""
    if "LOCAL_RANK" in env:  # torchrun has started this process itself
        return None
    if "PET_NNODES" in env and (machine := _of_operator(env)):
        return machine
    if "KUBERNETES_SERVICE_HOST" in env and all(name in env for name in RENDEZVOUS):
        port = int_of(env, "MASTER_PORT", DEFAULT_PORT)
        rank, size = int_of(env, "RANK", 0), int_of(env, "WORLD_SIZE", 1)
        return Machine(rank, size, None, env["MASTER_ADDR"], port, "the pod's variables RANK and WORLD_SIZE")
    if int_of(env, "LWS_GROUP_SIZE", 1) > 1 and "LWS_WORKER_INDEX" in env:
        rank, size = int_of(env, "LWS_WORKER_INDEX", 0), int_of(env, "LWS_GROUP_SIZE", 1)
        by = "LeaderWorkerSet's variables LWS_WORKER_INDEX and LWS_GROUP_SIZE"
        return Machine(rank, size, None, env.get("LWS_LEADER_ADDRESS", ""), DEFAULT_PORT, by)
    return None


def _of_operator(env: Mapping[str, str]) -> Machine | None:
    nodes = int_of({"PET_NNODES": env["PET_NNODES"].split(":")[-1]}, "PET_NNODES", 1)  # MIN:MAX
    if "PET_NODE_RANK" not in env:
        if nodes == 1:
            return None
        raise UserError(
            f"this is one of {nodes} machines (PET_NNODES), but which of them is not said (PET_NODE_RANK)",
            where="environment",
            fix="An elastic job numbers its machines while they run, and packtrain cannot: take elasticPolicy away, or use "
            "topology=manual with topology.node_rank.",
        )
    number = env.get("PET_NPROC_PER_NODE", "")
    return Machine(
        node=int_of(env, "PET_NODE_RANK", 0),
        nodes=nodes,
        per_node=int(number) if number.isdigit() else None,  # or "auto", "gpu"
        main_address=env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR", ""),
        main_port=int_of(env, "PET_MASTER_PORT", int_of(env, "MASTER_PORT", DEFAULT_PORT)),
        by="torchrun's variables PET_NNODES and PET_NODE_RANK",
    )


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


def _of_torch(env: Mapping[str, str]) -> Joined:
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
    return Joined(rank, total, per_node, "RANK, WORLD_SIZE and MASTER_ADDR are set", {}, machines)


def _of_mpi(topology: Topology, env: Mapping[str, str], names: tuple[str, ...]) -> Joined:
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
        raise UserError(
            f"mpirun has started {total} processes on several machines, and none of them knows the first one's name",
            where="topology.main_address",
            fix="Set it, or MASTER_ADDR (mpirun -x MASTER_ADDR=HOST).",
        )
    port = topology.main_port or int_of(env, "MASTER_PORT", DEFAULT_PORT)
    told = _torch_variables(rank, total, local, per_node, address, port)
    return Joined(rank, total, per_node or total, f"mpirun has started it ({names[0]})", told)


def _of_slurm(topology: Topology, allocation: Allocation) -> Joined:
    if len(set(allocation.tasks)) > 1:
        each = ", ".join(f"{host}: {tasks}" for host, tasks in zip(allocation.hosts, allocation.tasks, strict=False))
        raise UserError(
            f"the machines of the step have different numbers of tasks ({each})",
            where="environment variable SLURM_STEP_TASKS_PER_NODE",
            fix="Start the same number on each: srun --ntasks-per-node=N, or one, which starts the others.",
        )
    per_node, total = allocation.tasks[0], sum(allocation.tasks)
    port = topology.main_port or allocation.port
    told = _torch_variables(allocation.rank, total, allocation.local_rank, per_node, allocation.hosts[0], port)
    return Joined(allocation.rank, total, per_node, f"srun has started {per_node} tasks on each machine", told)


def _torch_variables(rank: int, total: int, local: int, per_node: int, address: str, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": total, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_node}
    return {**{name: str(number) for name, number in numbers.items()}, "MASTER_ADDR": address, "MASTER_PORT": str(port)}


def launch_of(env: Mapping[str, str], parent: int) -> tuple[str, int] | None:
    """The launch that has started this process for its RANK: a name that it has for all on this machine, and the number here.

    `parent` is the process that has started this one: torchrun and DeepSpeed's launcher start all of a machine. By hand, where
    they are called BY_HAND, nothing is known of it. None where they do not have ranks of a machine.
    """
    if _TORCHRUN in env:
        return f"{parent}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", int_of(env, "LOCAL_RANK", 0)
    for (rank, size, local), names in _LAUNCHES:
        if local in env and (env.get(rank), env.get(size)) == (env.get("RANK"), env.get("WORLD_SIZE")):
            told = [env[name] for name in names if env.get(name)]
            return re.sub(r"[^\w.]", "-", "-".join(told)) or str(parent), int_of(env, local, 0)
    if any(name not in env for name in (*RENDEZVOUS, *ALSO_NEEDED)):
        return None
    if "CROSS_SIZE" in env and "LOCAL_SIZE" in env:  # DeepSpeed's
        return str(parent), int_of(env, "LOCAL_RANK", 0)
    name = re.sub(r"[^\w.]", "-", f"{env['MASTER_ADDR']}-{env['MASTER_PORT']}")
    return f"{BY_HAND}-{name}", int_of(env, "LOCAL_RANK", 0)
