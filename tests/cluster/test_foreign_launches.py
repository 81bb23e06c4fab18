"""Processes that another launcher has started are watched from inside: who is named, and that all of them end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from packtrain.launch.worker import PARENT
from tests.cluster.small_launch import PRELOAD, SMALL, at_work
from tests.cluster.test_stalls import CONFIG, running
from tests.cluster.two_hosts import ENDED_S, LONG_S
from tests.ports import free_port
from tests.waiting import until

WORKER = """
import os, signal, sys, time
from pathlib import Path
from packtrain.config.compose import load_config
from packtrain.errors import LostPeers, UserError
from packtrain.errors import exit_code_of
from packtrain.launch.execute import execute
from packtrain.plan.launch_plan import plan_launch
from packtrain.plan.surroundings import detect_surroundings
from tests.cluster.small_group import Group

fault = os.environ["FAULT"]

def read_documents():
    time.sleep(1000)

def work():
    rank = int(os.environ["RANK"])
    Path(f"pid-{rank}").write_text(str(os.getpid()))
    group = Group()
    for step in range(1, 8):
        group.heartbeat.enter("data", step=step)
        if step == 4 and "killed" in fault: time.sleep(3)  # until rank 0 knows where all are
        if step == 4 and (rank, fault) == (1, "data"): read_documents()
        if step == 4 and (rank, fault) == (0, "stopped"): os.kill(os.getpid(), signal.SIGSTOP)
        if step == 4 and fault.startswith(f"{rank} is killed"): os.kill(os.getpid(), signal.SIGKILL)
        if step == 4 and (rank, fault) == (1, "raises"): raise UserError("row 7 is broken")
        if step == 4 and (rank, fault) == (1, "has a bug"): raise ValueError("shapes do not fit")
        if step == 4 and fault == "no launcher":
            Path(f"waits-{rank}").touch()
            time.sleep(1000)
        group.heartbeat.enter("backward", step=step)
        if step == 4 and rank == 0 and fault in ("1 is killed", "raises"): time.sleep(1000)  # as NCCL
        if step == 4 and rank == 1 and fault == "0 is killed": time.sleep(1000)
        group.all_reduce(name="broadcast" if step == 4 and (rank, fault) == (1, "apart") else "all_reduce")
        group.heartbeat.usual_s = 0.01
    return 0

def launched():
    config = load_config("run.yaml", [])
    return execute(plan_launch(config, detect_surroundings()), config, work)

sys.exit(exit_code_of(launched))
"""


@dataclass(frozen=True)
class Case:
    """A launch: what happens to it, what is said, and the exit code of all, where ranks end as they should."""

    launcher: str
    fault: str
    said: tuple[str, ...] = ()
    code: int = 0

    def __str__(self) -> str:
        return f"{self.launcher}-{self.fault}"


DATA = ("rank 1 on ", "is behind: no progress for ", "loading data of step 4", "in read_documents", "rank 0 on ")
STOPPED = ("rank 0 on ", "has not answered for ", "it is stopped")
DIED = "ended without an error message, in loading data of step 4"
KILLED = 128 + signal.SIGKILL
CASES = (
    Case("torchrun", "data", DATA, 1),
    Case("torchrun", "none"),
    Case("mpirun", "data", DATA, 4),
    Case("mpirun", "1 is killed", ("rank 1 on ", DIED), KILLED),
    Case("srun", "stopped", STOPPED, KILLED),
    Case("srun", "0 is killed", ("rank 0 on ", "is gone: no process listens at its port any more"), KILLED),
    Case("srun", "raises", ("row 7 is broken",), 4),
    Case("mpirun", "has a bug", ("rank 1 on ", " has failed:", "ValueError: shapes do not fit"), 4),
    Case("srun", "none"),
    Case("cyclic", "data", (*DATA[:-1], "rank 3 on "), 4),
    Case("hand", "stopped", STOPPED, KILLED),
)
ABANDONED = Case("mpirun", "no launcher")
Launch = tuple[Path, subprocess.Popen[str]]


def start(folder: Path, launcher: str, fault: str) -> Launch:
    (folder / "worker.py").write_text(WORKER)
    topology = {"step_timeout": 120 if fault == ABANDONED.fault else 10, "gpus_per_node": 2}
    (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "topology": topology}))
    port = str(free_port())
    given = {"FAULT": fault, PARENT: str(os.getpid())}
    if launcher == "torchrun":
        where = ["--start", "log", "1", "0", "2", "127.0.0.1", port]
        given[PRELOAD] = "packtrain.launch.execute packtrain.config.compose"
        return folder, at_work(folder, *SMALL, *where, **given, TORCHELASTIC_RUN_ID="none")
    number = "4" if launcher == "cyclic" else "2"
    return folder, at_work(folder, "-m", "tests.cluster.foreign_launch", launcher, number, port, **given)


def nothing_is_left(folder: Path) -> bool:
    """No rank, and nothing that says that there is one."""
    return until(lambda: not running(folder), ENDED_S)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, Launch]]:
    """All at once."""
    folders = {case: tmp_path_factory.mktemp(re.sub(r"\W", "-", str(case))) for case in (ABANDONED, *CASES)}
    runs = {case: start(folder, case.launcher, case.fault) for case, folder in folders.items()}
    yield runs
    for _, process in runs.values():
        process.kill()


def test_ranks_end_when_the_launcher_that_has_started_them_is_killed(started: dict[Case, Launch]) -> None:
    folder, process = started[ABANDONED]
    until(lambda: all((folder / f"waits-{rank}").exists() for rank in (0, 1)) or process.poll() is not None)
    process.kill()
    _, stderr = process.communicate(timeout=LONG_S)
    assert "the launcher on " in stderr and " is gone: ending its processes" in stderr
    assert nothing_is_left(folder)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_launch_by_others_is_watched_and_ended(case: Case, started: dict[Case, Launch]) -> None:
    folder, process = started[case]
    _, stderr = process.communicate(timeout=LONG_S)
    assert process.returncode == case.code, stderr
    for one in case.said:
        assert one in stderr
    diagnosed = bool(case.said) and case.fault not in ("raises", "has a bug", "stopped", "0 is killed")
    assert "lost the other processes" not in stderr
    assert stderr.count("likely cause") == diagnosed
    assert nothing_is_left(folder)
    assert (folder / "out/logs/diagnosis.txt").exists() == diagnosed
