"""Checks of GPUs: the driver, their health, who else uses them, and whether the run has enough of them. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from packtrain.diagnose.checks.check import GIB, Check, first_or, passed, size
from packtrain.diagnose.checks.needs import Needs
from packtrain.diagnose.checks.software import VISIBLE, hidden, shown
from packtrain.diagnose.facts.facts import Facts, Gpu, KernelEvent
from packtrain.plan.memory import OUTSIDE, Memory

_DAY_S = 86400
_OF_PROGRAMS = (8, 13, 31, 32, 38, 43, 44, 45, 66, 68, 69, 137)
"""Xids that mostly come of a program's own mistake; the others speak of the GPU, its memory or its links."""
_BUSY_MEMORY = GIB
_BUSY_PERCENT = 10


def check_driver(facts: Facts, needs: Needs) -> Iterator[Check]:
    """Whether the driver answers, in one version."""
    gpus = facts.gpus
    if not gpus.present and gpus.error and "not installed" not in gpus.error:
        what = f"there is an nvidia-smi, but no GPU that the system shows: {gpus.error}"
        yield Check(
            "gpu-driver", "warn", what, "if this machine has GPUs: nvidia-smi, dmesg, and the container's --gpus all"
        )
    elif not gpus.present:
        yield passed("gpu-driver", "no NVIDIA driver on this machine: runs are on the CPU")
    elif gpus.error and "not installed" in gpus.error:
        what = "the machine has NVIDIA device files, but no nvidia-smi: the GPUs' health is not known"
        yield Check("gpu-driver", "warn", what, "install nvidia-utils, or start the container with --gpus all")
    elif "No devices" in gpus.error:
        what = "nvidia-smi shows no GPU: the job, the container or CUDA's driver has taken them away"
        fix = "ask Slurm for them (topology.gres=gpu:N), or start the container with --gpus all"
        yield Check("gpu-driver", "fail" if needs.configured else "warn", what, fix)
    elif gpus.error:
        fix = "nvidia-smi (does it hang? look at dmesg, then reboot)"
        if "mismatch" in gpus.error:
            fix = "reboot, or unload and load the module: its version is not the libraries' (apt has updated them)"
        elif "communicate with the NVIDIA driver" in gpus.error:
            fix = "install the NVIDIA driver for the running kernel, or load it: modprobe nvidia"
        yield Check("gpu-driver", "fail", f"nvidia-smi: {gpus.error}", fix)
    else:
        yield passed("gpu-driver", f"{gpus.driver or 'version not known'}, CUDA {gpus.cuda or 'not known'} at most")


def check_number(facts: Facts, needs: Needs) -> Iterator[Check]:
    """GPUs against the processes of the run."""
    gpus = visible(facts, needs)
    if not facts.gpus.gpus:
        return
    kinds = Counter(gpu.name for gpu in gpus)
    named = ", ".join(f"{number} × {name}" for name, number in kinds.items()) or "none visible"
    if needs.configured and gpus and needs.per_node > len(gpus):
        what = f"{needs.per_node} processes on this machine, and {len(gpus)} visible GPUs ({named})"
        fix = f"topology.gpus_per_node={len(gpus)}, or look at CUDA_VISIBLE_DEVICES and nvidia-smi"
        yield Check("gpus", "fail", what, fix)
    elif len(kinds) > 1:
        yield Check("gpus", "warn", f"{named}: the slowest sets the pace", "CUDA_VISIBLE_DEVICES with GPUs of one kind")
    elif any(gpu.mig for gpu in gpus):
        what = f"{named}, split by MIG: NCCL cannot join parts of one GPU"
        yield Check("gpus", "warn", what, "nvidia-smi -mig 0 (as root, GPU idle), or one process")
    elif any(gpu.compute_mode == "Prohibited" for gpu in gpus):
        yield Check("gpus", "fail", f"{named}, in compute mode Prohibited", "nvidia-smi -c DEFAULT (as root)")
    elif hidden(shown(facts, needs)):
        name = f"topology.environment.{VISIBLE}" if VISIBLE in needs.environment else VISIBLE
        yield Check("gpus", "warn", f"{name} hides all {len(facts.gpus.gpus)} GPUs", f"unset {name}")
    else:
        yield passed("gpus", named)


def check_health(facts: Facts, needs: Needs) -> Iterator[Check]:
    """Memory errors, repairs that wait, links to NVSwitch, and Xids."""
    if facts.gpus.gpus:
        yield from first_or("gpu-health", _ill(facts, needs), f"no memory errors{_log(facts)}")


def _log(facts: Facts) -> str:
    lack = facts.gpus.events_lack
    return f"; Xids are not known (dmesg: {lack})" if lack else ", no Xid in the kernel's log"


def _ill(facts: Facts, needs: Needs) -> Iterator[Check]:
    for gpu in visible(facts, needs):
        name = f"GPU {gpu.index} ({gpu.name})"
        reset = f"nvidia-smi --gpu-reset -i {gpu.index} (as root, GPU idle), or leave it out by CUDA_VISIBLE_DEVICES"
        if gpu.repair:
            yield Check("gpu-health", "fail", f"{name}: {gpu.repair}", reset)
        elif gpu.uncorrected:
            what = f"{name}: uncorrected memory errors since the driver was loaded: {gpu.uncorrected}"
            yield Check("gpu-health", "fail", what, reset)
        if gpu.fabric:
            what = f"{name}: its link to NVSwitch is {gpu.fabric}"
            yield Check("gpu-health", "fail", what, "systemctl restart nvidia-fabricmanager (of the driver's version)")
    for (code, where), events in _by_code(facts.gpus.events).items():
        newest = events[-1]
        recent = newest.age_s is None or newest.age_s < _DAY_S
        status = "fail" if recent and code not in _OF_PROGRAMS else "warn"
        times = f", {len(events)} times" if len(events) > 1 else ""
        what = f"Xid {code} on {where} {_ago(newest.age_s)}{times}: {newest.text or 'no text'}"
        fix = f"https://docs.nvidia.com/deploy/xid-errors says what {code} means; reset or leave out the GPU if it comes again"
        yield Check("gpu-health", status, what, fix)


def _by_code(events: tuple[KernelEvent, ...]) -> dict[tuple[int, str], list[KernelEvent]]:
    found: dict[tuple[int, str], list[KernelEvent]] = {}
    for event in events:
        if event.code:
            found.setdefault((event.code, event.where), []).append(event)
    return found


def check_pace(facts: Facts, needs: Needs) -> Iterator[Check]:
    """GPUs that are slowed down, by heat, power or a narrow slot."""
    if facts.gpus.gpus:
        hottest = max((gpu.temperature for gpu in facts.gpus.gpus if gpu.temperature is not None), default=None)
        yield from first_or(
            "gpu-pace",
            _slow(facts, needs),
            f"none is slowed down{'' if hottest is None else f', {hottest} °C at most'}",
        )


def _slow(facts: Facts, needs: Needs) -> Iterator[Check]:
    gpus = visible(facts, needs)
    for gpu in gpus:
        if gpu.throttled:
            heat = "" if gpu.temperature is None else f" at {gpu.temperature} °C"
            what = f"GPU {gpu.index} is slowed down{heat}: {', '.join(gpu.throttled)}"
            yield Check(
                "gpu-pace", "warn", what, f"nvidia-smi -q -d PERFORMANCE -i {gpu.index}; look at cooling and power"
            )
        if gpu.width and gpu.widest and gpu.width < gpu.widest:
            what = f"GPU {gpu.index} has {gpu.width} of {gpu.widest} PCIe lanes"
            yield Check("gpu-pace", "warn", what, "reseat the card; nvidia-smi -q shows the link's width")
    most = max((gpu.nvlinks or 0 for gpu in gpus), default=0)
    for gpu in gpus:
        if gpu.nvlinks is not None and gpu.nvlinks < most:
            what = f"GPU {gpu.index} has {gpu.nvlinks} NVLinks that are up, another one {most}"
            yield Check("gpu-pace", "warn", what, f"nvidia-smi nvlink --status -i {gpu.index}")


def check_busy(facts: Facts, needs: Needs) -> Iterator[Check]:
    """GPUs that others use already."""
    if facts.gpus.gpus:
        yield from first_or("gpu-use", _used(facts, needs), "all idle")


def _used(facts: Facts, needs: Needs) -> Iterator[Check]:
    for gpu in visible(facts, needs):
        busy = (gpu.utilization or 0) > _BUSY_PERCENT
        if not (busy or gpu.uses or (gpu.memory_used or 0) > _BUSY_MEMORY):
            continue
        free = (gpu.memory or 0) - (gpu.memory_used or 0)
        short = isinstance(needs.memory, Memory) and gpu.memory is not None and _least(needs.memory) > free
        by = f" by {', '.join(gpu.uses[:3])}" if gpu.uses else ""
        what = f"GPU {gpu.index} is in use{by}: {size(gpu.memory_used)} of its memory, {gpu.utilization or 0} % busy"
        if short and isinstance(needs.memory, Memory):
            what += f"; the run needs {size(_least(needs.memory))}, {size(free)} are free"
        others = [one.index for one in visible(facts, needs) if not _in_use(one)]
        fix = (
            f"CUDA_VISIBLE_DEVICES={','.join(map(str, others))}"
            if others
            else "end those processes, or use another machine"
        )
        yield Check("gpu-use", "fail" if short else "warn", what, fix)


def _in_use(gpu: Gpu) -> bool:
    return bool(gpu.uses) or (gpu.memory_used or 0) > _BUSY_MEMORY or (gpu.utilization or 0) > _BUSY_PERCENT


def check_gpu_memory(facts: Facts, needs: Needs) -> Iterator[Check]:
    """The estimate of the run against the memory of a GPU."""
    memory = needs.memory
    if not isinstance(memory, Memory) or memory.device is None or not facts.gpus.gpus:
        return
    if _least(memory) > memory.device:
        yield Check("gpu-memory", "fail", memory.sentence(), memory.advice)
    elif memory.fits is False:
        yield Check("gpu-memory", "warn", memory.sentence(), memory.advice)
    else:
        yield passed("gpu-memory", f"{size(memory.total + OUTSIDE)} of {size(memory.device)} on each GPU")


def _least(memory: Memory) -> int:
    """What a run takes for certain: activations are the part that is estimated from above."""
    return memory.total - (memory.activations or 0) + OUTSIDE


def visible(facts: Facts, needs: Needs) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES shows the run; all where it is not set."""
    wanted = shown(facts, needs)
    gpus = facts.gpus.gpus
    if wanted is None:
        return gpus
    found = []
    for name in (one.strip() for one in wanted.split(",")):
        if name.isdigit():
            matching = [gpu for gpu in gpus if gpu.index == int(name)]
        else:
            matching = [gpu for gpu in gpus if re.match(r"GPU-", name) and gpu.uuid.startswith(name)]
        if not matching:
            break
        found += matching
    return tuple(found)


def _ago(age_s: float | None) -> str:
    if age_s is None:
        return "since the machine started"
    return f"{age_s / 3600:.1f} hours ago" if age_s < 2 * _DAY_S else f"{age_s / _DAY_S:.0f} days ago"
