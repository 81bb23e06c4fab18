"""Facts about a machine and a run on it, and checks of these facts.

Every fact has a default that means "not known". Sizes are in bytes. nvidia-smi asks the driver; `python -m packtrain.diagnose.machine DTYPE`
asks torch in a separate process, because importing torch may crash and the first CUDA call may hang. Users need a report most in those
cases, so the process prints each fact at once, as a line of JSON.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module, metadata
from itertools import takewhile
from pathlib import Path
from typing import Literal

import psutil
from huggingface_hub import constants

from packtrain.attention.spec import BACKENDS, Backend, tried_by_auto
from packtrain.config.schema import RunConfig
from packtrain.errors import Json, Problem
from packtrain.monitor.heartbeat import free_memory
from packtrain.plan.known_model import plan_precision
from packtrain.plan.network_settings import FIX, LOOPBACK, HostNetwork, NetworkSetting, silence_for
from packtrain.plan.surroundings import INSTALL, lack_of_compiler
from packtrain.run_folder import DECISIVE_PACKAGES, installed_version
from packtrain.strategies.spec import packages_of_strategies
from packtrain.wording import counted, first_line, size, whole

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
    accelerators: Sequence[str] = ()  # names as `trl env` prints them, other makers' devices included
    accelerate: Json | None = None  # written by `accelerate config`
    warning: str = ""
    kernels: Mapping[str, Mapping[str, str]] | None = None  # backend → tried kernel → its fault ("": it works)


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
    """A folder that a run writes to. `setting`: its config key. `lack`: why it, or its nearest parent, is not writable."""

    setting: str
    path: str
    free: int | None = None
    total: int | None = None
    lack: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """The machine without its GPUs and network. `packages`: versions (None: not installed). `conflicts`: (required, installed),
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
    silence: str = ""  # message if a name server does not answer


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

    `problems`: why it cannot start on this machine. `obstacles`: why it cannot start with this plan.
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
    """Run `python -m module arguments…`. Return its stdout, and why it failed ("" if it did not). After `limit_s` seconds kill it
    with all its children, and return its output so far."""
    command = [sys.executable, "-m", module, *arguments]
    # files, not pipes: a grandchild that inherits one blocks nothing
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        run = partial(subprocess.Popen, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True)
        process = run(command, env={**os.environ, **(env or {})})
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


PACKAGES = (
    *(*DECISIVE_PACKAGES, "huggingface_hub", "bitsandbytes", "vllm", "flash-attn-3", "triton", "torchao"),
    *("safetensors", "numpy", "pyarrow", "hydra-core", "omegaconf"),
    *("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
_OF_HYBRIDS = ("flash-linear-attention", "causal-conv1d", "mamba-ssm")
_FOLDERS = {"trainer.output_dir": "output-folder", "data.cache_dir": "cache-folder", "HF_HOME": "hub-cache"}
_REPORTED = (
    *("ACCELERATE_", "CONDA_PREFIX", "CUBLAS", "CUDA_", "CUDNN_", "DS_", "FI_", "FSDP_", "GLOO_", "HF_", "KMP_", "LD_"),
    *("MASTER_", "MKL_", "NCCL_", "NVIDIA_", "NVTE_", "OMP_", "PACKTRAIN_", "PYTHONPATH", "PYTORCH_", "SLURM_JOB_ID"),
    *("SLURM_JOB_NODELIST", "TMPDIR", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "UCX_", "VIRTUAL_ENV"),
)


def read_host() -> Host:
    """Read packages, limits, memory and cores. Imports nothing; takes two seconds if a name server is silent."""
    shm, files = Path("/dev/shm"), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Host(
        platform=platform.platform(),
        python=platform.python_version(),
        packages={name: installed_version(name) for name in (*PACKAGES, *packages_of_strategies())},
        conflicts=tuple(conflicts()),
        nofile=-1 if files == resource.RLIM_INFINITY else files,
        shm=psutil.disk_usage(str(shm)).total if shm.is_dir() else None,
        memory=psutil.virtual_memory().total,
        memory_free=free_memory(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        environment=reported_variables(os.environ),
        uncompiled=lack_of_compiler(),
        silence=silence_for(LOOPBACK) or silence_for(socket.gethostname()),
    )


def conflicts() -> Iterator[tuple[str, str]]:
    """Yield each unmet requirement of packtrain, with the installed version."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, metadata.requires("packtrain") or []):
        version = installed_version(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and (version is None or not requirement.specifier.contains(version, prereleases=True)):
            yield f"{requirement.name}{requirement.specifier}", version or "none"


def reported_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that change how training runs, by name."""
    proxies = ("http_proxy", "https_proxy", "no_proxy")
    names = sorted(name for name in env if name.startswith(_REPORTED) or name.lower() in proxies)
    return {name: env[name] for name in names}


def read_folder(setting: str, path: str) -> Folder:
    """Read the facts of the folder `path`. Blocks as long as its disk does."""
    wanted = Path(path).expanduser().absolute()
    parent = next(folder for folder in (wanted, *wanted.parents) if os.path.lexists(folder))
    usage, lack = psutil.disk_usage(str(parent)), ""
    try:  # permissions say little about network disks and root
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        lack = f"cannot be written to: {error.strerror}"
    return Folder(setting, str(wanted), usage.free, usage.total, lack)


def check_run(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check that the run can start here with its config."""
    for problem in (*run.problems, *run.obstacles):
        what = f"{problem.where}: {problem.what}" if problem.where else problem.what
        yield Check("run", "fail" if problem in run.problems else "warn", what, problem.fix)
    if not (run.problems or run.obstacles) and run.configured:
        shape = f"{counted(run.nodes, 'machines')} of {counted(run.per_node, 'processes')}"
        yield Check("run", "ok", f"{shape}, strategy={run.config.strategy.name}")


def check_packages(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check that packtrain's requirements are met, and the package of the strategy is there."""
    host, strategy = facts.host, run.config.strategy.spec
    words = "; ".join(f"packtrain needs {wanted}, found {version}" for wanted, version in host.conflicts)
    fix = "pip install " + " ".join(f"'{wanted}'" for wanted, _ in host.conflicts)
    yield Check("packages", "fail" if words else "ok", words or "packtrain's requirements are met", fix)
    for package in packages_of_strategies():
        version, needed = host.packages.get(package), strategy.package == package
        what = version or f"not installed, {f'but needed by strategy={strategy.name}' if needed else 'and not needed'}"
        yield Check(package, "ok" if version or not needed else "fail", what, f"pip install 'packtrain[{package}]'")


def check_limits(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check /dev/shm, open files, memory and a compiler. NCCL and data workers pass their data through /dev/shm; sockets are files, too."""
    host = facts.host
    fix = "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm"
    what = f"{size(host.shm)} in /dev/shm, where the processes of a machine pass their data"
    yield Check("shared-memory", "warn" if host.shm is not None and host.shm < GIB else "ok", what, fix)
    few = host.nofile is not None and -1 < host.nofile < (4096 if run.nodes * run.per_node > 1 else 1024)
    what = "no limit" if host.nofile == -1 else f"{host.nofile or 'not known'} for each process"
    fix = "ulimit -n 65536 (for good: '* - nofile 65536' in /etc/security/limits.conf)"
    yield Check("open-files", "warn" if few else "ok", what, fix)
    what = f"{size(host.memory_free)} free in the machine or its cgroup, of {size(host.memory)}"
    fix = "end other processes, or ask for more memory (Slurm: --mem=0 in topology.sbatch for all of it; docker run --memory)"
    little = host.memory_free is not None and host.memory_free < 2 * GIB
    yield Check("memory", "warn" if little else "ok", what, fix)
    if facts.driver.gpus:
        what = host.uncompiled or "Triton can compile its kernels"
        yield Check("compiler", "warn" if host.uncompiled else "ok", what, INSTALL)


def check_folders(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check the folders that the run writes to. Without the output folder there is no run."""
    for folder in facts.folders:
        name, elsewhere = _FOLDERS[folder.setting], f"{folder.setting} on another disk"
        if folder.lack:
            status = "fail" if name == "output-folder" and run.configured else "warn"
            fix = f"df {folder.path} (does it answer?), chmod u+w, or {elsewhere}"
            yield Check(name, status, f"{folder.path}: {folder.lack}", fix)
        else:
            little = folder.free is not None and folder.free < GIB
            space = f"{folder.path}: {size(folder.free)} free of {size(folder.total)}"
            yield Check(name, "warn" if little else "ok", space, elsewhere)


def check_network(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check the network for runs on several machines: RDMA ports, a silent name server."""
    ports, silence = facts.network.ports, facts.host.silence
    words = "; ".join(
        f"{port.device}:{port.number} ({port.layer}, {'ACTIVE' if port.active else 'DOWN'}, {port.rate or '?'} Gb/s)"
        for port in ports
    )
    status = "warn" if any(not port.active and port.layer == "InfiniBand" for port in ports) else "ok"
    if not ports or run.variables(facts).get("NCCL_IB_DISABLE") == "1":
        words, status = f"{words or 'no RDMA device'}: machines would talk by TCP", "ok"
    elif run.nodes > 1 and not any(port.active for port in ports):
        status = "fail"
    fix = "check cable, switch and subnet manager (ibstat); or topology.environment.NCCL_IB_DISABLE=1 to use TCP"
    yield Check("infiniband", status, words, fix)
    if silence:
        yield Check("name-server", "warn", f"{silence}, and torch waits 10 s for it at each connection", FIX)


VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY = "index,name,uuid,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,driver_version"
_BUSY_MEMORY = GIB


def ask_driver(limit_s: float) -> Driver:
    """Ask the driver for the machine's GPUs. If it does not answer, return the `error`."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return Driver("there is no nvidia-smi" if Path("/proc/driver/nvidia").exists() else "")
    query = [command, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Driver(first_line(error))
    if done.returncode or not done.stdout.strip():
        return Driver((done.stdout or done.stderr).strip().partition("\n")[0] or "nvidia-smi shows no GPU")
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line]
    return Driver(version=rows[0][-1], gpus=tuple(_gpu(row) for row in rows))


def _gpu(row: list[str]) -> Gpu:
    index, name, uuid, memory, used, errors, _ = row
    total, in_use = ((number := whole(text)) and number * MIB for text in (memory, used))
    trouble = f"{errors} uncorrected memory errors since the driver was loaded" if whole(errors) else ""
    return Gpu(whole(index) or 0, name, uuid, total, in_use, trouble)


def ask_torch(limit_s: float, dtype: str, env: Mapping[str, str]) -> Torch:
    """Ask torch within the time limit, with a run's variables `env`. This also tries its flash kernels on a typical layer in `dtype`."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
    return read_torch(*ask_python(__name__, dtype, limit_s=limit_s, env={**quiet, **env}))


def read_torch(output: str, error: str = "") -> Torch:
    """Read the facts in the output of torch's process; `error` is why it is incomplete."""
    facts: Json = {}
    for line in output.splitlines():
        with suppress(ValueError):  # the last line may be incomplete
            facts |= json.loads(line)
    return Torch(**{"error": error, **facts})


def _print_torch(dtype: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # all other output goes to stderr

    def report(**facts: object) -> None:
        print(json.dumps(facts, default=str), file=out, flush=True)

    try:
        import torch

        report(version=torch.__version__, cuda=torch.version.cuda)
    except BaseException as error:  # a broken library may even exit
        report(error=f"torch cannot be imported: {type(error).__name__}: {first_line(error)}")
        return
    with suppress(Exception):  # builds without NCCL fail in several ways
        from torch.cuda import nccl

        report(nccl=".".join(map(str, nccl.version())))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        available = torch.cuda.is_available()
    remarks = dict.fromkeys(str(item.message).partition("\n")[0] for item in caught if "CUDA" in str(item.message))
    report(available=available, devices=names, warning="; ".join(remarks))
    report(accelerators=accelerators(names), accelerate=accelerate_config())
    if available:
        report(kernels=_try_kernels(dtype))


def accelerators(gpus: list[str]) -> list[str]:
    """Return the names of torch's devices, in the order and words of `trl env`."""
    import torch

    if gpus or torch.backends.mps.is_available():
        return gpus or ["MPS"]
    return [torch.xpu.get_device_name(index) for index in range(torch.xpu.device_count())]


def accelerate_config() -> Json | None:
    """Return the config that `accelerate config` wrote, as `trl env` prints it.

    accelerate is imported only if there is such a config.
    """
    if not os.path.isfile(os.path.join(constants.HF_HOME, "accelerate", "default_config.yaml")):
        return None
    from accelerate.commands.config import load_config_from_file

    try:
        return load_config_from_file(None).to_dict()
    except Exception as error:
        return {"error": first_line(error)}


def _try_kernels(dtype: str) -> dict[str, dict[str, str]]:
    """Try the kernels of each backend that needs some. Return the fault of each ("" if it works)."""
    import torch

    tried: dict[str, dict[str, str]] = {}
    for backend in BACKENDS.all().values():
        if backend.kernels:
            try:
                tried[backend.name] = import_module(backend.kernels).try_kernels(getattr(torch, dtype))
            except Exception as error:  # the GPU itself may be broken, or full
                tried[backend.name] = {"all": first_line(error)}
    return tried


def check_driver(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check that the driver answers."""
    driver, name = facts.driver, "gpu-driver"
    if driver.gpus:
        yield Check(name, "ok", driver.version or "version not known")
    elif not driver.error:
        yield Check(name, "ok", "no NVIDIA driver on this machine: runs are on the CPU")
    else:
        fix = "does nvidia-smi answer? ask Slurm for GPUs (topology.gpus_per_node), start the container with --gpus all, or reboot"
        yield Check(name, "fail", f"the driver shows no GPU: {driver.error}", fix)


def check_torch(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check that torch works, and can use the GPUs of the machine."""
    torch, gpus = facts.torch, facts.driver.gpus
    built = f"torch {torch.version}" + (f" for CUDA {torch.cuda}" if torch.cuda else "")
    if torch.available is None and (error := torch.error or "torch was not asked"):
        fix = "time python -c 'import torch; print(torch.cuda.is_available())' (a slow disk, a broken driver?)"
        fix = fix if torch.version else f"pip install --force-reinstall torch, or {fix}"
        late = "no answer" in error  # it hangs, or the machine is busy
        yield Check("torch", "warn" if late else "fail", f"{built}: {error}" if torch.version else error, fix)
    elif select_gpus(facts, run) and torch.available is False:
        why = torch.warning or ("it does not say why" if torch.cuda else "it is a build without CUDA")
        fix = "reinstall torch for a CUDA version that the driver supports (nvidia-smi); or check the driver and its fabric manager "
        fix += "(nvidia-smi -q); in a container start it with --gpus all"
        yield Check("torch", "fail", f"{built} finds no GPU where the driver shows {len(gpus)}: {why}", fix)
    else:
        yield Check("torch", "ok", f"{built} ({torch.warning})" if torch.warning else built)


def check_gpus(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check GPUs against the run's processes: number, health, memory, and memory held by other programs."""
    gpus = select_gpus(facts, run)
    if not facts.driver.gpus:
        return
    named = ", ".join(f"{count} × {kind}" for kind, count in Counter(gpu.name for gpu in gpus).items())
    if not gpus:
        yield Check("gpus", "warn", f"{VISIBLE} hides all {len(facts.driver.gpus)} GPUs", f"unset {VISIBLE}")
    elif run.configured and run.per_node > len(gpus):
        what = f"{run.per_node} processes on this machine, and {len(gpus)} visible GPUs ({named})"
        yield Check("gpus", "fail", what, f"topology.gpus_per_node={len(gpus)}, or check {VISIBLE} and nvidia-smi")
    else:
        yield Check("gpus", "ok", named)
    sick = "; ".join(f"GPU {gpu.index} ({gpu.name}): {gpu.trouble}" for gpu in gpus if gpu.trouble)
    fix = f"nvidia-smi --gpu-reset -i N (as root, GPU idle), or exclude it by {VISIBLE}"
    yield Check("gpu-health", "fail" if sick else "ok", sick or "no memory errors", fix)
    used = [gpu for gpu in gpus if (gpu.memory_used or 0) > _BUSY_MEMORY]
    words = "; ".join(f"GPU {gpu.index} is in use: {size(gpu.memory_used)} of its memory" for gpu in used)
    fix = f"end those processes (nvidia-smi), or choose others by {VISIBLE}"
    yield Check("gpu-use", "warn" if used else "ok", words or "all idle", fix)


def select_gpus(facts: Facts, run: PlannedRun) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES shows the run; all if it is not set. CUDA ignores the first wrong name and all after it."""
    wanted, gpus = run.variables(facts).get(VISIBLE), facts.driver.gpus
    if wanted is None or wanted.strip().startswith(
        "MIG"
    ):  # the driver's list does not say which GPU such a part belongs to
        return gpus
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    found = [next((gpu for gpu in gpus if name == str(gpu.index) or gpu.uuid.startswith(name)), None) for name in names]
    shown = takewhile(lambda gpu: gpu is not None, found)
    return tuple(dict.fromkeys(gpu for gpu in shown if gpu is not None))


def check_attention(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check the backend that model.attention selects for most models. The loaded model decides."""
    asked, mode = run.config.model.attention, run.config.packing.mode
    backend = run.config.model.backend or tried_by_auto()[0]
    kernel, why = _kernel(backend, facts, run)
    if mode == "padding" or not backend.kernels:
        yield Check("attention", "ok", f"no flash kernel is needed: packing.mode={mode}, model.attention={asked}")
    elif kernel:
        yield Check("attention", "ok", f"{backend.name}: {kernel}{f' ({why})' if why else ''}")
    elif asked == backend.name:
        yield Check("attention", "fail", f"model.attention={asked} is not available: {why}", "model.attention=auto")
    else:
        words = f"no {backend.name} kernel works for packed rows, so attention is slower: {why}"
        yield Check("attention", "ok" if facts.torch.kernels is None else "warn", words, backend.get_kernels)


def check_hybrids(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Name the kernels of hybrid models that a GPU could use. Other models need none."""
    versions = {name: facts.host.packages.get(name) for name in _OF_HYBRIDS}
    found = [f"{name} {version}" for name, version in versions.items() if version]
    lacking = ", ".join(name for name, version in versions.items() if not version)
    advice = "pip install --no-build-isolation 'packtrain[hybrid]', docs/modes.md"
    found += [f"not installed, and used by hybrid models only: {lacking} ({advice})"] * bool(lacking)
    if facts.driver.gpus:
        yield Check("hybrid-kernels", "ok", "; ".join(found))


def _kernel(backend: Backend, facts: Facts, run: PlannedRun) -> tuple[str | None, str]:
    """Return the backend's kernel for the run's layers, and why better ones do not work.

    If no kernel works, return None and the reason. The kernel is "" if the backend needs none.
    """
    torch = facts.torch
    if backend.devices == ("cuda",) and torch.available is False:
        return None, "the device is not a CUDA GPU"
    if backend.formats and run.dtype not in backend.formats:
        formats = " and ".join(backend.formats)
        return None, f"the layers compute in {run.dtype}, the kernels in {formats} (trainer.mixed_precision=bf16)"
    if not backend.kernels:
        return "", "it needs no kernel"
    if torch.kernels is None:
        return None, f"the kernels were not tried ({torch.error or 'no time'})"
    tried = torch.kernels.get(backend.name, {})
    lacking = "; ".join(f"{name}: {lack}" for name, lack in tried.items() if lack)
    return next((name for name, lack in tried.items() if not lack), None), lacking


def attention_json(facts: Facts, run: PlannedRun) -> dict[str, dict[str, object]]:
    """Return for each backend whether it can serve packed rows here, and why."""
    found: dict[str, dict[str, object]] = {}
    for name, backend in BACKENDS.all().items():
        kernel, why = _kernel(backend, facts, run)
        found[name] = {"available": kernel is not None, "why": kernel or why}
        if backend.kernels:
            found[name]["kernels"] = dict((facts.torch.kernels or {}).get(name, {}))
    return found


CHECKS = (
    *(check_run, check_limits, check_folders, check_packages, check_network),
    *(check_torch, check_driver, check_gpus, check_attention, check_hybrids),
)

if __name__ == "__main__":
    _print_torch(sys.argv[1])
