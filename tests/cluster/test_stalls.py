"""Faults of real processes: who is named, with which cause, how soon, and that nothing is left running.

The workers are small scripts in place of `packtrain worker`, which say where they are as a training run does; most of them
import no torch (small_launch.py, small_group.py). Time limits are set low (topology.step_timeout).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from packtrain.monitor.processes import life_of
from tests.cluster.small_launch import PRELOAD, SMALL, at_work
from tests.cluster.two_hosts import ENDED_S, LONG_S

LAUNCH = """
import sys
from dataclasses import replace
from packtrain.config.compose import load_config
from packtrain.launch.exit_status import exit_code_of
from packtrain.launch.execute import execute
from packtrain.plan.launch_plan import plan_launch
from packtrain.plan.surroundings import look_around

config = load_config("run.yaml", sys.argv[1:])
plan = plan_launch(config, replace(look_around(), gpus=0))
(command,) = plan.commands
argv = [*command.argv[: command.argv.index("-m")], "worker.py", *command.argv[-2:]]
sys.exit(exit_code_of(lambda: execute(replace(plan, commands=(replace(command, argv=argv),)), config, int)))
"""
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

def told():  # the watchdog, where the rank is
    time.sleep(3)

if rank == 1 and "GROUP" in os.environ:
    Path(os.environ["GROUP"], "cgroup.procs").write_text(str(me))

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
import os, signal, sys, time
from pathlib import Path
from packtrain.errors import LostPeers
from packtrain.monitor.heartbeat import own_heartbeat
from packtrain.launch.worker import run_worker

rank, me = int(os.environ["RANK"]), os.getpid()
Path(f"pid-{rank}").write_text(str(me))

def work():
    import torch, torch.distributed as dist
    heartbeat = own_heartbeat()
    dist.init_process_group("gloo")
    total = torch.ones(3)
    def meet(step, phase="backward"):
        heartbeat.enter(phase, step=step)
        try:
            dist.all_reduce(total)
        except RuntimeError as error:
            raise LostPeers(str(error)) from error
    for step in (1, 2, 3):
        heartbeat.enter("data", step=step)
        meet(step)
        heartbeat.usual_s = 0.01
{body}
    return 0

def whole():
    try:
        return work()
    finally:
        sys.modules["torch"].distributed.destroy_process_group()

run_worker(whole)
"""
BY_TORCHRUN = ("-c", LAUNCH)
LIMIT_S = 10


def start(
    folder: Path, body: str, step_timeout: int = LIMIT_S, worker: str = WORKER, launcher: tuple[str, ...] = SMALL
) -> subprocess.Popen[str]:
    (folder / "worker.py").write_text(worker.replace("{body}", body))
    (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    with_torch = worker == WITH_TORCH and launcher == SMALL
    given = {PRELOAD: "torch.distributed"} if with_torch else {}
    return at_work(folder, *launcher, f"topology.step_timeout={step_timeout}", **given)


def launch(folder: Path, body: str, step_timeout: int = LIMIT_S, launcher: tuple[str, ...] = SMALL) -> tuple[int, str]:
    process = start(folder, body, step_timeout, launcher=launcher)
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
    told()
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
STALLS = {
    "data": READS,
    "stopped": STOPS,
    "checkpoint": CHECKPOINT,
    "collectives": DIFFER,
}


@pytest.fixture(scope="module")
def stalls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, subprocess.Popen[str]]]]:
    """All of them at once: most of their time is waiting."""
    started = {}
    for name, body in STALLS.items():
        folder = tmp_path_factory.mktemp(name)
        os.mkfifo(folder / "pipe")
        started[name] = folder, start(folder, body, worker=WITH_TORCH if name == "collectives" else WORKER)
    yield started
    for _, process in started.values():
        process.kill()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "data",
            [
                "rank 1 on ",
                "behind: for ",
                "in loading data of step 4, no progress",
                "reading the data",
                "in read_documents",
            ],
        ),
        (
            "stopped",
            ["rank 1 on ", "is stopped, in the forward pass of step 4 (micro-batch 2)", "SIGSTOP"],
        ),
        (
            "checkpoint",
            ["rank 0 on ", "in the checkpoint after step 3", "slow or stalled storage", "in _sync", "gloo:barrier"],
        ),
        (
            "collectives",
            ["different collective operations", "gloo:barrier number 4", "gloo:all_reduce number 4 (Float 3)"],
        ),
    ],
)
def test_a_stalled_run_is_diagnosed_and_ended_within_its_limit(
    name: str, said: list[str], stalls: dict[str, tuple[Path, subprocess.Popen[str]]]
) -> None:
    folder, process = stalls[name]
    _, stderr = process.communicate(timeout=LONG_S)
    took = (folder / "out/logs/ranks.json").stat().st_mtime - float((folder / "since").read_text())
    assert process.returncode == 4
    assert not running(folder)
    assert took < (3 if name == "checkpoint" else 1) * LIMIT_S + ENDED_S, took
    assert stderr.endswith((folder / "out/logs/diagnosis.txt").read_text())
    for one in said:
        assert one in stderr
    assert stderr.count("likely cause") == 1
    waiting = 0 if "rank 1" in stderr.splitlines()[0] else 1
    stacks = (folder / f"out/logs/stacks-rank-0000{waiting}.txt").read_text()
    assert "in work" in stacks and "-- pending: gloo:" in stacks


KILLED = """
    heartbeat.enter("forward", step=4)
    Path("since").write_text(str(time.time()))
    told()
    if rank == 1: os.kill(me, signal.SIGKILL)
    meet(4)
"""
RAISES = """
    heartbeat.enter("forward", step=4)
    Path("since").write_text(str(time.time()))
    if rank == 1: raise RuntimeError("CUDA error: an illegal memory access was encountered")
    meet(4)
"""


def test_a_killed_rank_is_named_with_its_signal_and_place_and_the_others_losses_are_not_repeated(
    tmp_path: Path,
) -> None:
    code, stderr = launch(tmp_path, KILLED, step_timeout=600, launcher=BY_TORCHRUN)
    assert time.time() - float((tmp_path / "since").read_text()) < ENDED_S
    pid = (tmp_path / "pid-1").read_text()
    first, *rest = stderr.splitlines()
    assert code == 4, stderr
    # nor has it always the time to write down the signal
    died = (
        rf"rank 1 on \S+ \(process {pid}\) ended without an error message( \(SIGKILL\))?, in the forward pass of step 4"
    )
    assert re.fullmatch(died, first)
    assert [line.strip()[:10] for line in rest] == ["rank 0 on ", "likely cau", "→ find out"]


ABORTS = """
    heartbeat.enter("forward", step=4)
    told()
    if rank == 1: os.kill(me, signal.SIGKILL)
    try:
        meet(4)
    except OSError: pass
    except Exception:
        os.abort()  # as NCCL has a rank do whose peer is gone
"""
CRASHES = """
    heartbeat.enter("forward", step=4)
    def in_a_kernel(): os.kill(me, signal.SIGSEGV)
    told()
    if rank == 1: in_a_kernel()
    meet(4)
"""


def test_a_rank_that_ends_itself_without_a_word_is_named_with_its_exit_code(tmp_path: Path) -> None:
    for number in (7, 0):
        folder = tmp_path / str(number)
        folder.mkdir()
        body = f"    heartbeat.enter('forward', step=4)\n    told()\n    if rank == 1: __import__('posix')._exit({number})\n    meet(4)\n"
        code, stderr = launch(folder, body, step_timeout=600)
        assert code == 4, stderr
        by = " (exit code 7)" if number else ""  # launchers note no end with 0
        assert f"ended without an error message{by}, in the forward pass of step 4" in stderr.splitlines()[0]


def test_a_rank_that_aborts_because_another_was_killed_is_not_the_one_that_is_named(tmp_path: Path) -> None:
    code, stderr = launch(tmp_path, ABORTS, step_timeout=600)
    assert code == 4, stderr
    died = r"rank 1 on \S+ \(process \d+\) ended without an error message( \(SIGKILL\))?, in the forward pass of step 4"
    assert re.fullmatch(died, stderr.splitlines()[0]), stderr
    assert stderr.count("likely cause") == 1


def test_a_crash_is_named_with_the_stack_at_which_it_was(tmp_path: Path) -> None:
    code, stderr = launch(tmp_path, CRASHES, step_timeout=600)
    assert code == 4, stderr
    assert re.search(
        r"ended without an error message( \(SIGSEGV\))?, in the forward pass of step 4", stderr.splitlines()[0]
    )
    assert stderr.count("in in_a_kernel") == 1
    assert "Fatal Python error" in (tmp_path / "out/logs/stacks-rank-00001.txt").read_text()


LEAVES = """
    if rank == 1:
        told()
        return 0
    meet(4, "counts")
"""


def test_a_rank_that_has_come_to_its_end_too_early_is_named(tmp_path: Path) -> None:
    code, stderr = launch(tmp_path, LEAVES, step_timeout=600)
    assert code == 4, stderr
    assert stderr.startswith("rank 1 on ") and "has finished, the others have not" in stderr
    assert ", in exchanging the counts of step 4" in stderr and "fewer steps" in stderr


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


def test_doctor_says_from_another_terminal_why_a_run_hangs_and_workers_do_not_outlive_a_killed_launcher(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "pipe")
    process = start(tmp_path, UNTIL_TOLD + READS, step_timeout=600)
    limit = time.monotonic() + LONG_S
    while not (tmp_path / "trains").exists() and time.monotonic() < limit:
        time.sleep(0.1)
    assert doctor(tmp_path)[0] == 0
    (tmp_path / "told").touch()
    code, said = 0, ""
    while code == 0 and time.monotonic() < limit:
        code, said = doctor(tmp_path, "--stacks")
    assert code == 4, said
    assert "rank 1 on " in said and "is behind: for " in said and "likely cause: reading the data" in said
    assert said.count("in read_documents") == 2 and "in meet" in said and "gloo:all_reduce number " in said
    assert len(running(tmp_path)) == 2  # they go on

    process.kill()
    process.communicate(timeout=LONG_S)
    limit = time.monotonic() + ENDED_S
    while running(tmp_path) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not running(tmp_path)
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


def test_a_slow_rank_on_a_machine_at_its_limit_is_no_stall(tmp_path: Path) -> None:
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        code, stderr = launch(tmp_path, SLOW, step_timeout=30)
    finally:
        for one in load:
            one.kill()
            one.wait()
    assert (code, stderr) == (0, "")


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
