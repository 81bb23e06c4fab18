"""Reading a machine: what the driver, torch, /sys and /proc say, and what they say when something is wrong."""

from __future__ import annotations

import threading
import time
import types
from pathlib import Path
from typing import Any

import psutil
import pytest

from packtrain.diagnose import devices, host, network, software
from packtrain.diagnose.devices import MARK, has_nvidia, read_torch
from packtrain.diagnose.facts import Torch, size
from packtrain.diagnose.probe import Probe, Unanswered, command
from packtrain.plan.interfaces import is_loopback

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
            "RemappedRows": (1, 0, 0, 0),
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
    found = devices._driver(Nvml(gpus=2))
    assert (found.driver, found.cuda, len(found.gpus)) == ("570.133.20", "12.8", 2)
    well, lost = found.gpus
    assert (well.name, well.memory) == ("NVIDIA H100 80GB HBM3", 80 * GIB)
    assert well.trouble == ""
    assert (lost.index, lost.trouble) == (1, "the driver has lost it: GPU is lost")


@pytest.mark.parametrize(
    ("changes", "fact", "value"),
    [
        ({"TotalEccErrors": 2}, "trouble", "2 uncorrected memory errors since the driver was loaded"),
        ({"RemappedRows": (0, 1, 1, 0)}, "trouble", "a repair of its memory waits for a reset"),
        ({"RemappedRows": (0, 1, 0, 1)}, "trouble", "memory rows could not be remapped"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_each_fault_of_a_gpu_is_read(changes: dict[str, Any], fact: str, value: Any) -> None:
    (gpu,) = devices._driver(Nvml(**changes)).gpus
    assert getattr(gpu, fact) == value


def test_names_are_resolved_or_say_why_not() -> None:
    assert all(map(is_loopback, network.resolved("localhost").addresses))
    assert network.resolved("no-such-machine.invalid").lack and network.resolved("a" * 300).lack


@pytest.mark.parametrize(
    ("groups", "files", "memory", "cores"),
    [
        ("0::/\n", {"memory.max": "4194304", "memory.current": "100", "cpu.max": "50000 100000"}, 2**22, 0.5),
        ("0::/job\n", {"memory.max": "max", "job/memory.max": "2097152", "job/cpu.max": "max 100000"}, 2**21, None),
        ("", {}, None, None),
    ],
    ids=["container", "Slurm job", "no cgroup"],
)
def test_the_tightest_limit_of_the_cgroups_counts(
    groups: str, files: dict[str, str], memory: int | None, cores: float | None, tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    found, machine = host.read_host(tmp_path), psutil.virtual_memory().total
    assert found.memory == (memory or machine)
    assert found.cpus == cores or (cores is None and found.cpus >= 1)
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
    others = ("HOME", "HOSTNAME", "PWD", "PYTHONUNBUFFERED", "SLURM_NODEID", "TMPDIR_OF_OTHERS")
    assert tuple(host.told(dict.fromkeys((*others, *matter), "x"))) == matter


def test_a_folder_that_is_not_there_yet_is_judged_by_its_parent(tmp_path: Path) -> None:
    new = host.read_folder("trainer.output_dir", str(tmp_path / "a/b/c"))
    assert new.writable and new.free and new.kind and list(tmp_path.iterdir()) == []
    proc = host.read_folder("trainer.output_dir", "/proc/run")
    assert (proc.writable, proc.kind) == (False, "proc")  # whatever its rights say to root
    (tmp_path / "file").touch()
    assert host.read_folder("trainer.output_dir", str(tmp_path / "file/run")).lack.endswith("is a file")


def test_nvidia_hardware_is_seen_without_its_driver(tmp_path: Path) -> None:
    assert not has_nvidia(tmp_path)
    device = tmp_path / "sys/bus/pci/devices/0000:19:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    assert has_nvidia(tmp_path)


def test_packages_that_do_not_fit_are_found_by_what_packtrain_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.9.0+cu128", "trl": "1.16.0", "flash-attn": "2.6.0"}
    wanted = ["torch>=2.10", "trl>=1.16,<2", "peft>=0.21", 'flash-attn>=2.8; extra == "flash"']
    monkeypatch.setattr(software, "version_of", installed.get)
    monkeypatch.setattr(software.metadata, "requires", lambda package: wanted)
    assert list(software.conflicts()) == [("torch>=2.10", "2.9.0+cu128"), ("peft>=0.21", "none")]


def test_a_limit_of_some_kilobytes_is_not_told_as_none_at_all() -> None:
    assert [size(number) for number in (0, 65536, 8 * 2**20, 2**31)] == ["0 MiB", "64 KiB", "8 MiB", "2.0 GiB"]


def test_what_torch_could_not_finish_saying_counts_as_far_as_it_came() -> None:
    said = f'noise\n{MARK}{{"version": "2.13.0", "cuda": "13.0"}}\n{MARK}{{"kind": "cu'
    assert read_torch(said, "no answer within 8 s") == Torch("no answer within 8 s", version="2.13.0", cuda="13.0")
    assert read_torch("").error == "its process said nothing"


def test_a_command_that_hangs_is_given_up_with_its_children(tmp_path: Path) -> None:
    script = tmp_path / "hangs"
    script.write_text(f"#!/bin/sh\nsleep 600 & echo $! > {tmp_path}/pid\necho half\nsleep 600\n")
    script.chmod(0o755)
    for limit_s in (0.5, 5, 60):  # which a machine that has other things to do may need to come to the first word
        began = time.monotonic()
        with pytest.raises(Unanswered, match=f"no answer within {limit_s} s") as refusal:
            command((str(script),), limit_s)
        assert time.monotonic() - began < limit_s + 60
        if refusal.value.output:
            break
    assert refusal.value.output == "half\n"
    child, end = int((tmp_path / "pid").read_text()), time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_command_that_fails_is_a_line() -> None:
    for argv, why in (
        (("no-such-command-at-all",), "not installed"),
        (("sh", "-c", "echo 'Failed to initialize NVML' >&2; exit 9"), "Failed to initialize NVML"),
        (("sh", "-c", "exit 7"), "ends with exit code 7"),
    ):
        with pytest.raises(Unanswered, match=why):
            command(argv, 60)


def test_a_question_whose_answer_fails_or_never_comes_costs_only_itself() -> None:
    with pytest.raises(Unanswered, match=r"no answer within 0\.1 s"):
        Probe(lambda: threading.Event().wait(300), 0.1).answer()
    with pytest.raises(Unanswered, match="division by zero"):
        Probe(lambda: 1 / 0, 60).answer()
    assert Probe(lambda: 7, 60).answer() == 7
