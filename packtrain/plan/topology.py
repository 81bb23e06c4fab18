"""Processes of a run, their machines, and the role of this process. Pure.

The config, the launcher's variables and the machine itself must agree: a contradiction is an error that names both sources. A plan that
only cannot start from here (a plan for 64 machines made on a laptop) has an obstacle; it is shown all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from packtrain.config.schema import Topology
from packtrain.errors import CheckFailed, Problem, UserError
from packtrain.plan.network_settings import is_ip, is_loopback
from packtrain.plan.surroundings import (
    DEFAULT_PORT,
    TORCH,
    Allocation,
    Surroundings,
    read_allocation,
    read_number,
    read_pod,
    read_process,
    require,
)
from packtrain.wording import counted

GPUS_PER_NODE = "topology.gpus_per_node"
Role = Literal["train", "launch", "srun", "ray"]


@dataclass(frozen=True, slots=True)
class Processes:
    """`gpus_per_node` processes on each of `nodes` machines, and the reason. This machine is number `node`.

    `needs_srun`: packtrain is not yet started on all machines of a Slurm job. `needs_ray`: Ray is to start them. `joins`: another launcher
    has started all processes, and `env` has the variables that torch then needs. `relaunched`: even a single process gets a launcher, which
    can restart it. `hosts` are the machines' names, if known. `obstacles` keep the plan from starting here.
    """

    nodes: int
    gpus_per_node: int
    reason: str
    node: int = 0
    needs_srun: bool = False
    needs_ray: bool = False
    joins: bool = False
    relaunched: bool = False
    hosts: tuple[str, ...] = ()
    main_address: str | None = None
    main_port: int | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    obstacles: tuple[Problem, ...] = ()

    @property
    def num_processes(self) -> int:
        """The number of processes on all machines."""
        return self.nodes * self.gpus_per_node

    @property
    def role(self) -> Role:
        """This process's task: train, launch its machine's processes, or start packtrain by srun or Ray."""
        if self.needs_ray:
            return "ray"
        alone = self.num_processes == 1 and not self.relaunched
        return "srun" if self.needs_srun else "train" if self.joins or alone else "launch"

    @property
    def in_process(self) -> bool:
        """Whether the calling process itself trains."""
        return self.role == "train"

    def restrict(self, machines: Sequence[int]) -> Processes:
        """Return the processes on only these machines, renumbered in this order."""
        hosts = tuple(self.hosts[node] for node in machines) if self.hosts else ()
        reason = f"{_machines(len(machines), self.gpus_per_node)}, of {self.nodes} machines"
        return replace(self, nodes=len(machines), node=machines.index(self.node), hosts=hosts, reason=reason)


def choose_processes(topology: Topology, surroundings: Surroundings) -> Processes:
    """Choose the processes of a run with this `topology`. Raises UserError or CheckFailed if sources contradict each other."""
    kind, env = topology.kind, surroundings.env
    if kind == "ray":
        nodes, per_node = topology.nodes or 1, topology.gpus_per_node
        if per_node is None:
            what = "how many GPUs each machine has is not known here"
            fix = "Set it; ray status shows what the cluster has."
            raise UserError(what, where=GPUS_PER_NODE, fix=fix, code="gpus-unknown")
        return Processes(nodes, per_node, f"Ray: {_machines(nodes, per_node)}", needs_ray=True)
    allocation = read_allocation(env)
    process, pod = read_process(topology, env, allocation), read_pod(topology, env)
    in_slurm = kind in ("auto", "slurm") and ("SLURM_JOB_ID" in env or "SLURM_PROCID" in env)
    if in_slurm and not (allocation or process) and read_number(env, "SLURM_NTASKS", 1) > 1:
        require(env, ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"))  # else each task would start its own run
    if kind not in ("single", "local", "manual"):
        if process:
            return _join(topology, *process, surroundings)
        if pod and kind != "slurm":
            return _in_pod(topology, *pod, surroundings)
    else:
        number = read_number({**env, **process[1]}, "WORLD_SIZE", 1) if process else 1
        if kind != "manual":  # with manual the user numbers machines, no matter who started them
            started = [pod[1].nodes or 1 if pod else 1]
            started += [len(allocation.hosts)] if allocation and allocation.place == "task" else []
            number = max(number, *started)
        if number > 1:
            what = f"this process is one of {number} of a running launch; each would start its own run"
            fix = "Use topology=env (or auto) to join the launch, or start packtrain without a launcher."
            raise UserError(what, where="topology.kind", fix=fix, code="launch-in-launch")
    if kind == "env":
        require(env, TORCH)
    if kind == "single":
        return Processes(1, 1, "topology=single: one process")
    if kind in ("auto", "slurm") and allocation:
        return _in_slurm(topology, surroundings, allocation)
    by_hand = kind == "manual" or (kind == "auto" and topology.node_rank is not None)
    if by_hand or kind == "slurm" or (topology.nodes or 1) > 1:
        return _numbered(topology, surroundings, by_hand=by_hand)
    return _on_this_machine(topology, surroundings)


def _join(topology: Topology, by: str, added: Mapping[str, str], surroundings: Surroundings) -> Processes:
    env = {**surroundings.env, **added}
    rank, total = read_number(env, "RANK", 0), read_number(env, "WORLD_SIZE", 1)
    _check_number("rank", rank, total, "environment variable RANK")
    # LOCAL_SIZE is set by DeepSpeed's launcher
    per_node = max(read_number(env, "LOCAL_WORLD_SIZE", read_number(env, "LOCAL_SIZE", total)), 1)
    local_rank = read_number(env, "LOCAL_RANK", 0)
    _check_number("rank on this machine", local_rank, per_node, "environment variable LOCAL_RANK")
    nodes = max(total // per_node, 1)
    if total != nodes * per_node:
        here = f"{total} processes in all, {per_node} of them on this machine"
        fix = "start the same number of processes on every machine"
        what = f"{here}: the other machines have a different number"
        raise CheckFailed(what, where=f"the launch ({by})", fix=fix, code="uneven-launch")
    wanted = (topology.nodes or nodes, topology.gpus_per_node or per_node)
    if wanted != (nodes, per_node):
        what = f"{_machines(*wanted)} are asked for, but the launch has {_machines(nodes, per_node)}"
        fix = "the number of processes that accelerate launch wants is the total over all machines; torchrun's is for each machine"
        raise CheckFailed(what, where="topology", fix=fix, code="launch-differs")
    source = f"MASTER_ADDR and MASTER_PORT ({by})"
    _agree(topology, source, main_address=env["MASTER_ADDR"], main_port=read_number(env, "MASTER_PORT", 0))
    checked = "OMPI_COMM_WORLD_RANK" in env  # DeepSpeed requires Open MPI's LOCAL_RANK
    if surroundings.gpus == 1 and added and not checked:
        added = {**added, "LOCAL_RANK": "0"}  # each task sees only one GPU (--gpus-per-task), as number 0
    reason = f"joins a running launch as rank {rank} of {total} ({by})"
    return Processes(nodes, per_node, reason, joins=True, env=added, main_address=env["MASTER_ADDR"])


def _in_pod(topology: Topology, by: str, pod: Topology, surroundings: Surroundings) -> Processes:
    _check_number("machine", pod.node_rank or 0, pod.nodes or 1, by)
    names = ("nodes", "node_rank", "gpus_per_node", "main_address")
    _agree(topology, by, **{name: getattr(pod, name) for name in names})
    _check_gpus(pod.gpus_per_node or 1, surroundings, GPUS_PER_NODE)
    pod = replace(pod, main_address=topology.main_address or pod.main_address)
    processes = _numbered(pod, surroundings, by_hand=True)
    return replace(processes, reason=f"machine {pod.node_rank} of {processes.reason} ({by})")


def _in_slurm(topology: Topology, surroundings: Surroundings, allocation: Allocation) -> Processes:
    hosts, first = allocation.hosts, allocation.hosts[0]
    job, node = f"Slurm job {allocation.job}", 0
    _agree(topology, f"{job}: {', '.join(hosts)}", nodes=len(hosts), main_address=first)
    if allocation.place == "task":
        node = allocation.node
        _check_number("machine", node, len(hosts), "environment variable SLURM_NODEID")
        _agree(topology, f"{job} (SLURM_NODEID)", node_rank=node)
    per_node = topology.gpus_per_node or allocation.gpus or max(surroundings.gpus, 1)
    if allocation.gpus and per_node > allocation.gpus:
        what = f"{per_node}, but {job} has {allocation.gpus} GPUs on this machine (SLURM_GPUS_ON_NODE)"
        fix = f"Ask Slurm for more (--gres=gpu:{per_node}), or set it to at most {allocation.gpus}."
        raise UserError(what, where=GPUS_PER_NODE, fix=fix, code="too-few-gpus")
    if allocation.place != "outside":
        _check_gpus(per_node, surroundings, "SLURM_GPUS_ON_NODE" if allocation.gpus else GPUS_PER_NODE)
    return Processes(
        nodes=len(hosts),
        gpus_per_node=per_node,
        needs_srun=allocation.place == "outside" or (allocation.place == "machine" and len(hosts) > 1),
        reason=f"{job}: {_machines(len(hosts), per_node)}",
        node=node,
        hosts=hosts,
        main_address=topology.main_address or first,
        main_port=topology.main_port or allocation.port,
    )


def _numbered(topology: Topology, surroundings: Surroundings, *, by_hand: bool) -> Processes:
    """Plan machines that users start one by one, each with its number. Not `by_hand`: this machine may not be one of them."""
    nodes, node = topology.nodes or 1, topology.node_rank
    per_node = topology.gpus_per_node or surroundings.gpus or int(by_hand)
    if not per_node:
        what = f"how many GPUs each of {nodes} machines has is not known here"
        raise UserError(what, where=GPUS_PER_NODE, fix="Set it.", code="gpus-unknown")
    _check_number("machine", node or 0, nodes, "topology.node_rank")
    obstacles = []
    if not by_hand:
        slurm = "topology.kind", "this is not inside a Slurm job"
        where, what = slurm if topology.kind == "slurm" else ("topology.nodes", f"{nodes} machines are asked for")
        fix = (
            "Submit it (packtrain sbatch VERB CONFIG), start packtrain in an allocation (salloc), or on every machine "
        )
        fix += "with topology=manual and its topology.node_rank."
        obstacles = [Problem(what, where, fix, code="machines-not-started")]
    if by_hand and node is None:
        fix = f"Set it on each machine, from 0 to {nodes - 1}."
        what = "the number of this machine is not known"
        obstacles.append(Problem(what, "topology.node_rank", fix, code="no-node-rank"))
    if by_hand and topology.main_address is None and nodes > 1:
        fix = "Set it to its host name or address, on each machine."
        obstacles.append(Problem("the first machine is not known", "topology.main_address", fix, code="no-address"))
    obstacles += _too_few_gpus(per_node, surroundings) if by_hand else []
    return Processes(
        nodes=nodes,
        gpus_per_node=per_node,
        reason=_machines(nodes, per_node),
        node=node or 0,
        main_address=topology.main_address,
        main_port=topology.main_port or DEFAULT_PORT,
        obstacles=tuple(obstacles),
    )


def _on_this_machine(topology: Topology, surroundings: Surroundings) -> Processes:
    wanted, gpus = topology.gpus_per_node, surroundings.gpus
    reason = f"{counted(gpus, 'GPUs') if gpus else 'no GPU is visible'} on {surroundings.host}"
    if not gpus and surroundings.driver and "CUDA_VISIBLE_DEVICES" not in surroundings.env:  # not hidden on purpose
        reason += " (it has an NVIDIA driver: see whether nvidia-smi works)"
    return Processes(
        nodes=1,
        gpus_per_node=wanted or max(gpus, 1),
        reason=f"{reason}, topology.gpus_per_node={wanted}" if wanted else reason,
        main_port=topology.main_port,
        obstacles=tuple(_too_few_gpus(wanted or 0, surroundings)),
    )


def _check_number(thing: str, number: int, total: int, where: str) -> None:
    if number >= total:
        fix = f"Numbers go from 0 to {total - 1}."
        raise UserError(f"{thing} {number} of {total}", where=where, fix=fix, code="number-too-high")


def _agree(topology: Topology, source: str, **given: int | str | None) -> None:
    """Raise UserError if a key of `topology` differs from the value that `source` has `given`.

    Addresses are compared only as host names, with or without their domain.
    """
    for name, value in given.items():
        wanted = getattr(topology, name)
        if None in (wanted, value) or wanted == value:
            continue
        if name == "main_address":
            address = str(value)
            same = wanted.split(".")[0] == address.split(".")[0]
            if same or not address or is_loopback(address) or is_ip(wanted) or is_ip(address):
                continue
        fix = f"Remove the key, or set it to {value}."
        what = f"{wanted}, but it is {value} by {source}"
        raise UserError(what, where=f"topology.{name}", fix=fix, code="sources-disagree")


def _check_gpus(per_node: int, surroundings: Surroundings, source: str) -> None:
    """Raise CheckFailed if this machine shows fewer GPUs than promised. A machine without a driver runs on its CPUs."""
    if per_node > surroundings.gpus and surroundings.driver:
        what = f"{surroundings.host} shows {surroundings.gpus} GPUs, {per_node} were promised ({source})"
        fix = "look at nvidia-smi and CUDA_VISIBLE_DEVICES there, and leave the machine out if a GPU is lost"
        raise CheckFailed(what, where=f"machine {surroundings.host}", fix=fix, code="gpus-missing")


def _too_few_gpus(wanted: int, surroundings: Surroundings) -> list[Problem]:
    if not surroundings.gpus or wanted <= surroundings.gpus:
        return []
    what = f"{wanted} processes, but {surroundings.gpus} visible GPUs"
    fix = f"Set it to at most {surroundings.gpus}, and look at CUDA_VISIBLE_DEVICES."
    return [Problem(what, GPUS_PER_NODE, fix, code="too-few-gpus")]


def _machines(nodes: int, per_node: int) -> str:
    return f"{counted(nodes, 'machines')}, {counted(per_node, 'processes')} on each"
