"""Faults of real processes: who is named, with which cause, how soon, and that nothing is left running.

The workers are small scripts in place of `packtrain worker`, which say where they are as a training run does; most of them
import no torch (small_launch.py, small_group.py). Time limits are set low (topology.step_timeout).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from packtrain.monitor.heartbeat import life_of
from tests.cluster.small_launch import BY_TORCHRUN, PRELOAD, SMALL, at_work
from tests.cluster.two_hosts import ENDED_S, LONG_S
from tests.waiting import until

CONFIG = {
    "model": {"init": "random", "config": {"model_type": "llama"}, "tokenizer": "quickstart"},
    "data": {"train": "me/data"},
    "batch": {"examples_per_step": 4},
    "trainer": {"output_dir": "out"},
    "topology": {"gpus_per_node": 2},
}

WORKER = """
import os, signal, sys, time
from pathlib import Path
from packtrain.launch.worker import run_worker
from tests.cluster.small_group import Group

rank, me = int(os.environ["RANK"]), os.getpid()
Path(f"pid-{rank}").write_text(str(me))

def wait_for_the_watchdog():
    time.sleep(3)

def work():
    group = Group()
    heartbeat = group.heartbeat
    def meet(step, phase="backward"):
        heartbeat.enter(phase, step=step)
        group.all_reduce()
    for step in (1, 2, 3):
        heartbeat.enter("data", step=step)
        meet(step)
        heartbeat.usual_s = 0.01
{body}
    return 0

run_worker(work)
"""

WITH_TORCH = """
import os, time
from pathlib import Path
from packtrain.errors import LostPeers
from packtrain.monitor.heartbeat import own_heartbeat
from packtrain.launch.worker import run_worker

rank = int(os.environ["RANK"])
Path(f"pid-{rank}").write_text(str(os.getpid()))

def work():
    import torch, torch.distributed as dist
    heartbeat = own_heartbeat()
    dist.init_process_group("gloo")
    total = torch.ones(3)
    for step in (1, 2, 3):
        heartbeat.enter("backward", step=step)
        dist.all_reduce(total)
        heartbeat.usual_s = 0.01
    try:
{body}
    except RuntimeError as error:
        raise LostPeers(str(error)) from error
    finally:
        dist.destroy_process_group()
    return 0

run_worker(work)
"""
LIMIT_S = 10


def start(folder: Path, body: str, step_timeout: int = LIMIT_S, worker: str = WORKER, launcher: tuple = SMALL):
    (folder / "worker.py").write_text(worker.replace("{body}", body))
    (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    with_torch = worker == WITH_TORCH and launcher == SMALL
    given = {PRELOAD: "torch.distributed"} if with_torch else {}
    return at_work(folder, *launcher, f"topology.step_timeout={step_timeout}", **given)


def launch(folder: Path, body: str, step_timeout: int = LIMIT_S) -> tuple[int, str]:
    process = start(folder, body, step_timeout)
    _, stderr = process.communicate(timeout=LONG_S)
    assert not running(folder)
    return process.returncode, stderr


def running(folder: Path) -> list[int]:
    """Workers that are still there."""
    pids = [int(file.read_text()) for file in folder.glob("pid-*")]
    return [pid for pid in pids if life_of(pid) != "gone"]


READS = """
    heartbeat.enter("data", step=4)
    Path("since").write_text(str(time.time()))
    def read_documents():
        with open("pipe") as file: file.read()
    if rank == 1: read_documents()
    meet(4, "counts")
"""
UNTIL_TOLD = """
    while not group.all_reduce(float(rank == 0 and Path("told").exists())):
        heartbeat.enter("data", step=3)
        Path("trains").touch()
        time.sleep(0.05)
"""
STOPS = """
    heartbeat.enter("forward", step=4, micro=2)
    Path("since").write_text(str(time.time()))
    def stop_here(): os.kill(me, signal.SIGSTOP)
    wait_for_the_watchdog()
    if rank == 1: stop_here()
    meet(4)
"""
CHECKPOINT = """
    heartbeat.enter("checkpoint", step=3)
    Path("since").write_text(str(time.time()))
    def _sync():
        with open("pipe", "w") as file: file.write("weights")
    if rank == 0: _sync()
    group.all_reduce(name="barrier")
"""
DIFFER = """
        heartbeat.enter("eval", step=3)
        Path("since").write_text(str(time.time()))
        dist.barrier() if rank == 1 else dist.all_reduce(total)
"""
FORWARD = """
    heartbeat.enter("forward", step=4)
    Path("since").write_text(str(time.time()))
    wait_for_the_watchdog()
"""
KILLED = """
    if rank == 1: os.kill(me, signal.SIGKILL)
    meet(4)
"""
ABORTS = """
    if rank == 1: os.kill(me, signal.SIGKILL)
    try:
        meet(4)
    except OSError: pass
    except Exception:
        os.abort()  # as NCCL has a rank do whose peer is gone
"""
CRASHES = """
    def in_a_kernel(): os.kill(me, signal.SIGSEGV)
    if rank == 1: in_a_kernel()
    meet(4)
"""
EXITS = """
    if rank == 1: __import__('posix')._exit(%s)
    meet(4)
"""
LEAVES = """
    if rank == 1: return 0
    meet(4, "counts")
"""


@dataclass(frozen=True)
class Fault:
    """What the ranks do, which one the first line of the diagnosis names, and what else is in it."""

    body: str
    named: str
    said: tuple[str, ...] = ()
    waiting: int | None = None  # the rank whose stack shows that it waits, in a run that hangs
    worker: str = WORKER
    launcher: tuple[str, ...] = SMALL


DIED = r"rank 1 on \S+ \(process \d+\) ended without an error message( \(%s\))?, in the forward pass of step 4"
FAULTS = {
    "data": Fault(READS, "rank 1 on .*no progress.*step 4.*", ("reading the data", "in read_documents"), 0),
    "stopped": Fault(STOPS, r"rank 1 on .*forward pass of step 4 \(micro-batch 2\).*", ("SIGSTOP",), 0),
    "checkpoint": Fault(CHECKPOINT, "rank 0 on .*step 3.*", ("storage", "in _sync", "gloo:barrier"), 1),
    "collectives": Fault(
        DIFFER, "rank .*", ("gloo:barrier number 4", "gloo:all_reduce number 4 (Float 3)"), 1, worker=WITH_TORCH
    ),
    "killed": Fault(FORWARD + KILLED, DIED % "SIGKILL", launcher=BY_TORCHRUN),
    "aborts": Fault(FORWARD + ABORTS, DIED % "SIGKILL"),
    "crashes": Fault(FORWARD + CRASHES, DIED % "SIGSEGV", ("in in_a_kernel",)),
    "exits with 7": Fault(FORWARD + EXITS % 7, DIED % "exit code 7", ("(exit code 7)",)),
    "exits with 0": Fault(FORWARD + EXITS % 0, DIED % "no launcher notes it"),
    "leaves": Fault(FORWARD + LEAVES, "rank 1 on .*has finished.*", ("step 4", "fewer steps")),
}


@pytest.fixture(scope="module")
def faults(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Path, subprocess.Popen[str]]]]:
    """All that are asked for at once: most of their time is waiting."""
    started = {}
    asked = [item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")]
    for name, fault in FAULTS.items():
        if name not in asked:
            continue
        folder = tmp_path_factory.mktemp("fault")
        os.mkfifo(folder / "pipe")
        limit = 600 if fault.waiting is None else LIMIT_S
        started[name] = folder, start(folder, fault.body, limit, fault.worker, fault.launcher)
    yield started
    for _, process in started.values():
        process.kill()


@pytest.mark.sample(without=("aborts", "exits with 7"))
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_diagnosed_once_and_ends_the_run_within_its_limit(name, faults):
    fault, (folder, process) = FAULTS[name], faults[name]
    _, stderr = process.communicate(timeout=LONG_S)
    assert process.returncode == 4, stderr
    assert not running(folder)
    diagnosis = folder / "out/logs/diagnosis.txt"
    took = diagnosis.stat().st_mtime - float((folder / "since").read_text())
    assert took < ENDED_S + (0 if fault.waiting is None else (3 if name == "checkpoint" else 1) * LIMIT_S), took
    assert re.fullmatch(fault.named, diagnosis.read_text().splitlines()[0]), stderr
    assert stderr.endswith(diagnosis.read_text())
    for one in fault.said:
        assert one in stderr
    assert stderr.count("likely cause") == 1
    if fault.waiting is not None:
        stacks = (folder / f"out/logs/stacks-rank-0000{fault.waiting}.txt").read_text()
        assert "in work" in stacks and "-- pending: gloo:" in stacks


RAISES = """
    heartbeat.enter("forward", step=4)
    Path("since").write_text(str(time.time()))
    if rank == 1: raise RuntimeError("CUDA error: an illegal memory access was encountered")
    meet(4)
"""


def test_an_exception_is_shown_once_with_its_rank_by_the_last_lines_of_its_log(tmp_path: Path) -> None:
    code, stderr = launch(tmp_path, RAISES, step_timeout=600)
    assert code == 4
    assert "rank 1 failed (exit code 1)" in stderr
    assert stderr.count("RuntimeError: CUDA error") == 1
    assert "lost" not in stderr and "Connection" not in stderr
    code, said = doctor(tmp_path)
    assert code == 4 and "rank 1 failed (exit code 1)" in said and "RuntimeError: CUDA error" in said


def doctor(folder: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "packtrain", "doctor", "out", *options]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LONG_S, check=False)
    return ended.returncode, ended.stdout


def test_doctor_says_from_another_terminal_why_a_run_hangs_and_workers_do_not_outlive_a_killed_launcher(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    process = start(tmp_path, UNTIL_TOLD + READS, step_timeout=600)
    until((tmp_path / "trains").exists)
    assert doctor(tmp_path)[0] == 0
    (tmp_path / "told").touch()
    # each look is a process
    code, said = until(lambda: (told := doctor(tmp_path, "--stacks"))[0] and told, look_s=1)
    assert code == 4, said
    assert "rank 1 on " in said and "is behind: no progress for " in said and "likely cause: reading the data" in said
    assert said.count("in read_documents") == 2 and "in meet" in said and "gloo:all_reduce number " in said
    assert len(running(tmp_path)) == 2  # they go on

    process.kill()
    process.communicate(timeout=LONG_S)
    until(lambda: not running(tmp_path), ENDED_S)
    code, said = doctor(tmp_path)
    assert code == 4 and "was killed" in said


SLOW = """
    for step in range(4, 8):
        heartbeat.enter("forward", step=step)
        end = time.monotonic() + (0.6 if rank else 0.2)
        while time.monotonic() < end: sum(range(1000))
        meet(step)
    heartbeat.enter("forward", step=8)
    end = time.monotonic() + (4.5 if rank else 0)
    while time.monotonic() < end: sum(range(1000))
    meet(8)
"""


def test_a_slow_rank_is_no_stall(tmp_path: Path) -> None:
    assert launch(tmp_path, SLOW, step_timeout=30) == (0, "")


FULL_DISK = """
    logs = Path("out/logs")
    if rank == 1:
        names = ["stacks-rank-00000.txt", "stacks-rank-00001.txt", "diagnosis.txt", "launcher.log", "rank-00001.log"]
        for name in [*names, ".ranks.json.partial"]:
            os.mkfifo(logs / f"{name}.stalled")  # who opens it waits for ever
            os.rename(logs / f"{name}.stalled", logs / name)
    heartbeat.enter("checkpoint", step=3)
    def _sync():
        (logs / "rank-00001.log").write_text("weights")
    if rank == 1: _sync()
    group.all_reduce(name="barrier")
"""


@pytest.mark.exhaustive
def test_a_run_whose_folder_is_on_a_stalled_disk_is_diagnosed_and_ended_all_the_same(tmp_path: Path) -> None:
    code, stderr = launch(tmp_path, FULL_DISK)
    assert code == 4, stderr
    assert "rank 1 on " in stderr and "in the checkpoint after step 3" in stderr and "in _sync" in stderr
    assert "slow or stalled storage" in stderr
