"""The machine beside GPUs and network: limits, memory, cores and folders, and checks of them.

`root` is the file system to read from; tests hand in one of their own.
"""

from __future__ import annotations

import os
import re
import resource
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from packtrain.diagnose.facts import GIB, MIB, Check, Facts, Folder, Host, RunNeeds, size
from packtrain.plan.interfaces import kernel_text
from packtrain.plan.memory import Memory

_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "squashfs", "apfs")
_FOLDERS = {"trainer.output_dir": "output-folder", "data.cache_dir": "cache-folder"}
_TOLD = (
    *("ACCELERATE_", "CUBLAS", "CUDA_", "CUDNN_", "DS_", "FI_", "FSDP_", "GLOO_", "HF_", "HSA_", "KMP_"),
    *("MASTER_", "MKL_", "NCCL_", "NVIDIA_", "NVTE_", "OMP_", "PACKTRAIN_", "PYTORCH_", "ROCR_"),
    *("TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "UCX_"),
)
_ALSO_TOLD = (
    *("CONDA_PREFIX", "HTTP_PROXY", "HTTPS_PROXY", "LD_LIBRARY_PATH", "LD_PRELOAD", "NO_PROXY"),
    *("PYTHONHASHSEED", "PYTHONHOME", "PYTHONNOUSERSITE", "PYTHONPATH", "SLURM_JOB_ID", "SLURM_JOB_NODELIST"),
    *("TMPDIR", "VIRTUAL_ENV", "http_proxy", "https_proxy", "no_proxy"),
)


def read_host(root: Path = Path("/")) -> Host:
    """Limits, memory and cores with what the cgroup allows; without folders, which may take long."""
    memory = psutil.virtual_memory()
    limits = [(int(text), folder) for text, folder in _cgroup("memory.max", root) if text.isdigit()]
    allowed, free = memory.total, memory.available
    if limits and min(limits)[0] < memory.total:
        allowed, folder = min(limits)
        cached = re.search(r"^inactive_file (\d+)$", kernel_text(folder / "memory.stat"), re.MULTILINE)
        used = int(kernel_text(folder / "memory.current") or 0) - int(cached[1] if cached else 0)
        free = min(free, allowed - used)
    cpus: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    quotas = [text.split() for text, _ in _cgroup("cpu.max", root)]
    return Host(
        nofile=-1 if files == resource.RLIM_INFINITY else files,
        shm=_room(root / "dev/shm")[0],
        memory=allowed,
        memory_free=free,
        cpus=min([cpus, *(int(quota) / int(period) for quota, period in quotas if quota.isdigit())]),
        environment=told(os.environ),
    )


def _cgroup(file: str, root: Path) -> Iterator[tuple[str, Path]]:
    """The texts of a file of this process' group (version 2) and of those around it."""
    lines = kernel_text(root / "proc/self/cgroup").splitlines()
    group = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    mount = root / "sys/fs/cgroup"
    for folder in ((mount / group), *(mount / group).parents):
        if (folder == mount or mount in folder.parents) and (text := kernel_text(folder / file).strip()):
            yield text, folder


def _room(folder: Path) -> tuple[int | None, int | None]:
    """Bytes in all, and bytes free for this user."""
    try:
        room = os.statvfs(folder)
    except OSError:
        return None, None
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize


def told(env: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that change how training runs, by name."""
    return {name: value for name, value in sorted(env.items()) if name.startswith(_TOLD) or name in _ALSO_TOLD}


def read_folder(setting: str, path: str) -> Folder:
    """What the disk under `path` says; waits as long as the disk does."""
    wanted = Path(path).expanduser().absolute()
    there = next(folder for folder in (wanted, *wanted.parents) if os.path.lexists(folder))
    if not stat.S_ISDIR(there.stat().st_mode):
        return Folder(setting, str(wanted), writable=False, lack=f"{there} is a file")
    try:  # rights say little of network disks and of root
        tempfile.TemporaryFile(dir=there).close()
        writable = True
    except OSError:
        writable = False
    mounts = [one for one in psutil.disk_partitions(all=True) if there.resolve().is_relative_to(one.mountpoint)]
    kind = max(mounts, key=lambda one: len(one.mountpoint)).fstype if mounts else ""
    total, free = _room(there)
    return Folder(setting, str(wanted), writable, free, total, kind)


def check_run(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether the run can start here as it is configured."""
    for one in (*needs.problems, *needs.obstacles):
        status = "fail" if one in needs.problems else "warn"
        yield Check("run", status, f"{one.where}: {one.what}" if one.where else one.what, one.fix)
    if needs.configured and not (needs.problems or needs.obstacles):
        machines = f"{needs.nodes} machines with " if needs.nodes > 1 else ""
        processes = f"{needs.per_node} process{'es' if needs.per_node > 1 else ''}"
        yield Check("run", "ok", f"{machines}{processes}, strategy={needs.strategy}")


def check_limits(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """/dev/shm, through which NCCL and data workers hand on their data, open files and sockets, and cores."""
    host = facts.host
    several = needs.per_node > 1 or len(facts.gpus.gpus) > 1
    if host.shm is not None and host.shm <= (GIB if several else 64 * MIB):
        status = "fail" if host.shm < 256 * MIB and several and needs.configured else "warn"
        what = f"/dev/shm has {size(host.shm)}, and processes of a machine hand on their data there"
        fix = "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm"
        yield Check("shared-memory", status, what, fix)
    else:
        yield Check("shared-memory", "ok", f"{size(host.shm)} in /dev/shm")
    wanted = 4096 if needs.nodes * needs.per_node > 1 else 1024
    if host.nofile is not None and -1 < host.nofile < wanted:
        what = f"{host.nofile} for each process; a run like this can take more than {wanted}"
        fix = "ulimit -n 65536 (for good: '* - nofile 65536' in /etc/security/limits.conf)"
        yield Check("open-files", "warn", what, fix)
    else:
        yield Check("open-files", "ok", "no limit" if host.nofile == -1 else f"{host.nofile or 'not known'}")
    if needs.per_node > host.cpus:
        fix = "more cores (Slurm: topology.cpus_per_node), or fewer processes: topology.gpus_per_node"
        yield Check("cores", "warn", f"{needs.per_node} processes on {host.cpus:g} cores", fix)
    else:
        yield Check("cores", "ok", f"{host.cpus:g} cores")


def check_memory(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """The memory that the machine and its cgroup leave, against what the run's processes take for certain."""
    host, memory, need = facts.host, needs.memory, 0
    if isinstance(memory, Memory):  # all of it without GPUs, with them what loading and offloading take
        on_cpu = 0 if facts.gpus.gpus else memory.total - (memory.activations or 0)
        need = max(memory.host, on_cpu) * needs.per_node
    of = f"{size(host.memory_free)} free of {size(host.memory)} that the machine or its cgroup allows"
    what = f"the run needs {size(need)} on this machine; {of}" if need else of
    more = "more memory (Slurm: topology.memory=0 for all of the machine's; docker run --memory), or strategy=zero3 over more GPUs"
    if host.memory is not None and need > host.memory:
        yield Check("memory", "fail", what, more)
    elif host.memory_free is not None and host.memory_free < max(need, 2 * GIB):
        yield Check("memory", "warn", what, f"end other processes, or {more}")
    else:
        yield Check("memory", "ok", what)


def check_folders(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Where the run writes."""
    for folder in facts.host.folders:
        name = _FOLDERS.get(folder.setting, "hub-cache")
        room = f"{size(folder.free)} free of {size(folder.total)}" + (f", {folder.kind}" if folder.kind else "")
        yield from list(_folder(name, folder, needs)) or [Check(name, "ok", f"{folder.path}: {room}")]


def _folder(name: str, folder: Folder, needs: RunNeeds) -> Iterator[Check]:
    output, path, free = name == "output-folder", folder.path, folder.free
    stops = "fail" if output and needs.configured else "warn"
    set_it = f"{folder.setting} on another disk"
    needed = needs.disk if output else 0
    if folder.lack:
        yield Check(name, stops, f"{path}: {folder.lack}", f"df {path} (does it answer?), or {set_it}")
    elif folder.writable is False:
        what = f"{path} cannot be written to{'' if output else ': only what is in it can be used'}"
        yield Check(name, stops, what, f"chmod u+w, or {set_it}")
    elif free is not None and free < needed:
        what = f"{path} has {size(free)} free; model and checkpoints take about {size(needed)}"
        yield Check(name, "warn", what, f"{set_it}, or a smaller trainer.keep_checkpoints")
    elif free is not None and (free < GIB or free < 0.02 * (folder.total or 0)):
        yield Check(name, stops if free < 64 * MIB else "warn", f"{path} has {size(free)} free", set_it)
    if output and needs.nodes > 1 and folder.kind in _LOCAL:
        what = f"{path} is on a disk of this machine ({folder.kind}); each of {needs.nodes} would have its own"
        yield Check(name, "warn", what, f"{folder.setting} on a file system that all machines share")


CHECKS = (check_run, check_limits, check_memory, check_folders)
