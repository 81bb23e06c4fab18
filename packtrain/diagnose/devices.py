"""What only the GPU driver and torch can say, and checks of it; each is asked in a process of its own that can be killed:
`python -m packtrain.diagnose.devices driver|torch DTYPE`.

The driver is asked through NVML (nvidia-ml-py). Importing torch may crash, and the first call of CUDA may hang; a report is
wanted just then, so each fact of torch is a line of its own on stdout as soon as it is known.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packtrain.diagnose.facts import GIB, Check, Device, Facts, Gpu, Gpus, RunNeeds, Torch, size
from packtrain.diagnose.probe import Unanswered, command, first_line
from packtrain.plan.interfaces import kernel_text
from packtrain.plan.memory import OUTSIDE, Memory

MARK = "packtrain-fact "
VISIBLE = "CUDA_VISIBLE_DEVICES"
_BUSY_MEMORY = GIB
_PCI, _NVIDIA, _DISPLAY = "sys/bus/pci/devices", "0x10de", ("0x0300", "0x0302")


def ask_driver(limit_s: float) -> Gpus:
    """The machine's GPUs; a driver that does not answer is the `error`."""
    try:
        found = json.loads(command((sys.executable, "-m", __name__, "driver"), limit_s).splitlines()[-1])
        return Gpus(**{**found, "gpus": tuple(Gpu(**one) for one in found["gpus"])})
    except Unanswered as refusal:
        return Gpus(present=has_nvidia(), error=str(refusal))


def ask_torch(limit_s: float, dtype: str) -> Torch:
    """What torch had said by the time limit; its kernels are tried on a usual layer that computes in `dtype`."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
    argv, error = (sys.executable, "-m", __name__, "torch", dtype), ""
    try:
        output = command(argv, limit_s, quiet)
    except Unanswered as refusal:
        output, error = refusal.output, str(refusal)
    return read_torch(output, error)


def read_torch(output: str, error: str = "") -> Torch:
    """What torch's process said; `error` is why it said no more."""
    found: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith(MARK) and line.endswith("}"):
            found |= json.loads(line.removeprefix(MARK))
    devices = tuple(Device(**one) for one in found.pop("devices", ()))
    architectures = tuple(found.pop("architectures", ()))
    if not found and not error:
        error = "its process said nothing"
    return Torch(**{"error": error, **found}, devices=devices, architectures=architectures)


def has_nvidia(root: Path = Path("/")) -> bool:
    """Whether the system shows NVIDIA hardware or its driver."""
    if (root / "proc/driver/nvidia").exists() or any((root / "dev").glob("nvidia[0-9]*")):
        return True
    found = [(kernel_text(one / "vendor"), kernel_text(one / "class")) for one in (root / _PCI).glob("*")]
    return any(vendor == _NVIDIA and kind.startswith(_DISPLAY) for vendor, kind in found)


def _say_driver() -> None:
    try:
        import pynvml
    except ImportError:
        found = Gpus(present=has_nvidia(), error="nvidia-ml-py is not installed")
    else:
        try:
            pynvml.nvmlInit()
            found = _driver(pynvml)
        except pynvml.NVMLError as error:
            found = Gpus(present=has_nvidia(), error=str(error))
    print(json.dumps(asdict(found)))


def _driver(nvml: Any) -> Gpus:
    def ask(name: str, *args: Any) -> Any:
        """None where this driver or this GPU does not know."""
        try:
            return getattr(nvml, name)(*args)
        except Exception:  # old drivers lack functions, and some values are not UTF-8
            return None

    def gpu(index: int) -> Gpu:
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            return Gpu(index, trouble=f"the driver has lost it: {error}")
        memory, rows = ask("nvmlDeviceGetMemoryInfo", handle), ask("nvmlDeviceGetRemappedRows", handle)
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        errors = ask("nvmlDeviceGetTotalEccErrors", handle, *kinds)
        trouble = f"{errors} uncorrected memory errors since the driver was loaded" if errors else ""
        if rows and (rows[2] or rows[3]):
            trouble = "memory rows could not be remapped" if rows[3] else "a repair of its memory waits for a reset"
        return Gpu(
            index=index,
            name=ask("nvmlDeviceGetName", handle) or "?",
            uuid=ask("nvmlDeviceGetUUID", handle) or "",
            memory=memory and memory.total,
            memory_used=memory and memory.used,
            trouble=trouble,
        )

    cuda = ask("nvmlSystemGetCudaDriverVersion_v2")
    return Gpus(
        present=True,
        driver=ask("nvmlSystemGetDriverVersion"),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        gpus=tuple(gpu(index) for index in range(nvml.nvmlDeviceGetCount())),
    )


def _say_torch() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to stderr

    def say(**facts: Any) -> None:
        out.write(f"{MARK}{json.dumps(facts, default=str)}\n")
        out.flush()

    try:
        import torch
    except BaseException as error:  # a broken library may even exit
        say(error=f"torch cannot be imported: {type(error).__name__}: {first_line(str(error))}")
        return
    built = torch.version.cuda
    say(version=torch.__version__, cuda=built, architectures=list(torch.cuda.get_arch_list()) if built else [])
    say(nccl=_nccl(), accelerate=_accelerate())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind = _kind()
        devices = [asdict(one) for one in _devices(kind)]
    told = "; ".join(dict.fromkeys(first_line(str(one.message)) for one in caught if "CUDA" in str(one.message)))
    say(kind=kind, available=kind == "cuda", devices=devices, warning=told)
    if kind == "cuda":
        say(kernels=_kernels(sys.argv[2]))


def _nccl() -> str | None:
    try:
        from torch.cuda import nccl

        return ".".join(map(str, nccl.version()))
    except Exception:  # builds without NCCL fail in several ways
        return None


def _kind() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found else "cpu"


def _devices(kind: str) -> list[Device]:
    import torch

    if kind == "cuda":
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [Device(one.name, one.total_memory, f"sm_{one.major}{one.minor}") for one in found]
    if kind in ("cpu", "mps"):
        return [Device("MPS")] if kind == "mps" else []
    name = getattr(torch.get_device_module(kind), "get_device_name", lambda index: kind)
    return [Device(name(index)) for index in range(torch.accelerator.device_count())]


def _accelerate() -> dict[str, Any] | None:
    """accelerate's default config as `trl env` has it: with accelerate's defaults; None where there is none."""
    try:
        from accelerate.commands.config import default_config_file, load_config_from_file

        return load_config_from_file(default_config_file).to_dict() if os.path.isfile(default_config_file) else None
    except Exception as error:
        return {"error": f"accelerate cannot read it: {first_line(str(error))}"}


def _kernels(dtype: str) -> dict[str, str]:
    """The flash kernels in their order down to the first that is right, each with what it lacks."""
    import torch

    try:
        from packtrain.attention.kernels.selection import LayerFeatures, choose_kernel

        features = LayerFeatures(getattr(torch, dtype), 4, 128, 128)
        choice = choose_kernel(features, torch.device("cuda", 0))
    except Exception as error:  # the GPU itself may be broken, or full
        return {"all": first_line(str(error)) or type(error).__name__}
    return {**dict(choice.lacks), **({choice.kernel.name: ""} if choice.kernel else {})}


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
    wanted, seen = visible(facts, needs), visible(facts, RunNeeds())  # torch was asked without the config's variables
    built = f"torch {torch.version}" + (f" for CUDA {torch.cuda}" if torch.cuda else "")
    install = (
        f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{_wheel_for(gpus.cuda)}"
    )
    if torch.version is None:
        fix = 'time python -c "import torch" (a slow disk?)' if late else "pip install --force-reinstall torch"
        yield Check("torch", "warn" if late else "fail", torch.error or "torch was not asked", fix)
    elif wanted and torch.cuda is None:
        what = f"{built} is a build without CUDA, on a machine with {len(gpus.gpus)} GPUs"
        yield Check("torch", "fail", what, install)
    elif torch.cuda and gpus.cuda and not torch.available and _major(torch.cuda) > _major(gpus.cuda):
        # within a major version a driver runs programs of newer minor ones
        what = f"{built}, but driver {gpus.driver} knows CUDA {gpus.cuda} at most"
        yield Check("torch", "fail", what, f"a newer driver, or {install}")
    elif torch.cuda and wanted and seen and torch.available is False:
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


def check_gpus(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """GPUs against the processes of the run: their number, their health, and memory that other programs hold."""
    gpus, all_gpus, least = visible(facts, needs), facts.gpus.gpus, _least(needs.memory)
    if not all_gpus:
        return
    named = ", ".join(f"{number} × {kind}" for kind, number in Counter(gpu.name for gpu in gpus).items())
    if not gpus:
        yield Check("gpus", "warn", f"{VISIBLE} hides all {len(all_gpus)} GPUs", f"unset {VISIBLE}")
    elif needs.configured and needs.per_node > len(gpus):
        what = f"{needs.per_node} processes on this machine, and {len(gpus)} visible GPUs ({named})"
        yield Check("gpus", "fail", what, f"topology.gpus_per_node={len(gpus)}, or look at {VISIBLE} and nvidia-smi")
    else:
        yield Check("gpus", "ok", named)
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


def visible(facts: Facts, needs: RunNeeds) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES shows the run; all where it is not set."""
    wanted, gpus = needs.variables(facts).get(VISIBLE), facts.gpus.gpus
    if wanted is None:
        return gpus
    found: list[Gpu] = []
    for name in (one.strip() for one in wanted.split(",")):
        matching = [gpu for gpu in gpus if name == str(gpu.index) or (name[:4] == "GPU-" and gpu.uuid.startswith(name))]
        if not matching:  # CUDA ends its list there
            break
        found += matching
    return tuple(found)


def _major(version: str) -> int:
    """The first number of a version."""
    return int(re.sub(r"\D.*", "", version) or 0)


def _wheel_for(cuda: str | None) -> str:
    return {11: "cu118", 12: "cu126"}.get(_major(cuda or "13"), "cu130")


def _has_code(capability: str | None, architectures: tuple[str, ...]) -> bool:
    """By binary code of the same major version, or by PTX of any."""
    own = re.sub(r"\D", "", capability or "")[:-1]
    built = {re.sub(r"\D", "", one)[:-1] for one in architectures}
    return not built or not own or own in built or any(one.startswith("compute_") for one in architectures)


CHECKS = (check_torch, check_driver, check_gpus, check_gpu_memory)

if __name__ == "__main__":
    {"driver": _say_driver, "torch": _say_torch}[sys.argv[1]]()
