"""What is known of one machine, what a run needs of it, and the form of a check that compares the two: plain values.

Every fact has a default that means "not known". Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from packtrain import wording
from packtrain.errors import Problem
from packtrain.plan.memory import Memory
from packtrain.plan.network_settings import HostNetwork, NetworkSetting

Status = Literal["ok", "warn", "fail"]
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Software:
    """Versions of packages (None: not installed), and `conflicts`: (required, installed), as in ("torch>=2.10", "none")."""

    platform: str = ""
    python: str = ""
    packages: Mapping[str, str | None] = field(default_factory=dict)
    conflicts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Torch:
    """torch's answers; `error` is why it could not be asked, `warning` what it printed while it searched for GPUs."""

    error: str = ""
    version: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    available: bool | None = None
    kind: str = "cpu"
    devices: tuple[str, ...] = ()  # names of accelerators
    capability: tuple[int, ...] = ()  # of the first GPU, (9, 0) for Hopper
    warning: str = ""
    kernels: Mapping[str, str] | None = None  # flash kernels that were tried, and what each lacks ("": it is right)
    accelerate: Mapping[str, Any] | None = None  # accelerate's default config


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
    """The machine's GPUs; `present`: it has NVIDIA's driver at all; `error`: why that does not answer."""

    present: bool = False
    error: str = ""
    driver: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that a run writes to, by the key or variable that names it; if it does not exist, the facts are its parent's."""

    setting: str
    path: str
    writable: bool | None = None
    free: int | None = None
    total: int | None = None
    kind: str = ""
    lack: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """The machine beside GPUs and network; `memory` is what its cgroup allows; -1 is no limit of `nofile`."""

    nofile: int | None = None
    shm: int | None = None
    memory: int | None = None
    memory_free: int | None = None
    cpus: int = 1
    folders: tuple[Folder, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    uncompiled: str = ""  # what Triton lacks to compile its kernels


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine; `silence` is the message of a silent name server, `lacks` a line for each question without an answer."""

    software: Software = Software()
    torch: Torch = Torch()
    gpus: Gpus = Gpus()
    network: HostNetwork = field(default_factory=HostNetwork)
    silence: str = ""
    host: Host = Host()
    lacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunNeeds:
    """A run as this machine sees it: `per_node` of its processes on each of `nodes` machines; `configured`: one was named."""

    configured: bool = False
    nodes: int = 1
    per_node: int = 1
    strategy: str = "ddp"
    attention: str = "auto"
    packed: bool = True
    dtype: str = "bfloat16"
    environment: Mapping[str, str] = field(default_factory=dict)
    network: tuple[NetworkSetting, ...] = ()  # for NCCL and gloo
    memory: Memory | str = "no config"  # the estimate, or why there is none
    disk: int = 0  # of all that the run keeps; 0: not known
    problems: tuple[Problem, ...] = ()  # why it cannot start here
    obstacles: tuple[Problem, ...] = ()  # why it cannot be started in this way

    @property
    def between(self) -> Status:
        """The status of a problem between machines: it fails a run on several, and is a warning for any other."""
        return "fail" if self.nodes > 1 else "warn"

    def variables(self, facts: Facts) -> dict[str, str]:
        """The environment variables that change how training runs, as its processes will have them."""
        return {**facts.host.environment, **self.environment}


@dataclass(frozen=True, slots=True)
class Check:
    """`found` in words; `fix` is a command or a config key, dropped where all is well."""

    name: str
    status: Status
    found: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.status == "ok":
            object.__setattr__(self, "fix", "")


def size(number: int | None) -> str:
    """Bytes in words."""
    return "not known" if number is None else wording.size(number)
