"""The machine beside its GPUs and its network: limits, memory, folders, clock, and what it runs in.

`root` is the file system to read from; tests hand in one of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from packtrain.diagnose.facts.facts import Clock, Folder, Limits
from packtrain.plan.interfaces import kernel_text, whole

CHRONY = ("chronyc", "-n", "tracking")
TIMEDATE = ("timedatectl", "show", "-p", "NTPSynchronized")
_UNLIMITED = 2**60  # what cgroups write for no limit is a little below 2^63
_SLURM = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_NNODES",
    "SLURM_STEP_ID",
    "SLURM_GPUS_ON_NODE",
    "SLURM_CPUS_ON_NODE",
)
_TOLD = (
    "ACCELERATE_",
    "CUBLAS",
    "CUDA_",
    "CUDNN_",
    "DS_",
    "FI_",
    "FSDP_",
    "GLOO_",
    "HF_",
    "HSA_",
    "KMP_",
    "MASTER_",
    "MKL_",
    "NCCL_",
    "NVIDIA_",
    "NVTE_",
    "OMP_",
    "PACKTRAIN_",
    "PYTORCH_",
    "ROCR_",
    "TOKENIZERS_",
    "TORCH",
    "TRANSFORMERS_",
    "TRITON_",
    "UCX_",
)
_ALSO_TOLD = (
    "CONDA_PREFIX",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "NO_PROXY",
    "PYTHONHASHSEED",
    "PYTHONHOME",
    "PYTHONNOUSERSITE",
    "PYTHONPATH",
    "TMPDIR",
    "VIRTUAL_ENV",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)


def read_limits(root: Path = Path("/")) -> Limits:
    """Ulimits of this process, /dev/shm, memory and cores with what its cgroup allows."""
    memory = _meminfo(kernel_text(root / "proc/meminfo"))
    groups = parse_cgroup(kernel_text(root / "proc/self/cgroup"))
    limit, used = _cgroup_memory(root / "sys/fs/cgroup", groups)
    shm, shm_free = _room(root / "dev/shm")[:2]
    return Limits(
        memlock=_ulimit("RLIMIT_MEMLOCK"),
        nofile=_ulimit("RLIMIT_NOFILE"),
        shm=shm,
        shm_free=shm_free,
        memory=memory.get("MemTotal"),
        memory_free=memory.get("MemAvailable"),
        memory_limit=limit,
        memory_in_use=used,
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_limit=_cgroup_cpus(root / "sys/fs/cgroup", groups),
    )


def parse_cgroup(text: str) -> dict[str, str]:
    """Controller → group, by /proc/self/cgroup; "" is the one hierarchy of version 2."""
    found = {}
    for line in text.splitlines():
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        found |= dict.fromkeys(controllers.split(","), group)
    return found


def _cgroup_memory(mount: Path, groups: Mapping[str, str]) -> tuple[int | None, int | None]:
    """The smallest limit on the way up from the group of this process, and what is in use under it."""
    found: list[tuple[int, int | None]] = []
    for base, group, limit_file, used_file in (
        (mount, groups.get("", ""), "memory.max", "memory.current"),
        (mount / "memory", groups.get("memory", ""), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in _upwards(base, group):
            limit = whole(kernel_text(folder / limit_file))
            if limit is not None and limit < _UNLIMITED:
                used = whole(kernel_text(folder / used_file))
                cached = re.search(
                    r"^(?:total_)?inactive_file (\d+)$", kernel_text(folder / "memory.stat"), re.MULTILINE
                )
                found.append((limit, None if used is None else max(0, used - int(cached[1] if cached else 0))))
    return min(found) if found else (None, None)


def _cgroup_cpus(mount: Path, groups: Mapping[str, str]) -> float | None:
    found = []
    for folder in _upwards(mount, groups.get("", "")):
        quota, _, period = kernel_text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            found.append(int(quota) / int(period))
    for folder in _upwards(mount / "cpu", groups.get("cpu", "")):
        quota, period = (whole(kernel_text(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        if quota is not None and quota > 0 and period:
            found.append(quota / period)
    return min(found, default=None)


def _upwards(base: Path, group: str) -> list[Path]:
    """The folder of a group and of those around it. Inside a container only the outermost may be there: it is the group."""
    folder = base / group.strip("/")
    return [folder, *(one for one in folder.parents if one == base or base in one.parents)]


def _meminfo(text: str) -> dict[str, int]:
    return {name: int(number) * 1024 for name, number in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def _ulimit(name: str) -> int | None:
    """The soft limit, -1 for none."""
    try:
        import resource

        soft = resource.getrlimit(getattr(resource, name))[0]
    except (ImportError, AttributeError, OSError):
        return None
    return -1 if soft == resource.RLIM_INFINITY or soft >= _UNLIMITED else soft


def read_folder(setting: str, path: str, root: Path = Path("/")) -> Folder:
    """What the disk under `path` says; waits as long as the disk does."""
    wanted = Path(path).expanduser().absolute()
    there = next(folder for folder in (wanted, *wanted.parents) if _is_there(folder))
    if not stat.S_ISDIR(there.stat().st_mode):
        return Folder(setting, str(wanted), writable=False, lack=f"{there} is a file")
    total, free, inodes = _room(there)
    return Folder(
        setting=setting,
        path=str(wanted),
        writable=_takes_files(there),
        free=free,
        total=total,
        inodes_free=inodes,
        kind=file_system(str(there.resolve()), kernel_text(root / "proc/self/mountinfo")),
    )


def _is_there(folder: Path) -> bool:
    with suppress(OSError):
        folder.lstat()
        return True
    return False


def _room(folder: Path) -> tuple[int | None, int | None, int | None]:
    """Bytes in all, bytes free for this user, and files that can still be made (None where that has no limit)."""
    try:
        room = os.statvfs(folder)
    except (OSError, AttributeError):
        return None, None, None
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize, room.f_favail if room.f_files else None


def _takes_files(folder: Path) -> bool:
    """Found out by making one, without a name where the system can: rights say little of network disks and of root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def file_system(path: str, mountinfo: str) -> str:
    """The type of the file system that holds `path` (ext4, nfs4, lustre), by /proc/self/mountinfo; "" where not known."""
    best, kind = "", ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        parts = before.split()
        if len(parts) < 5 or not after:
            continue
        mount = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), parts[4])
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):  # of two on the same place the later one is on top
            best, kind = mount, after.split()[0]
    return kind


def parse_chrony(text: str) -> Clock:
    """By `chronyc -n tracking`."""
    offset = re.search(r"^System time\s*: ([\d.]+) seconds (slow|fast)", text, re.MULTILINE)
    leap = re.search(r"^Leap status\s*: (.*)$", text, re.MULTILINE)
    if not leap:
        return Clock(source="chronyc")
    seconds = float(offset[1]) * (1 if offset[2] == "fast" else -1) if offset else None
    return Clock(leap[1].strip() != "Not synchronised", seconds, "chronyc")


def parse_timedate(text: str) -> Clock:
    """By `timedatectl show`."""
    found = re.search(r"^NTPSynchronized=(yes|no)$", text, re.MULTILINE)
    return Clock(found[1] == "yes" if found else None, None, "timedatectl")


def surroundings_of(env: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """The Slurm job and the container that this process is in, by name of the fact."""
    found = {name: env[name] for name in _SLURM if name in env}
    groups = kernel_text(root / "proc/1/cgroup") + kernel_text(root / "proc/self/cgroup")
    signs = {
        "docker": (root / ".dockerenv").exists() or "docker" in groups,
        "podman": (root / "run/.containerenv").exists(),
        "Kubernetes": "KUBERNETES_SERVICE_HOST" in env or "kubepods" in groups,
        "Apptainer": "APPTAINER_CONTAINER" in env or "SINGULARITY_CONTAINER" in env,
        "Enroot": "ENROOT_ROOTFS" in env or "ENROOT_CONFIG_PATH" in env,
        "WSL": "microsoft" in kernel_text(root / "proc/version").lower(),
    }
    if inside := [name for name, there in signs.items() if there]:
        found["container"] = ", ".join(inside)
    if tool := shutil.which("sbatch"):
        found["sbatch"] = tool
    return found


def told(env: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that change how training runs, by name."""
    return {name: value for name, value in sorted(env.items()) if name.startswith(_TOLD) or name in _ALSO_TOLD}


def uptime(root: Path = Path("/")) -> float | None:
    """Seconds since the machine started."""
    with suppress(ValueError, IndexError):
        return float(kernel_text(root / "proc/uptime").split()[0])
    return None
