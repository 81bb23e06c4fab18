"""Facts of a machine, and what the checks make of them: each line of a table is a machine with one thing wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packtrain.config.schema import RunConfig, Strategy, Topology
from packtrain.diagnose.devices import attention_json, visible_gpus
from packtrain.diagnose.env import check_all, needs_of
from packtrain.diagnose.facts import (
    Check,
    Facts,
    Folder,
    Gpu,
    Gpus,
    Host,
    RunNeeds,
    Software,
    Torch,
)
from packtrain.plan.memory import Memory
from packtrain.plan.network_settings import HostNetwork, Interface, NetworkSetting, Port, matching
from packtrain.plan.surroundings import Surroundings

GIB = 2**30
MIB = 2**20
TWO_MACHINES = RunNeeds(configured=True, nodes=2, per_node=8)
ONE_MACHINE = RunNeeds(configured=True, per_node=8)
GPU = Gpu(0, "NVIDIA H100 80GB HBM3", "GPU-0", 80 * GIB, 4 * MIB)
MEMORY = Memory(10**9, 10**9, 4 * GIB, 4 * GIB, 8 * GIB, 0, 10 * GIB, device=80 * GIB)


def machine(**changes: Any) -> Facts:
    """A healthy machine with eight H100 and two InfiniBand ports; `changes` are parts of it, or single facts."""
    eth = Interface("eth0", ("10.0.0.1",), default_route=True)
    lo = Interface("lo", ("127.0.0.1",))
    found = {
        "software": Software("Linux", "3.12", {"packtrain": "0.1", "deepspeed": "0.19.8"}),
        "torch": Torch("", "2.13.0", "12.8", "2.27.7", True, "cuda", ("H100",) * 8),
        "gpus": Gpus(
            True, "", "570.133.20", "12.8", tuple(replace(GPU, index=at, uuid=f"GPU-{at}") for at in range(8))
        ),
        "network": HostNetwork((eth, lo), (Port("mlx5_0", rate=400.0),)),
        "host": Host(
            *(2**20, 500 * GIB, 1000 * GIB, 900 * GIB, 96),
            (Folder("trainer.output_dir", "/data/run", True, 500 * GIB, 1000 * GIB, "lustre"),),
        ),
    }
    return Facts(**{**found, **changes})


def torch(**changes: Any) -> Facts:
    return machine(torch=replace(machine().torch, **changes))


def gpu(**changes: Any) -> Facts:
    first, *others = machine().gpus.gpus
    return machine(gpus=replace(machine().gpus, gpus=(replace(first, **changes), *others)))


def gpus(**changes: Any) -> Facts:
    return machine(gpus=replace(machine().gpus, **changes))


def network(**changes: Any) -> Facts:
    return machine(network=replace(machine().network, **changes))


def ports(*ports: Port) -> Facts:
    return network(ports=ports)


def limits(**changes: Any) -> Facts:
    return machine(host=replace(machine().host, **changes))


def folder(**changes: Any) -> Facts:
    return machine(host=replace(machine().host, folders=(replace(machine().host.folders[0], **changes),)))


def variables(**env: str) -> Facts:
    return machine(host=replace(machine().host, environment=env))


UP, ROCE = Port("mlx5_0", rate=400.0), Port("mlx5_1", rate=100.0, layer="Ethernet")
DOWN = Port("mlx5_1", active=False, rate=10.0)


def named(facts: Facts, needs: RunNeeds, name: str) -> list[Check]:
    found = [check for check in check_all(facts, needs) if check.name == name]
    assert found, f"no check is named {name}"
    return found


def test_a_healthy_machine_passes_every_check_also_for_a_run_on_several() -> None:
    for needs in (RunNeeds(), ONE_MACHINE, TWO_MACHINES):
        assert {check.status for check in check_all(machine(), needs)} == {"ok"}


def test_what_triton_lacks_to_compile_matters_where_there_is_a_gpu() -> None:
    lacking = limits(uncompiled="no C compiler (gcc or clang), so Triton cannot build its kernels for the GPU")
    (check,) = named(lacking, RunNeeds(), "compiler")
    assert (check.status, check.found) == ("warn", lacking.host.uncompiled) and "apt-get install gcc" in check.fix
    assert "compiler" not in [check.name for check in check_all(replace(lacking, gpus=Gpus(False)), RunNeeds())]


def test_a_machine_of_which_nothing_is_known_is_no_crash() -> None:
    for needs in (
        RunNeeds(),
        TWO_MACHINES,
        RunNeeds(configured=True, strategy="zero3", attention="flash", memory=MEMORY),
    ):
        assert all(check.found for check in check_all(Facts(), needs))


TROUBLE: list[tuple[str, Facts, RunNeeds, str, str, str]] = [
    # check, machine, run, status, what is found, what the fix names
    ("packages", machine(software=Software(conflicts=(("torch>=2.10", "2.9"),))), RunNeeds(), "fail", "found 2.9", "pip install 'torch>=2.10'"),
    ("torch", torch(version="2.13.0+cpu", cuda=None, available=False, kind="cpu"), RunNeeds(), "fail", "where the driver shows 8: it is a build without CUDA", "reinstall torch for CUDA 12.8"),
    ("torch", torch(available=False, kind="cpu", warning="Error 802: system not yet initialized"), RunNeeds(), "fail", "Error 802", "fabric manager"),
    ("torch", torch(version=None, error="torch cannot be imported: ImportError: libcudnn"), RunNeeds(), "fail", "libcudnn", "reinstall"),
    ("torch", torch(version=None, error="no answer within 8 s"), RunNeeds(), "warn", "no answer", "import torch"),
    ("torch", torch(available=None, error="no answer within 8 s"), RunNeeds(), "warn", "no answer", "import torch"),
    ("torch", torch(available=None, error="ends with exit code -11"), RunNeeds(), "fail", "exit code -11", "import torch"),
    ("attention", torch(kernels={"FlashAttention 4": "not installed", "torch's varlen_attn": "wrong by 3"}), RunNeeds(), "warn", "wrong by 3", "flash"),
    ("attention", torch(kernels={"FlashAttention 4": "not installed", "torch's varlen_attn": "wrong by 3"}, capability=(9, 0)), RunNeeds(), "warn", "wrong by 3", "packtrain[flash]"),
    ("attention", torch(kernels={"FlashAttention 4": "not installed"}, capability=(9, 0)), RunNeeds(dtype="float32"), "warn", "compute in float32", "trainer.mixed_precision=bf16"),
    ("attention", machine(), RunNeeds(True, attention="flash", dtype="float32"), "fail", "compute in float32", "model.attention=auto"),
    ("deepspeed", machine(software=Software()), RunNeeds(True, strategy="zero2"), "fail", "not installed", "packtrain[deepspeed]"),
    ("gpu-driver", gpus(error="no answer within 5 s", gpus=()), RunNeeds(), "fail", "no answer within 5 s", "reinstall the driver"),
    ("gpu-driver", gpus(gpus=()), ONE_MACHINE, "fail", "the driver shows no GPU", "topology.gpus_per_node"),
    ("gpu-driver", gpus(present=False, error="Unknown Error", gpus=()), RunNeeds(), "warn", "Unknown Error", "--gpus all"),
    ("gpus", machine(), RunNeeds(True, per_node=9), "fail", "9 processes on this machine, and 8 visible", "topology.gpus_per_node=8"),
    ("gpus", variables(CUDA_VISIBLE_DEVICES=""), RunNeeds(), "warn", "hides all 8", "unset"),
    ("gpus", machine(), RunNeeds(True, environment={"CUDA_VISIBLE_DEVICES": "-1"}), "warn", "hides all 8", "CUDA_VISIBLE_DEVICES"),
    ("gpus", machine(), RunNeeds(True, per_node=4, environment={"CUDA_VISIBLE_DEVICES": "1,5"}), "fail", "4 processes on this machine, and 2 visible", "topology.gpus_per_node=2"),
    ("torch", replace(torch(version="2.13.0+cpu", cuda=None, available=False, kind="cpu"), host=variables(CUDA_VISIBLE_DEVICES="").host), RunNeeds(True, environment={"CUDA_VISIBLE_DEVICES": "0"}), "fail", "without CUDA", "reinstall torch for CUDA 12.8"),
    ("gpu-health", gpu(trouble="3 uncorrected memory errors"), RunNeeds(), "fail", "GPU 0 (NVIDIA H100 80GB HBM3): 3 uncorrected memory errors", "--gpu-reset"),
    ("gpu-use", gpu(memory_used=60 * GIB), RunNeeds(), "warn", "in use: 60 GiB", "CUDA_VISIBLE_DEVICES=1,2,3,4,5,6,7"),
    ("gpu-memory", machine(), RunNeeds(True, memory=replace(MEMORY, optimizer=80 * GIB, advice="strategy=zero3")), "fail", "DOES NOT FIT", "strategy=zero3"),
    ("gpu-memory", machine(), RunNeeds(True, memory=replace(MEMORY, activations=70 * GIB, advice="strategy=zero3")), "warn", "DOES NOT FIT", "strategy=zero3"),
    ("infiniband", ports(DOWN), TWO_MACHINES, "fail", "no port is up: mlx5_1:1 (InfiniBand, DOWN, 10.0 Gb/s)", "NCCL_IB_DISABLE=1"),
    ("infiniband", ports(DOWN), RunNeeds(), "warn", "no port is up", "ibstat"),
    ("infiniband", ports(UP, DOWN), TWO_MACHINES, "warn", "mlx5_0:1 (InfiniBand, ACTIVE, 400.0 Gb/s); mlx5_1", "ibstat"),
    ("network-interface", variables(GLOO_SOCKET_IFNAME="ib0"), TWO_MACHINES, "fail", "GLOO_SOCKET_IFNAME=ib0, which reaches no other", "GLOO_SOCKET_IFNAME=eth0"),
    ("network-interface", variables(NCCL_SOCKET_IFNAME="lo"), TWO_MACHINES, "fail", "reaches no other machine", "NCCL_SOCKET_IFNAME=eth0"),
    ("network-interface", network(interfaces=(Interface("eth1", ("10.0.0.9",), up=False),)), replace(TWO_MACHINES, environment={"NCCL_SOCKET_IFNAME": "=eth1"}), "fail", "missing, down or a loopback", "unset NCCL_SOCKET_IFNAME"),
    ("name-server", machine(silence="the name server does not answer for n1"), RunNeeds(), "warn", "does not answer for n1, and torch asks it", "/etc/resolv.conf"),
    ("shared-memory", limits(shm=64 * MIB), ONE_MACHINE, "warn", "64 MiB in /dev/shm", "--shm-size"),
    ("shared-memory", limits(shm=64 * MIB), RunNeeds(), "warn", "64 MiB in /dev/shm", "--shm-size"),
    ("open-files", limits(nofile=1024), ONE_MACHINE, "warn", "1024", "ulimit -n"),
    ("memory", limits(memory=16 * GIB, memory_free=15 * GIB), RunNeeds(True, per_node=8, memory=replace(MEMORY, host=4 * GIB)), "fail", "the run needs 32 GiB on this machine; 15 GiB free of 16 GiB that the machine or its cgroup", "--mem=0 in topology.sbatch"),
    ("memory", limits(memory_free=GIB), RunNeeds(), "warn", "1 GiB free", "end other processes"),
    ("cores", limits(cpus=4), ONE_MACHINE, "warn", "8 processes on 4 cores", "--cpus-per-task"),
    ("output-folder", folder(writable=False), ONE_MACHINE, "fail", "/data/run cannot be written to", "trainer.output_dir"),
    ("output-folder", folder(free=4 * MIB), ONE_MACHINE, "warn", "4 MiB free", "trainer.output_dir"),
    ("output-folder", folder(free=10 * GIB), RunNeeds(True, disk=100 * GIB), "warn", "take about 100 GiB", "keep_checkpoints"),
    ("output-folder", folder(kind="ext4"), TWO_MACHINES, "warn", "each of 2 would have its own", "share"),
    ("output-folder", folder(lack="no answer within 5 s"), ONE_MACHINE, "fail", "no answer within 5 s", "df /data/run"),
    ("cache-folder", folder(setting="data.cache_dir", writable=False), ONE_MACHINE, "warn", "cannot be written to", "data.cache_dir"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "facts", "needs", "status", "found", "fix"), TROUBLE)
def test_each_trouble_is_named_with_its_fix(
    name: str, facts: Facts, needs: RunNeeds, status: str, found: str, fix: str
) -> None:
    worst = max(named(facts, needs, name), key=lambda check: ("ok", "warn", "fail").index(check.status))
    assert (worst.status, found in worst.found, fix in worst.fix) == (status, True, True), worst


def test_what_only_matters_between_machines_is_no_trouble_for_a_run_on_one() -> None:
    led = replace(TWO_MACHINES, network=(NetworkSetting("GLOO_SOCKET_IFNAME", "eth0", "leads to n0"),))
    (way,) = named(network(interfaces=(Interface("eth0", ("10.0.0.9",)),)), led, "network-interface")
    assert (way.status, way.found) == ("ok", "GLOO_SOCKET_IFNAME=eth0 leads to n0")
    assert named(folder(kind="ext4"), ONE_MACHINE, "output-folder")[0].status == "ok"


def test_every_check_is_in_the_handbook() -> None:
    page = (Path(__file__).parents[3] / "docs/diagnostics.md").read_text()
    names = (
        {name for name, *_ in TROUBLE} | {check.name for check in check_all(machine(), TWO_MACHINES)} | {"hub-cache"}
    )
    assert sorted(name for name in names if f"| `{name}` |" not in page) == []


def test_only_visible_gpus_are_judged() -> None:
    sick = gpu(trouble="3 memory errors")
    shown = replace(sick, host=replace(sick.host, environment={"CUDA_VISIBLE_DEVICES": "2,GPU-3"}))
    assert [one.index for one in visible_gpus(shown, RunNeeds())] == [2, 3]
    assert named(shown, RunNeeds(), "gpu-health")[0].status == "ok"
    for_the_run = RunNeeds(True, environment={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert [one.index for one in visible_gpus(shown, for_the_run)] == [0, 1]
    assert named(shown, for_the_run, "gpu-health")[0].status == "fail"


def test_a_torch_that_was_asked_where_no_gpu_is_shown_is_not_blamed_for_finding_none() -> None:
    blind = replace(torch(available=False, kind="cpu"), host=variables(CUDA_VISIBLE_DEVICES="").host)
    for environment in ({}, {"CUDA_VISIBLE_DEVICES": "0"}):
        assert named(blind, RunNeeds(True, environment=environment), "torch")[0].status == "ok"


@pytest.mark.parametrize(
    ("wanted", "names"),
    [("eth", ["eth0", "eth1"]), ("=eth0,ib0", ["eth0", "ib0"]), ("^lo,docker", ["eth0", "eth1", "ib0"]), ("enp", [])],
)
def test_interfaces_are_chosen_as_nccl_does(wanted: str, names: list[str]) -> None:
    assert matching(wanted, ["lo", "eth0", "eth1", "ib0", "docker0"]) == names


def test_the_attention_that_auto_comes_to_is_named_with_what_better_kernels_lack() -> None:
    kernels = {"FlashAttention 4": "not installed", "FlashAttention 2": ""}
    (found,) = named(torch(kernels=kernels), RunNeeds(), "attention")
    assert found.found == "flash: FlashAttention 2 (FlashAttention 4: not installed)"
    backends = attention_json(torch(kernels=kernels), RunNeeds())
    assert (
        list(backends) == ["flash", "segmented", "per_document", "sdpa_mask"] and backends["flash"]["available"] is True
    )
    (found,) = named(torch(available=False, kind="cpu"), RunNeeds(), "attention")
    assert (found.status, found.found.partition("ways: ")[2]) == ("ok", "the device is cpu")
    (late,) = named(torch(kernels=None, error="no answer within 8 s"), RunNeeds(), "attention")
    assert late.found.endswith("the kernels were not tried (no answer within 8 s)")


@pytest.mark.parametrize(
    ("capability", "kernel", "lack", "fix"),
    [
        ((9, 0), "torch's varlen_attn", "not installed", "(FlashAttention 4, a wheel), or FlashAttention 3 of the hub"),
        ((9, 0), "FlashAttention 2", "not installed", "pip install 'packtrain[flash]'"),
        ((9, 0), "FlashAttention 3 of the hub", "not installed", ""),
        ((9, 0), "torch's varlen_attn", "needs cutlass, which is not installed", ""),
        ((10, 0), "torch's varlen_attn", "not installed", "pip install 'packtrain[flash]' (FlashAttention 4, a wheel)"),
        ((8, 0), "torch's varlen_attn", "not installed", ""),
        ((8, 9), "torch's varlen_attn", "not installed", ""),
        ((12, 0), "torch's varlen_attn", "not installed", ""),
        ((), "torch's varlen_attn", "not installed", ""),
    ],
)
def test_a_faster_kernel_is_named_for_the_generation_of_the_gpu_and_for_no_other(
    capability: tuple[int, ...], kernel: str, lack: str, fix: str
) -> None:
    here = torch(kernels={"FlashAttention 4": lack, kernel: ""}, capability=capability)
    (found,) = named(here, RunNeeds(), "attention")
    assert found.status == ("warn" if fix else "ok") and found.found.startswith(f"flash: {kernel} (")
    assert fix in found.fix if fix else not found.fix
    amd = replace(here, torch=replace(here.torch, cuda=None))  # ROCm's torch gives numbers of its own
    assert named(amd, RunNeeds(), "attention")[0].status == "ok"


def test_what_speaks_against_the_plan_is_a_failed_check_and_not_the_end_of_the_report() -> None:
    config = RunConfig(topology=Topology(kind="slurm"), strategy=Strategy(name="zero3"))
    needs = needs_of(config, Surroundings(host="n1"))
    (check,) = named(machine(), needs, "run")
    assert (check.status, needs.strategy) == ("fail", "zero3") and "topology.gpus_per_node" in check.found
    elsewhere = needs_of(RunConfig(topology=Topology(nodes=4, gpus_per_node=8)), Surroundings(host="n1"))
    assert named(machine(), elsewhere, "run")[0].status == "warn" and elsewhere.nodes * elsewhere.per_node == 32
