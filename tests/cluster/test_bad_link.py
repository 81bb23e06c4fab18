"""A link between two hosts that loses packets ends the run when a step does not come through."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.bad_link import BadLink, bad_link
from tests.cluster.test_two_hosts import prepared, small
from tests.cluster.two_hosts import Running, TwoHosts, both

WORKER = """
from pathlib import Path
from packtrain.launch.worker import run_worker
from tests.cluster.small_group import Group

def work():
    group = Group()
    for step in range(10**6):
        group.heartbeat.enter("backward", step=step)
        group.all_reduce(payload=bytes(2**25 if Path("big").exists() else 1))
        group.heartbeat.usual_s = 0.01
        if group.rank == 0: Path("step").write_text(str(step))

run_worker(work)
"""
LIMIT_S = 16
ENDED_S = 120
"""Twice what is promised. How often what the launchers say to each other is lost, and how long TCP then waits, is chance."""


@pytest.fixture(scope="module")
def link(made: TwoHosts) -> Iterator[BadLink]:
    with bad_link(made) as link:
        yield link


def training(made: TwoHosts, folder: Path, *overrides: str) -> tuple[Running, Running]:
    """A run of small workers that has come to its first steps."""
    (prepared(folder) / "worker.py").write_text(WORKER)
    runs = small(made, folder, *overrides)
    goes_on(folder, runs)
    return runs


def goes_on(folder: Path, runs: tuple[Running, Running]) -> None:
    """Waits for the next step."""
    file, end = folder / "step", time.monotonic() + 120
    before = file.read_text() if file.exists() else ""
    while not file.exists() or file.read_text() == before:
        assert [run.process.poll() for run in runs] == [None, None], runs[0].text + runs[1].text
        assert time.monotonic() < end, runs[0].text
        time.sleep(0.05)


def test_a_link_that_loses_packets_ends_the_run_in_time(made: TwoHosts, link: BadLink, tmp_path: Path) -> None:
    runs = training(made, tmp_path, f"topology.step_timeout={LIMIT_S}")
    link.loss = 0.4
    (tmp_path / "big").write_text("")
    assert both(runs, 2 * ENDED_S) == [4, 4], runs[0].text
    link.loss = 0.0
    stood = (tmp_path / "step").stat().st_mtime  # the last that was whole
    assert max(run.begun + run.took() for run in runs) - stood < ENDED_S
    said = runs[0].text + runs[1].text  # either side may be the first to give the other up, which then sees it gone
    assert "a link, a network card or a GPU" in said or "was lost: silent for" in said
    made.assert_empty()
