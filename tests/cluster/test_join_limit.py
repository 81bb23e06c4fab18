"""Ranks that wait for the others at the start have topology.join_timeout for it, however short topology.step_timeout is."""

from __future__ import annotations

from pathlib import Path

import pytest

from packtrain.monitor.old.time_limits import TimeLimits, limit_s, patience_s
from tests.cluster.test_watchdog import launch
from tests.unit.monitor.test_diagnosis import FOR_OTHERS, named, rank

JOINS = """
    exec(compile("def wait_for_the_others(): time.sleep(7)", "/x/packtrain/train/sync/store.py", "exec"))
    pulse.enter("join", step=0)
    locals()["wait_for_the_others"]()
"""


@pytest.mark.parametrize("where", ["the others", "the others, at the store", "the first sum"])
@pytest.mark.parametrize(("step_s", "join_s"), [(600, 900), (600, 300), (20, 300), (10, 10)])
def test_whoever_waits_for_the_others_to_join_gives_up_by_himself_before_the_watchdog_ends_him(
    where: str, step_s: float, join_s: float
) -> None:
    limits = TimeLimits(step_s, join_s=join_s)
    waiting = [rank(one, "join", usual=0.0, **FOR_OTHERS[where]) for one in range(4)]
    twice = 2 * join_s  # a stage waits for the operation, then for what the others say of it
    assert twice < patience_s(named(waiting), waiting, limits) < twice + 120
    assert limit_s(rank(0, "join", usual=0.0), limits) <= 45  # who waits for nobody


def test_a_wait_at_the_start_that_is_longer_than_a_step_may_take_ends_no_run(tmp_path: Path) -> None:
    assert launch(tmp_path, JOINS, step_timeout=10) == (0, "")
