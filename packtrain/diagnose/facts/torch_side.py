"""What only torch can say, asked in a process of its own: `python -m packtrain.diagnose.facts.torch_side`.

Importing torch may crash, and the first call of CUDA may hang (a driver that is half there, NVSwitch without its manager);
a report is wanted just then. Each fact is a line of its own on stdout as soon as it is known, so what was found before the
time is up counts. CUDA is left alone until a `Layer` comes on stdin, as JSON: by then nvidia-smi has looked at GPUs without this process.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict, dataclass
from typing import Any

from packtrain.diagnose.facts.facts import Device, Torch
from packtrain.diagnose.facts.software import accelerate_config

MARK = "packtrain-fact "


@dataclass(frozen=True, slots=True)
class Layer:
    """The attention layer that kernels are tried for; `dtype` is what it computes in, by torch's name."""

    dtype: str = "bfloat16"
    group: int = 4
    head_dim: int = 128


def read_facts(output: str, error: str = "") -> tuple[Torch, dict[str, Any] | None]:
    """What the process said, and accelerate's config as accelerate reads it; `error` is why it said no more."""
    found: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith(MARK):
            try:
                found |= json.loads(line.removeprefix(MARK))
            except ValueError:
                continue
    accelerate = found.pop("accelerate", None)
    devices = tuple(Device(**one) for one in found.pop("devices", ()))
    architectures = tuple(found.pop("architectures", ()))
    return Torch(**{"error": error, **found}, devices=devices, architectures=architectures), accelerate


def main() -> None:
    """Says what it finds, until all is said."""
    say = _voice()
    try:
        import torch
    except BaseException as error:  # a broken library may even exit
        say(error=f"torch cannot be imported: {type(error).__name__}: {_first_line(error)}")
        return
    build = {"version": torch.__version__, "cuda": torch.version.cuda, "nccl": _nccl()}
    say(**build, architectures=list(torch.cuda.get_arch_list()) if torch.version.cuda else [])
    say(accelerate=_accelerate_config())
    layer = Layer(**json.loads(sys.stdin.read() or "{}"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind = _kind()
        devices = [asdict(one) for one in _devices(kind)]
    told = "; ".join(dict.fromkeys(_first_line(one.message) for one in caught if "CUDA" in str(one.message)))
    say(kind=kind, available=kind == "cuda", devices=devices, warning=told, cudnn=_cudnn())
    if kind == "cuda":
        say(kernels=_kernels(layer))


def _voice():
    """A function that prints a fact; whatever else is printed from now on goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**facts: Any) -> None:
        out.write(MARK + json.dumps(facts, default=str) + "\n")
        out.flush()

    return say


def _kind() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        return accelerator.type if accelerator else "cpu"
    return "cpu"


def _devices(kind: str) -> list[Device]:
    import torch

    if kind == "cuda":
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [Device(one.name, one.total_memory, f"sm_{one.major}{one.minor}") for one in found]
    if kind == "mps":
        return [Device("MPS", torch.mps.recommended_max_memory())]
    if kind == "xpu":
        return [Device(torch.xpu.get_device_name(index)) for index in range(torch.xpu.device_count())]
    if kind == "neuron":
        neuron: Any = getattr(torch, "neuron", None)
        return [Device(neuron.get_device_properties(index).name) for index in range(neuron.device_count())]
    return [] if kind == "cpu" else [Device(kind) for _ in range(torch.accelerator.device_count())]


def _nccl() -> str | None:
    try:
        from torch.cuda import nccl

        return ".".join(map(str, nccl.version()))
    except Exception:  # builds without NCCL fail in several ways
        return None


def _cudnn() -> str | None:
    import torch

    try:
        number = torch.backends.cudnn.version()
    except Exception:  # a cuDNN of another version than torch was built for
        return None
    return None if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _accelerate_config() -> dict[str, Any] | None:
    """As `trl env` has it: with accelerate's defaults."""
    if accelerate_config(os.environ) is None:
        return None
    try:
        from accelerate.commands.config import default_config_file, load_config_from_file

        return load_config_from_file(default_config_file).to_dict()
    except Exception as error:
        return {"error": f"accelerate cannot read it: {_first_line(error)}"}


def _kernels(layer: Layer) -> dict[str, str]:
    """The flash kernels in their order down to the first that is right, each with what it lacks."""
    import torch

    try:
        from packtrain.attention.kernels.selection import LayerFeatures, choose_kernel

        dtype = getattr(torch, layer.dtype)
        choice = choose_kernel(
            LayerFeatures(dtype, layer.group, layer.head_dim, layer.head_dim), torch.device("cuda", 0)
        )
    except Exception as error:  # the GPU itself may be broken, or full
        return {"all": _first_line(error)}
    return {**dict(choice.lacks), **({choice.kernel.name: ""} if choice.kernel else {})}


def _first_line(error: BaseException | str) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


if __name__ == "__main__":
    main()
