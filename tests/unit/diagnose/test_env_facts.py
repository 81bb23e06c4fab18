"""Reading a machine: what nvidia-smi, /sys, /proc and the kernel's log say, and what they say when something is wrong."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import machines
import pytest

from packtrain.diagnose.checks.check import size
from packtrain.diagnose.facts import ask, gpus, host, links, software
from packtrain.diagnose.facts.ask import NoAnswer, Question, command
from packtrain.diagnose.facts.facts import Clock, Conflict, Torch
from packtrain.diagnose.facts.gather import has_nvidia
from packtrain.diagnose.facts.torch_side import MARK, read_facts
from packtrain.launch.processes import sight
from packtrain.plan.interfaces import is_loopback, read_network

GIB = 2**30


def test_eight_healthy_h100_are_read_with_nothing_wrong() -> None:
    found = gpus.parse_details(machines.nvidia_smi(*[{}] * 8))
    assert (found.driver, found.cuda, len(found.gpus)) == ("570.133.20", "12.8", 8)
    last = found.gpus[7]
    assert (last.index, last.name, last.memory, last.width, last.widest) == (
        7,
        "NVIDIA H100 80GB HBM3",
        81559 * 2**20,
        16,
        16,
    )
    assert (last.ecc, last.uncorrected, last.repair, last.throttled, last.fabric, last.uses) == (
        True,
        0,
        "",
        (),
        "",
        (),
    )


def test_the_limits_of_a_gpus_clock_and_power_are_read() -> None:
    found = gpus.parse_details(machines.nvidia_smi({}, {"power": 500, "clock": "1410 MHz"})).gpus
    assert [(one.clock, one.power) for one in found] == [(1980, 700), (1410, 500)]


def test_each_fault_of_a_gpu_is_read() -> None:
    faulty = [
        {"uncorrected": 2},
        {"pending": "Yes"},
        {"failure": "Yes"},
        {"slowdown": "Active", "heat": 93},
        {"fabric": "In Progress", "fabric_status": "N/A"},
        {"processes": machines.process(4711, "python train.py") + machines.process(900, "Xorg", kind="G")},
        {"mig": "Enabled", "width": "8x"},
    ]
    found = gpus.parse_details(machines.nvidia_smi(*faulty)).gpus
    assert found[0].uncorrected == 2
    assert found[1].repair == "a repair waits for a reset"
    assert found[2].repair == "memory rows could not be remapped"
    assert found[3].throttled == ("hardware slowdown", "too hot (hardware)")
    assert found[4].fabric == "In Progress"
    assert found[5].uses == ("4711 python train.py",)
    assert found[6].mig and found[6].width == 8


def test_what_a_driver_does_not_know_is_not_known() -> None:
    sparse = "<nvidia_smi_log><gpu id='0'><product_name>NVIDIA GeForce GTX 1070</product_name></gpu></nvidia_smi_log>"
    (gpu,) = gpus.parse_details(f'<?xml version="1.0" ?>{sparse}').gpus
    assert gpu.name.endswith("1070") and gpu.memory is None and gpu.ecc is None and gpu.uncorrected is None


@pytest.mark.parametrize(
    "said",
    ["", "Failed to initialize NVML: Driver/library version mismatch", "<?xml version='1.0' ?><nvidia", "\x00\xff%$"],
)
def test_what_is_no_description_of_gpus_is_said_in_a_line(said: str) -> None:
    for parse in (gpus.parse_details, gpus.parse_short, gpus.parse_topology):
        with pytest.raises(NoAnswer) as refusal:
            parse(said)
        assert len(str(refusal.value)) < 300 and "\n" not in str(refusal.value)


def test_the_short_list_stands_in_for_the_whole_description() -> None:
    said = "0, NVIDIA H200, GPU-1, 565.57.01, 143771, 1, 0, 27\n1, NVIDIA H200, GPU-2, 565.57.01, 143771, [N/A], [N/A], 28\n"
    found = gpus.parse_short(said)
    assert (found.driver, [gpu.name for gpu in found.gpus]) == ("565.57.01", ["NVIDIA H200"] * 2)
    assert found.gpus[0].memory == 143771 * 2**20 and found.gpus[1].utilization is None


def test_links_are_the_matrix_without_colours_and_legend_and_are_counted_per_gpu() -> None:
    rows = gpus.parse_topology(machines.topology(2)).splitlines()
    assert len(rows) == 5 and rows[1].split()[:3] == ["GPU0", "X", "NV18"] and "\x1b" not in rows[0]
    assert rows[4] == "NIC0: mlx5_0"
    found = gpus.parse_details(machines.nvidia_smi({}, {}))
    linked = gpus.with_nvlinks(found.gpus, gpus.parse_nvlinks(machines.nvlinks(18, 17)))
    assert [gpu.nvlinks for gpu in linked] == [18, 17]


def test_xids_and_killed_processes_are_found_in_the_kernels_log_with_their_age() -> None:
    log = (
        "[ 1000.000000] NVRM: Xid (PCI:0000:c3:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        "[ 4600.500000] eth0: link up\n"
        "NVRM: Xid (PCI:0000:19:00): 31, pid=123, name=python, Ch 00000008, MMU Fault\n"
        "[ 4000.000000] Memory cgroup out of memory: Killed process 77 (python3) total-vm:1kB\n"
    )
    off, fault, killed = gpus.parse_kernel_log(log, 4600.0)
    assert (off.code, off.where, off.age_s) == (79, "0000:c3:00", 3600.0) and "fallen off" in off.text
    assert (fault.code, fault.age_s) == (31, None)
    assert (killed.code, killed.text, killed.age_s) == (0, "Killed process 77 (python3)", 600.0)


def test_infiniband_and_roce_ports_are_read_with_what_is_wrong_with_them(tmp_path: Path) -> None:
    machines.write_port(tmp_path, "mlx5_2", state="1: DOWN", phys_state="2: Polling", rate="10 Gb/sec (4X SDR)")
    machines.write_port(tmp_path, "mlx5_0", link_layer="Ethernet", rate="100 Gb/sec (4X EDR)", interface="ens1f0np0")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    for name in ("uverbs0", "rdma_cm"):
        (tmp_path / "dev/infiniband" / name).touch()
    roce, down = read_network(None, root=tmp_path, addresses={}).ports
    assert (roce.device, roce.layer, roce.interfaces, down.active) == ("mlx5_0", "Ethernet", ("ens1f0np0",), False)
    assert links.read_states(tmp_path) == {"mlx5_0:1": "ACTIVE, LinkUp", "mlx5_2:1": "DOWN, Polling"}
    assert links.read_verbs(tmp_path) == ("uverbs0",)
    assert links.read_states(tmp_path / "nothing") == {} and links.read_verbs(tmp_path / "nothing") == ()


def test_names_resolve_or_say_why_not() -> None:
    assert all(map(is_loopback, links.resolved("localhost").addresses))
    assert links.resolved("no-such-machine.invalid").lack
    assert links.resolved("a" * 300).lack


@pytest.mark.parametrize(
    ("groups", "files", "memory", "cores"),
    [
        ("0::/\n", {"memory.max": "8589934592", "memory.current": "100", "cpu.max": "200000 100000"}, 8 * GIB, 2.0),
        (
            "0::/job\n",
            {"memory.max": "max", "job/memory.max": "4294967296", "job/cpu.max": "max 100000"},
            4 * GIB,
            None,
        ),
        (
            "4:memory:/docker/1\n1:cpu,cpuacct:/docker/1\n",
            {
                "memory/memory.limit_in_bytes": "2147483648",
                "cpu/cpu.cfs_quota_us": "150000",
                "cpu/cpu.cfs_period_us": "100000",
            },
            2 * GIB,
            1.5,
        ),
        (
            "4:memory:/\n",
            {"memory/memory.limit_in_bytes": "9223372036854771712", "cpu/cpu.cfs_quota_us": "-1"},
            None,
            None,
        ),
        ("", {}, None, None),
    ],
    ids=["container of version 2", "Slurm job", "version 1 seen from inside", "no limit", "no cgroup"],
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
    limits = host.read_limits(tmp_path)
    assert (limits.memory_limit, limits.cpu_limit) == (memory, cores)


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


def test_the_file_system_of_a_folder_is_that_of_the_innermost_mount() -> None:
    mounts = (
        "22 1 254:0 / / rw - ext4 /dev/vda rw\n"
        "30 22 0:40 / /scratch rw - lustre 10.0.0.1@o2ib:/fs rw\n"
        r"31 22 0:41 / /my\040data rw - nfs4 server:/x rw"
    )
    found = [host.file_system(path, mounts) for path in ("/home/me", "/scratch/run", "/my data/a", "/scratch2", "/")]
    assert found == ["ext4", "lustre", "nfs4", "ext4", "ext4"]
    assert host.file_system("/x", "garbage\n") == ""


def test_a_folder_that_is_not_there_yet_is_judged_by_its_parent(tmp_path: Path) -> None:
    new = host.read_folder("trainer.output_dir", str(tmp_path / "a/b/c"))
    assert new.writable and new.free and list(tmp_path.iterdir()) == []
    assert host.read_folder("trainer.output_dir", "/proc/run").writable is False  # whatever its rights say to root
    (tmp_path / "file").touch()
    assert host.read_folder("trainer.output_dir", str(tmp_path / "file/run")).lack.endswith("is a file")


@pytest.mark.parametrize(
    ("parse", "said", "clock"),
    [
        (
            host.parse_chrony,
            "System time     : 0.000012345 seconds slow of NTP time\nLeap status     : Normal\n",
            Clock(True, -0.000012345, "chronyc"),
        ),
        (host.parse_chrony, "Leap status     : Not synchronised\n", Clock(False, None, "chronyc")),
        (host.parse_chrony, "506 Cannot talk to daemon\n", Clock(None, None, "chronyc")),
        (host.parse_timedate, "NTPSynchronized=no\n", Clock(False, None, "timedatectl")),
    ],
)
def test_clocks_are_read(parse, said: str, clock: Clock) -> None:
    assert parse(said) == clock


def test_nvidia_hardware_is_seen_without_its_driver(tmp_path: Path) -> None:
    assert not has_nvidia(tmp_path)
    device = tmp_path / "sys/bus/pci/devices/0000:19:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    assert has_nvidia(tmp_path)


def test_packages_that_do_not_fit_are_found_by_what_they_say_of_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.9.0+cu128", "trl": "1.16.0", "flash-attn": "2.6.0"}
    wanted = [
        "torch>=2.10",
        "trl>=1.16,<2",
        "peft>=0.21",
        'flash-attn>=2.8; extra == "flash"',
        'wandb; extra == "wandb"',
        "??",
    ]
    monkeypatch.setattr(software, "version_of", installed.get)
    monkeypatch.setattr(software.metadata, "requires", lambda package: wanted)
    assert list(software.conflicts_of("packtrain")) == [
        Conflict("packtrain", "torch>=2.10", "2.9.0+cu128"),
        Conflict("packtrain", "peft>=0.21", None),
        Conflict("packtrain", "flash-attn>=2.8", "2.6.0"),
    ]


def test_a_limit_of_some_kilobytes_is_not_told_as_none_at_all() -> None:
    assert [size(number) for number in (0, 65536, 8 * 2**20, 2**31)] == ["0 MiB", "64 KiB", "8 MiB", "2.0 GiB"]


def test_build_tools_are_those_that_a_run_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(name: str) -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        return str(tmp_path / name)

    usual, beside, in_path = put("usual/nvcc"), put("venv/bin/ninja"), put("path/nvcc")
    monkeypatch.setattr(software, "_NVCC", usual)
    monkeypatch.setattr(software.sys, "executable", str(tmp_path / "venv/bin/python"))
    nowhere, path = {"PATH": str(tmp_path)}, {"PATH": str(tmp_path / "path")}
    assert software.tool_command("ninja", nowhere) == (beside, "--version")
    assert software.tool_command("nvcc", nowhere) == (usual, "--version")
    assert software.tool_command("nvcc", path) == (in_path, "--version")
    assert software.tool_command("nvcc", {**path, "CUDA_HOME": "/opt/cuda"}) == ("/opt/cuda/bin/nvcc", "--version")
    assert software.tool_command("C++ compiler", nowhere) == ("c++", "--version")


def test_what_torch_could_not_finish_saying_counts_as_far_as_it_came() -> None:
    said = f'noise\n{MARK}{{"version": "2.13.0", "cuda": "13.0"}}\n{MARK}{{"kind": "cu'
    torch, accelerate = read_facts(said, "no answer within 8 s")
    assert torch == Torch(error="no answer within 8 s", version="2.13.0", cuda="13.0") and accelerate is None
    assert torch.available is None


def test_a_command_that_hangs_is_given_up_with_its_children(tmp_path: Path) -> None:
    script = tmp_path / "hangs"
    script.write_text(f"#!/bin/sh\nsleep 600 & echo $! > {tmp_path}/pid\necho half\nsleep 600\n")
    script.chmod(0o755)
    for limit_s in (0.5, 5, 60):  # which a machine that has other things to do may need to come to the first word
        began = time.monotonic()
        with pytest.raises(NoAnswer, match=f"no answer within {limit_s} s") as refusal:
            command((str(script),), limit_s)
        assert time.monotonic() - began < limit_s + 60
        if refusal.value.output:
            break
    assert refusal.value.output == "half\n"
    child, end = int((tmp_path / "pid").read_text()), time.monotonic() + 60
    while sight(child).state not in ("", "Z"):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_command_that_fails_or_never_ends_to_speak_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "_MOST", 2**16)
    for argv, why in (
        (("no-such-command-at-all",), "not installed"),
        (("sh", "-c", "echo 'Failed to initialize NVML' >&2; exit 9"), "Failed to initialize NVML"),
        (("sh", "-c", "exit 7"), "ends with exit code 7"),
        (("cat", "/dev/zero"), "answers with more than"),
    ):
        with pytest.raises(NoAnswer, match=why):
            command(argv, 60)


def test_a_question_whose_answer_fails_or_never_comes_costs_only_itself() -> None:
    with pytest.raises(NoAnswer, match=r"no answer within 0\.1 s"):
        Question(lambda: threading.Event().wait(300), 0.1).answer()
    with pytest.raises(NoAnswer, match="division by zero"):
        Question(lambda: 1 / 0, 60).answer()
    assert Question(lambda: 7, 60).answer() == 7
