"""Packages, build tools and attention backends: what is installed (nothing is imported to find out), and checks of it."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packtrain.diagnose.facts import Check, Facts, RunNeeds, Software, Torch
from packtrain.diagnose.probe import Inquiry, command
from packtrain.plan.launcher_settings import STAGES

PACKAGES = (
    *("packtrain", "torch", "transformers", "trl", "accelerate", "datasets", "huggingface_hub", "peft"),
    *("tokenizers", "deepspeed", "bitsandbytes", "liger-kernel", "vllm", "flash-attn", "flash-attn-3"),
    *("flash-attn-4", "kernels", "triton", "torchao", "safetensors", "numpy", "pyarrow", "hydra-core"),
    *("omegaconf", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
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
_TOOLS = {
    "C++ compiler": ("c++", "apt install g++ (or your system's compiler)"),
    "ninja": ("ninja", "pip install ninja"),
}
"""What DeepSpeed compiles its parts with: program, and how to get it."""


def ask_software(inquiry: Inquiry) -> None:
    """Asks git for the commit of each checkout."""
    for name, folder in _checkouts():
        inquiry.ask(f"git {name}", lambda at=str(folder): command(("git", "-C", at, "rev-parse", "--short=7", "HEAD")))


def software_of(inquiry: Inquiry) -> Software:
    """What is installed."""
    packages = {name: version_of(name) for name in PACKAGES}
    where = {name: shutil.which(program) or _beside(program) for name, (program, _) in _TOOLS.items()}
    commits = {name: inquiry.answer(f"git {name}", "").strip() for name, _ in _checkouts()}
    return Software(platform.platform(), platform.python_version(), packages, tuple(conflicts()), where, commits)


def _beside(program: str) -> str | None:
    """A program that is installed beside this Python, where a run finds it too."""
    return shutil.which(program, path=str(Path(sys.executable).parent))


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


def conflicts() -> Iterator[tuple[str, str]]:
    """What packtrain needs and is not installed in a version that will do, with the version that is."""
    from packaging.requirements import Requirement

    for wanted in map(Requirement, metadata.requires("packtrain") or []):
        found = version_of(wanted.name)
        counts = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if counts and (found is None or not wanted.specifier.contains(found, prereleases=True)):
            yield f"{wanted.name}{wanted.specifier}", found or "none"


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
    """Whether packtrain's own requirements are met, and what DeepSpeed needs where the run asks for it."""
    software, deepspeed = facts.software, facts.software.packages.get("deepspeed")
    if software.conflicts:
        words = "; ".join(f"packtrain needs {wanted}, found {found}" for wanted, found in software.conflicts)
        fix = "pip install " + " ".join(f"'{wanted}'" for wanted, _ in software.conflicts)
        yield Check("packages", "fail", words, fix)
    else:
        yield Check("packages", "ok", "packtrain's requirements are met")
    missing = [name for name in _TOOLS if not software.tools.get(name)]
    if needs.strategy not in STAGES:
        words = f"DeepSpeed {deepspeed or 'is not installed'}"
        yield Check("deepspeed", "ok", words + ("; this run does not use it" if needs.configured else ""))
    elif deepspeed is None:
        what = f"strategy={needs.strategy}, and DeepSpeed is not installed"
        yield Check("deepspeed", "fail", what, "pip install 'packtrain[deepspeed]'")
    elif missing:
        what = f"DeepSpeed {deepspeed} compiles parts of itself, and there is no {' and no '.join(missing)}"
        status = "fail" if needs.strategy == "zero3_offload" or not facts.gpus.gpus else "warn"
        yield Check("deepspeed", status, what, "; ".join(_TOOLS[name][1] for name in missing))
    else:
        yield Check("deepspeed", "ok", f"{deepspeed} for strategy={needs.strategy}, with {' and '.join(_TOOLS)}")


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
    if needs.dtype not in ("bfloat16", "float16"):
        return None, f"the layers compute in {needs.dtype}, the kernels in bfloat16 and float16"
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
    on_any = {
        "segmented": "an attention function once per document, on any device; auto proves on the loaded model that it is exact",
        "per_document": "the model once per document, on any device and for any model",
        "sdpa_mask": "one dense mask, the plain reference; slow for long rows",
    }
    flash = {"available": kernel is not None, "why": kernel or why, "kernels": dict(facts.torch.kernels or {})}
    return {"flash": flash, **{name: {"available": True, "why": words} for name, words in on_any.items()}}


CHECKS = (check_packages, check_attention)
