"""Reading a machine: what the driver, torch, /sys and /proc say, and what they say when something is wrong."""

from __future__ import annotations

import threading
import time
import types
from pathlib import Path
from typing import Any

import psutil
import pytest

from packtrain.diagnose import devices, host
from packtrain.diagnose.devices import MARK, read_torch
from packtrain.diagnose.facts import Torch
from packtrain.diagnose.timeouts import Probe, Unanswered, ask_python

GIB = 2**30


class Nvml:
    """As pynvml speaks of one healthy H100, but for `changes`; what is not known here is NotSupported."""

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, gpus: int = 1, **changes: Any) -> None:
        healthy = {
            "Name": "NVIDIA H100 80GB HBM3",
            "UUID": "GPU-1",
            "MemoryInfo": types.SimpleNamespace(total=80 * GIB, used=4 * 2**20),
            "TotalEccErrors": 0,
        }
        self._known, self._gpus = {**healthy, **changes}, gpus

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVML_"):
            return 0
        if name.startswith("nvmlDeviceGet") and name.removeprefix("nvmlDeviceGet") in self._known:
            value = self._known[name.removeprefix("nvmlDeviceGet")]
            return lambda handle, *args: value
        raise AttributeError(name)

    def nvmlDeviceGetCount(self) -> int:
        return self._gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 0:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.133.20"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080


def test_a_healthy_gpu_is_read_with_nothing_wrong_and_one_that_is_lost_is_named() -> None:
    (sick,) = devices.read_driver(Nvml(TotalEccErrors=2))["gpus"]
    assert sick["trouble"] == "2 uncorrected memory errors since the driver was loaded"
    found = devices.read_driver(Nvml(gpus=2))
    assert (found["driver"], found["cuda"], len(found["gpus"])) == ("570.133.20", "12.8", 2)
    well, lost = found["gpus"]
    assert (well["name"], well["memory"], well["trouble"]) == ("NVIDIA H100 80GB HBM3", 80 * GIB, "")
    assert lost == {"index": 1, "trouble": "the driver has lost it: GPU is lost"}


@pytest.mark.parametrize(
    ("groups", "files", "memory"),
    [
        ("0::/\n", {"memory.max": "4194304"}, 2**22),
        ("0::/job\n", {"memory.max": "max", "job/memory.max": "2097152"}, 2**21),
        ("", {}, None),
    ],
    ids=["container", "Slurm job", "no cgroup"],
)
def test_the_tightest_limit_of_the_cgroups_counts(
    groups: str, files: dict[str, str], memory: int | None, tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    found, machine = host.read_host(tmp_path), psutil.virtual_memory().total
    assert found.memory == (memory or machine)
    assert found.cpus >= 1
    assert found.memory_free is not None and found.memory_free <= (memory or machine)


def test_variables_that_change_how_training_runs_are_told_and_no_others() -> None:
    matter = (
        "ACCELERATE_USE_CPU",
        "LD_PRELOAD",
        "NCCL_ALGO",
        "PACKTRAIN_CACHE",
        "PYTHONPATH",
        "TORCH_LOGS",
        "no_proxy",
    )
    others = ("HOME", "HOSTNAME", "PWD", "PYTHONUNBUFFERED", "SLURM_NODEID")
    assert tuple(host.reported_variables(dict.fromkeys((*others, *matter), "x"))) == matter


def test_a_folder_that_is_not_there_yet_is_judged_by_its_parent(tmp_path: Path) -> None:
    new = host.read_folder("trainer.output_dir", str(tmp_path / "a/b/c"))
    assert new.writable and new.free and new.kind and list(tmp_path.iterdir()) == []
    proc = host.read_folder("trainer.output_dir", "/proc/run")
    assert (proc.writable, proc.kind) == (False, "proc")  # whatever its rights say to root
    (tmp_path / "file").touch()
    assert host.read_folder("trainer.output_dir", str(tmp_path / "file/run")).lack.endswith("is a file")


def test_packages_that_do_not_fit_are_found_by_what_packtrain_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.9.0+cu128", "trl": "1.16.0", "flash-attn": "2.6.0"}
    wanted = ["torch>=2.10", "trl>=1.16,<2", "peft>=0.21", 'flash-attn>=2.8; extra == "flash"']
    monkeypatch.setattr(host, "installed_version", installed.get)
    monkeypatch.setattr(host.metadata, "requires", lambda package: wanted)
    assert list(host.conflicts()) == [("torch>=2.10", "2.9.0+cu128"), ("peft>=0.21", "none")]


def test_what_torch_could_not_finish_saying_counts_as_far_as_it_came() -> None:
    said = f'noise\n{MARK}{{"version": "2.13.0", "cuda": "13.0"}}\n{MARK}{{"kind": "cu'
    assert read_torch(said, "no answer within 8 s") == Torch("no answer within 8 s", version="2.13.0", cuda="13.0")
    assert read_torch(f'{MARK}{{"devices": ["H100"], "capability": [9, 0]}}').capability == (9, 0)


HANGS = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
open("pid", "w").write(str(child.pid))
print("half", flush=True)
time.sleep(600)
"""


def test_a_process_that_hangs_is_given_up_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    monkeypatch.chdir(tmp_path)
    for limit_s in (0.5, 5, 60):  # which a machine that has other things to do may need to come to the first word
        began = time.monotonic()
        with pytest.raises(Unanswered, match=f"no answer within {limit_s} s") as refusal:
            ask_python("hangs", limit_s=limit_s)
        assert time.monotonic() - began < limit_s + 60
        if refusal.value.output:
            break
    assert refusal.value.output == "half\n"
    child, end = int((tmp_path / "pid").read_text()), time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_process_that_fails_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for script, why in (
        ("sys.exit('no libnvidia-ml.so')", "no libnvidia-ml.so"),
        ("sys.exit(7)", "ends with exit code 7"),
    ):
        (tmp_path / "fails.py").write_text(f"import sys\n{script}\n")
        with pytest.raises(Unanswered, match=why):
            ask_python("fails", limit_s=60)


def test_a_question_whose_answer_fails_or_never_comes_costs_only_itself() -> None:
    with pytest.raises(Unanswered, match=r"no answer within 0\.1 s"):
        Probe(lambda: threading.Event().wait(300), 0.1).answer()
    with pytest.raises(Unanswered, match="division by zero"):
        Probe(lambda: 1 / 0, 60).answer()
    assert Probe(lambda: 7, 60).answer() == 7
