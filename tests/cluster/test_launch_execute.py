"""Real processes through accelerate: which exit code comes out, what reaches the terminal, and what a signal does.

The workers are small scripts in place of `packtrain worker`, so that only the launcher is under test; where torchrun has no
part in it, small_launch.py stands in for that.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from packtrain.errors import BUG
from tests.cluster.small_launch import BY_TORCHRUN, SMALL, at_work
from tests.cluster.test_stalls import CONFIG
from tests.cluster.two_hosts import LONG_S
from tests.unit.test_layout import PACKAGE, files_of_section
from tests.waiting import until

WORKER = """
import os, signal, sys, time
from packtrain.errors import CheckFailed, PeerFailed, UserError
from packtrain.launch.worker import run_worker

rank = int(os.environ["RANK"])

def work():
    print("hello from rank", rank, os.environ["OMP_NUM_THREADS"], sys.argv[1:], flush=True)
{body}
    return 0

run_worker(work)
"""

ALL_REDUCE = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    print("sum", total.item(), flush=True)
    dist.destroy_process_group()
"""
# os.write: a signal inside print would have its text written twice
STOPPABLE = """
    def stop(number, frame):
        os.write(1, b"checkpoint\\n")
        raise SystemExit(128 + number)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    os.write(1, b"ready\\n")
    while True: time.sleep(0.1)
"""
# whoever is second to raise is not to be ended before that
TOGETHER = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"here-{rank}", "w")
    while not os.path.exists(f"here-{1 - rank}"): time.sleep(0.001)
"""

MOST_FILES = 22
"""Files of ours that a reader goes through to follow a launch of two processes, from `execute` to the exit code."""
WATCHED = f"""
import json, sys, threading
import packtrain.launch.execute as module
files, unwatched = set(), module.execute
def note(frame, event, _):
    if event == "call" and frame.f_code.co_filename.startswith("{PACKAGE}/"):
        files.add(frame.f_code.co_filename.removeprefix("{PACKAGE}/"))
def watched(*given):
    threading.setprofile(note), sys.setprofile(note)
    try:
        return unwatched(*given)
    finally:
        sys.setprofile(None)
        json.dump(sorted(files), open("files.json", "w"))
module.execute = watched
"""


def start(folder: Path, body: str, launcher: tuple[str, ...] = SMALL, **groups: str) -> subprocess.Popen[str]:
    (folder / "worker.py").write_text(WORKER.replace("{body}", body))
    (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, **groups}))
    return at_work(folder, *launcher, OMP_NUM_THREADS=None)


def launch(folder: Path, body: str, launcher: tuple[str, ...] = SMALL, **groups: str) -> tuple[int, str, str]:
    process = start(folder, body, launcher, **groups)
    stdout, stderr = process.communicate(timeout=LONG_S)
    return process.returncode, stdout, stderr


def has(log: Path, text: str) -> bool:
    return log.exists() and text in log.read_text()


def test_processes_reduce_over_gloo_and_only_rank_0_writes_to_the_terminal(tmp_path: Path) -> None:
    strategy = "zero1" if find_spec("deepspeed") else "ddp"  # torchrun imports DeepSpeed, which prints
    code, stdout, stderr = launch(tmp_path, ALL_REDUCE, BY_TORCHRUN, strategy=strategy)
    assert (code, stderr) == (0, "")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert re.fullmatch(rf"hello from rank 0 {threads} \['sft', '.*/config.yaml'\]\nsum 3.0\n", stdout)
    assert "sum 3.0" in (tmp_path / "out/logs/rank-00001.log").read_text()
    begun = {"config.yaml", "plan.json", "env.json", "accelerate.yaml"}  # these workers never begin to train
    begun |= {"deepspeed.json"} if strategy == "zero1" else set()
    assert {file.name for file in (tmp_path / "out/logs/attempt").iterdir()} == begun


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "code"),
    [
        ("raise UserError('bad data')", "time.sleep(300)", 2),
        ("time.sleep(300)", "raise CheckFailed('leaks')", 3),
        ("raise PeerFailed('gone')", "time.sleep(300)", 4),
        ("raise RuntimeError('oops')", "time.sleep(300)", 4),
        ("raise RuntimeError('oops')", "raise RuntimeError('oops')", 1),
        ("raise RuntimeError('gone')", "raise UserError('bad data')", 2),
    ],
    ids=["user-error", "check-failed", "peer-failed", "one-raises", "bug", "the-most-telling"],
)
def test_the_exit_code_says_what_the_worker_died_of(rank_0: str, rank_1: str, code: int, tmp_path: Path) -> None:
    by_torchrun = rank_0 == "raise UserError('bad data')"
    first = TOGETHER if rank_0.startswith("raise") and rank_1.startswith("raise") else ""
    body = f"{first}    if rank == 0: {rank_0}\n    if rank == 1: {rank_1}\n"
    ended, _, stderr = launch(tmp_path, body, BY_TORCHRUN if by_torchrun else SMALL)
    assert ended == code
    assert "ChildFailedError" not in stderr and "stopped by" not in stderr
    assert not by_torchrun or "ChildFailedError" in (tmp_path / "out/logs/launcher.log").read_text()
    if by_torchrun:
        assert stderr == "error:\n  bad data\n"
    if "oops" in rank_0:
        assert stderr.count("RuntimeError: oops") == 1 and stderr.count(BUG) == (code == 1)
        assert ("rank 0 failed (exit code 1): see out/logs/rank-00000.log" in stderr) == (code == 4)
    if code == 3:
        assert "rank 1 failed (exit code 3): see out/logs/rank-00001.log" in stderr
        assert f"{socket.gethostname()}, rank 1:   leaks" in stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_worker_and_decides_the_exit_code(number: int, tmp_path: Path) -> None:
    process = start(tmp_path, STOPPABLE)
    other = tmp_path / "out/logs/rank-00001.log"
    assert process.stdout is not None
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None
    until(lambda: has(other, "\nready\n") or process.poll() is not None)
    process.send_signal(number)
    stdout, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 128 + number
    assert stdout == "checkpoint\n"
    assert "checkpoint" in other.read_text()


AGAIN = """
    received = []
    def stop(number, frame):
        received.append(number)
        os.write(1, b"now\\n" if received[1:] else b"finishing\\n")
        if received[1:]: raise KeyboardInterrupt
    signal.signal(signal.SIGINT, stop)
    os.write(1, b"ready\\n")
    while True: time.sleep(0.1)
"""


def test_a_second_ctrl_c_reaches_every_worker_and_is_not_the_end_of_torchrun(tmp_path: Path) -> None:
    process, other = start(tmp_path, AGAIN, BY_TORCHRUN), tmp_path / "out/logs/rank-00001.log"
    assert process.stdout is not None
    for word in ("ready", "finishing"):
        while process.stdout.readline() != f"{word}\n":
            assert process.poll() is None
        until(lambda word=word: has(other, f"\n{word}\n") or process.poll() is not None)
        process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=LONG_S)
    assert (process.returncode, stdout, stderr) == (130, "now\n", "stopped by SIGINT\n")
    assert other.read_text().endswith("finishing\nnow\n")


def test_a_signal_before_training_ends_every_process_with_one_line(tmp_path: Path) -> None:
    body = "    try: time.sleep(300)\n    except BaseException: raise ImportError('as an import may say')\n"
    process, other = start(tmp_path, body), tmp_path / "out/logs/rank-00001.log"
    until(lambda: has(other, "hello") or process.poll() is not None)
    assert process.stdout and "hello" in process.stdout.readline()  # rank 0 has begun, too
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=LONG_S)
    assert (process.returncode, stderr) == (130, "stopped by SIGINT\n")
    assert "Traceback" not in other.read_text()


def test_a_launch_goes_through_few_files(tmp_path: Path) -> None:
    option, program = BY_TORCHRUN
    assert launch(tmp_path, "", (option, WATCHED + program))[0] == 0
    files = {*json.loads((tmp_path / "files.json").read_text())}
    named = files_of_section(PACKAGE.parent / "docs/architecture.md", "One launch")
    assert {one for one in named if one.startswith("launch/")} - {"launch/worker.py"} <= files
    assert len(files) <= MOST_FILES, "\n".join(sorted(files))
