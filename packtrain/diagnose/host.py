"""The machine beside its GPUs: packages, limits, memory, cores, folders, network; and checks."""

from __future__ import annotations

import os
import platform
import resource
import socket
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import psutil

from packtrain.diagnose.facts import GIB, Check, Facts, Folder, Host, PlannedRun
from packtrain.monitor.processes import free_memory
from packtrain.plan.network_settings import FIX, LOOPBACK, silence_for
from packtrain.plan.surroundings import INSTALL, lack_of_compiler
from packtrain.run_folder import installed_version
from packtrain.wording import counted, size

PACKAGES = (
    *("packtrain", "torch", "transformers", "trl", "accelerate", "datasets", "huggingface_hub", "peft"),
    *("tokenizers", "deepspeed", "bitsandbytes", "liger-kernel", "vllm", "flash-attn", "flash-attn-3"),
    *("flash-attn-4", "kernels", "triton", "torchao", "safetensors", "numpy", "pyarrow", "hydra-core"),
    *("omegaconf", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
)
_FOLDERS = {"trainer.output_dir": "output-folder", "data.cache_dir": "cache-folder", "HF_HOME": "hub-cache"}
_REPORTED = (
    *("ACCELERATE_", "CONDA_PREFIX", "CUBLAS", "CUDA_", "CUDNN_", "DS_", "FI_", "FSDP_", "GLOO_", "HF_", "KMP_", "LD_"),
    *("MASTER_", "MKL_", "NCCL_", "NVIDIA_", "NVTE_", "OMP_", "PACKTRAIN_", "PYTHONPATH", "PYTORCH_", "SLURM_JOB_ID"),
    *("SLURM_JOB_NODELIST", "TMPDIR", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "UCX_", "VIRTUAL_ENV"),
)


def read_host() -> Host:
    """Read packages, limits, memory and cores. Imports nothing; takes two seconds if a name server is silent."""
    shm, files = Path("/dev/shm"), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Host(
        platform=platform.platform(),
        python=platform.python_version(),
        packages={name: installed_version(name) for name in PACKAGES},
        conflicts=tuple(conflicts()),
        nofile=-1 if files == resource.RLIM_INFINITY else files,
        shm=psutil.disk_usage(str(shm)).total if shm.is_dir() else None,
        memory=psutil.virtual_memory().total,
        memory_free=free_memory(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        environment=reported_variables(os.environ),
        uncompiled=lack_of_compiler(),
        silence=silence_for(LOOPBACK) or silence_for(socket.gethostname()),
    )


def conflicts() -> Iterator[tuple[str, str]]:
    """Yield packtrain's requirements without a suitable installed version, with the installed version."""
    from packaging.requirements import Requirement

    for requirement in map(Requirement, metadata.requires("packtrain") or []):
        version = installed_version(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and (version is None or not requirement.specifier.contains(version, prereleases=True)):
            yield f"{requirement.name}{requirement.specifier}", version or "none"


def reported_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that change how training runs, by name."""
    proxies = ("http_proxy", "https_proxy", "no_proxy")
    names = sorted(name for name in env if name.startswith(_REPORTED) or name.lower() in proxies)
    return {name: env[name] for name in names}


def read_folder(setting: str, path: str) -> Folder:
    """Read the facts of the folder `path`. Blocks as long as its disk does."""
    wanted = Path(path).expanduser().absolute()
    parent = next(folder for folder in (wanted, *wanted.parents) if os.path.lexists(folder))
    usage, lack = psutil.disk_usage(str(parent)), ""
    try:  # permissions say little about network disks and root
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        lack = f"cannot be written to: {error.strerror}"
    return Folder(setting, str(wanted), usage.free, usage.total, lack)


def check_run(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check that the run can start here with its config."""
    for problem in (*run.problems, *run.obstacles):
        what = f"{problem.where}: {problem.what}" if problem.where else problem.what
        yield Check("run", "fail" if problem in run.problems else "warn", what, problem.fix)
    if not (run.problems or run.obstacles) and run.configured:
        shape = f"{counted(run.nodes, 'machines')} of {counted(run.per_node, 'processes')}"
        yield Check("run", "ok", f"{shape}, strategy={run.config.strategy.name}")


def check_packages(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check that packtrain's requirements are met, and DeepSpeed is there if needed."""
    host, deepspeed, strategy = facts.host, facts.host.packages.get("deepspeed"), run.config.strategy.spec
    words = "; ".join(f"packtrain needs {wanted}, found {version}" for wanted, version in host.conflicts)
    fix = "pip install " + " ".join(f"'{wanted}'" for wanted, _ in host.conflicts)
    yield Check("packages", "fail" if words else "ok", words or "packtrain's requirements are met", fix)
    missing = strategy.package == "deepspeed" and deepspeed is None
    what = deepspeed or f"not installed, {'but needed by strategy=' + strategy.name if missing else 'and not needed'}"
    yield Check("deepspeed", "fail" if missing else "ok", what, "pip install 'packtrain[deepspeed]'")


def check_limits(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check /dev/shm, open files, memory and a compiler. NCCL and data workers pass their data through /dev/shm; sockets are files, too."""
    host = facts.host
    fix = "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm"
    what = f"{size(host.shm)} in /dev/shm, where the processes of a machine pass their data"
    yield Check("shared-memory", "warn" if host.shm is not None and host.shm < GIB else "ok", what, fix)
    few = host.nofile is not None and -1 < host.nofile < (4096 if run.nodes * run.per_node > 1 else 1024)
    what = "no limit" if host.nofile == -1 else f"{host.nofile or 'not known'} for each process"
    fix = "ulimit -n 65536 (for good: '* - nofile 65536' in /etc/security/limits.conf)"
    yield Check("open-files", "warn" if few else "ok", what, fix)
    what = f"{size(host.memory_free)} free in the machine or its cgroup, of {size(host.memory)}"
    fix = "end other processes, or more memory (Slurm: --mem=0 in topology.sbatch for all of the machine's; docker run --memory)"
    little = host.memory_free is not None and host.memory_free < 2 * GIB
    yield Check("memory", "warn" if little else "ok", what, fix)
    if facts.driver.gpus:
        what = host.uncompiled or "Triton has what it needs to compile"
        yield Check("compiler", "warn" if host.uncompiled else "ok", what, INSTALL)


def check_folders(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check the folders that the run writes to. Without the output folder there is no run."""
    for folder in facts.folders:
        name, elsewhere = _FOLDERS[folder.setting], f"{folder.setting} on another disk"
        if folder.lack:
            status = "fail" if name == "output-folder" and run.configured else "warn"
            fix = f"df {folder.path} (does it answer?), chmod u+w, or {elsewhere}"
            yield Check(name, status, f"{folder.path}: {folder.lack}", fix)
        else:
            little = folder.free is not None and folder.free < GIB
            space = f"{folder.path}: {size(folder.free)} free of {size(folder.total)}"
            yield Check(name, "warn" if little else "ok", space, elsewhere)


def check_network(facts: Facts, run: PlannedRun) -> Iterator[Check]:
    """Check the network for runs on several machines: RDMA ports, a silent name server."""
    ports, silence = facts.network.ports, facts.host.silence
    words = "; ".join(
        f"{port.device}:{port.number} ({port.layer}, {'ACTIVE' if port.active else 'DOWN'}, {port.rate or '?'} Gb/s)"
        for port in ports
    )
    status = "warn" if any(not port.active and port.layer == "InfiniBand" for port in ports) else "ok"
    if not ports or run.variables(facts).get("NCCL_IB_DISABLE") == "1":
        words, status = f"{words or 'no RDMA device'}: machines would talk by TCP", "ok"
    elif run.nodes > 1 and not any(port.active for port in ports):
        status = "fail"
    fix = "check cable, switch and subnet manager (ibstat); or topology.environment.NCCL_IB_DISABLE=1 to use TCP"
    yield Check("infiniband", status, words, fix)
    if silence:
        yield Check("name-server", "warn", f"{silence}, and torch asks it at each connection, for 10 s", FIX)


CHECKS = (check_run, check_limits, check_folders, check_packages, check_network)
