"""What is known of one machine, what a run needs of it, and the form of a check that compares the two: plain values.

Every fact has a default that means "not known", so a machine without a tool, a driver or a network is described as well as
any other. Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from packtrain.config.schema import RunConfig
from packtrain.errors import PacktrainError, Problem
from packtrain.plan.interfaces import Interface, NetworkSetting, Port
from packtrain.plan.launch_plan import plan_launch
from packtrain.plan.memory import ADAPTER_BYTES, BYTES, Memory, estimate
from packtrain.plan.surroundings import Surroundings

Status = Literal["ok", "warn", "fail"]
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Software:
    """Versions of packages and paths of build tools (None: not installed); `commits` of packages that run from a checkout;
    `conflicts`: what packtrain needs ("torch>=2.10") and the version that is installed ("none")."""

    platform: str = ""
    python: str = ""
    packages: Mapping[str, str | None] = field(default_factory=dict)
    conflicts: tuple[tuple[str, str], ...] = ()
    tools: Mapping[str, str | None] = field(default_factory=dict)
    commits: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator as torch sees it; `capability` as in sm_90."""

    name: str
    memory: int | None = None
    capability: str | None = None


@dataclass(frozen=True, slots=True)
class Torch:
    """What torch says of itself; `error` is why it could not be asked, `warning` what it said while looking for GPUs.

    `kernels` are the flash kernels that were tried and what each lacks ("" for the one that is right), `accelerate` is
    accelerate's default config, as accelerate reads it.
    """

    error: str = ""
    version: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    architectures: tuple[str, ...] = ()
    available: bool | None = None
    kind: str = "cpu"
    devices: tuple[Device, ...] = ()
    warning: str = ""
    kernels: Mapping[str, str] | None = None
    accelerate: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver sees it; `trouble` is in words."""

    index: int
    name: str = "?"
    uuid: str = ""
    memory: int | None = None
    memory_used: int | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Gpus:
    """The machine's GPUs; `present` is whether it has NVIDIA hardware or its driver at all, `error` why the driver is silent."""

    present: bool = False
    error: str = ""
    driver: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True)
class HostName:
    """A host name and what it resolves to; `lack` is why it does not."""

    name: str = ""
    addresses: tuple[str, ...] = ()
    lack: str = ""


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """`main`: the first machine of the run, where there is another one; `silence`: what the name server does not answer."""

    main: HostName | None = None
    interfaces: tuple[Interface, ...] = ()
    ports: tuple[Port, ...] = ()
    silence: str = ""


@dataclass(frozen=True, slots=True)
class Folder:
    """Where a run writes, by the key or variable that names it; what is said of one that is not there yet is its parent's."""

    setting: str
    path: str
    writable: bool | None = None
    free: int | None = None
    total: int | None = None
    kind: str = ""
    lack: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """The machine beside GPUs and network; `memory` and `cpus` are what its cgroup allows; -1 is no limit of `nofile`."""

    nofile: int | None = None
    shm: int | None = None
    memory: int | None = None
    memory_free: int | None = None
    cpus: float = 1
    folders: tuple[Folder, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine; `lacks` says in a line each what was asked and not answered."""

    software: Software = Software()
    torch: Torch = Torch()
    gpus: Gpus = Gpus()
    network: NetworkFacts = NetworkFacts()
    host: Host = Host()
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """`found` in words; `fix` is a command or a config key, "" where all is well."""

    name: str
    status: Status
    found: str
    fix: str = ""


def size(number: int | None) -> str:
    """Bytes in words."""
    if number is None:
        return "not known"
    if 0 < number < MIB:
        return f"{number / 1024:.0f} KiB"
    if number < GIB:
        return f"{number / MIB:.0f} MiB"
    return f"{number / GIB:.1f} GiB" if number < 100 * GIB else f"{number / GIB:.0f} GiB"


@dataclass(frozen=True, slots=True)
class RunNeeds:
    """A run as this machine sees it: `per_node` of its processes on each of `nodes` machines; `configured`: one was named.

    `memory` is its estimate, or a sentence on why there is none, `disk` the size of all that the run keeps (0: not known).
    `problems` keep it from starting here, `obstacles` only from being started in this way. `network` is what packtrain tells
    NCCL and gloo.
    """

    configured: bool = False
    nodes: int = 1
    per_node: int = 1
    strategy: str = "ddp"
    attention: str = "auto"
    packed: bool = True
    dtype: str = "bfloat16"
    main_address: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    network: tuple[NetworkSetting, ...] = ()
    memory: Memory | str = "no config"
    disk: int = 0
    problems: tuple[Problem, ...] = ()
    obstacles: tuple[Problem, ...] = ()

    @property
    def between(self) -> Status:
        """What trouble between machines means: without a config it may matter."""
        return "fail" if self.nodes > 1 else "warn"

    def variables(self, facts: Facts) -> dict[str, str]:
        """The environment variables that change how training runs, as its processes will have them."""
        return {**facts.host.environment, **self.environment}


def needs_of(config: RunConfig, surroundings: Surroundings) -> RunNeeds:
    """The needs of a run on a machine with these surroundings."""
    problems, obstacles = (), ()
    nodes, per_node = config.topology.nodes or 1, config.topology.gpus_per_node or max(surroundings.gpus, 1)
    main_address, network = config.topology.main_address, ()
    try:
        launch = plan_launch(config, surroundings, config.objective.kind)
    except PacktrainError as error:
        problems = error.problems
    else:
        nodes, per_node, obstacles, network = launch.nodes, launch.gpus_per_node, launch.obstacles, launch.network
        main_address = launch.accelerate.get("main_process_ip") if nodes > 1 else None
    memory = estimate(config, nodes * per_node, surroundings.gpu_memory)
    return RunNeeds(
        configured=True,
        nodes=nodes,
        per_node=per_node,
        strategy=config.strategy.name,
        attention=config.model.attention,
        packed=config.packing.mode != "padding",
        dtype=dtype_of(config),
        main_address=main_address,
        environment=config.topology.variables,
        network=network,
        memory=memory,
        disk=_on_disk(config, memory),
        problems=problems,
        obstacles=obstacles,
    )


def _on_disk(config: RunConfig, memory: Memory | str) -> int:
    """Bytes of the trained model and all checkpoints; a stopped run writes one that was not asked for."""
    if isinstance(memory, str):
        return 0
    width = BYTES.get(config.model.dtype, 2)
    final = memory.trained * ADAPTER_BYTES if config.peft.kind == "lora" else memory.parameters * width
    states = 8 * memory.trained  # two numbers in float32 of AdamW, the largest that is common
    kept = 1 if config.trainer.checkpoint_every is None else (config.trainer.keep_checkpoints or 0) + 1
    return final + kept * (final + states)


def dtype_of(config: RunConfig) -> str:
    """What the attention layers compute in, by torch's name."""
    dtype = config.model.dtype
    return "bfloat16" if dtype == "auto" or config.trainer.mixed_precision == "bf16" else dtype
