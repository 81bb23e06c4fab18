"""The machine beside GPUs and network: limits, memory, cores and folders, and checks of them.

`root` is the file system to read from; tests hand in one of their own.
"""

from __future__ import annotations

import os
import resource
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from packtrain.diagnose.facts import GIB, MIB, Check, Facts, Folder, Host, RunNeeds, judged, size
from packtrain.plan.memory import Memory
from packtrain.plan.network_settings import kernel_text
from packtrain.plan.surroundings import INSTALL, lack_of_compiler

_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "squashfs", "apfs")
_FOLDERS = {"trainer.output_dir": "output-folder", "data.cache_dir": "cache-folder", "HF_HOME": "hub-cache"}
_TOLD = (
    *("ACCELERATE_", "CONDA_PREFIX", "CUBLAS", "CUDA_", "CUDNN_", "DS_", "FI_", "FSDP_", "GLOO_", "HF_", "KMP_", "LD_"),
    *("MASTER_", "MKL_", "NCCL_", "NVIDIA_", "NVTE_", "OMP_", "PACKTRAIN_", "PYTHONPATH", "PYTORCH_", "SLURM_JOB_ID"),
    *("SLURM_JOB_NODELIST", "TMPDIR", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "UCX_", "VIRTUAL_ENV"),
)


def reported_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that change how training runs, by name."""
    return {
        name: value
        for name, value in sorted(env.items())
        if name.startswith(_TOLD) or name.lower() in ("http_proxy", "https_proxy", "no_proxy")
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
    room = psutil.disk_usage(str(there))
    return Folder(setting, str(wanted), writable, room.free, room.total, kind)


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
    host, several = facts.host, needs.per_node > 1 or len(facts.gpus.gpus) > 1
    small = host.shm is not None and host.shm <= (GIB if several else 64 * MIB)
    fix = "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm"
    what = f"{size(host.shm)} in /dev/shm, where the processes of a machine hand on their data"
    yield judged("shared-memory", "warn" if small else "ok", what, fix)
    few = host.nofile is not None and -1 < host.nofile < (4096 if needs.nodes * needs.per_node > 1 else 1024)
    what = "no limit" if host.nofile == -1 else f"{host.nofile or 'not known'} for each process"
    fix = "ulimit -n 65536 (for good: '* - nofile 65536' in /etc/security/limits.conf)"
    yield judged("open-files", "warn" if few else "ok", what, fix)
    what = f"{needs.per_node} process{'es' if needs.per_node > 1 else ''} on {host.cpus} cores"
    fix = "more cores (Slurm: --cpus-per-task in topology.sbatch), or fewer processes: topology.gpus_per_node"
    yield judged("cores", "warn" if needs.per_node > host.cpus else "ok", what, fix)


def check_compiler(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether Triton can compile its kernels, where there is a GPU to compile them for."""
    if facts.gpus.gpus:
        lack = facts.host.uncompiled
        yield judged("compiler", "warn" if lack else "ok", lack or "Triton has what it needs to compile", INSTALL)


def check_memory(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """The memory that the machine and its cgroup leave, against what the run's processes take for certain."""
    host, memory, need = facts.host, needs.memory, 0
    if isinstance(memory, Memory):  # all of it without GPUs, with them what loading and offloading take
        on_cpu = 0 if facts.gpus.gpus else memory.total - (memory.activations or 0)
        need = max(memory.host, on_cpu) * needs.per_node
    of = f"{size(host.memory_free)} free of {size(host.memory)} that the machine or its cgroup allows"
    what = f"the run needs {size(need)} on this machine; {of}" if need else of
    fix = "end other processes, or more memory (Slurm: --mem=0 in topology.sbatch for all of the machine's; docker run --memory)"
    little = host.memory_free is not None and host.memory_free < max(need, 2 * GIB)
    too_little = host.memory is not None and host.memory < need
    yield judged("memory", "fail" if too_little else "warn" if little else "ok", what, fix)


def check_folders(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Where the run writes: without the output folder there is no run."""
    for folder in facts.host.folders:
        name, path = _FOLDERS[folder.setting], folder.path
        output, elsewhere = name == "output-folder", f"{folder.setting} on another disk"
        stops = "fail" if output and needs.configured else "warn"
        needed = max(needs.disk if output else 0, GIB)
        room = f"{path}: {size(folder.free)} free of {size(folder.total)}, {folder.kind or 'of a kind not known'}"
        if folder.lack:
            yield Check(name, stops, f"{path}: {folder.lack}", f"df {path} (does it answer?), or {elsewhere}")
        elif folder.writable is False:
            yield Check(name, stops, f"{path} cannot be written to", f"chmod u+w, or {elsewhere}")
        elif folder.free is not None and folder.free < needed:
            more = f"; model and checkpoints take about {size(needed)}" if needed > GIB else ""
            yield Check(name, "warn", room + more, f"{elsewhere}, or a smaller trainer.keep_checkpoints")
        elif output and needs.nodes > 1 and folder.kind in _LOCAL:
            what = f"{path} is on a disk of this machine ({folder.kind}); each of {needs.nodes} would have its own"
            yield Check(name, "warn", what, f"{folder.setting} on a file system that all machines share")
        else:
            yield Check(name, "ok", room)


CHECKS = (check_run, check_limits, check_compiler, check_memory, check_folders)
