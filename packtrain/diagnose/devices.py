"""What only the GPU driver and torch can say, each asked in a process of its own that can be killed:
`python -m packtrain.diagnose.devices driver|torch LAYER`.

The driver is asked through NVML (nvidia-ml-py). Importing torch may crash, and the first call of CUDA may hang; a report is
wanted just then, so each fact of torch is a line of its own on stdout as soon as it is known.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packtrain.diagnose.facts import Device, Gpu, Gpus, Layer, Torch
from packtrain.diagnose.probe import Unanswered, command, first_line
from packtrain.plan.interfaces import kernel_text

MARK = "packtrain-fact "
_PCI, _NVIDIA, _DISPLAY = "sys/bus/pci/devices", "0x10de", ("0x0300", "0x0302")


def ask_driver(limit_s: float) -> Gpus:
    """The machine's GPUs; a driver that does not answer is the `error`."""
    try:
        found = json.loads(command((sys.executable, "-m", __name__, "driver"), limit_s).splitlines()[-1])
        return Gpus(**{**found, "gpus": tuple(Gpu(**one) for one in found["gpus"])})
    except Unanswered as refusal:
        return Gpus(present=has_nvidia(), error=str(refusal))


def ask_torch(limit_s: float, layer: Layer) -> Torch:
    """What torch had said by the time limit; its kernels are tried on `layer`."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
    argv, error = (sys.executable, "-m", __name__, "torch", json.dumps(asdict(layer))), ""
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
            mig=bool((ask("nvmlDeviceGetMigMode", handle) or [0])[0]),
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
    say(nccl=_or_none(_nccl), accelerate=_accelerate())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind = _kind()
        devices = [asdict(one) for one in _devices(kind)]
    told = "; ".join(dict.fromkeys(first_line(str(one.message)) for one in caught if "CUDA" in str(one.message)))
    cudnn = _or_none(torch.backends.cudnn.version)
    cudnn = cudnn and f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
    say(kind=kind, available=kind == "cuda", devices=devices, warning=told, cudnn=cudnn)
    if kind == "cuda":
        say(kernels=_kernels(Layer(**json.loads(sys.argv[2]))))


def _or_none(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:  # builds without NCCL, and a cuDNN of another version, fail in several ways
        return None


def _nccl() -> str:
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))


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


def _kernels(layer: Layer) -> dict[str, str]:
    """The flash kernels in their order down to the first that is right, each with what it lacks."""
    import torch

    try:
        from packtrain.attention.kernels.selection import LayerFeatures, choose_kernel

        features = LayerFeatures(getattr(torch, layer.dtype), layer.group, layer.head_dim, layer.head_dim)
        choice = choose_kernel(features, torch.device("cuda", 0))
    except Exception as error:  # the GPU itself may be broken, or full
        return {"all": first_line(str(error)) or type(error).__name__}
    return {**dict(choice.lacks), **({choice.kernel.name: ""} if choice.kernel else {})}


if __name__ == "__main__":
    {"driver": _say_driver, "torch": _say_torch}[sys.argv[1]]()
