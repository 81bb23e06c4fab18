"""RunConfig + Surroundings → LaunchPlan: everything to be started, as a value for `packtrain plan`. Pure.

Every setting of accelerate's launcher is on the command line AND in the YAML: without --config_file, accelerate mixes in the user's answers
to `accelerate config`. The launcher only starts processes; strategies/*/run.py makes the strategy active in them. BatchPlan divides one
optimizer step among processes and micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

from packtrain.config.rules import nearest_multiples
from packtrain.config.schema import RunConfig, Topology
from packtrain.errors import Json, Problem, UserError
from packtrain.objectives.spec import OBJECTIVES
from packtrain.plan.network_settings import NetworkSetting, choose_network
from packtrain.plan.surroundings import DEFAULT_PORT, Surroundings, visible_gpus
from packtrain.plan.topology import GPUS_PER_NODE, Processes, choose_processes
from packtrain.run_folder import RunFolder
from packtrain.strategies.spec import Launcher, engine_sections
from packtrain.wording import counted

_WORKER = ("packtrain", "worker")  # python -m …
_NOT_KNOWN_YET = "MAIN_ADDRESS"  # in plans for machines whose names are not known yet
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"  # since torch 2.9, and before
_WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
_MAX_GPUS = 1024  # on one machine


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One optimizer step over all devices, and the work of each device.

    `unit` names the examples: documents or pairs. `rows_per_step` counts rows of `tokens_per_device` over all devices, and
    `micro_batches_per_device` is the accumulation. Both are None if they depend on the lengths of the step's examples. `steps` of the run
    is None if it depends on the data.
    """

    mode: str
    processes: int
    examples_per_step: int | None
    tokens_per_step: int | None
    examples_per_device: int | None
    tokens_per_device: int | None
    rows_per_step: int | None
    micro_batches_per_device: int | None
    unit: str = "documents"
    steps: int | None = None
    sequence_parallel: int | str = 1

    def sentence(self) -> str:
        """Describe the global step, the share of each process, and its micro-batches."""
        number, processes = self.rows_per_step or self.examples_per_step or 0, self.processes
        unit = "rows" if self.rows_per_step else self.unit
        step = counted(number, unit)
        if self.rows_per_step:
            step = f"{self.tokens_per_step} tokens = {step}"
        share = counted(number // processes if number % processes == 0 else round(number / processes, 2), unit)
        where = "on 1 process" if processes == 1 else f"about {share} on each of {processes} processes, in"
        times = self.micro_batches_per_device
        micro = "as many micro-batches as it takes," if times is None else counted(times, "micro-batches")
        limits = [counted(self.examples_per_device, self.unit)] if self.examples_per_device else []
        limits += [f"{self.tokens_per_device} tokens"] if self.tokens_per_device else []
        split = ""
        if processes > 1 and self.sequence_parallel != 1:
            over = "as few" if self.sequence_parallel == "auto" else str(self.sequence_parallel)
            split = f"; {self.unit} above that are split over {over} neighbouring processes"
            split += " as the longest one needs" if self.sequence_parallel == "auto" else ""
        return f"a step is {step}: {where} {micro} of at most {' and '.join(limits)}{split}"

    def to_json(self) -> Json:
        """Return the figures, the sentence as `summary`, and the run's most `examples` and `tokens`.

        Examples count repeats, and an epoch's last step may not be full. Tokens assume full rows; real rows are almost full."""
        each = {"examples": self.examples_per_step, "tokens": self.tokens_per_step}
        whole = {name: self.steps * number if self.steps and number else None for name, number in each.items()}
        return {**asdict(self), **whole, "summary": self.sentence()}


def plan_batch(config: RunConfig, processes: int) -> BatchPlan:
    """Return the batch arithmetic of a run on `processes` devices.

    Raises UserError if rows of batch.tokens_per_step do not divide evenly among processes, if processes do not divide into groups of
    strategy.sequence_parallel, or if a step would be split although the loss needs all its pairs together.
    """
    batch, mode, sequence_parallel = config.batch, config.packing.mode, config.strategy.sequence_parallel
    if sequence_parallel != "auto" and processes % int(sequence_parallel):
        what = f"{counted(processes, 'processes')} cannot make groups of {sequence_parallel}"
        fix = f"Set it to auto or a divisor of {processes}, or start another number of processes."
        raise UserError(what, where="strategy.sequence_parallel", fix=fix, code="uneven-groups")
    examples, tokens = batch.limits(mode)
    rows = micro_batches = None
    if batch.tokens_per_step is not None and tokens is not None:
        rows = batch.tokens_per_step // tokens
        if rows % processes:
            what = f"{rows} rows of {tokens} tokens do not divide over {processes} processes"
            fix = f"Nearest that do: {nearest_multiples(batch.tokens_per_step, tokens * processes)}."
            raise UserError(what, where="batch.tokens_per_step", fix=fix, code="rows-not-divisible")
        micro_batches = rows // processes if mode == "packed" else None
    elif batch.examples_per_step is not None and examples is not None and tokens is None:
        micro_batches = math.ceil(math.ceil(batch.examples_per_step / examples) / processes)
    if (sorting := config.objective.sorting_losses) and (processes > 1 or (micro_batches or 1) > 1):
        where, fix = f"{processes} processes", "Use one process (topology=single)"
        if processes == 1:  # training itself checks micro-batches by tokens
            where, fix = f"{micro_batches} micro-batches", f"Set batch.examples_per_device={batch.examples_per_step}"
        what = f"{' and '.join(sorting)} sorts all pairs of a step, which here are spread over {where}"
        raise UserError(what, where="objective.loss", fix=f"{fix}, or choose another loss.", code="sorted-pairs-split")
    return BatchPlan(
        mode=mode,
        processes=processes,
        examples_per_step=batch.examples_per_step,
        tokens_per_step=batch.tokens_per_step,
        examples_per_device=examples,
        tokens_per_device=tokens,
        rows_per_step=rows,
        micro_batches_per_device=micro_batches,
        unit=config.objective.spec.examples,
        steps=config.trainer.max_steps,
        sequence_parallel=sequence_parallel,
    )


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """The command that starts the processes of one machine; `env` has only added variables."""

    node: int
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan(Processes):
    """The processes of a run, and how they are started.

    `srun` starts packtrain on every machine of a Slurm job; it is empty elsewhere. packtrain then runs `commands`, one for each machine.
    This machine is called `host` and shows `gpus`; the smallest of them has `gpu_memory` bytes. `network` holds the network settings of
    its processes, with reasons. `engines` are the settings of each engine, None without it. The run may restart `restarts` times, with at least `least_nodes` machines.
    """

    commands: tuple[NodeCommand, ...]
    accelerate: Json
    engines: Mapping[str, Json | None]
    batch: BatchPlan
    host: str
    gpus: int
    srun: tuple[str, ...]
    network: tuple[NetworkSetting, ...]
    gpu_memory: int | None = None
    restarts: int = 0
    least_nodes: int = 1

    @property
    def survives_lost_machines(self) -> bool:
        """Whether a restart may use fewer machines. Then Slurm must not end the job when it loses one."""
        return self.restarts > 0 and self.least_nodes < self.nodes

    @property
    def lacks_gpus_alone(self) -> bool:
        """Whether the only obstacle is too few GPUs on this machine, one of several.

        The rendezvous reports that on all machines.
        """
        lacking = self.nodes > 1 and 0 < self.gpus < self.gpus_per_node
        return lacking and all(item.where == GPUS_PER_NODE for item in self.obstacles)

    @property
    def engine_settings(self) -> Json | None:
        """The settings of the engine in use, if there is one."""
        return next((settings for settings in self.engines.values() if settings is not None), None)

    @property
    def ranks(self) -> range:
        """The ranks of this machine."""
        return range(self.node * self.gpus_per_node, (self.node + 1) * self.gpus_per_node)

    @property
    def command(self) -> NodeCommand:
        """The command of this machine."""
        return self.commands[self.node if len(self.commands) > 1 else 0]

    def to_json(self) -> Json:
        """Return plain containers. The keys are a promise to users."""
        return {
            "num_processes": self.num_processes,
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "commands": [{"node": item.node, "argv": list(item.argv), "env": dict(item.env)} for item in self.commands],
            "accelerate": dict(self.accelerate),
            **self.engines,
            "batch": self.batch.to_json(),
        }


def plan_launch(
    config: RunConfig,
    surroundings: Surroundings,
    verb: str | None = None,
    arguments: Sequence[str] = (),
    machines: Sequence[int] | None = None,
) -> LaunchPlan:
    """Return the plan of `packtrain verb arguments…` with this `config`, on `machines` by number or on all.

    Raises UserError or CheckFailed if the run is impossible, or if two sources contradict each other.
    """
    verb = verb or config.objective.kind
    topology, strategy, folder = config.topology, config.strategy.spec, RunFolder.of(config.trainer)
    surroundings = _with_asked_gpus(topology, surroundings)
    processes = choose_processes(topology, surroundings)
    restarts = config.trainer.restarts if verb in OBJECTIVES.all() else 0
    if restarts:
        obstacles = (*processes.obstacles, *_why_no_restarts(processes, topology))
        processes = replace(processes, relaunched=True, obstacles=obstacles)
    least = topology.min_nodes or processes.nodes
    no_kill = restarts > 0 and least < processes.nodes
    processes = processes if machines is None else processes.restrict(machines)
    port = processes.main_port or (surroundings.free_port if processes.nodes == 1 else DEFAULT_PORT)
    launcher, gpus = strategy.launcher(str(folder.engine)), surroundings.gpus > 0
    settings = [_launcher_yaml(processes, node, launcher, port=port, gpus=gpus) for node in range(processes.nodes)]
    worker = ("-m", *_WORKER, verb, str(folder.config))

    def argv(settings: Mapping[str, object]) -> tuple[str, ...]:
        if processes.num_processes == 1 or processes.joins:
            return (surroundings.python, *worker)
        flags = _launcher_flags(settings, launcher, join_timeout_s=topology.join_timeout)
        return (surroundings.accelerate, "launch", "--config_file", str(folder.accelerate), *flags, *worker)

    network = _network(topology, processes, surroundings)
    env = _env(topology, processes, surroundings)
    own_env = {**{item.name: item.value for item in network if item.value is not None}, **env}
    return LaunchPlan(
        **{item.name: getattr(processes, item.name) for item in fields(processes)},
        commands=tuple(  # network settings of the other machines are not known here
            NodeCommand(node, argv(item), own_env if node == processes.node else env)
            for node, item in enumerate(settings)
        ),
        accelerate=settings[processes.node],
        engines=engine_sections(strategy, config.model.dtype, config.optim.max_grad_norm),
        batch=plan_batch(config, processes.num_processes),
        host=surroundings.host,
        gpus=surroundings.gpus,
        srun=_srun(processes, surroundings, verb, arguments, no_kill=no_kill) if processes.needs_srun else (),
        network=network,
        restarts=restarts,
        least_nodes=least,
        gpu_memory=surroundings.gpu_memory,
    )


def _launcher_yaml(processes: Processes, node: int, strategy: Launcher, *, port: int, gpus: bool) -> dict[str, object]:
    """Return accelerate's YAML for machine `node`.

    CPUs use MULTI_GPU too: accelerate's `cpu` path ignores the number of processes.
    """
    alone = processes.num_processes == 1 or processes.joins
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        **({"distributed_type": "NO"} if alone else strategy.settings),
        "num_machines": 1 if alone else processes.nodes,
        "num_processes": 1 if alone else processes.num_processes,  # accelerate counts them over all machines
        "machine_rank": node,
        "mixed_precision": "no",  # trainer.mixed_precision is set when the model is made
        "use_cpu": not gpus and alone,
        "debug": False,
    }
    if not alone:
        address = "127.0.0.1" if processes.nodes == 1 else processes.main_address or _NOT_KNOWN_YET
        config |= {"main_process_ip": address, "main_process_port": port, "same_network": True, "gpu_ids": "all"}
    return config


def _launcher_flags(settings: Mapping[str, object], strategy: Launcher, *, join_timeout_s: int) -> list[str]:
    """Return the same for the command line. Processes that have not found each other after `join_timeout_s` seconds give up."""
    flags = [*strategy.flags, "--same_network"]
    for name in ("num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port"):
        flags += [f"--{name}", str(settings[name])]
    return [*flags, "--rdzv_conf", f"timeout={join_timeout_s}", "--mixed_precision", "no", "--dynamo_backend", "no"]


def _why_no_restarts(processes: Processes, topology: Topology) -> list[Problem]:
    """Return why trainer.restarts and topology.min_nodes cannot work here."""
    if processes.joins:
        what = "processes that another launcher has started can be started again by that alone"
        fix = "Set it to 0 and use the launcher's own (torchrun --max-restarts), or start packtrain without it."
        return [Problem(what, "trainer.restarts", fix, code="restarts-not-ours")]
    if (topology.min_nodes or 1) > processes.nodes:
        what = f"{topology.min_nodes}, but the run has {counted(processes.nodes, 'machines')}"
        return [Problem(what, "topology.min_nodes", f"Set it to at most {processes.nodes}.", code="min-nodes-too-high")]
    return []


def _with_asked_gpus(topology: Topology, surroundings: Surroundings) -> Surroundings:
    """Return the surroundings with the GPUs that topology.environment makes visible to the processes."""
    asked = topology.variables.get(_VISIBLE)
    if asked is None:
        return surroundings
    hidden = _VISIBLE in surroundings.env and surroundings.driver  # how many GPUs the machine has is not known
    gpus = visible_gpus(_MAX_GPUS if hidden else surroundings.gpus, asked)
    return replace(surroundings, gpus=gpus, env={**surroundings.env, _VISIBLE: asked})


def _srun(
    processes: Processes, surroundings: Surroundings, verb: str, arguments: Sequence[str], *, no_kill: bool
) -> tuple[str, ...]:
    """Return the srun command. It starts one task per machine, with all cores of the job there.

    The task starts its machine's processes. A failed task does not make srun kill the others: machine 0 ends them in order.
    """
    flags = ["--nodes", str(processes.nodes), "--ntasks", str(processes.nodes), "--ntasks-per-node", "1"]
    if cpus := surroundings.env.get("SLURM_CPUS_ON_NODE"):  # srun does not inherit this from the job
        flags += ["--cpus-per-task", cpus]
    flags += ["--kill-on-bad-exit=0", "--wait=0"]  # override the cluster's defaults
    flags += ["--no-kill"] if no_kill else []
    return ("srun", *flags, surroundings.python, "-m", "packtrain", verb, *arguments)


def _network(topology: Topology, processes: Processes, surroundings: Surroundings) -> tuple[NetworkSetting, ...]:
    """Return network settings for this machine's processes.

    Empty unless this machine is one of several and about to start them. Raises CheckFailed if the user's settings name a missing interface.
    """
    if surroundings.network is None or processes.nodes == 1 or processes.obstacles or processes.needs_srun:
        return ()
    main, gpus = processes.main_address, surroundings.gpus > 0
    here = surroundings.network(main)
    return tuple(choose_network(here, surroundings.env, main, asked=topology.variables, gpus=gpus))


def _env(topology: Topology, processes: Processes, surroundings: Surroundings) -> dict[str, str]:
    """Return variables of the processes: shares of the cores, the GPU of a single process.

    torch's allocator on GPUs grows its blocks: rows of many lengths leave holes between blocks of fixed size.
    OpenMP threads spin 5 ms at a barrier before they sleep, even if a neighbour occupies the core that they wait for: 20 times slower. Here
    they spin 1/300 of that (benchmarks/busy_neighbour.py), and not at all on a busy machine. Fewer threads would help too, but they
    change the order of sums and thus the results. The user's own variables win.
    """
    asked = topology.variables
    added, own = dict[str, str](), dict[str, str]()
    if surroundings.gpus and not set(_ALLOCATOR) & {*surroundings.env, *asked}:
        added[_ALLOCATOR[0]] = "expandable_segments:True"
    if not surroundings.gpus and not _WAITING & {*surroundings.env, *asked}:
        busy = surroundings.load > surroundings.cpus / 2
        added |= {"OMP_WAIT_POLICY": "passive"} if busy else {"GOMP_SPINCOUNT": "1000"}
    if processes.joins:
        return {**added, **processes.env, **asked}
    if processes.num_processes > 1:
        added["OMP_NUM_THREADS"] = str(max(1, surroundings.cpus // processes.gpus_per_node))
    # transformers would spread one process over all GPUs (DataParallel)
    if processes.num_processes == 1 and surroundings.gpus > 1:
        own[_VISIBLE] = surroundings.env.get(_VISIBLE, "0").split(",")[0].strip()
    added = {name: value for name, value in added.items() if name not in surroundings.env}
    return {**added, **asked, **own}
