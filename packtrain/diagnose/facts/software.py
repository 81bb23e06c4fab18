"""Packages and build tools: what `trl env` prints, the versions that packtrain asks for, and what compiles.

Nothing is imported to find a version: a report is wanted most where an import fails.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from packtrain.diagnose.facts.facts import Conflict, Software, Torch
from packtrain.plan.shapes import hub_home

PACKAGES = (
    "packtrain",
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "datasets",
    "huggingface_hub",
    "peft",
    "tokenizers",
    "deepspeed",
    "bitsandbytes",
    "liger-kernel",
    "vllm",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "kernels",
    "triton",
    "torchao",
    "safetensors",
    "numpy",
    "pyarrow",
    "hydra-core",
    "omegaconf",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
_CHECKED = ("packtrain", "transformers", "trl", "accelerate", "peft", "datasets", "deepspeed", "liger-kernel", "vllm")
TOOLS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "C++ compiler": (("c++", "--version"), r"(.+)"),
    "ninja": (("ninja", "--version"), r"(\d[\w.]*)"),
    "nvcc": (("nvcc", "--version"), r"release [\d.]+, V([\d.]+)"),
}
"""Name → its command, and where its answer has the version."""
_NVCC = "/usr/local/cuda/bin/nvcc"


def read_software(tools: Mapping[str, str | None]) -> Software:
    """What is installed; `tools` are the versions of build tools."""
    packages = {name: version_of(name) for name in PACKAGES}
    return Software(
        platform=platform.platform(),
        python=platform.python_version(),
        packages=packages,
        conflicts=tuple(conflict for name in _CHECKED if packages[name] for conflict in conflicts_of(name)),
        tools=tools,
        accelerate=accelerate_config(os.environ),
        commits={name: commit for name in ("trl", "packtrain") if (commit := commit_of(name))},
    )


def version_of(package: str) -> str | None:
    """The installed version; None where there is none."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def conflicts_of(package: str) -> Iterator[Conflict]:
    """What `package` needs and is not installed in a version that will do; extras count only where they are installed."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in metadata.requires(package) or []:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        found = version_of(wanted.name)
        always = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        extra = not always and found is not None and _is_wanted_extra(package, wanted)
        if not (always or extra):
            continue
        if found is None or not wanted.specifier.contains(found, prereleases=True):
            yield Conflict(package, f"{wanted.name}{wanted.specifier}", found)


def _is_wanted_extra(package: str, wanted: Any) -> bool:
    """packtrain's extras are packages that a run may use; other packages' extras mostly concern their own development."""
    if package != "packtrain":
        return False
    return any(
        wanted.marker.evaluate({"extra": name}) for name in ("deepspeed", "flash", "tensorboard", "wandb", "mlflow")
    )


def commit_of(package: str) -> str:
    """The commit of the checkout that a package runs from, "" where it is installed as usual."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin:
        return ""
    git = Path(spec.origin).parent.parent / ".git"
    with suppress(OSError):
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head[:7]
        name = head.removeprefix("ref: ")
        if (git / name).is_file():
            return (git / name).read_text().strip()[:7]
        packed = re.search(rf"^(\w{{7}})\w* {re.escape(name)}$", (git / "packed-refs").read_text(), re.MULTILINE)
        return packed[1] if packed else ""
    return ""


def accelerate_config(env: Mapping[str, str]) -> dict[str, Any] | None:
    """accelerate's default config file as it stands; None where there is none."""
    import yaml

    folder = Path(hub_home(env)).expanduser() / "accelerate"
    for name, read in (("default_config.yaml", yaml.safe_load), ("default_config.json", json.loads)):
        if (folder / name).is_file():
            try:
                content = read((folder / name).read_text(encoding="utf-8"))
            except (OSError, ValueError, yaml.YAMLError):
                return {"error": f"{folder / name} cannot be read"}
            return content if isinstance(content, dict) else {"error": f"{folder / name} is no mapping"}
    return None


def accelerators(torch: Torch) -> str:
    """TRL's line of them."""
    if torch.error:
        return f"not known ({torch.error})"
    return ", ".join(device.name for device in torch.devices) or ("MPS" if torch.kind == "mps" else "cpu")


def trl_lines(software: Software, torch: Torch) -> dict[str, Any]:
    """Name → value of the lines of `trl env`, in its order and its words."""
    packages = software.packages
    commit = software.commits.get("trl")

    def version(name: str) -> str:
        return packages.get(name) or "not installed"

    return {
        "Platform": software.platform,
        "Python version": software.python,
        "TRL version": f"{version('trl')}+{commit}" if commit else version("trl"),
        "PyTorch version": version("torch"),
        "accelerator(s)": accelerators(torch),
        "Transformers version": version("transformers"),
        "Accelerate version": version("accelerate"),
        "Accelerate config": software.accelerate or "not found",
        "Datasets version": version("datasets"),
        "HF Hub version": version("huggingface_hub"),
        "bitsandbytes version": version("bitsandbytes"),
        "DeepSpeed version": version("deepspeed"),
        "Liger-Kernel version": version("liger-kernel"),
        "PEFT version": version("peft"),
        "vLLM version": version("vllm"),
    }


def tool_command(name: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """The command of a build tool as a run finds it: nvcc where torch looks for it (CUDA_HOME, PATH, its usual place), ninja
    beside this Python, too."""
    (program, *rest), _ = TOOLS[name]
    found = shutil.which(program, path=env.get("PATH"))
    if name == "nvcc" and (home := env.get("CUDA_HOME") or env.get("CUDA_PATH")):
        found = str(Path(home, "bin/nvcc"))
    elif name == "nvcc" and not found:
        found = shutil.which(_NVCC)
    elif name == "ninja" and not found:
        found = shutil.which(program, path=str(Path(sys.executable).parent))
    return (found or program, *rest)


def tool_version(name: str, said: str) -> str | None:
    """The version in what a build tool says of itself."""
    found = re.search(TOOLS[name][1], said)
    return found[1].strip() if found else None
