"""Facts from the GPU driver and torch, and checks of them.

nvidia-smi asks the driver; `python -m packtrain.diagnose.devices DTYPE` asks torch: importing torch may crash, and the first call
of CUDA may hang. A report is needed most in those cases, so each fact is printed on stdout at once, as a line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from packtrain.attention.spec import BACKENDS, Backend, tried_by_auto
from packtrain.diagnose.facts import GIB, MIB, Check, Driver, Facts, Gpu, PlannedRun, Torch, ask_python
from packtrain.wording import first_line, size, whole

VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY = "index,name,uuid,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,driver_version"
_BUSY_MEMORY = GIB


def ask_driver(limit_s: float) -> Driver:
    """Ask the driver for the machine's GPUs. If it does not answer, return the `error`."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return Driver("there is no nvidia-smi" if Path("/proc/driver/nvidia").exists() else "")
    query = [command, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Driver(first_line(error))
    if done.returncode or not done.stdout.strip():
        return Driver((done.stdout or done.stderr).strip().partition("\n")[0] or "nvidia-smi shows no GPU")
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line]
    return Driver(version=rows[0][-1], gpus=tuple(_gpu(row) for row in rows))


def _gpu(row: list[str]) -> Gpu:
    index, name, uuid, memory, used, errors, _ = row
    total, in_use = ((number := whole(text)) and number * MIB for text in (memory, used))
    trouble = f"{errors} uncorrected memory errors since the driver was loaded" if whole(errors) else ""
    return Gpu(whole(index) or 0, name, uuid, total, in_use, trouble)


def ask_torch(limit_s: float, dtype: str, env: Mapping[str, str]) -> Torch:
    """Ask torch within the time limit, under a run's variables `env`. Its flash kernels are tried on a usual layer that computes in
    `dtype`."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
    return read_torch(*ask_python(__name__, dtype, limit_s=limit_s, env={**quiet, **env}))


def read_torch(output: str, error: str = "") -> Torch:
    """Read the facts in the output of torch's process; `error` is why it is incomplete."""
    facts: dict[str, Any] = {"error": error}
    for line in output.splitlines():
        with suppress(ValueError):  # the last line may be incomplete
            facts |= json.loads(line)
    return Torch(**facts)


def _print_torch(dtype: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # all other output goes to stderr

    def report(**facts: Any) -> None:
        print(json.dumps(facts, default=str), file=out, flush=True)

    try:
        import torch

        report(version=torch.__version__, cuda=torch.version.cuda)
    except BaseException as error:  # a broken library may even exit
        report(error=f"torch cannot be imported: {type(error).__name__}: {first_line(error)}")
        return
    with suppress(Exception):  # builds without NCCL fail in several ways
        from torch.cuda import nccl

        report(nccl=".".join(map(str, nccl.version())))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        available = torch.cuda.is_available()
    remarks = dict.fromkeys(str(item.message).partition("\n")[0] for item in caught if "CUDA" in str(item.message))
    report(available=available, devices=names, warning="; ".join(remarks))
    report(accelerators=accelerators(names), accelerate=accelerate_config())
    if available:
        report(kernels=_try_kernels(dtype))


def accelerators(gpus: list[str]) -> list[str]:
    """Names of torch's devices, in the order and words of `trl env`."""
    import torch

    if gpus or torch.backends.mps.is_available():
        return gpus or ["MPS"]
    return [torch.xpu.get_device_name(index) for index in range(torch.xpu.device_count())]


def accelerate_config() -> dict[str, Any] | None:
    """Config that `accelerate config` has written, as `trl env` prints it.

    accelerate is imported only if there is such a config.
    """
    if not os.path.isfile(os.path.join(constants.HF_HOME, "accelerate", "default_config.yaml")):
        return None
    from accelerate.commands.config import load_config_from_file

    try:
        return load_config_from_file(None).to_dict()
    except Exception as error:
        return {"error": first_line(error)}


def _try_kernels(dtype: str) -> dict[str, dict[str, str]]:
    """Try the kernels of each backend that needs some. Return them with their lacks ("" for the right one)."""
    import torch

    tried: dict[str, dict[str, str]] = {}
    for backend in BACKENDS.all().values():
        if backend.kernels:
            try:
                tried[backend.name] = import_module(backend.kernels).try_kernels(getattr(torch, dtype))
            except Exception as error:  # the GPU itself may be broken, or full
                tried[backend.name] = {"all": first_line(error)}
    return tried


def check_driver(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check that the driver answers."""
    driver, name = facts.driver, "gpu-driver"
    if driver.gpus:
        yield Check(name, "ok", driver.version or "version not known")
    elif not driver.error:
        yield Check(name, "ok", "no NVIDIA driver on this machine: runs are on the CPU")
    else:
        fix = "does nvidia-smi answer? ask Slurm for GPUs (topology.gpus_per_node), start the container with --gpus all, or reboot"
        yield Check(name, "fail", f"the driver shows no GPU: {driver.error}", fix)


def check_torch(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check that torch works, and can use the GPUs of the machine."""
    torch, gpus = facts.torch, facts.driver.gpus
    built = f"torch {torch.version}" + (f" for CUDA {torch.cuda}" if torch.cuda else "")
    if torch.available is None and (error := torch.error or "torch was not asked"):
        fix = "time python -c 'import torch; print(torch.cuda.is_available())' (a slow disk, a broken driver?)"
        fix = fix if torch.version else f"pip install --force-reinstall torch, or {fix}"
        late = "no answer" in error  # it hangs, or the machine is busy
        yield Check("torch", "warn" if late else "fail", f"{built}: {error}" if torch.version else error, fix)
    elif select_gpus(facts, run) and torch.available is False:
        why = torch.warning or ("it does not say why" if torch.cuda else "it is a build without CUDA")
        fix = "reinstall torch for a CUDA that the driver has (nvidia-smi); or check the driver and its fabric manager "
        fix += "(nvidia-smi -q); in a container start it with --gpus all"
        yield Check("torch", "fail", f"{built} finds no GPU where the driver shows {len(gpus)}: {why}", fix)
    else:
        yield Check("torch", "ok", f"{built} ({torch.warning})" if torch.warning else built)


def check_gpus(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check GPUs against the run's processes: number, health, memory, and memory held by other programs."""
    gpus = select_gpus(facts, run)
    if not facts.driver.gpus:
        return
    named = ", ".join(f"{count} × {kind}" for kind, count in Counter(gpu.name for gpu in gpus).items())
    if not gpus:
        yield Check("gpus", "warn", f"{VISIBLE} hides all {len(facts.driver.gpus)} GPUs", f"unset {VISIBLE}")
    elif run.configured and run.per_node > len(gpus):
        what = f"{run.per_node} processes on this machine, and {len(gpus)} visible GPUs ({named})"
        yield Check("gpus", "fail", what, f"topology.gpus_per_node={len(gpus)}, or check {VISIBLE} and nvidia-smi")
    else:
        yield Check("gpus", "ok", named)
    sick = "; ".join(f"GPU {gpu.index} ({gpu.name}): {gpu.trouble}" for gpu in gpus if gpu.trouble)
    fix = f"nvidia-smi --gpu-reset -i N (as root, GPU idle), or exclude it by {VISIBLE}"
    yield Check("gpu-health", "fail" if sick else "ok", sick or "no memory errors", fix)
    used = [gpu for gpu in gpus if (gpu.memory_used or 0) > _BUSY_MEMORY]
    words = "; ".join(f"GPU {gpu.index} is in use: {size(gpu.memory_used)} of its memory" for gpu in used)
    fix = f"end those processes (nvidia-smi), or choose others by {VISIBLE}"
    yield Check("gpu-use", "warn" if used else "ok", words or "all idle", fix)


def select_gpus(facts: Facts, run: PlannedRun) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES shows the run; all if it is not set."""
    wanted, gpus = run.variables(facts).get(VISIBLE), facts.driver.gpus
    if wanted is None:
        return gpus
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    return tuple(gpu for name in names for gpu in gpus if name == str(gpu.index) or gpu.uuid.startswith(name))


def check_attention(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check the backend that model.attention selects for most models. The loaded model decides."""
    asked, mode = run.config.model.attention, run.config.packing.mode
    backend = run.config.model.backend or tried_by_auto()[0]
    kernel, why = _kernel(backend, facts, run)
    if mode == "padding" or not backend.kernels:
        yield Check("attention", "ok", f"no flash kernel is needed: packing.mode={mode}, model.attention={asked}")
    elif kernel:
        yield Check("attention", "ok", f"{backend.name}: {kernel}{f' ({why})' if why else ''}")
    elif asked == backend.name:
        yield Check("attention", "fail", f"model.attention={asked} is not available: {why}", "model.attention=auto")
    else:
        words = f"no {backend.name} kernel serves packed rows, they take slower ways: {why}"
        yield Check("attention", "ok" if facts.torch.kernels is None else "warn", words, backend.get_kernels)


def _kernel(backend: Backend, facts: Facts, run: PlannedRun) -> tuple[str | None, str]:
    """Return the backend's kernel for the run's layers, and the lacks of better ones.

    Without a right kernel return None and the reason. The kernel is "" if the backend needs none.
    """
    torch = facts.torch
    if backend.devices == ("cuda",) and torch.available is False:
        return None, "the device is no GPU of CUDA"
    if backend.formats and run.dtype not in backend.formats:
        formats = " and ".join(backend.formats)
        return None, f"the layers compute in {run.dtype}, the kernels in {formats} (trainer.mixed_precision=bf16)"
    if not backend.kernels:
        return "", "it needs no kernel"
    if torch.kernels is None:
        return None, f"the kernels were not tried ({torch.error or 'no time'})"
    tried = torch.kernels.get(backend.name, {})
    lacking = "; ".join(f"{name}: {lack}" for name, lack in tried.items() if lack)
    return next((name for name, lack in tried.items() if not lack), None), lacking


def attention_json(facts: Facts, run: PlannedRun) -> dict[str, dict[str, object]]:
    """Return for each backend whether it can serve packed rows here, and why."""
    found: dict[str, dict[str, object]] = {}
    for name, backend in BACKENDS.all().items():
        kernel, why = _kernel(backend, facts, run)
        found[name] = {"available": kernel is not None, "why": kernel or why}
        if backend.kernels:
            found[name]["kernels"] = dict((facts.torch.kernels or {}).get(name, {}))
    return found


CHECKS = (check_torch, check_driver, check_gpus, check_attention)

if __name__ == "__main__":
    _print_torch(sys.argv[1])
