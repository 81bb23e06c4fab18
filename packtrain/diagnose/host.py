"""The machine beside its GPUs: packages, limits, memory, cores, folders and network, and checks of them.

`root` is the file system to read from; tests pass one of their own.
"""

from __future__ import annotations

import os
import platform
import resource
import stat
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from packtrain.diagnose.facts import GIB, MIB, Check, Facts, Folder, Host, RunNeeds, Software, Torch, size
from packtrain.plan.launcher_settings import STAGES
from packtrain.plan.memory import Memory
from packtrain.plan.network_settings import FIX, SOCKETS, kernel_text, matching
from packtrain.plan.surroundings import INSTALL, lack_of_compiler
from packtrain.run_folder import installed_version
from packtrain.wording import counted

PACKAGES = (
    *("packtrain", "torch", "transformers", "trl", "accelerate", "datasets", "huggingface_hub", "peft"),
    *("tokenizers", "deepspeed", "bitsandbytes", "liger-kernel", "vllm", "flash-attn", "flash-attn-3"),
    *("flash-attn-4", "kernels", "triton", "torchao", "safetensors", "numpy", "pyarrow", "hydra-core"),
    *("omegaconf", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
_TRL_NAMES = {
    "Datasets": "datasets",
    "HF Hub": "huggingface_hub",
    "bitsandbytes": "bitsandbytes",
    "DeepSpeed": "deepspeed",
    "Liger-Kernel": "liger-kernel",
    "PEFT": "peft",
    "vLLM": "vllm",
}
_LOCAL_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "squashfs", "apfs")
_FOLDERS = {"trainer.output_dir": "output-folder", "data.cache_dir": "cache-folder", "HF_HOME": "hub-cache"}
_REPORTED = (
    *("ACCELERATE_", "CONDA_PREFIX", "CUBLAS", "CUDA_", "CUDNN_", "DS_", "FI_", "FSDP_", "GLOO_", "HF_", "KMP_", "LD_"),
    *("MASTER_", "MKL_", "NCCL_", "NVIDIA_", "NVTE_", "OMP_", "PACKTRAIN_", "PYTHONPATH", "PYTORCH_", "SLURM_JOB_ID"),
    *("SLURM_JOB_NODELIST", "TMPDIR", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "UCX_", "VIRTUAL_ENV"),
)


def read_software() -> Software:
    """What is installed; nothing is imported."""
    packages = {name: installed_version(name) for name in PACKAGES}
    return Software(platform.platform(), platform.python_version(), packages, tuple(conflicts()))


def conflicts() -> Iterator[tuple[str, str]]:
    """Requirements of packtrain that are not installed in a suitable version, with the installed version."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, metadata.requires("packtrain") or []):
        version = installed_version(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and (version is None or not requirement.specifier.contains(version, prereleases=True)):
            yield f"{requirement.name}{requirement.specifier}", version or "none"


def trl_lines(software: Software, torch: Torch) -> dict[str, Any]:
    """Name → value of the lines of `trl env`, in its order and words."""
    installed = {name: version or "not installed" for name, version in software.packages.items()}
    return {
        "Platform": software.platform,
        "Python version": software.python,
        "TRL version": installed.get("trl"),
        "PyTorch version": installed.get("torch"),
        "accelerator(s)": f"not known ({torch.error})" if torch.error else ", ".join(torch.devices) or "cpu",
        "Transformers version": installed.get("transformers"),
        "Accelerate version": installed.get("accelerate"),
        "Accelerate config": torch.accelerate or ("not found" if torch.version else "not known"),
        **{f"{name} version": installed.get(package) for name, package in _TRL_NAMES.items()},
    }


def reported_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that change how training runs, by name."""
    return {
        name: value
        for name, value in sorted(env.items())
        if name.startswith(_REPORTED) or name.lower() in ("http_proxy", "https_proxy", "no_proxy")
    }


def read_host(root: Path = Path("/")) -> Host:
    """Limits, memory with what the cgroup allows, and cores; without folders, which may take long."""
    memory, shm, limit = psutil.virtual_memory(), root / "dev/shm", _memory_limit(root)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Host(
        nofile=-1 if files == resource.RLIM_INFINITY else files,
        shm=psutil.disk_usage(str(shm)).total if shm.is_dir() else None,
        memory=min(memory.total, limit or memory.total),
        memory_free=min(memory.available, limit or memory.available),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        uncompiled=lack_of_compiler(),
        environment=reported_variables(os.environ),
    )


def _memory_limit(root: Path) -> int | None:
    """The tightest limit of this process' cgroup (version 2) and of those around it."""
    lines = kernel_text(root / "proc/self/cgroup").splitlines()
    group = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    mount = root / "sys/fs/cgroup"
    texts = [kernel_text(mount / folder / "memory.max") for folder in (group, *map(str, Path(group).parents))]
    return min((int(text) for text in texts if text.isdigit()), default=None)


def read_folder(setting: str, path: str) -> Folder:
    """The facts of the folder `path`; blocks as long as its disk does."""
    wanted = Path(path).expanduser().absolute()
    parent = next(folder for folder in (wanted, *wanted.parents) if os.path.lexists(folder))
    if not stat.S_ISDIR(parent.stat().st_mode):
        return Folder(setting, str(wanted), writable=False, lack=f"{parent} is a file")
    try:  # permissions say little of network disks and of root
        tempfile.TemporaryFile(dir=parent).close()
        writable = True
    except OSError:
        writable = False
    mounts = [mount for mount in psutil.disk_partitions(all=True) if parent.resolve().is_relative_to(mount.mountpoint)]
    kind = max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""
    usage = psutil.disk_usage(str(parent))
    return Folder(setting, str(wanted), writable, usage.free, usage.total, kind)


def check_run(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether the run can start here as it is configured."""
    for problem in (*needs.problems, *needs.obstacles):
        what = f"{problem.where}: {problem.what}" if problem.where else problem.what
        yield Check("run", "fail" if problem in needs.problems else "warn", what, problem.fix)
    if not (needs.problems or needs.obstacles) and needs.configured:
        shape = f"{counted(needs.nodes, 'machines')} of {counted(needs.per_node, 'processes')}"
        yield Check("run", "ok", f"{shape}, strategy={needs.strategy}")


def check_packages(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether packtrain's own requirements are met, and DeepSpeed is there where the run asks for it."""
    software, deepspeed = facts.software, facts.software.packages.get("deepspeed")
    words = "; ".join(f"packtrain needs {wanted}, found {version}" for wanted, version in software.conflicts)
    fix = "pip install " + " ".join(f"'{wanted}'" for wanted, _ in software.conflicts)
    yield Check("packages", "fail" if words else "ok", words or "packtrain's requirements are met", fix)
    missing = needs.strategy in STAGES and deepspeed is None
    what = f"strategy={needs.strategy}, and DeepSpeed is not installed" if missing else deepspeed
    fix = "pip install 'packtrain[deepspeed]'"
    yield Check("deepspeed", "fail" if missing else "ok", what or "not installed, and not needed", fix)


def check_limits(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """/dev/shm, through which NCCL and data workers hand on their data, open files and sockets, and cores."""
    host, several = facts.host, needs.per_node > 1 or len(facts.gpus.gpus) > 1
    small = host.shm is not None and host.shm <= (GIB if several else 64 * MIB)
    fix = "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm"
    what = f"{size(host.shm)} in /dev/shm, where the processes of a machine hand on their data"
    yield Check("shared-memory", "warn" if small else "ok", what, fix)
    few = host.nofile is not None and -1 < host.nofile < (4096 if needs.nodes * needs.per_node > 1 else 1024)
    what = "no limit" if host.nofile == -1 else f"{host.nofile or 'not known'} for each process"
    fix = "ulimit -n 65536 (for good: '* - nofile 65536' in /etc/security/limits.conf)"
    yield Check("open-files", "warn" if few else "ok", what, fix)
    what = f"{counted(needs.per_node, 'processes')} on {host.cpus} cores"
    fix = "more cores (Slurm: --cpus-per-task in topology.sbatch), or fewer processes: topology.gpus_per_node"
    yield Check("cores", "warn" if needs.per_node > host.cpus else "ok", what, fix)
    if facts.gpus.gpus:
        what = host.uncompiled or "Triton has what it needs to compile"
        yield Check("compiler", "warn" if host.uncompiled else "ok", what, INSTALL)


def check_memory(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """The memory that the machine and its cgroup leave, against what the run's processes take for certain."""
    host, memory, need = facts.host, needs.memory, 0
    if isinstance(memory, Memory):  # all of it without GPUs, with them what loading and offloading take
        on_cpu = 0 if facts.gpus.gpus else memory.total - (memory.activations or 0)
        need = max(memory.host, on_cpu) * needs.per_node
    free = f"{size(host.memory_free)} free of {size(host.memory)} that the machine or its cgroup allows"
    what = f"the run needs {size(need)} on this machine; {free}" if need else free
    fix = "end other processes, or more memory (Slurm: --mem=0 in topology.sbatch for all of the machine's; docker run --memory)"
    little = host.memory_free is not None and host.memory_free < max(need, 2 * GIB)
    too_little = host.memory is not None and host.memory < need
    yield Check("memory", "fail" if too_little else "warn" if little else "ok", what, fix)


def check_folders(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Where the run writes: without the output folder there is no run."""
    for folder in facts.host.folders:
        name, path = _FOLDERS[folder.setting], folder.path
        output, elsewhere = name == "output-folder", f"{folder.setting} on another disk"
        stops = "fail" if output and needs.configured else "warn"
        needed = max(needs.disk if output else 0, GIB)
        space = f"{path}: {size(folder.free)} free of {size(folder.total)}, {folder.kind or 'of a kind not known'}"
        if folder.lack:
            yield Check(name, stops, f"{path}: {folder.lack}", f"df {path} (does it answer?), or {elsewhere}")
        elif folder.writable is False:
            yield Check(name, stops, f"{path} cannot be written to", f"chmod u+w, or {elsewhere}")
        elif folder.free is not None and folder.free < needed:
            more = f"; model and checkpoints take about {size(needed)}" if needed > GIB else ""
            yield Check(name, "warn", space + more, f"{elsewhere}, or a smaller trainer.keep_checkpoints")
        elif output and needs.nodes > 1 and folder.kind in _LOCAL_DISKS:
            what = f"{path} is on a disk of this machine ({folder.kind}); each of {needs.nodes} would have its own"
            yield Check(name, "warn", what, f"{folder.setting} on a file system that all machines share")
        else:
            yield Check(name, "ok", space)


def check_network(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """What stops runs on several machines or slows them: RDMA ports that are down, interfaces that lead nowhere, a silent name
    server. Each fails where the run is on several machines, and warns where no run was named."""
    interfaces, ports = facts.network.interfaces, facts.network.ports
    ways = [card for card in interfaces if card.default_route] or [card for card in interfaces if card.usable]
    outward = ways[0].name if ways else "INTERFACE"
    words = "; ".join(
        f"{port.device}:{port.number} ({port.layer}, {'ACTIVE' if port.active else 'DOWN'}, {port.rate or '?'} Gb/s)"
        for port in ports
    )
    if not ports or needs.variables(facts).get("NCCL_IB_DISABLE") == "1":
        what = f"{words or 'no RDMA device'}: machines would talk by TCP over {outward}"
        yield Check("infiniband", "ok", what)
    elif not any(port.active for port in ports):
        fix = "check cable, switch and subnet manager (ibstat); or topology.environment.NCCL_IB_DISABLE=1 to use TCP"
        yield Check("infiniband", needs.between, f"no port is up: {words}", fix)
    else:
        down = any(not port.active and port.layer == "InfiniBand" for port in ports)
        yield Check("infiniband", "warn" if down else "ok", words, "check those that are DOWN (ibstat)")
    well = True
    for variable in SOCKETS if interfaces else ():
        wanted = needs.variables(facts).get(variable, "")
        names = matching(wanted, [card.name for card in interfaces], exact=variable.startswith("GLOO"))
        if wanted and not any(card.usable for card in interfaces if card.name in names):
            what = f"{variable}={wanted}, which reaches no other machine: it is missing, down or a loopback"
            fix = f"topology.environment.{variable}={outward}, or unset {variable}"
            yield Check("network-interface", needs.between, what, fix)
            well = False
    if well:
        chosen = [f"{one.name}={one.value} {one.reason}" for one in needs.network if one.value and one.name in SOCKETS]
        yield Check("network-interface", "ok", "; ".join(chosen) or f"machines would talk over {outward}")
    if facts.silence:
        yield Check("name-server", "warn", f"{facts.silence}, and torch asks it at each connection, for 10 s", FIX)


CHECKS = (check_run, check_limits, check_memory, check_folders, check_packages, check_network)
