"""Markers and order of the test suite, and how its made-up examples are chosen: the same each time, on any machine."""

from __future__ import annotations

import gc
import os
import sys
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.train import forked

settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
WAITING = ("test_image", "test_cluster", "test_env", "test_rendezvous", "test_cache", "test_sync")
"""Files that mostly wait for processes or time limits, as all of tests/cluster do."""
gc.disable()  # until all tests are imported, which halves the time of that in each worker


def pytest_configure(config: pytest.Config) -> None:
    # Many tests start processes. Where pip has compiled nothing, one process compiles once what would take each worker 10 s.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        forked.serve()
    # Tiny models gain nothing from a second thread, which costs a third more: it spins while it waits.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config.addinivalue_line("markers", 'slow: takes more than a few seconds; left out by -m "not slow"')
    config.addinivalue_line("markers", "exhaustive: more of what others sample; only run by -m exhaustive")
    config.addinivalue_line("markers", "sample(*cases, without=()): all other cases, or those without, are exhaustive")


class ByServer(LoadFileScheduling):
    """Give each file to one worker, and all files on stand-in GPUs to the same one: they share a process that has imported everything."""

    def _split_scope(self, nodeid: str) -> str:
        return "tests/standin" if nodeid.startswith("tests/standin/") else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return ByServer(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Leave imported objects out of later collections: each trainer collects garbage at its end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases that are exhaustive. Files that mostly wait for processes take turns with files that mostly compute: of two workers one does each."""
    more = {*(Path(__file__).with_name("exhaustive.txt").read_text().splitlines())}
    files: dict[Path, list[pytest.Item]] = {}
    cases: dict[str, set[str]] = {}
    for item in items:
        function, _, case = item.nodeid.removesuffix("]").partition("[")
        cases.setdefault(function, set()).add(case)
        mark = item.get_closest_marker("sample")
        left_out = mark and (case in mark.kwargs.get("without", ()) or case not in (mark.args or [case]))
        if left_out or item.nodeid in more:
            item.add_marker(pytest.mark.exhaustive)
        files.setdefault(item.path, []).append(item)
    if not any("::" in one for one in config.args):  # else not all cases are here
        for item in items:
            if mark := item.get_closest_marker("sample"):
                unknown = {*mark.args, *mark.kwargs.get("without", ())} - cases[item.nodeid.partition("[")[0]]
                assert not unknown, f"{item.nodeid}: no such cases to sample: {unknown}"
    waiting = [path for path in files if path.parent.name == "cluster" or path.stem in WAITING]
    computing = [path for path in files if path not in waiting]
    turns = chain.from_iterable(zip_longest(computing, waiting))
    items[:] = [item for path in turns if path is not None for item in files[path]]
