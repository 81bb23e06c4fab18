"""Packages, build tools and attention backends: what is installed (nothing is imported to find out), and checks of it."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packtrain.diagnose.facts import Check, Facts, RunNeeds, Software, Torch
from packtrain.diagnose.gpus import major
from packtrain.diagnose.probe import Inquiry, command
from packtrain.plan.launcher_settings import STAGES

PACKAGES = (
    *("packtrain", "torch", "transformers", "trl", "accelerate", "datasets", "huggingface_hub", "peft"),
    *("tokenizers", "deepspeed", "bitsandbytes", "liger-kernel", "vllm", "flash-attn", "flash-attn-3"),
    *("flash-attn-4", "kernels", "triton", "torchao", "safetensors", "numpy", "pyarrow", "hydra-core"),
    *("omegaconf", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
_CHECKED = ("packtrain", "transformers", "trl", "accelerate", "peft", "datasets", "deepspeed", "liger-kernel", "vllm")
_EXTRAS = ("", "deepspeed", "flash", "tensorboard", "wandb", "mlflow")
_TRL_LINES = {
    "Transformers version": "transformers",
    "Accelerate version": "accelerate",
    "Accelerate config": "",
    "Datasets version": "datasets",
    "HF Hub version": "huggingface_hub",
    "bitsandbytes version": "bitsandbytes",
    "DeepSpeed version": "deepspeed",
    "Liger-Kernel version": "liger-kernel",
    "PEFT version": "peft",
    "vLLM version": "vllm",
}
_VERSIONS = {"C++ compiler": r"(.+)", "ninja": r"(\d[\w.]*)", "nvcc": r"release [\d.]+, V([\d.]+)"}
_INSTALL = {"C++ compiler": "apt install g++ (or your system's compiler)", "ninja": "pip install ninja"}
_USUAL_NVCC = "/usr/local/cuda/bin/nvcc"


def ask_software(inquiry: Inquiry) -> None:
    """Asks every build tool, and git for the commit of each checkout."""
    for name in _VERSIONS:
        inquiry.ask(name, lambda name=name: command(tool_command(name, os.environ)))
    for name, folder in _checkouts():
        inquiry.ask(f"git {name}", lambda at=str(folder): command(("git", "-C", at, "rev-parse", "--short=7", "HEAD")))


def software_of(inquiry: Inquiry) -> Software:
    """What is installed."""
    packages, tools = {name: version_of(name) for name in PACKAGES}, {}
    for name, pattern in _VERSIONS.items():
        found = re.search(pattern, inquiry.answer(name, ""))
        tools[name] = found[1].strip() if found else None
    commits = {name: inquiry.answer(f"git {name}", "").strip() for name, _ in _checkouts()}
    conflicts = tuple(conflict for name in _CHECKED if packages[name] for conflict in conflicts_of(name))
    return Software(platform.platform(), platform.python_version(), packages, conflicts, tools, commits)


def tool_command(name: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """The command of a build tool as a run finds it: nvcc where torch looks for it, ninja beside this Python, too."""
    program = {"C++ compiler": "c++"}.get(name, name)
    found = shutil.which(program, path=env.get("PATH"))
    if name == "nvcc" and (home := env.get("CUDA_HOME") or env.get("CUDA_PATH")):
        found = str(Path(home, "bin/nvcc"))
    elif name == "nvcc" and not found:
        found = shutil.which(_USUAL_NVCC)
    elif name == "ninja" and not found:
        found = shutil.which(program, path=str(Path(sys.executable).parent))
    return (found or program, "--version")


def _checkouts() -> Iterator[tuple[str, Path]]:
    """The packages that run from a checkout, and where."""
    for name in ("trl", "packtrain"):
        spec = importlib.util.find_spec(name)
        if spec and spec.origin and (Path(spec.origin).parents[1] / ".git").exists():
            yield name, Path(spec.origin).parents[1]


def version_of(package: str) -> str | None:
    """The installed version; None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def conflicts_of(package: str) -> Iterator[tuple[str, str, str]]:
    """What `package` needs and is not installed in a version that will do; packtrain's extras count where they are installed."""
    from packaging.requirements import InvalidRequirement, Requirement

    for text in metadata.requires(package) or []:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        found = version_of(wanted.name)
        extras = _EXTRAS if package == "packtrain" and found else _EXTRAS[:1]
        counts = wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras)
        if counts and (found is None or not wanted.specifier.contains(found, prereleases=True)):
            yield package, f"{wanted.name}{wanted.specifier}", found or "none"


def trl_lines(software: Software, torch: Torch) -> dict[str, Any]:
    """Name → value of the lines of `trl env`, in its order and its words."""
    installed = {name: software.packages.get(name) or "not installed" for name in PACKAGES}
    commit = software.commits.get("trl")
    accelerators = ", ".join(device.name for device in torch.devices) or "cpu"
    return {
        "Platform": software.platform,
        "Python version": software.python,
        "TRL version": f"{installed['trl']}+{commit}" if commit else installed["trl"],
        "PyTorch version": installed["torch"],
        "accelerator(s)": f"not known ({torch.error})" if torch.error else accelerators,
        **{
            name: installed[package] if package else torch.accelerate or ("not found" if torch.version else "not known")
            for name, package in _TRL_LINES.items()
        },
    }


def check_packages(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Versions that do not work together, by what the packages themselves say."""
    own = [one for one in facts.software.conflicts if one[0] == "packtrain"]
    others = [one for one in facts.software.conflicts if one[0] != "packtrain"]
    for name, conflicts in (("packages", own), ("other-packages", others)):
        if conflicts:
            status = "fail" if conflicts is own else "warn"
            words = "; ".join("{} needs {}, found {}".format(*one) for one in conflicts)
            yield Check(name, status, words, "pip install " + " ".join(f"'{wanted}'" for _, wanted, _ in conflicts))
    if not facts.software.conflicts:
        count = sum(version is not None for version in facts.software.packages.values())
        yield Check("packages", "ok", f"{count} installed ones fit together")


def check_deepspeed(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """What DeepSpeed needs to compile its parts, where the run asks for it."""
    version, tools = facts.software.packages.get("deepspeed"), facts.software.tools
    nvcc, cuda, asked = tools.get("nvcc"), facts.torch.cuda, f"strategy={needs.strategy}"
    missing = [name for name in _INSTALL if not tools.get(name)]
    compiles = needs.strategy == "zero3_offload" or not facts.gpus.gpus
    install_nvcc = f"install CUDA {cuda}'s nvcc and point CUDA_HOME at it"
    if needs.strategy not in STAGES:
        lacking = f", without {' and '.join(missing)}" if version and missing else ""
        words = f"DeepSpeed {version or 'is not installed'}{lacking}"
        yield Check("deepspeed", "ok", words + ("; this run does not use it" if needs.configured else ""))
    elif version is None:
        what = f"{asked}, and DeepSpeed is not installed"
        yield Check("deepspeed", "fail", what, "pip install 'packtrain[deepspeed]'")
    elif missing:
        what = f"{asked}: DeepSpeed {version} compiles parts of itself, and there is no {' and no '.join(missing)}"
        fix = "; ".join(_INSTALL[name] for name in missing)
        yield Check("deepspeed", "fail" if compiles else "warn", what, fix)
    elif compiles and nvcc and cuda and major(nvcc) != major(cuda):
        what = f"{asked}: nvcc is of CUDA {nvcc}, torch of {cuda}; DeepSpeed refuses to compile its parts then"
        yield Check("deepspeed", "fail", what, install_nvcc)
    elif needs.strategy == "zero3_offload" and cuda and not nvcc:
        what = f"{asked}: DeepSpeed compiles its CPU Adam against CUDA's headers, and there is no nvcc"
        yield Check("deepspeed", "warn", what, install_nvcc)
    else:
        compilers = ", ".join(f"{name} {tools[name]}" for name in _INSTALL)
        yield Check("deepspeed", "ok", f"{version} for {asked}, with {compilers}")


def check_attention(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether packed rows can be attended to as asked, and by the fastest kernels."""
    found, why = flash_kernel(facts, needs)
    if needs.attention == "flash" and needs.packed and found is None:
        yield Check("attention", "fail", f"model.attention=flash is not available: {why}", "model.attention=auto")
    elif needs.attention == "auto" and needs.packed and facts.torch.kernels is not None and found is None:
        what = f"no flash kernel serves packed rows, they take slower ways: {why}"
        yield Check("attention", "warn", what, "trainer.mixed_precision=bf16, or pip install 'packtrain[flash]'")
    else:
        yield Check("attention", "ok", ": ".join(chosen_backend(facts, needs)))


def flash_kernel(facts: Facts, needs: RunNeeds) -> tuple[str | None, str]:
    """The flash kernel that serves the run's layers, or None and why there is none."""
    torch = facts.torch
    if torch.version is None:
        return None, torch.error or "torch was not asked"
    if torch.kind != "cuda":
        return None, f"the device is {torch.kind}"
    if needs.layer.dtype not in ("bfloat16", "float16"):
        return None, f"the layers compute in {needs.layer.dtype}, the kernels in bfloat16 and float16"
    if torch.kernels is None:
        return None, f"the kernels were not tried ({torch.error or 'no time'})"
    lacking = "; ".join(f"{name}: {lack}" for name, lack in torch.kernels.items() if lack)
    return next((name for name, lack in torch.kernels.items() if not lack), None), lacking


def chosen_backend(facts: Facts, needs: RunNeeds) -> tuple[str, str]:
    """The backend that model.attention comes to for most models, and why; the loaded model has the last word."""
    kernel, why = flash_kernel(facts, needs)
    if not needs.packed:
        return "the model's own", "packing.mode=padding"
    if needs.attention not in ("auto", "flash"):
        return needs.attention, "asked for"
    if kernel:
        return "flash", f"{kernel} ({why})" if why else kernel
    return "segmented", f"no flash: {why}"


def attention_json(facts: Facts, needs: RunNeeds) -> dict[str, dict[str, object]]:
    """Each backend with whether it can serve packed rows here, and why."""
    kernel, why = flash_kernel(facts, needs)
    flash = f"{kernel} ({why})" if kernel and why else kernel or why
    on_any = {
        "segmented": "an attention function once per document, on any device; auto proves on the loaded model that it is exact",
        "per_document": "the model once per document, on any device and for any model",
        "sdpa_mask": "one dense mask, the plain reference; slow for long rows",
    }
    found = {name: {"available": True, "why": words} for name, words in on_any.items()}
    return {
        "flash": {"available": kernel is not None, "why": flash, "kernels": dict(facts.torch.kernels or {})},
        **found,
    }


CHECKS = (check_packages, check_attention, check_deepspeed)
