"""Checks of the GPUs, of their driver, and of whether torch can use them and the run has enough of them. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from packtrain.diagnose.facts import GIB, Check, Facts, Gpu, RunNeeds, size
from packtrain.plan.memory import OUTSIDE, Memory

VISIBLE = "CUDA_VISIBLE_DEVICES"
_BUSY_MEMORY = GIB


def check_driver(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether the driver answers."""
    gpus, name = facts.gpus, "gpu-driver"
    if not gpus.error and gpus.gpus:
        yield Check(name, "ok", f"{gpus.driver or 'version not known'}, CUDA {gpus.cuda or 'not known'} at most")
    elif not gpus.error:
        fix = "ask Slurm for them (topology.gres=gpu:N), or start the container with --gpus all"
        what = "the driver shows no GPU: the job or container has none"
        yield Check(name, "fail" if needs.configured else "warn", what, fix)
    elif not gpus.present and ("Not Found" in gpus.error or "not installed" in gpus.error):
        yield Check(name, "ok", "no NVIDIA driver on this machine: runs are on the CPU")
    elif "not installed" in gpus.error:
        yield Check(name, "warn", f"the GPUs' health is not known: {gpus.error}", "pip install nvidia-ml-py")
    else:
        fix = "does nvidia-smi answer? reboot (after an update), or reinstall the driver; in a container, --gpus all"
        yield Check(name, "fail" if gpus.present else "warn", f"the driver does not answer: {gpus.error}", fix)


def check_torch(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether torch works, and can use the GPUs that the machine has."""
    torch, gpus = facts.torch, facts.gpus
    late = "no answer" in torch.error  # it hangs, or the machine is busy: unknown yet
    away = hidden(shown(facts, needs))
    unseen = away or hidden(facts.host.environment.get(VISIBLE))  # torch was asked without the config's variables
    built = f"torch {torch.version}" + (f" for CUDA {torch.cuda}" if torch.cuda else "")
    index = f"--index-url https://download.pytorch.org/whl/{_wheel_for(gpus.cuda)}"
    if torch.version is None:
        fix = 'time python -c "import torch" (a slow disk?)' if late else "pip install --force-reinstall torch"
        yield Check("torch", "warn" if late else "fail", torch.error or "torch was not asked", fix)
    elif gpus.gpus and torch.cuda is None and not away:
        what = f"{built} is a build without CUDA, on a machine with {len(gpus.gpus)} GPUs"
        yield Check("torch", "fail", what, f"pip install --force-reinstall torch {index}")
    elif torch.cuda and gpus.cuda and not torch.available and major(torch.cuda) > major(gpus.cuda):
        # within a major version a driver runs programs of newer minor ones
        what = f"{built}, but driver {gpus.driver} knows CUDA {gpus.cuda} at most"
        yield Check("torch", "fail", what, f"a newer driver, or pip install torch {index}")
    elif torch.cuda and gpus.gpus and torch.available is False and not unseen:
        what = f"{built} finds no GPU where the driver shows {len(gpus.gpus)}: {torch.warning or 'it does not say why'}"
        fix = "look at the driver and its fabric manager (nvidia-smi -q); in a container start it with --gpus all"
        yield Check("torch", "fail", what, fix)
    elif torch.error and torch.available is None:
        what = f"{built}, but looking for GPUs ended otherwise: {torch.error}"
        fix = "time python -c 'import torch; print(torch.cuda.is_available())'"
        yield Check("torch", "fail" if gpus.gpus and not late else "warn", what, fix)
    elif lacking := [one for one in torch.devices if not _has_code(one.capability, torch.architectures)]:
        what = f"{built} has no code for {lacking[0].name} ({lacking[0].capability}), only {', '.join(torch.architectures)}"
        yield Check("torch", "fail", what, "pip install --upgrade torch")
    else:
        yield Check("torch", "ok", built)


def check_number(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """GPUs against the processes of the run."""
    gpus, name = visible(facts, needs), "gpus"
    if not facts.gpus.gpus:
        return
    kinds = Counter(gpu.name for gpu in gpus)
    named = ", ".join(f"{number} × {kind}" for kind, number in kinds.items()) or "none visible"
    if needs.configured and gpus and needs.per_node > len(gpus):
        what = f"{needs.per_node} processes on this machine, and {len(gpus)} visible GPUs ({named})"
        yield Check(name, "fail", what, f"topology.gpus_per_node={len(gpus)}, or look at {VISIBLE} and nvidia-smi")
    elif any(gpu.mig for gpu in gpus):
        what = f"{named}, split by MIG: NCCL cannot join parts of one GPU"
        yield Check(name, "warn", what, "nvidia-smi -mig 0 (as root, GPU idle), or one process")
    elif len(kinds) > 1:
        yield Check(name, "warn", f"{named}: the slowest sets the pace", f"{VISIBLE} with GPUs of one kind")
    elif hidden(shown(facts, needs)):
        by = f"topology.environment.{VISIBLE}" if VISIBLE in needs.environment else VISIBLE
        yield Check(name, "warn", f"{by} hides all {len(facts.gpus.gpus)} GPUs", f"unset {by}")
    else:
        yield Check(name, "ok", named)


def check_health(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Memory errors, repairs that wait, GPUs that the driver has lost, and memory that other programs hold."""
    gpus, least = visible(facts, needs), _least(needs.memory)
    sick = [gpu for gpu in gpus if gpu.trouble]
    for gpu in sick:
        fix = f"nvidia-smi --gpu-reset -i {gpu.index} (as root, GPU idle), or leave it out by {VISIBLE}"
        yield Check("gpu-health", "fail", f"GPU {gpu.index} ({gpu.name}): {gpu.trouble}", fix)
    used = [gpu for gpu in gpus if (gpu.memory_used or 0) > _BUSY_MEMORY]
    idle = ",".join(str(gpu.index) for gpu in gpus if gpu not in used)
    for gpu in used:
        free = (gpu.memory or 0) - (gpu.memory_used or 0)
        what = f"GPU {gpu.index} is in use: {size(gpu.memory_used)} of its memory"
        what += f"; the run needs {size(least)}, {size(free)} are free" if least > free else ""
        fix = f"{VISIBLE}={idle}" if idle else "end those processes (nvidia-smi), or use another machine"
        yield Check("gpu-use", "fail" if least > free else "warn", what, fix)
    if facts.gpus.gpus:
        yield from () if sick else (Check("gpu-health", "ok", "no memory errors"),)
        yield from () if used else (Check("gpu-use", "ok", "all idle"),)


def check_gpu_memory(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """The estimate of the run against the memory of a GPU."""
    memory = needs.memory
    if not isinstance(memory, Memory) or memory.device is None or not facts.gpus.gpus:
        return
    if _least(memory) > memory.device or memory.fits is False:
        status = "fail" if _least(memory) > memory.device else "warn"
        yield Check("gpu-memory", status, memory.sentence(), memory.advice)
    else:
        yield Check("gpu-memory", "ok", f"{size(memory.total + OUTSIDE)} of {size(memory.device)} on each GPU")


def _least(memory: Memory | str) -> int:
    """What a run takes for certain: activations are the part that is estimated from above."""
    return memory.total - (memory.activations or 0) + OUTSIDE if isinstance(memory, Memory) else 0


def shown(facts: Facts, needs: RunNeeds) -> str | None:
    """CUDA_VISIBLE_DEVICES as the run's processes will have it."""
    return needs.environment.get(VISIBLE, facts.host.environment.get(VISIBLE))


def hidden(wanted: str | None) -> bool:
    """Whether this value of CUDA_VISIBLE_DEVICES takes all GPUs away on purpose."""
    return wanted is not None and (not wanted.strip() or wanted.strip().startswith("-"))


def visible(facts: Facts, needs: RunNeeds) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES shows the run; all where it is not set."""
    wanted, gpus = shown(facts, needs), facts.gpus.gpus
    if wanted is None:
        return gpus
    found: list[Gpu] = []
    for name in (one.strip() for one in wanted.split(",")):
        matching = [gpu for gpu in gpus if name == str(gpu.index) or (name[:4] == "GPU-" and gpu.uuid.startswith(name))]
        if not matching:  # CUDA ends its list there
            break
        found += matching
    return tuple(found)


def major(version: str) -> int:
    """The first number of a version."""
    return int(re.sub(r"\D.*", "", version) or 0)


def _wheel_for(cuda: str | None) -> str:
    return {11: "cu118", 12: "cu126"}.get(major(cuda or "13"), "cu130")


def _has_code(capability: str | None, architectures: tuple[str, ...]) -> bool:
    """By binary code of the same major version, or by PTX of any."""
    own = re.sub(r"\D", "", capability or "")[:-1]
    built = {re.sub(r"\D", "", one)[:-1] for one in architectures}
    return not built or not own or own in built or any(one.startswith("compute_") for one in architectures)


CHECKS = (check_torch, check_driver, check_number, check_health, check_gpu_memory)
