"""What only the GPU driver and torch know, and checks of it; each is asked in a process of its own that can be killed:
`python -m packtrain.diagnose.devices driver|torch DTYPE`.

The driver is asked through NVML (nvidia-ml-py). Importing torch may crash, and the first call of CUDA may hang; a report is
wanted just then, so each fact of torch is a line of its own on stdout as soon as it is known.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from packtrain.diagnose.facts import GIB, Check, Facts, Gpu, Gpus, RunNeeds, Torch, size
from packtrain.diagnose.timeouts import Unanswered, ask_python
from packtrain.plan.memory import Memory
from packtrain.wording import first_line

MARK = "packtrain-fact "
VISIBLE = "CUDA_VISIBLE_DEVICES"
_BUSY_MEMORY = GIB
_FLASH_4 = "pip install 'packtrain[flash]' (FlashAttention 4, a wheel)"
_FASTER = {9: f"{_FLASH_4}, or FlashAttention 3 of the hub (docs/modes.md)", 10: _FLASH_4}
"""What is faster than torch's kernel and FlashAttention 2, by the major number of the compute capability (docs/modes.md)."""


def ask_driver(limit_s: float) -> Gpus:
    """The machine's GPUs; a driver that does not answer is the `error`."""
    present = Path("/proc/driver/nvidia").exists() or any(Path("/dev").glob("nvidia[0-9]*"))
    try:
        answer = json.loads(ask_python(__name__, "driver", limit_s=limit_s).splitlines()[-1])
    except Unanswered as refusal:
        return Gpus(present, str(refusal))
    return Gpus(present, **{**answer, "gpus": tuple(Gpu(**gpu) for gpu in answer.get("gpus", ()))})


def ask_torch(limit_s: float, dtype: str) -> Torch:
    """torch's answers up to the time limit; its kernels are tried on a usual layer that computes in `dtype`."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
    try:
        return read_torch(ask_python(__name__, "torch", dtype, limit_s=limit_s, env=quiet))
    except Unanswered as refusal:
        return read_torch(refusal.output, str(refusal))


def read_torch(output: str, error: str = "") -> Torch:
    """The output of torch's process; `error` is why it is incomplete."""
    facts: dict[str, Any] = {"error": error}
    for line in output.splitlines():
        if line.startswith(MARK) and line.endswith("}"):
            facts |= json.loads(line.removeprefix(MARK))
    facts |= {name: tuple(facts.get(name, ())) for name in ("devices", "capability")}
    return Torch(**facts)


def _print_driver() -> None:
    import pynvml

    try:
        pynvml.nvmlInit()
        print(json.dumps(read_driver(pynvml)))
    except pynvml.NVMLError as error:
        print(json.dumps({"error": str(error)}))


def read_driver(nvml: Any) -> dict[str, Any]:
    """As `Gpus` has it, from the module pynvml."""

    def ask(name: str, *args: Any) -> Any:
        """The driver's value; None if this driver or GPU does not support it."""
        with suppress(Exception):  # old drivers lack functions, and some values are not UTF-8
            return getattr(nvml, name)(*args)

    def gpu(index: int) -> dict[str, Any]:
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            return {"index": index, "trouble": f"the driver has lost it: {error}"}
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        errors = ask("nvmlDeviceGetTotalEccErrors", handle, *kinds)
        return {
            "index": index,
            "name": ask("nvmlDeviceGetName", handle) or "?",
            "uuid": ask("nvmlDeviceGetUUID", handle) or "",
            "memory": memory and memory.total,
            "memory_used": memory and memory.used,
            "trouble": f"{errors} uncorrected memory errors since the driver was loaded" if errors else "",
        }

    cuda = ask("nvmlSystemGetCudaDriverVersion_v2")
    return {
        "driver": ask("nvmlSystemGetDriverVersion"),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        "gpus": [gpu(index) for index in range(nvml.nvmlDeviceGetCount())],
    }


def _print_torch() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed goes to stderr

    def report(**facts: Any) -> None:
        print(f"{MARK}{json.dumps(facts, default=str)}", file=out, flush=True)

    try:
        import torch

        report(version=torch.__version__, cuda=torch.version.cuda)
    except BaseException as error:  # a broken library may even exit
        report(error=f"torch cannot be imported: {type(error).__name__}: {first_line(error)}")
        return
    with suppress(Exception):  # builds without NCCL fail in several ways
        from torch.cuda import nccl

        report(nccl=".".join(map(str, nccl.version())))
    report(accelerate=accelerate_config())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind, names = accelerators()
    remarks = dict.fromkeys(str(one.message).partition("\n")[0] for one in caught if "CUDA" in str(one.message))
    report(kind=kind, available=kind == "cuda", devices=names, warning="; ".join(remarks))
    if kind == "cuda":
        report(capability=torch.cuda.get_device_capability(0))
        report(kernels=_kernels(sys.argv[2]))


def accelerators() -> tuple[str, list[str]]:
    """The kind of device that torch computes on, and the names of those that there are."""
    import torch

    if torch.cuda.is_available():
        return "cuda", [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ("mps", ["MPS"]) if torch.backends.mps.is_available() else ("cpu", [])


def accelerate_config() -> dict[str, Any] | None:
    """accelerate's default config, as `trl env` has it; None where there is none."""
    try:
        from accelerate.commands.config import default_config_file, load_config_from_file

        return load_config_from_file(default_config_file).to_dict() if os.path.isfile(default_config_file) else None
    except Exception as error:
        return {"error": f"accelerate cannot read it: {first_line(error)}"}


def _kernels(dtype: str) -> dict[str, str]:
    """The flash kernels in their order down to the first that is right, each with what it lacks."""
    import torch

    try:
        from packtrain.attention.kernels.selection import LayerFeatures, choose_kernel

        features = LayerFeatures(getattr(torch, dtype), 4, 128, 128)
        choice = choose_kernel(features, torch.device("cuda", 0))
    except Exception as error:  # the GPU itself may be broken, or full
        return {"all": first_line(error)}
    return {**dict(choice.lacks), **({choice.kernel.name: ""} if choice.kernel else {})}


def check_driver(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether the driver answers."""
    gpus, name = facts.gpus, "gpu-driver"
    if gpus.gpus and not gpus.error:
        yield Check(name, "ok", f"{gpus.driver or 'version not known'}, CUDA {gpus.cuda or 'not known'} at most")
    elif not gpus.error:
        fix = "ask Slurm for them (topology.gpus_per_node=N), or start the container with --gpus all"
        what = "the driver shows no GPU: the job or container has none"
        yield Check(name, "fail" if needs.configured else "warn", what, fix)
    elif not gpus.present and "Not Found" in gpus.error:
        yield Check(name, "ok", "no NVIDIA driver on this machine: runs are on the CPU")
    else:
        fix = "does nvidia-smi answer? reboot (after an update), or reinstall the driver; in a container, --gpus all"
        yield Check(name, "fail" if gpus.present else "warn", f"the driver does not answer: {gpus.error}", fix)


def check_torch(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether torch works, and can use the GPUs that the machine has."""
    torch, gpus = facts.torch, facts.gpus
    late = "no answer" in torch.error  # it hangs, or the machine is busy: unknown yet
    built = f"torch {torch.version}" + (f" for CUDA {torch.cuda}" if torch.cuda else "")
    # torch was asked without the config's variables
    shown = visible_gpus(facts, needs) and (visible_gpus(facts, RunNeeds()) or torch.cuda is None)
    if torch.version is None:
        fix = 'time python -c "import torch" (a slow disk?)' if late else "pip install --force-reinstall torch"
        yield Check("torch", "warn" if late else "fail", torch.error or "torch was not asked", fix)
    elif shown and torch.available is False:
        why = torch.warning or ("it does not say why" if torch.cuda else "it is a build without CUDA")
        what = f"{built} finds no GPU where the driver shows {len(gpus.gpus)}: {why}"
        fix = f"reinstall torch for CUDA {gpus.cuda} or older (pytorch.org/get-started); or check the driver and its fabric "
        yield Check("torch", "fail", what, fix + "manager (nvidia-smi -q); in a container start it with --gpus all")
    elif torch.error and torch.available is None:
        what = f"{built}, but its search for GPUs failed: {torch.error}"
        fix = "time python -c 'import torch; print(torch.cuda.is_available())'"
        yield Check("torch", "fail" if gpus.gpus and not late else "warn", what, fix)
    else:
        yield Check("torch", "ok", f"{built} ({torch.warning})" if torch.warning else built)


def check_gpus(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """GPUs against the processes of the run: their number, health and memory, and memory that other programs hold."""
    gpus, number, memory = visible_gpus(facts, needs), len(facts.gpus.gpus), needs.memory
    if not number:
        return
    named = ", ".join(f"{count} × {kind}" for kind, count in Counter(gpu.name for gpu in gpus).items())
    if not gpus:
        yield Check("gpus", "warn", f"{VISIBLE} hides all {number} GPUs", f"unset {VISIBLE}")
    elif needs.configured and needs.per_node > len(gpus):
        what = f"{needs.per_node} processes on this machine, and {len(gpus)} visible GPUs ({named})"
        yield Check("gpus", "fail", what, f"topology.gpus_per_node={len(gpus)}, or check {VISIBLE} and nvidia-smi")
    else:
        yield Check("gpus", "ok", named)
    sick = "; ".join(f"GPU {gpu.index} ({gpu.name}): {gpu.trouble}" for gpu in gpus if gpu.trouble)
    fix = f"nvidia-smi --gpu-reset -i N (as root, GPU idle), or exclude it by {VISIBLE}"
    yield Check("gpu-health", "fail" if sick else "ok", sick or "no memory errors", fix)
    used = [gpu for gpu in gpus if (gpu.memory_used or 0) > _BUSY_MEMORY]
    words = "; ".join(f"GPU {gpu.index} is in use: {size(gpu.memory_used)} of its memory" for gpu in used)
    idle = ",".join(str(gpu.index) for gpu in gpus if gpu not in used)
    fix = f"{VISIBLE}={idle}" if idle else "end those processes (nvidia-smi), or use another machine"
    yield Check("gpu-use", "warn" if used else "ok", words or "all idle", fix)
    if isinstance(memory, Memory) and memory.device is not None:
        certain = memory.total - (memory.activations or 0) + memory.outside  # activations are estimated from above
        status = "fail" if certain > memory.device else "warn" if memory.fits is False else "ok"
        yield Check("gpu-memory", status, memory.sentence(), memory.advice)


def visible_gpus(facts: Facts, needs: RunNeeds) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES shows the run; all where it is not set."""
    wanted, gpus = needs.variables(facts).get(VISIBLE), facts.gpus.gpus
    if wanted is None:
        return gpus
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    return tuple(gpu for name in names for gpu in gpus if name == str(gpu.index) or gpu.uuid.startswith(name))


def check_attention(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """The backend that model.attention comes to for most models, and why; the loaded model decides."""
    kernel, why = flash_kernel(facts, needs)
    torch = facts.torch
    missing = torch.cuda and (torch.kernels or {}).get("FlashAttention 4") == "not installed" and torch.capability
    faster = _FASTER.get(torch.capability[0], "") if missing else ""
    if not needs.packed:
        yield Check("attention", "ok", "the model's own: packing.mode=padding")
    elif needs.attention not in ("auto", "flash"):
        yield Check("attention", "ok", f"{needs.attention}: asked for")
    elif kernel:
        better = faster and not kernel.startswith(("FlashAttention 4", "FlashAttention 3"))
        words = f"flash: {kernel}{f' ({why})' if why else ''}"
        yield Check("attention", "warn" if better else "ok", words, faster)
    elif needs.attention == "flash":
        yield Check("attention", "fail", f"model.attention=flash is not available: {why}", "model.attention=auto")
    else:
        halved = needs.dtype in ("bfloat16", "float16")
        fix = (
            (faster or "docs/modes.md names the flash kernels for each GPU")
            if halved
            else "trainer.mixed_precision=bf16"
        )
        words = f"no flash kernel serves packed rows, they take slower ways: {why}"
        yield Check("attention", "ok" if torch.kernels is None else "warn", words, fix)


def flash_kernel(facts: Facts, needs: RunNeeds) -> tuple[str | None, str]:
    """The flash kernel that serves the run's layers and what better ones lack, or None and why there is none."""
    torch = facts.torch
    if torch.available is False:
        return None, f"the device is {torch.kind}"
    if needs.dtype not in ("bfloat16", "float16"):
        return None, f"the layers compute in {needs.dtype}, the kernels in bfloat16 and float16"
    if torch.kernels is None:
        return None, f"the kernels were not tried ({torch.error or 'no time'})"
    lacking = "; ".join(f"{name}: {lack}" for name, lack in torch.kernels.items() if lack)
    return next((name for name, lack in torch.kernels.items() if not lack), None), lacking


def attention_json(facts: Facts, needs: RunNeeds) -> dict[str, dict[str, object]]:
    """Each backend with whether it can serve packed rows here, and why."""
    kernel, why = flash_kernel(facts, needs)
    on_any_device = {
        "segmented": "an attention function once per document; auto proves on the loaded model that it is exact",
        "per_document": "the model once per document, for any model",
        "sdpa_mask": "one dense mask, the plain reference; slow for long rows",
    }
    flash = {"available": kernel is not None, "why": kernel or why, "kernels": dict(facts.torch.kernels or {})}
    return {"flash": flash, **{name: {"available": True, "why": words} for name, words in on_any_device.items()}}


CHECKS = (check_torch, check_driver, check_gpus, check_attention)

if __name__ == "__main__":
    {"driver": _print_driver, "torch": _print_torch}[sys.argv[1]]()
