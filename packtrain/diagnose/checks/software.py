"""Checks of versions and of what a run needs to have installed. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packtrain.diagnose.checks.check import Check, first_or, passed
from packtrain.diagnose.checks.needs import Needs
from packtrain.diagnose.facts.facts import Facts
from packtrain.plan.launcher_settings import STAGES

VISIBLE = "CUDA_VISIBLE_DEVICES"
_COMPILING = ("C++ compiler", "ninja")
_INSTALL = {"C++ compiler": "apt install g++ (or your system's compiler)", "ninja": "pip install ninja"}


def check_packages(facts: Facts, needs: Needs) -> Iterator[Check]:
    """Versions that do not work together, by what the packages themselves say."""
    own = [one for one in facts.software.conflicts if one.by == "packtrain"]
    others = [one for one in facts.software.conflicts if one.by != "packtrain"]

    def words(conflicts) -> str:
        return "; ".join(f"{one.by} needs {one.requirement}, found {one.found or 'none'}" for one in conflicts)

    def install(conflicts) -> str:
        return "pip install " + " ".join(f"'{one.requirement}'" for one in conflicts)

    if own:
        yield Check("packages", "fail", words(own), install(own))
    if others:
        yield Check("other-packages", "warn", words(others), install(others))
    if not facts.software.conflicts:
        count = sum(version is not None for version in facts.software.packages.values())
        yield passed("packages", f"{count} installed ones fit together")


def check_torch(facts: Facts, needs: Needs) -> Iterator[Check]:
    """Whether torch works, and can use the GPUs that the machine has."""
    torch, gpus = facts.torch, facts.gpus
    if torch.version is None:
        status = "warn" if "no answer" in torch.error else "fail"
        fix = (
            "pip install --force-reinstall torch"
            if status == "fail"
            else 'time python -c "import torch" (a slow disk?)'
        )
        yield Check("torch", status, torch.error or "torch was not asked", fix)
        return
    away = hidden(shown(facts, needs))
    looked_away = away or hidden(facts.host.environment.get(VISIBLE))  # torch was asked without the config's variables
    built = f"torch {torch.version}" + (f" for CUDA {torch.cuda}" if torch.cuda else "")
    if gpus.gpus and torch.cuda is None and not away:
        index = f"https://download.pytorch.org/whl/{_wheel_for(gpus.cuda)}"
        what = f"{built} is a build without CUDA, on a machine with {len(gpus.gpus)} GPUs"
        yield Check("torch", "fail", what, f"pip install --force-reinstall torch --index-url {index}")
    elif torch.cuda and gpus.cuda and not torch.available and _too_new(torch.cuda, gpus.cuda):
        what = f"{built}, but driver {gpus.driver} knows CUDA {gpus.cuda} at most"
        index = f"https://download.pytorch.org/whl/{_wheel_for(gpus.cuda)}"
        yield Check("torch", "fail", what, f"a newer driver, or pip install torch --index-url {index}")
    elif torch.cuda and gpus.gpus and torch.available is False and not looked_away:
        what = f"{built} finds no GPU where nvidia-smi shows {len(gpus.gpus)}: {torch.warning or 'it does not say why'}"
        yield Check("torch", "fail", what, _cuda_fix(torch.warning))
    elif torch.error and torch.available is None:
        late = "no answer" in torch.error  # it hangs, or the machine is busy: nobody knows yet
        what = f"{built}, but looking for GPUs ended otherwise: {torch.error}"
        fix = "time python -c 'import torch; print(torch.cuda.is_available())'"
        yield Check("torch", "fail" if gpus.gpus and not late else "warn", what, fix)
    else:
        yield from first_or("torch", _architectures(facts), built)


def _architectures(facts: Facts) -> Iterator[Check]:
    """A GPU that torch has no code for."""
    built = facts.torch.architectures
    majors = {re.sub(r"\D", "", one)[:-1] for one in built}
    for device in facts.torch.devices:
        number = re.sub(r"\D", "", device.capability or "")
        if built and number and number[:-1] not in majors and not any(one.startswith("compute_") for one in built):
            what = f"torch {facts.torch.version} has no code for {device.name} ({device.capability}), only {', '.join(built)}"
            yield Check("torch", "fail", what, "pip install --upgrade torch")
            return


def shown(facts: Facts, needs: Needs) -> str | None:
    """CUDA_VISIBLE_DEVICES as the run's processes will have it: of topology.environment, else of the one that asks."""
    return needs.environment.get(VISIBLE, facts.host.environment.get(VISIBLE))


def hidden(wanted: str | None) -> bool:
    """Whether this value of CUDA_VISIBLE_DEVICES takes all GPUs away on purpose."""
    return wanted is not None and (not wanted.strip() or wanted.strip().startswith("-"))


def _cuda_fix(warning: str) -> str:
    if "802" in warning or "not yet initialized" in warning:
        return "systemctl restart nvidia-fabricmanager (of the driver's version)"
    if "803" in warning or "too old" in warning:
        return "a newer NVIDIA driver, or a torch for an older CUDA"
    if "804" in warning:
        return "take cuda-compat out of LD_LIBRARY_PATH, or use it with a data-centre GPU only"
    return "look at CUDA_VISIBLE_DEVICES and the driver (nvidia-smi); in a container start it with --gpus all"


def _wheel_for(cuda: str | None) -> str:
    major = (cuda or "13").split(".")[0]
    return {"11": "cu118", "12": "cu126"}.get(major, "cu130")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _too_new(torch: str, driver: str) -> bool:
    """Within a major version a driver runs programs of newer minor ones."""
    return _number(torch)[0] > _number(driver)[0]


def check_deepspeed(facts: Facts, needs: Needs) -> Iterator[Check]:
    """What DeepSpeed needs to compile its parts, where the run asks for it."""
    version = facts.software.packages.get("deepspeed")
    tools = facts.software.tools
    missing = [name for name in _COMPILING if not tools.get(name)]
    fix = "; ".join(_INSTALL[name] for name in missing)
    if needs.strategy not in STAGES:
        with_it = f"DeepSpeed {version}" if version else "DeepSpeed is not installed"
        lacking = f", without {' and '.join(missing)}" if version and missing else ""
        yield passed(
            "deepspeed", f"{with_it}{lacking}; this run does not use it" if needs.configured else with_it + lacking
        )
        return
    asked = f"strategy={needs.strategy}"
    if version is None:
        yield Check(
            "deepspeed", "fail", f"{asked}, and DeepSpeed is not installed", "pip install 'packtrain[deepspeed]'"
        )
        return
    compiles = needs.strategy == "zero3_offload" or not facts.gpus.gpus
    nvcc, cuda = tools.get("nvcc"), facts.torch.cuda
    if missing:
        what = f"{asked}: DeepSpeed {version} compiles parts of itself, and there is no {' and no '.join(missing)}"
        yield Check("deepspeed", "fail" if compiles else "warn", what, fix)
    elif compiles and nvcc and cuda and _number(nvcc)[0] != _number(cuda)[0]:
        what = f"{asked}: nvcc is of CUDA {nvcc}, torch of {cuda}; DeepSpeed refuses to compile its parts then"
        yield Check("deepspeed", "fail", what, f"install CUDA {cuda}'s nvcc and point CUDA_HOME at it")
    elif needs.strategy == "zero3_offload" and cuda and not nvcc:
        what = f"{asked}: DeepSpeed compiles its CPU Adam against CUDA's headers, and there is no nvcc"
        yield Check("deepspeed", "warn", what, f"install CUDA {cuda}'s nvcc and point CUDA_HOME at it")
    else:
        yield passed(
            "deepspeed", f"{version} for {asked}, with {', '.join(f'{name} {tools[name]}' for name in _COMPILING)}"
        )


def check_attention(facts: Facts, needs: Needs) -> Iterator[Check]:
    """Whether packed rows can be attended to as asked, and by the fastest kernels."""
    found, why = flash_kernel(facts, needs)
    asked = needs.attention
    if asked == "flash" and needs.packed and found is None:
        yield Check("attention", "fail", f"model.attention=flash is not available: {why}", "model.attention=auto")
    elif asked in ("auto", "flash") and needs.packed and facts.torch.kernels is not None and found is None:
        what = f"no flash kernel serves packed rows, they take slower ways: {why}"
        yield Check("attention", "warn", what, "trainer.mixed_precision=bf16, or pip install 'packtrain[flash]'")
    else:
        backend, reason = chosen_backend(facts, needs)
        yield passed("attention", f"{backend}: {reason}")


def flash_kernel(facts: Facts, needs: Needs) -> tuple[str | None, str]:
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
    right = next((name for name, lack in torch.kernels.items() if not lack), None)
    return right, lacking


def chosen_backend(facts: Facts, needs: Needs) -> tuple[str, str]:
    """The backend that model.attention comes to for most models, and why; the loaded model has the last word."""
    kernel, why = flash_kernel(facts, needs)
    if not needs.packed:
        return "the model's own", "packing.mode=padding"
    if needs.attention not in ("auto", "flash"):
        return needs.attention, "asked for"
    if kernel:
        return "flash", f"{kernel} ({why})" if why else kernel
    return "segmented", f"no flash: {why}"


def attention_json(facts: Facts, needs: Needs) -> dict[str, dict[str, object]]:
    """Each backend with whether it can serve packed rows here, and why."""
    kernel, why = flash_kernel(facts, needs)
    any_device = "on any device; auto proves on the loaded model that it is exact"
    return {
        "flash": {
            "available": kernel is not None,
            "why": f"{kernel} ({why})" if kernel and why else kernel or why,
            "kernels": dict(facts.torch.kernels or {}),
        },
        "segmented": {"available": True, "why": f"an attention function once per document, {any_device}"},
        "per_document": {"available": True, "why": "the model once per document, on any device and for any model"},
        "sdpa_mask": {"available": True, "why": "one dense mask, the plain reference; slow for long rows"},
    }
