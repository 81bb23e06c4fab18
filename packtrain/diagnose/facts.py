"""Facts of a machine and a run on it, the form of checks, time-limited questions.

Every fact has a default that means "not known". Sizes are in bytes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from packtrain.config.schema import RunConfig
from packtrain.errors import Problem
from packtrain.plan.known_model import plan_precision
from packtrain.plan.network_settings import HostNetwork, NetworkSetting

Status = Literal["ok", "warn", "fail"]
MIB, GIB = 2**20, 2**30
Load = Callable[[], RunConfig | None]  # returns the config of the named run, if there is one


@dataclass(frozen=True, slots=True)
class Torch:
    """torch's answers. `error`: why it could not be asked; `warning`: its output while it searched for GPUs."""

    error: str = ""
    version: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    available: bool | None = None
    devices: Sequence[str] = ()  # names of GPUs
    accelerators: Sequence[str] = ()  # names as `trl env` prints them, also of other makers' devices
    accelerate: Mapping[str, Any] | None = None  # written by `accelerate config`
    warning: str = ""
    kernels: Mapping[str, Mapping[str, str]] | None = None  # backend → kernels that were tried → lack ("": it is right)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, seen by the driver. `trouble` is in words."""

    index: int
    name: str = "?"
    uuid: str = ""
    memory: int | None = None
    memory_used: int | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver and its GPUs. `error`: why an installed driver shows none."""

    error: str = ""
    version: str | None = None
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that a run writes to, or its parent, with its key. `lack`: why it cannot be written to."""

    setting: str
    path: str
    free: int | None = None
    total: int | None = None
    lack: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """The machine beside GPUs and network. `packages`: versions (None: not installed). `conflicts`: (required, installed),
    such as ("torch>=2.10", "none"). `memory_free`: limited by the cgroup. A `nofile` of -1 is no limit."""

    platform: str = ""
    python: str = ""
    packages: Mapping[str, str | None] = field(default_factory=dict)
    conflicts: tuple[tuple[str, str], ...] = ()
    nofile: int | None = None
    shm: int | None = None
    memory: int | None = None
    memory_free: int | None = None
    cpus: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    uncompiled: str = ""  # reason if Triton cannot compile its kernels
    silence: str = ""  # the message of a silent name server


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts of one machine."""

    host: Host = field(default_factory=Host)
    torch: Torch = Torch()
    driver: Driver = Driver()
    network: HostNetwork = field(default_factory=HostNetwork)
    folders: tuple[Folder, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run, seen by this machine: `per_node` processes on each of `nodes` machines. `configured`: a config was named.

    `problems`: why it cannot start here. `obstacles`: why it cannot start in this way.
    """

    configured: bool = False
    config: RunConfig = field(default_factory=RunConfig)
    nodes: int = 1
    per_node: int = 1
    network: tuple[NetworkSetting, ...] = ()
    problems: tuple[Problem, ...] = ()
    obstacles: tuple[Problem, ...] = ()

    @property
    def dtype(self) -> str:
        """Compute dtype of the attention layers on a GPU, by torch's name."""
        dtype = self.config.model.dtype
        return "bfloat16" if dtype == "auto" or plan_precision(self.config, dtype, gpu=True)[0] != "no" else dtype

    def variables(self, facts: Facts) -> dict[str, str]:
        """Return the environment variables of the run's processes that change how training runs."""
        return {**facts.host.environment, **self.config.topology.variables}


@dataclass(frozen=True, slots=True)
class Check:
    """Result of a check. `found` is in words; `fix` is a command or a config key (`check_all` drops it if all is well)."""

    name: str
    status: Status
    found: str
    fix: str = ""


def ask_python(module: str, *arguments: str, limit_s: float, env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Run `python -m module arguments…`. Return its stdout, and why it failed ("" if it did not). After `limit_s` seconds it is killed with
    all its children, and its output so far counts."""
    command = [sys.executable, "-m", module, *arguments]
    # files, not pipes: a grandchild that inherits one blocks nothing
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        files: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
        process = subprocess.Popen(command, **files, env={**os.environ, **(env or {})}, start_new_session=True)
        why = ""
        try:
            if code := process.wait(limit_s):
                why = f"ends with exit code {code}"
        except subprocess.TimeoutExpired:
            why = f"no answer within {limit_s:.3g} s"
        finally:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a process that hangs in the kernel cannot be killed
                process.wait(0.2)
        for file in (output, errors):
            file.seek(0)
        said, last = (file.read().decode(errors="replace").strip() for file in (output, errors))
        return said, f"{why}: {last.splitlines()[-1]}" if why and last else why
