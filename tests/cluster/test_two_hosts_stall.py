"""Runs that stand still on two network hosts: the rank is named with its machine, also where only both together can tell."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_two_hosts import prepared, small
from tests.cluster.two_hosts import ENDED_S, LONG_S, Running, TwoHosts, both

WORKER = """
import os, time
from pathlib import Path
from packtrain.launch.worker import run_worker
from tests.cluster.small_group import Group

rank, fault = int(os.environ["RANK"]), os.environ["FAULT"]

def read_documents():
    time.sleep(1000)

def work():
    group = Group()
    for step in range(1, 100):
        group.heartbeat.enter("data", step=step)
        if step == 4 and rank == 1 and fault == "data": read_documents()
        group.heartbeat.enter("backward")
        if step == 4: Path("since").write_text("")
        group.all_reduce(name="barrier" if step == 4 and rank == 1 and fault == "collectives" else "all_reduce")
        group.heartbeat.usual_s = 0.01
    return 0

run_worker(work)
"""
LIMIT_S = 10  # the least that may be set
ASKED = "asked"
FAULTS = {
    "data": ["rank 1 on n2 ", "is behind: for ", "loading data of step 4", "reading the data", "in read_documents"],
    "collectives": ["different collective operations", "rank 1 on n2", "gloo:barrier number 4", "all_reduce number 4"],
}


Stalls = dict[str, tuple[Path, tuple[Running, Running]]]


@pytest.fixture(scope="module")
def started(made: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stalls]:
    """All at once, each with a port of its own: most of their time is waiting."""
    started = {}
    for number, name in enumerate([*FAULTS, ASKED]):
        folder = prepared(tmp_path_factory.mktemp(name))
        (folder / "worker.py").write_text(WORKER)
        given = (
            f"topology.step_timeout={600 if name == ASKED else LIMIT_S}",
            f"topology.main_port={29500 + 10 * number}",
        )
        started[name] = folder, small(made, folder, *given, FAULT="data" if name == ASKED else name)
    yield started
    for run in started[ASKED][1]:
        run.process.kill()
        run.wait()
    made.assert_empty()


def test_doctor_on_another_machine_names_the_rank_and_shows_what_all_are_doing(made: TwoHosts, started: Stalls) -> None:
    folder, runs = started[ASKED]
    said, end = "", time.monotonic() + LONG_S
    while "likely cause: reading the data" not in said or said.count("it does not answer"):
        assert time.monotonic() < end, said
        doctor = made.start(2, "-m", "packtrain", "doctor", "run", "--stacks", cwd=folder)
        code, said = doctor.wait(), doctor.text
    assert code == 4
    assert "rank 1 on n2" in said and "rank 0 on n1 waits in gloo:all_reduce number 4" in said
    for rank, where in ((0, "in work"), (1, "in read_documents")):
        assert where in (folder / f"run/logs/stacks-rank-0000{rank}.txt").read_text()
        assert where in said.partition(f"stack of rank {rank} on n{rank + 1}")[2]
    assert [run.process.poll() for run in runs] == [None, None]  # they go on


@pytest.mark.parametrize(("fault", "said"), FAULTS.items(), ids=FAULTS)
def test_a_stall_is_told_on_the_first_machine_and_ends_both(fault: str, said: list[str], started: Stalls) -> None:
    folder, runs = started[fault]
    assert both(runs) == [4, 4]
    stalled = (folder / "since").stat().st_mtime
    assert max(run.begun + run.took() for run in runs) - stalled < LIMIT_S + ENDED_S
    for one in said:
        assert one in runs[0].text
    assert runs[0].text.count("likely cause") == 1
    for rank in (0, 1):
        assert "in work" in (folder / f"run/logs/stacks-rank-0000{rank}.txt").read_text()
