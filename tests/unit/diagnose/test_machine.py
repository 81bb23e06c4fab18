"""Reading a machine, also when something is wrong, and what the checks make of it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from packtrain.config.schema import Model, RunConfig, Strategy, Topology, Trainer
from packtrain.diagnose import machine
from packtrain.diagnose.env import check_all, plan_run, trl_block
from packtrain.diagnose.machine import (
    Check,
    Driver,
    Facts,
    Folder,
    Gpu,
    Host,
    PlannedRun,
    Torch,
    ask_python,
    attention_json,
)
from packtrain.plan.network_settings import HostNetwork, Interface, Port, matching
from packtrain.plan.surroundings import Surroundings
from packtrain.system import start
from tests.waiting import until

GIB = 2**30
MIB = 2**20
TWO_MACHINES = PlannedRun(configured=True, nodes=2, per_node=8)
ONE_MACHINE = PlannedRun(configured=True, per_node=8)
FULL_PRECISION = Trainer(mixed_precision="no")
GPU = Gpu(0, "NVIDIA H100 80GB HBM3", "GPU-0", 80 * GIB, 4 * MIB)
UP, DOWN = Port("mlx5_0", rate=400.0), Port("mlx5_1", active=False, rate=10.0)
HEALTHY = Facts(
    host=Host("Linux", "3.12", {"deepspeed": "0.19.8"}, (), 2**20, 500 * GIB, 1000 * GIB, 900 * GIB, 96),
    torch=Torch("", "2.13.0", "12.8", "2.27.7", True, ("H100",) * 8),
    driver=Driver("", "570.133.20", tuple(replace(GPU, index=at, uuid=f"GPU-{at}") for at in range(8))),
    network=HostNetwork((Interface("eth0", ("10.0.0.1",), default_route=True),), (UP,)),
    folders=(Folder("trainer.output_dir", "/data/run", 500 * GIB, 1000 * GIB),),
)


def torch(**changes: Any) -> Facts:
    return replace(HEALTHY, torch=replace(HEALTHY.torch, **changes))


def gpu(**changes: Any) -> Facts:
    first, *others = HEALTHY.driver.gpus
    return driver(gpus=(replace(first, **changes), *others))


def driver(**changes: Any) -> Facts:
    return replace(HEALTHY, driver=replace(HEALTHY.driver, **changes))


def ports(*ports: Port) -> Facts:
    return replace(HEALTHY, network=HostNetwork((), ports))


def host(**changes: Any) -> Facts:
    return replace(HEALTHY, host=replace(HEALTHY.host, **changes))


def folder(**changes: Any) -> Facts:
    return replace(HEALTHY, folders=(replace(HEALTHY.folders[0], **changes),))


def visible(wanted: str) -> Facts:
    return host(environment={"CUDA_VISIBLE_DEVICES": wanted})


def run_of(per_node: int = 1, environment: dict[str, str] | None = None, **config: Any) -> PlannedRun:
    return PlannedRun(True, RunConfig(topology=Topology(environment=environment or {}), **config), per_node=per_node)


def named(facts: Facts, run: PlannedRun, name: str) -> list[Check]:
    found = [check for check in check_all(facts, run) if check.name == name]
    assert found, f"no check is named {name}"
    return found


def test_a_healthy_machine_passes_every_check_and_one_of_which_nothing_is_known_is_no_crash() -> None:
    for run in (PlannedRun(), ONE_MACHINE, TWO_MACHINES):
        assert {check.status for check in check_all(HEALTHY, run)} == {"ok"}
    zero3 = run_of(strategy=Strategy(name="zero3"), model=Model(attention="flash"))
    for run in (PlannedRun(), TWO_MACHINES, zero3):
        assert all(check.found for check in check_all(Facts(), run))


def test_installed_and_missing_kernels_of_hybrids_are_named_where_there_is_a_gpu() -> None:
    (check,) = named(host(packages={"flash-linear-attention": "0.6.0"}), PlannedRun(), "hybrid-kernels")
    assert check.status == "ok" and check.found.startswith("flash-linear-attention 0.6.0; not installed")
    assert "causal-conv1d, mamba-ssm (pip install --no-build-isolation 'packtrain[hybrid]'" in check.found
    assert "hybrid-kernels" not in {check.name for check in check_all(driver(gpus=()), PlannedRun())}


NO_TORCH = {"version": None, "available": None}
CPU_BUILD = {"version": "2.13.0+cpu", "cuda": None, "available": False}
KERNELS = {"flash": {"FlashAttention 4": "not installed", "torch's varlen_attn": "wrong by 3"}}
FLASH = Model(attention="flash", dtype="float32")
TROUBLE: list[tuple[str, Facts, PlannedRun, str, str, str]] = [
    # check, machine, run, status, what is found, what the fix names
    ("packages", host(conflicts=(("torch>=2.10", "2.9"),)), PlannedRun(), "fail", "2.9", "pip install 'torch>=2.10'"),
    ("torch", torch(**CPU_BUILD), PlannedRun(), "fail", "without CUDA", "reinstall torch"),
    ("torch", torch(available=False, warning="Error 802"), PlannedRun(), "fail", "Error 802", "fabric manager"),
    ("torch", torch(error="ImportError: libcudnn", **NO_TORCH), PlannedRun(), "fail", "libcudnn", "reinstall"),
    ("torch", torch(error="no answer within 8 s", **NO_TORCH), PlannedRun(), "warn", "no answer", "import torch"),
    ("torch", torch(available=None, error="no answer within 8 s"), PlannedRun(), "warn", "no answer", "import torch"),
    ("torch", torch(available=None, error="ends with exit code -11"), PlannedRun(), "fail", "-11", "import torch"),
    ("attention", torch(kernels=KERNELS), PlannedRun(), "warn", "wrong by 3", "packtrain[flash]"),
    ("attention", torch(kernels=KERNELS), run_of(model=FLASH, trainer=FULL_PRECISION), "fail", "float32", "model.attention=auto"),
    ("deepspeed", host(packages={}), run_of(strategy=Strategy(name="zero2")), "fail", "zero2", "packtrain[deepspeed]"),
    ("gpu-driver", driver(error="no answer", gpus=()), PlannedRun(), "fail", "no answer", "nvidia-smi"),
    ("gpu-driver", driver(error="no GPU", gpus=()), ONE_MACHINE, "fail", "no GPU", "topology.gpus_per_node"),
    ("gpus", HEALTHY, run_of(9), "fail", "9 processes on this machine, and 8 visible", "topology.gpus_per_node=8"),
    ("gpus", visible(""), PlannedRun(), "warn", "hides all 8", "unset"),
    ("gpus", HEALTHY, run_of(environment={"CUDA_VISIBLE_DEVICES": "-1"}), "warn", "hides all 8", "CUDA_VISIBLE_DEVICES"),
    ("gpus", HEALTHY, run_of(4, {"CUDA_VISIBLE_DEVICES": "1,5"}), "fail", "and 2 visible", "topology.gpus_per_node=2"),
    # as CUDA reads it: nothing after a wrong name counts, and no name twice
    ("gpus", HEALTHY, run_of(4, {"CUDA_VISIBLE_DEVICES": "0,1,-1,2"}), "fail", "and 2 visible", "topology.gpus_per_node=2"),
    ("gpus", HEALTHY, run_of(4, {"CUDA_VISIBLE_DEVICES": "1,5,1"}), "fail", "and 2 visible", "topology.gpus_per_node=2"),
    ("gpu-health", gpu(trouble="3 memory errors"), PlannedRun(), "fail", "GPU 0 (NVIDIA H100 80GB HBM3): 3", "--gpu-reset"),
    ("gpu-use", gpu(memory_used=60 * GIB), PlannedRun(), "warn", "60 GiB", "CUDA_VISIBLE_DEVICES"),
    ("infiniband", ports(DOWN), TWO_MACHINES, "fail", "mlx5_1:1 (InfiniBand, DOWN, 10.0 Gb/s)", "NCCL_IB_DISABLE=1"),
    ("infiniband", ports(DOWN), PlannedRun(), "warn", "DOWN", "ibstat"),
    ("infiniband", ports(UP, DOWN), TWO_MACHINES, "warn", "mlx5_0:1 (InfiniBand, ACTIVE, 400.0 Gb/s); mlx5_1", "ibstat"),
    ("name-server", host(silence="it does not answer for n1"), PlannedRun(), "warn", "for n1", "/etc/resolv.conf"),
    ("shared-memory", host(shm=64 * MIB), PlannedRun(), "warn", "64 MiB", "--shm-size"),
    ("open-files", host(nofile=1024), ONE_MACHINE, "warn", "1024", "ulimit -n"),
    ("memory", host(memory_free=GIB), PlannedRun(), "warn", "1 GiB free", "end other processes"),
    ("compiler", host(uncompiled="no C compiler"), PlannedRun(), "warn", "no C compiler", "apt-get install gcc"),
    ("output-folder", folder(lack="cannot be written to"), ONE_MACHINE, "fail", "/data/run", "trainer.output_dir"),
    ("output-folder", folder(lack="cannot be written to"), PlannedRun(), "warn", "/data/run", "trainer.output_dir"),
    ("output-folder", folder(free=4 * MIB), ONE_MACHINE, "warn", "4 MiB free", "trainer.output_dir"),
    ("cache-folder", folder(setting="data.cache_dir", lack="no answer"), ONE_MACHINE, "warn", "no answer", "df /data/run"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "facts", "run", "status", "found", "fix"), TROUBLE)
def test_each_trouble_is_named_with_its_fix(name, facts, run, status, found, fix):
    (check,) = named(facts, run, name)
    assert (check.status, found in check.found, fix in check.fix) == (status, True, True), check


def test_every_check_is_in_the_handbook() -> None:
    page = (Path(__file__).parents[3] / "docs/diagnostics.md").read_text()
    names = {name for name, *_ in TROUBLE} | {check.name for check in check_all(HEALTHY, TWO_MACHINES)} | {"hub-cache"}
    assert sorted(name for name in names if f"| `{name}` |" not in page) == []


def test_interfaces_are_chosen_as_nccl_does() -> None:
    for wanted, names in {
        "eth": "eth0 eth1",
        "=eth0,ib0": "eth0 ib0",
        "^lo,docker": "eth0 eth1 ib0",
        "enp": "",
    }.items():
        assert matching(wanted, ["lo", "eth0", "eth1", "ib0", "docker0"]) == names.split()


def test_the_attention_that_auto_comes_to_is_named_with_what_better_kernels_lack() -> None:
    found = torch(kernels={"flash": {"FlashAttention 4": "not installed", "FlashAttention 2": ""}})
    (check,) = named(found, PlannedRun(), "attention")
    assert check.found == "flash: FlashAttention 2 (FlashAttention 4: not installed)"
    backends = attention_json(found, PlannedRun())
    assert list(backends) == ["flash", "segmented", "mixers", "per_document", "sdpa_mask"]
    assert backends["flash"]["available"] is True
    for facts, why in ((torch(available=False), "not a CUDA GPU"), (torch(error="no answer"), "no answer")):
        (check,) = named(facts, PlannedRun(), "attention")
        assert check.status == "ok" and why in check.found


def test_what_speaks_against_the_plan_is_a_failed_check_and_not_the_end_of_the_report() -> None:
    run = plan_run(RunConfig(topology=Topology(kind="slurm"), strategy=Strategy(name="zero3")), Surroundings(host="n1"))
    (check,) = named(HEALTHY, run, "run")
    assert check.status == "fail" and "topology.gpus_per_node" in check.found
    elsewhere = plan_run(RunConfig(topology=Topology(nodes=4, gpus_per_node=8)), Surroundings(host="n1"))
    assert named(HEALTHY, elsewhere, "run")[0].status == "warn" and elsewhere.nodes * elsewhere.per_node == 32


ROW = "{}, NVIDIA H100 80GB HBM3, GPU-{}, 81559, 4, {}, 570.133.20"


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Has nvidia-smi do what the shell script says."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_gpus_are_read_with_what_is_wrong_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, f"echo '{ROW.format(0, 0, 0)}'; echo '{ROW.format(1, 1, 2)}'")
    found = machine.ask_driver(60)
    well, sick = found.gpus
    assert (found.error, found.version) == ("", "570.133.20")
    assert well == Gpu(0, "NVIDIA H100 80GB HBM3", "GPU-0", 81559 * MIB, 4 * MIB)
    assert (sick.index, sick.trouble.partition(" ")[0]) == (1, "2")


def test_a_driver_that_does_not_answer_is_described(tmp_path, monkeypatch):
    for script, why in {
        "echo 'GPU is lost'; exit 15": "GPU is lost",
        "echo mismatch >&2; exit 18": "mismatch",
        "exec sleep 600": "timed out",
        "": "shows no GPU",
    }.items():
        nvidia_smi(tmp_path, monkeypatch, script)
        found = machine.ask_driver(1)
        assert (found.gpus, why in found.error) == ((), True)


def test_a_folder_that_is_not_there_yet_is_judged_by_its_parent(tmp_path: Path) -> None:
    new = machine.read_folder("trainer.output_dir", str(tmp_path / "a/b/c"))
    assert not new.lack and new.free and list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for place in ("/proc/run", str(tmp_path / "file/run")):  # whatever their rights say to root
        assert machine.read_folder("trainer.output_dir", place).lack


def test_packages_that_do_not_fit_are_found_by_what_packtrain_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.9.0+cu128", "trl": "1.16.0", "flash-attn": "2.6.0"}
    wanted = ["torch>=2.10", "trl>=1.16,<2", "peft>=0.21", 'flash-attn>=2.8; extra == "flash"']
    monkeypatch.setattr(machine, "installed_version", installed.get)
    monkeypatch.setattr(machine.metadata, "requires", lambda package: wanted)
    assert list(machine.conflicts()) == [("torch>=2.10", "2.9.0+cu128"), ("peft>=0.21", "none")]


def test_what_torch_could_not_finish_saying_and_a_question_that_fails_cost_only_themselves() -> None:
    said = '{"version": "2.13.0", "cuda": "13.0"}\n{"kind": "cu'
    expected = Torch("no answer within 8 s", version="2.13.0", cuda="13.0")
    assert machine.read_torch(said, "no answer within 8 s") == expected
    with pytest.raises(TimeoutError):
        start(lambda: threading.Event().wait(300)).result(0.1)
    with pytest.raises(ZeroDivisionError):
        start(lambda: 1 / 0).result(60)
    assert start(lambda: 7).result(60) == 7


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
        output, why = ask_python("hangs", limit_s=limit_s)
        assert time.monotonic() - began < limit_s + 60 and why == f"no answer within {limit_s} s"
        if output:
            break
    assert output == "half"
    child = int((tmp_path / "pid").read_text())
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE, 60)


@pytest.mark.parametrize("gpus", [[], ["NVIDIA H100 80GB HBM3", "NVIDIA L4"]])
@pytest.mark.parametrize("configured", [False, True])
def test_the_first_block_of_env_is_that_of_trl_env_line_for_line(gpus, configured, tmp_path, monkeypatch, capsys):
    import torch
    from accelerate.commands import config
    from accelerate.commands.config import config_args
    from huggingface_hub import constants
    from trl.scripts.env import print_env

    (file := tmp_path / "accelerate/default_config.yaml").parent.mkdir()
    if configured:
        file.write_text(
            "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\ndynamo_backend: INDUCTOR\n"
        )
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(config, "default_config_file", str(file))
    monkeypatch.setattr(config_args, "default_config_file", str(file))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: gpus[index])
    print_env()
    theirs = capsys.readouterr().out.strip("\n").splitlines()[2:]
    asked = Torch(available=bool(gpus), accelerators=machine.accelerators(gpus), accelerate=machine.accelerate_config())
    assert trl_block(Facts(machine.read_host(), asked)).splitlines() == theirs
    assert ("  - num_processes: 4" in theirs) == configured and len(theirs) >= 15
