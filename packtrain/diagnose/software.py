"""Packages and attention backends: what is installed (nothing is imported to find out), and checks of it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from packtrain.diagnose.facts import Check, Facts, RunNeeds, Software, Torch
from packtrain.plan.launcher_settings import STAGES

PACKAGES = (
    *("packtrain", "torch", "transformers", "trl", "accelerate", "datasets", "huggingface_hub", "peft"),
    *("tokenizers", "deepspeed", "bitsandbytes", "liger-kernel", "vllm", "flash-attn", "flash-attn-3"),
    *("flash-attn-4", "kernels", "triton", "torchao", "safetensors", "numpy", "pyarrow", "hydra-core"),
    *("omegaconf", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
_ALSO_OF_TRL = {
    "Datasets": "datasets",
    "HF Hub": "huggingface_hub",
    "bitsandbytes": "bitsandbytes",
    "DeepSpeed": "deepspeed",
}
_ALSO_OF_TRL |= {"Liger-Kernel": "liger-kernel", "PEFT": "peft", "vLLM": "vllm"}

_FLASH_4 = "pip install 'packtrain[flash]' (FlashAttention 4, a wheel)"
_FASTER = {9: f"{_FLASH_4}, or FlashAttention 3 of the hub (docs/modes.md)", 10: _FLASH_4}
"""What is faster than torch's kernel and FlashAttention 2, by the major number of the compute capability (docs/modes.md)."""


def read_software() -> Software:
    """What is installed."""
    packages = {name: version_of(name) for name in PACKAGES}
    return Software(platform.platform(), platform.python_version(), packages, tuple(conflicts()))


def version_of(package: str) -> str | None:
    """The installed version; None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def conflicts() -> Iterator[tuple[str, str]]:
    """Requirements of packtrain that are not installed in a suitable version, with the installed version."""
    from packaging.requirements import Requirement

    for wanted in map(Requirement, metadata.requires("packtrain") or []):
        found = version_of(wanted.name)
        counts = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if counts and (found is None or not wanted.specifier.contains(found, prereleases=True)):
            yield f"{wanted.name}{wanted.specifier}", found or "none"


def trl_lines(software: Software, torch: Torch) -> dict[str, Any]:
    """Name → value of the lines of `trl env`, in its order and its words."""
    installed = {name: software.packages.get(name) or "not installed" for name in PACKAGES}
    return {
        "Platform": software.platform,
        "Python version": software.python,
        "TRL version": installed["trl"],
        "PyTorch version": installed["torch"],
        "accelerator(s)": f"not known ({torch.error})" if torch.error else ", ".join(torch.devices) or "cpu",
        "Transformers version": installed["transformers"],
        "Accelerate version": installed["accelerate"],
        "Accelerate config": torch.accelerate or ("not found" if torch.version else "not known"),
        **{f"{name} version": installed[package] for name, package in _ALSO_OF_TRL.items()},
    }


def check_packages(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether packtrain's own requirements are met, and DeepSpeed is there where the run asks for it."""
    software, deepspeed = facts.software, facts.software.packages.get("deepspeed")
    if software.conflicts:
        words = "; ".join(f"packtrain needs {wanted}, found {found}" for wanted, found in software.conflicts)
        fix = "pip install " + " ".join(f"'{wanted}'" for wanted, _ in software.conflicts)
        yield Check("packages", "fail", words, fix)
    else:
        yield Check("packages", "ok", "packtrain's requirements are met")
    if needs.strategy in STAGES and deepspeed is None:
        what = f"strategy={needs.strategy}, and DeepSpeed is not installed"
        yield Check("deepspeed", "fail", what, "pip install 'packtrain[deepspeed]'")
    else:
        yield Check("deepspeed", "ok", deepspeed or "not installed, and not needed")


def check_attention(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """The backend that model.attention comes to for most models, and why; the loaded model has the last word."""
    kernel, why = flash_kernel(facts, needs)
    slower = f"no flash kernel serves packed rows, they take slower ways: {why}"
    if not needs.packed:
        yield Check("attention", "ok", "the model's own: packing.mode=padding")
    elif needs.attention not in ("auto", "flash"):
        yield Check("attention", "ok", f"{needs.attention}: asked for")
    elif kernel:
        faster = "" if kernel.startswith(("FlashAttention 4", "FlashAttention 3")) else _faster(facts.torch)
        found = f"flash: {kernel}{f' ({why})' if why else ''}"
        yield Check("attention", "warn" if faster else "ok", found, faster)
    elif needs.attention == "flash":
        yield Check("attention", "fail", f"model.attention=flash is not available: {why}", "model.attention=auto")
    elif facts.torch.kernels is None:
        yield Check("attention", "ok", slower)
    else:
        halved = needs.dtype in ("bfloat16", "float16")
        fix = _faster(facts.torch) or "docs/modes.md names the flash kernels for each GPU"
        yield Check("attention", "warn", slower, fix if halved else "trainer.mixed_precision=bf16")


def _faster(torch: Torch) -> str:
    """What to install for this generation of NVIDIA's GPUs, where FlashAttention 4 is not installed; "" if nothing is known."""
    missing = torch.cuda and (torch.kernels or {}).get("FlashAttention 4") == "not installed"
    return _FASTER.get(torch.capability[0], "") if missing and torch.capability else ""


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
    on_any = {
        "segmented": "an attention function once per document, on any device; auto proves on the loaded model that it is exact",
        "per_document": "the model once per document, on any device and for any model",
        "sdpa_mask": "one dense mask, the plain reference; slow for long rows",
    }
    flash = {"available": kernel is not None, "why": kernel or why, "kernels": dict(facts.torch.kernels or {})}
    return {"flash": flash, **{name: {"available": True, "why": words} for name, words in on_any.items()}}


CHECKS = (check_packages, check_attention)
