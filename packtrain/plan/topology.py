"""Which processes train, on which machines, and what this process has to do for it. Pure.

What the config says, what Slurm or another launcher says and what the machine shows must agree: a contradiction is an
error that names both. What is only missing to carry the plan out from here (a plan for 64 machines made on a laptop) is
an obstacle: the plan is shown all the same.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from packtrain.config.schema import Topology
from packtrain.errors import CheckFailed, Problem, UserError
from packtrain.plan.interfaces import is_loopback
from packtrain.plan.surroundings import (
    DEFAULT_PORT,
    Allocation,
    LaunchedMachine,
    LaunchedProcess,
    Surroundings,
    allocation_of,
    check_told,
    incomplete,
    joined,
    machine_of,
)
from packtrain.wording import counted

Role = Literal["train", "launch", "spread"]
GPUS_PER_NODE = "topology.gpus_per_node"


@dataclass(frozen=True, slots=True)
class Processes:
    """`per_node` processes on each of `nodes` machines, of which this is number `node`; and why.

    `spread` where packtrain is still to be started on all machines of a Slurm job; `joins` where another launcher has started
    all processes; `env` is what torch has to be told of it. `hosts` are the machines' names where they are known. `obstacles`
    keep the plan from being carried out from here.
    """

    nodes: int
    per_node: int
    reason: str
    node: int = 0
    spread: bool = False
    joins: bool = False
    hosts: tuple[str, ...] = ()
    main_address: str | None = None
    main_port: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    obstacles: tuple[Problem, ...] = ()

    @property
    def total(self) -> int:
        """Processes of all machines."""
        return self.nodes * self.per_node

    @property
    def role(self) -> Role:
        """What this process has to do: train, start those of its machine, or start packtrain on all machines."""
        return "spread" if self.spread else "train" if self.joins or self.total == 1 else "launch"


def choose_processes(topology: Topology, surroundings: Surroundings) -> Processes:
    """The processes that `topology` means here. Raises UserError or CheckFailed where two sources contradict each other."""
    allocation = allocation_of(surroundings.env)
    started = joined(topology, surroundings.env, allocation)
    if topology.kind in ("auto", "env", "slurm") and started:
        return _join(topology, started, surroundings)
    if started and started.total > 1:
        raise _each_its_own(started.total, "a running launch")
    machine = machine_of(surroundings.env)
    if topology.kind in ("single", "local"):
        if machine and machine.nodes > 1:
            raise _each_its_own(machine.nodes, machine.by)
        if allocation and len(allocation.tasks) > 1:
            raise _each_its_own(len(allocation.tasks), f"a step of Slurm job {allocation.job}")
    if topology.kind in ("auto", "env") and machine:
        return _machine(topology, surroundings, machine)
    if topology.kind == "env":
        raise incomplete(surroundings.env)
    if topology.kind == "single":
        return Processes(1, 1, "topology=single: one process")
    if topology.kind in ("auto", "slurm") and allocation:
        return _in_slurm(topology, surroundings, allocation)
    if topology.kind in ("auto", "slurm"):
        check_told(surroundings.env)
    if topology.kind == "manual" or (topology.kind == "auto" and topology.node_rank is not None):
        return _by_hand(topology, surroundings)
    if topology.kind == "slurm" or (topology.nodes or 1) > 1:
        return _elsewhere(topology, surroundings)
    return _on_this_machine(topology, surroundings)


def _each_its_own(number: int, launch: str) -> UserError:
    return UserError(
        f"this process is one of {number} of {launch}; each would start its own run",
        where="topology.kind",
        fix="Use topology=env (or auto) to join the launch, or start packtrain without a launcher.",
    )


def _join(topology: Topology, started: LaunchedProcess, surroundings: Surroundings) -> Processes:
    nodes = started.machines or max(started.total // started.per_node, 1)
    if started.total != nodes * started.per_node:
        raise CheckFailed(
            f"{started.total} processes in all, {started.per_node} of them on this machine: the others have another number",
            where=f"the launch ({started.by})",
            fix="start the same number of processes on every machine",
        )
    wanted = (topology.nodes or nodes, topology.gpus_per_node or started.per_node)
    if wanted != (nodes, started.per_node):
        raise CheckFailed(
            f"{_machines(*wanted)} are asked for, but the launch has {_machines(nodes, started.per_node)}",
            where="topology",
            fix="the number of processes that accelerate launch wants is the total over all machines; torchrun's is that of each",
        )
    env = dict(started.env)
    checked = "OMPI_COMM_WORLD_RANK" in surroundings.env  # DeepSpeed holds LOCAL_RANK to Open MPI's
    if surroundings.gpus == 1 and "LOCAL_RANK" in env and not checked:
        env["LOCAL_RANK"] = "0"  # each task has a GPU to itself (--gpus-per-task): the first that it sees
    address, port = ({**surroundings.env, **env}[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not address:
        raise UserError("it is empty", where="environment variable MASTER_ADDR", fix="Set it to the first machine.")
    _agree_on_address(topology, address, f"MASTER_ADDR ({started.by})")
    if not port.isdigit() or not 0 < int(port) < 65536:
        what = f"found {port!r}"
        raise UserError(what, where="environment variable MASTER_PORT", fix="Ports are whole numbers from 1 to 65535.")
    _agree("topology.main_port", topology.main_port, int(port), f"MASTER_PORT ({started.by})")
    if surroundings.env.get("GROUP_RANK", "").isdigit():  # torchrun's
        _agree("topology.node_rank", topology.node_rank, int(surroundings.env["GROUP_RANK"]), "GROUP_RANK (torchrun)")
    reason = f"joins a running launch as rank {started.rank} of {started.total} ({started.by})"
    return Processes(nodes, started.per_node, reason, joins=True, env=env)


def _machine(topology: Topology, surroundings: Surroundings, machine: LaunchedMachine) -> Processes:
    _agree("topology.nodes", topology.nodes, machine.nodes, machine.by)
    _agree("topology.node_rank", topology.node_rank, machine.node, machine.by)
    if machine.per_node is not None:
        _agree("topology.gpus_per_node", topology.gpus_per_node, machine.per_node, f"{machine.by} (PET_NPROC_PER_NODE)")
    if machine.node >= machine.nodes:
        what = f"machine {machine.node} of {machine.nodes}: they are numbered from 0"
        raise UserError(what, where=f"environment, {machine.by}")
    if machine.nodes > 1 and not (topology.main_address or machine.main_address):
        what = f"the first machine is not known: {machine.by} do not say its address"
        fix = "Set it to a name or address that all machines can reach."
        raise UserError(what, where="topology.main_address", fix=fix)
    _agree_on_address(topology, machine.main_address, machine.by)
    per_node = topology.gpus_per_node or machine.per_node or max(surroundings.gpus, 1)
    _check_gpus(per_node, surroundings, "topology.gpus_per_node")
    return Processes(
        nodes=machine.nodes,
        per_node=per_node,
        reason=f"machine {machine.node} of {machine.nodes} ({machine.by}), {per_node} processes each",
        node=machine.node,
        main_address=topology.main_address or machine.main_address,
        main_port=topology.main_port or machine.main_port,
    )


def _in_slurm(topology: Topology, surroundings: Surroundings, allocation: Allocation) -> Processes:
    nodes = len(allocation.hosts)
    job = f"Slurm job {allocation.job}"
    _agree("topology.nodes", topology.nodes, nodes, f"{job}: {', '.join(allocation.hosts)}")
    if allocation.place == "task":
        if allocation.node >= nodes:  # of a heterogeneous job
            what = f"machine {allocation.node} (SLURM_NODEID) of {nodes} of a step over several parts of a heterogeneous job"
            raise UserError(what, where=job, fix="Start packtrain in one of them: srun --het-group=0.")
        _agree("topology.node_rank", topology.node_rank, allocation.node, f"{job} (SLURM_NODEID)")
    elif topology.node_rank is not None and nodes > 1:
        what = f"{topology.node_rank} for all of the {nodes} machines of {job}"
        raise UserError(what, where="topology.node_rank", fix="Take the key away: inside a Slurm job it is known.")
    first = allocation.hosts[0]
    _agree_on_address(topology, first, f"{job}: the first of SLURM_JOB_NODELIST")
    per_node = topology.gpus_per_node or allocation.gpus or max(surroundings.gpus, 1)
    if allocation.gpus and per_node > allocation.gpus:
        what = f"{per_node}, but {job} has {allocation.gpus} GPUs on this machine (SLURM_GPUS_ON_NODE)"
        fix = f"Ask Slurm for more (--gres=gpu:{per_node}), or set it to at most {allocation.gpus}."
        raise UserError(what, where="topology.gpus_per_node", fix=fix)
    if allocation.place != "outside":
        _check_gpus(per_node, surroundings, "SLURM_GPUS_ON_NODE" if allocation.gpus else "topology.gpus_per_node")
    spread = allocation.place == "outside" or (allocation.place == "machine" and nodes > 1)
    idle = (allocation.gpus or per_node) - per_node
    reason = f"{job}: {_machines(nodes, per_node)}{f' ({idle} of its GPUs idle)' if idle > 0 else ''}"
    if allocation.gpus and not surroundings.gpus and not surroundings.driver and allocation.place != "outside":
        reason += f"; {surroundings.host} has no GPU driver, whatever Slurm says: they run on the CPU"
    return Processes(
        nodes=nodes,
        per_node=per_node,
        spread=spread,
        reason=reason,
        node=allocation.node if allocation.place == "task" else 0,
        hosts=allocation.hosts,
        main_address=topology.main_address or first,
        main_port=topology.main_port or allocation.port,
    )


def _by_hand(topology: Topology, surroundings: Surroundings) -> Processes:
    nodes = topology.nodes or 1
    per_node = topology.gpus_per_node or max(surroundings.gpus, 1)
    node = topology.node_rank
    if node is not None and node >= nodes:
        fix = f"Machines are numbered from 0 to {nodes - 1}." if topology.nodes else "Set topology.nodes."
        raise UserError(f"machine {node} of {nodes}", where="topology.node_rank", fix=fix)
    obstacles = []
    if topology.node_rank is None:
        what = "the number of this machine is not known"
        obstacles.append(Problem(what, "topology.node_rank", f"Set it on each machine, from 0 to {nodes - 1}."))
    if topology.main_address is None and nodes > 1:
        what = "the first machine is not known"
        obstacles.append(Problem(what, "topology.main_address", "Set it to its host name or address, on each machine."))
    obstacles += _too_few_gpus(per_node, surroundings)
    return Processes(
        nodes=nodes,
        per_node=per_node,
        reason=_machines(nodes, per_node, " started by hand"),
        node=node or 0,
        main_address=topology.main_address,
        main_port=topology.main_port or DEFAULT_PORT,
        obstacles=tuple(obstacles),
    )


def _elsewhere(topology: Topology, surroundings: Surroundings) -> Processes:
    """A plan for machines of which this may be none."""
    nodes = topology.nodes or 1
    per_node = topology.gpus_per_node or surroundings.gpus
    if not per_node:
        what = f"how many GPUs each of {nodes} machines has is not known here"
        raise UserError(what, where="topology.gpus_per_node", fix="Set it.")
    fix = "Submit it (packtrain sbatch VERB CONFIG), or start packtrain in an allocation (salloc)"
    if topology.kind == "slurm":
        where, what = "topology.kind", "this is not inside a Slurm job"
    else:
        where, what = "topology.nodes", f"{nodes} machines are asked for"
        fix += ", or the same command on every machine with topology=manual and its topology.node_rank"
    return Processes(
        nodes=nodes,
        per_node=per_node,
        reason=_machines(nodes, per_node),
        main_address=topology.main_address,
        main_port=topology.main_port or DEFAULT_PORT,
        obstacles=(Problem(what, where, fix + "."),),
    )


def _on_this_machine(topology: Topology, surroundings: Surroundings) -> Processes:
    if topology.node_rank:
        what = f"machine {topology.node_rank}, but there is only one"
        raise UserError(what, where="topology.node_rank", fix="Set topology.nodes.")
    wanted, gpus = topology.gpus_per_node, surroundings.gpus
    obstacles: tuple[Problem, ...] = ()
    if wanted is not None:
        what = f"{gpus} GPUs" if gpus else f"{surroundings.cpus} CPU cores"
        number, reason = wanted, f"topology.gpus_per_node={wanted}, on {surroundings.host} with {what}"
        obstacles = tuple(_too_few_gpus(wanted, surroundings))
        reason += _unseen(surroundings)
    elif gpus:
        number, reason = gpus, f"one process per visible GPU of {surroundings.host}"
    elif topology.kind == "local":
        what = "no GPU is visible, so the number of processes is not known"
        fix = "Set topology.gpus_per_node (processes on this machine), or topology=single."
        raise UserError(what, where="topology.gpus_per_node", fix=fix)
    else:
        number, reason = 1, f"no GPU is visible on {surroundings.host}: one process on the CPU{_unseen(surroundings)}"
    return Processes(1, number, reason, main_port=topology.main_port, obstacles=obstacles)


def _agree(key: str, wanted: int | None, found: int, source: str) -> None:
    if wanted is not None and wanted != found:
        fix = f"Take the key away, or set it to {found}."
        raise UserError(f"{wanted}, but it is {found} by {source}", where=key, fix=fix)


def _agree_on_address(topology: Topology, found: str, source: str) -> None:
    """Raises UserError where two host names differ; of addresses, and of a machine's names for itself, nothing is known."""
    wanted = topology.main_address
    if wanted and found and not (_same_host(wanted, found) or _same_host(found, wanted) or is_loopback(found)):
        fix = "Take the key away, or set both to the same."
        raise UserError(f"{wanted}, but it is {found} by {source}", where="topology.main_address", fix=fix)


def _check_gpus(per_node: int, surroundings: Surroundings, source: str) -> None:
    """Raises CheckFailed where this machine shows fewer GPUs than were promised; one without a driver runs on its CPUs."""
    if per_node > surroundings.gpus and surroundings.driver:
        what = f"{surroundings.host} shows {surroundings.gpus} GPUs, {per_node} were promised ({source})"
        fix = "look at nvidia-smi and CUDA_VISIBLE_DEVICES there, and leave the machine out if a GPU is lost"
        raise CheckFailed(what, where=f"machine {surroundings.host}", fix=fix)


def _too_few_gpus(wanted: int, surroundings: Surroundings) -> list[Problem]:
    if not surroundings.gpus or wanted <= surroundings.gpus:
        return []
    fix = f"Set it to at most {surroundings.gpus}, and look at CUDA_VISIBLE_DEVICES."
    return [Problem(f"{wanted} processes, but {surroundings.gpus} visible GPUs", GPUS_PER_NODE, fix)]


def _unseen(surroundings: Surroundings) -> str:
    """A remark where there should be GPUs, and they are not hidden on purpose."""
    if surroundings.gpus or not surroundings.driver or "CUDA_VISIBLE_DEVICES" in surroundings.env:
        return ""
    return " (it has an NVIDIA driver: see whether nvidia-smi works)"


def _machines(nodes: int, per_node: int, how: str = "") -> str:
    return f"{counted(nodes, 'machines')}{how}, {counted(per_node, 'processes')} on each"


def _same_host(name: str, host: str) -> bool:
    """Whether `name` may be the machine `host`: an address may, and a name with or without its domain."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.split(".")[0] == host.split(".")[0]
    return True
