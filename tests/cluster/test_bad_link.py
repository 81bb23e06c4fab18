"""A link between two hosts that delays, and one that loses packets: the one is named while the run goes on, the other ends it."""

from __future__ import annotations

import time
from pathlib import Path

from tests.cluster.bad_link import bad_link
from tests.cluster.test_two_hosts import prepared, small
from tests.cluster.two_hosts import TwoHosts, both

WORKER = """
from pathlib import Path
from packtrain.launch.worker import run_worker
from tests.cluster.small_group import Group

def work():
    group = Group()
    for step in range(10**6):
        group.pulse.enter("backward", step=step)
        group.all_reduce(payload=bytes(2**25 if Path("big").exists() else 1))
        group.pulse.usual_s = 0.01
        if group.rank == 0: Path("step").write_text(str(step))

run_worker(work)
"""
LIMIT_S = 16


def test_a_slow_link_is_named_while_training_goes_on_and_one_that_loses_packets_ends_it(
    made: TwoHosts, tmp_path: Path
) -> None:
    folder = prepared(tmp_path)
    (folder / "worker.py").write_text(WORKER)
    with bad_link(made) as link:
        runs = small(made, folder, f"topology.step_timeout={LIMIT_S}")
        end = time.monotonic() + 30
        while not (folder / "step").exists():
            assert time.monotonic() < end, runs[0].text
            time.sleep(0.05)
        link.delay_s = 2.0
        runs[0].until("the network between n1 and n2 is bad: an answer takes ")
        step = (folder / "step").read_text()
        while (folder / "step").read_text() == step:
            assert [run.process.poll() for run in runs] == [None, None], runs[0].text
            time.sleep(0.05)
        (folder / "big").write_text("")
        link.delay_s, link.loss = 0.0, 0.4
        lost = time.monotonic()
        assert both(runs, 60) == [4, 4], runs[0].text
        assert time.monotonic() - lost < LIMIT_S + 15
    said = runs[0].text + runs[1].text  # either side may be the first to give the other up, which then sees it gone
    assert "a link, a network card or a GPU" in said or "was lost: silent for" in said
    made.assert_empty()
