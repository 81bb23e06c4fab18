"""What is known of one machine, as values: read once, checked as tables, sent to other machines as JSON.

Everything has a default that means "not known", so a machine without a tool, a driver or a network is described as well
as any other. `lacks` says in a line each what was asked and not answered. Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from packtrain.plan.interfaces import Interface, Port


@dataclass(frozen=True, slots=True)
class Conflict:
    """The package `by` needs `requirement` ("torch>=2.10"), and `found` is installed (None: nothing)."""

    by: str
    requirement: str
    found: str | None


@dataclass(frozen=True, slots=True)
class Software:
    """Packages by name (None: not installed), what of them does not fit together, and build tools by name.

    `accelerate` is accelerate's own default config, None where there is none. `commits` are those of the checkouts that
    trl and packtrain run from, by package; who is installed as usual is not among them.
    """

    platform: str = ""
    python: str = ""
    packages: Mapping[str, str | None] = field(default_factory=dict)
    conflicts: tuple[Conflict, ...] = ()
    tools: Mapping[str, str | None] = field(default_factory=dict)
    accelerate: Mapping[str, Any] | None = None
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

    `kernels` are the flash kernels that were tried and what each lacks ("" for the one that is right).
    """

    error: str = ""
    version: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    nccl: str | None = None
    architectures: tuple[str, ...] = ()
    available: bool | None = None
    kind: str = "cpu"
    devices: tuple[Device, ...] = ()
    warning: str = ""
    kernels: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver sees it; None where it does not say. `throttled` are reasons, `uses` are "PID NAME" of others.

    `clock` is the highest that it may have, in MHz, `power` the most that it may take, in watts.
    """

    index: int
    name: str = "?"
    uuid: str = ""
    bus: str = ""
    memory: int | None = None
    memory_used: int | None = None
    utilization: int | None = None
    temperature: int | None = None
    ecc: bool | None = None
    uncorrected: int | None = None
    repair: str = ""
    throttled: tuple[str, ...] = ()
    width: int | None = None
    widest: int | None = None
    mig: bool = False
    compute_mode: str = "Default"
    fabric: str = ""
    uses: tuple[str, ...] = ()
    nvlinks: int | None = None
    clock: int | None = None
    power: int | None = None


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """A line of the kernel's log: an Xid of a GPU (`code`), or a process that the OOM killer ended (`code` 0).

    `age_s` is seconds ago, None where the log has no times.
    """

    code: int
    where: str
    text: str
    age_s: float | None = None


@dataclass(frozen=True, slots=True)
class Gpus:
    """The machine's GPUs; `present` is whether it has NVIDIA hardware or its driver at all.

    `topology` is nvidia-smi's matrix of links, `error` why nvidia-smi said nothing.
    """

    present: bool = False
    error: str = ""
    driver: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    topology: str = ""
    events: tuple[KernelEvent, ...] = ()
    events_lack: str = ""


@dataclass(frozen=True, slots=True)
class Name:
    """A host name and what it resolves to; `lack` is why it does not."""

    name: str = ""
    addresses: tuple[str, ...] = ()
    lack: str = ""


@dataclass(frozen=True, slots=True)
class Network:
    """`states`: of each port ("mlx5_0:1"); `verbs`: the device files that programs reach RDMA devices by; `environment`:
    NCCL's and gloo's variables; `main`: the first machine of the run, where there is another one; `silence`: what the
    name server does not answer, in words."""

    host: Name = Name()
    main: Name | None = None
    interfaces: tuple[Interface, ...] = ()
    ports: tuple[Port, ...] = ()
    states: Mapping[str, str] = field(default_factory=dict)
    verbs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    silence: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a process may take; None for no limit or not known (`memlock` and `nofile` have -1 for no limit)."""

    memlock: int | None = None
    nofile: int | None = None
    shm: int | None = None
    shm_free: int | None = None
    memory: int | None = None
    memory_free: int | None = None
    memory_limit: int | None = None
    memory_in_use: int | None = None
    cpus: int = 1
    cpu_limit: float | None = None


@dataclass(frozen=True, slots=True)
class Folder:
    """Where a run writes; what is said of one that is not there yet is its parent's.

    `setting` is the config key, or variable, that names it, `kind` the type of its file system.
    """

    setting: str
    path: str
    writable: bool | None = None
    free: int | None = None
    total: int | None = None
    inodes_free: int | None = None
    kind: str = ""
    lack: str = ""


@dataclass(frozen=True, slots=True)
class Clock:
    """Whether the clock is kept by NTP (None: not known), by how many seconds it is off, and who says so."""

    synchronised: bool | None = None
    offset_s: float | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """Everything of the machine that is neither GPU nor network. `around` is what it runs in (Slurm job, container)."""

    limits: Limits = Limits()
    folders: tuple[Folder, ...] = ()
    clock: Clock = Clock()
    around: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    load: float | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine."""

    software: Software = Software()
    torch: Torch = Torch()
    gpus: Gpus = Gpus()
    network: Network = Network()
    host: Host = Host()
    lacks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)
