"""Checks of the machine beside GPUs and network, and of whether the run may start here at all. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packtrain.diagnose.checks.check import GIB, MIB, Check, first_or, passed, size
from packtrain.diagnose.checks.needs import Needs
from packtrain.diagnose.facts.facts import Facts, Folder
from packtrain.plan.memory import Memory

_DAY_S = 86400
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "squashfs", "apfs")
EACH_ITS_OWN = "would have its own"
"""How what one machine can only guess of its output folder ends."""
_SLOWING: Mapping[str, tuple[str, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel is waited for"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked by another one"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a machine talk through its memory"),
    "NCCL_SHM_DISABLE": ("1", "processes of a machine talk through the network"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every tensor is allocated anew"),
}
"""Variables of debugging that are easily forgotten: the value that slows a run down, and how."""


def check_run(facts: Facts, needs: Needs) -> Iterator[Check]:
    """Whether the run can start here as it is configured."""
    if not needs.configured:
        return
    for problem in needs.problems:
        yield Check("run", "fail", f"{problem.where}: {problem.what}" if problem.where else problem.what, problem.fix)
    for problem in needs.obstacles:
        yield Check("run", "warn", f"{problem.where}: {problem.what}" if problem.where else problem.what, problem.fix)
    if not (needs.problems or needs.obstacles):
        machines = f"{needs.nodes} machines with " if needs.nodes > 1 else ""
        yield passed(
            "run", f"{machines}{needs.per_node} process{'es' if needs.per_node > 1 else ''}, strategy={needs.strategy}"
        )


def check_shared_memory(facts: Facts, needs: Needs) -> Iterator[Check]:
    """/dev/shm, through which NCCL and data workers hand on their data."""
    limits = facts.host.limits
    fix = "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm; else "
    fix += "mount -o remount,size=16G /dev/shm"
    uses = needs.per_node > 1 or needs.workers > 0 or len(facts.gpus.gpus) > 1
    if limits.shm is None:
        yield passed("shared-memory", "there is no /dev/shm")
    elif limits.shm < 256 * MIB and uses:
        what = f"/dev/shm has {size(limits.shm)}, and processes of a machine hand on their data there"
        yield Check("shared-memory", "fail" if needs.configured else "warn", what, fix)
    elif limits.shm <= (GIB if uses else 64 * MIB):
        yield Check("shared-memory", "warn", f"/dev/shm has {size(limits.shm)}", fix)
    elif limits.shm_free is not None and limits.shm_free < 256 * MIB:
        what = f"/dev/shm has {size(limits.shm_free)} left of {size(limits.shm)}"
        yield Check("shared-memory", "warn", what, "ls -l /dev/shm (what killed processes left there can be removed)")
    else:
        yield passed("shared-memory", f"{size(limits.shm_free)} free of {size(limits.shm)} in /dev/shm")


def check_open_files(facts: Facts, needs: Needs) -> Iterator[Check]:
    """The limit of open files and sockets."""
    limit = facts.host.limits.nofile
    wanted = 4096 if needs.processes > 1 or needs.workers else 1024
    if limit is None or limit == -1 or limit >= wanted:
        yield passed("open-files", "no limit" if limit == -1 else f"{limit or 'not known'}")
        return
    fix = "ulimit -n 65536 (for good: '* - nofile 65536' in /etc/security/limits.conf)"
    yield Check("open-files", "warn", f"{limit} for each process; a run like this can take more than {wanted}", fix)


def check_memory(facts: Facts, needs: Needs) -> Iterator[Check]:
    """The machine's own memory, and what the cgroup leaves of it."""
    limits = facts.host.limits
    limited = limits.memory_limit is not None and limits.memory_limit < (limits.memory or limits.memory_limit + 1)
    total = limits.memory_limit if limited else limits.memory
    free = [limits.memory_free]
    if limited and limits.memory_limit is not None:
        free.append(limits.memory_limit - (limits.memory_in_use or 0))
    left = min((one for one in free if one is not None), default=None)
    of = f"{size(left)} free of {size(total)}{' that the cgroup allows' if limited else ''}"
    fix = "more memory (Slurm: topology.memory=0 for all of the machine's; docker run --memory), or strategy=zero3 over more GPUs"
    need = _host_need(facts, needs)
    if need and total is not None and need > total:
        yield Check("memory", "fail", f"the run needs {size(need)} on this machine; {of}", fix)
    elif need and left is not None and need > left:
        yield Check(
            "memory", "warn", f"the run needs {size(need)} on this machine; {of}", "end other processes, or " + fix
        )
    elif left is not None and left < 2 * GIB:
        yield Check("memory", "warn", of, "end other processes, or " + fix)
    else:
        yield passed("memory", of + (f"; the run needs {size(need)}" if need else ""))
    killed = [one for one in facts.gpus.events if not one.code and (one.age_s is None or one.age_s < _DAY_S)]
    if killed:
        what = f"the kernel ended processes for lack of memory in the last day ({len(killed)}): {killed[-1].text}"
        yield Check("memory", "warn", what, "dmesg | grep -i 'out of memory'; " + fix)


def _host_need(facts: Facts, needs: Needs) -> int:
    """Bytes that the processes of this machine take for certain, 0 where that is not known: all of it without GPUs,
    with them what loading and offloading take."""
    memory = needs.memory
    if not isinstance(memory, Memory):
        return 0
    each = memory.host if facts.gpus.gpus else max(memory.host, memory.total - (memory.activations or 0))
    return each * needs.per_node


def check_cores(facts: Facts, needs: Needs) -> Iterator[Check]:
    """Cores against processes and their threads."""
    limits = facts.host.limits
    cores = limits.cpus if limits.cpu_limit is None else min(limits.cpus, limits.cpu_limit)
    allowed = f"{cores:g} cores" + (" that the cgroup allows" if cores < limits.cpus else "")
    asked = {**facts.host.environment, **needs.environment}.get("OMP_NUM_THREADS")
    if asked is not None and not asked.isdigit():
        yield Check(
            "cores", "warn", f"OMP_NUM_THREADS={asked} is no number", "unset OMP_NUM_THREADS: packtrain sets it"
        )
    elif needs.per_node > cores:
        what = f"{needs.per_node} processes on {allowed}"
        yield Check(
            "cores",
            "warn",
            what,
            "more cores (Slurm: topology.cpus_per_node), or fewer processes: topology.gpus_per_node",
        )
    elif asked and int(asked) * needs.per_node > cores:
        what = f"OMP_NUM_THREADS={asked} in each of {needs.per_node} processes, on {allowed}"
        yield Check("cores", "warn", what, f"unset it, or OMP_NUM_THREADS={max(1, int(cores // needs.per_node))}")
    else:
        yield passed("cores", allowed)


def check_clock(facts: Facts, needs: Needs) -> Iterator[Check]:
    """Whether the clock is kept."""
    clock = facts.host.clock
    off = (
        "" if clock.offset_s is None else f", {abs(clock.offset_s):.3g} s {'ahead' if clock.offset_s > 0 else 'behind'}"
    )
    fix = "systemctl enable --now chronyd (or systemd-timesyncd)"
    if clock.synchronised is None:
        yield passed("clock", "whether NTP keeps it is not known")
    elif not clock.synchronised:
        yield Check(
            "clock", "warn", f"not kept by NTP ({clock.source}{off}): times of several machines will not match", fix
        )
    elif abs(clock.offset_s or 0) > 1:
        yield Check(
            "clock", "warn", f"kept by NTP ({clock.source}), but{off.removeprefix(',')}", "chronyc makestep (as root)"
        )
    else:
        yield passed("clock", f"kept by NTP ({clock.source}{off})")


def check_folders(facts: Facts, needs: Needs) -> Iterator[Check]:
    """Where the run writes."""
    for folder in facts.host.folders:
        room = f"{size(folder.free)} free of {size(folder.total)}" + (f", {folder.kind}" if folder.kind else "")
        yield from first_or(_name(folder), _folder(folder, needs), f"{folder.path}: {room}")


def _name(folder: Folder) -> str:
    return {"trainer.output_dir": "output-folder", "data.cache_dir": "cache-folder"}.get(folder.setting, "hub-cache")


def _folder(folder: Folder, needs: Needs) -> Iterator[Check]:
    name, output = _name(folder), folder.setting == "trainer.output_dir"
    stops = "fail" if output and needs.configured else "warn"
    set_it = (
        f"{folder.setting} on another disk"
        if "." in folder.setting
        else f"export {folder.setting}=FOLDER on another disk"
    )
    if folder.lack:
        fix = f"df {folder.path} (does it answer?), or {set_it}"
        yield Check(name, "fail" if needs.configured else "warn", f"{folder.path}: {folder.lack}", fix)
        return
    if folder.writable is False:
        what = f"{folder.path} cannot be written to"
        yield Check(
            name, stops, what + ("" if output else ": only what is in it can be used"), f"chmod u+w, or {set_it}"
        )
        return
    free, needed = folder.free, needs.disk if output else 0
    if free is not None and needed and free < needed:
        what = f"{folder.path} has {size(free)} free; model and checkpoints take about {size(needed)}"
        fix = f"{set_it}, or a smaller trainer.keep_checkpoints"
        yield Check(name, "fail" if free < needs.final else "warn", what, fix)
    elif free is not None and (free < GIB or free < 0.02 * (folder.total or 0)):
        yield Check(name, stops if free < 64 * MIB else "warn", f"{folder.path} has {size(free)} free", set_it)
    if folder.inodes_free is not None and folder.inodes_free < 1000:
        yield Check(name, "warn", f"{folder.path} takes {folder.inodes_free} more files", set_it)
    if output and needs.nodes > 1 and folder.kind in _LOCAL:
        what = f"{folder.path} is on a disk of this machine ({folder.kind}); each of {needs.nodes} {EACH_ITS_OWN}"
        yield Check(name, "warn", what, f"{folder.setting} on a file system that all machines share")


def check_variables(facts: Facts, needs: Needs) -> Iterator[Check]:
    """Variables that slow a run down."""
    env = {**facts.host.environment, **needs.environment}
    found = {name: why for name, (slow, why) in _SLOWING.items() if env.get(name, "").upper() == slow}
    if found:
        what = "; ".join(f"{name}={env[name]}: {why}" for name, why in found.items())
        yield Check("variables", "warn", what, f"unset {' '.join(found)}")
    else:
        yield passed("variables", "none that slows a run down")
