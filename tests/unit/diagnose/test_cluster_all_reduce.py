"""The all-reduces of `packtrain env --cluster`: which backend, what its results mean, and real processes over gloo."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from packtrain.diagnose.cluster.all_reduce import WAITED, backend_of, checks_of, pairs_of, summary, take_part
from tests.ports import free_port
from tests.unit.diagnose.test_cluster_compare import with_torch

CPU = with_torch(available=False)
GPU = with_torch(available=True)
BROKEN = with_torch(error="libcudart.so.13: cannot open shared object file")
SLOW = with_torch(error="no answer within 4.5 s")


def entry(other: int, ms: float | None = 0.2, rate: float | None = 1000.0, found: str = "") -> dict[str, Any]:
    return {"other": other, "latency_ms": ms, "mib_per_s": rate, "found": found}


WELL = {"kib_ms": 0.1, "mib_64_ms": 64.0}
ONE, OTHER = {**WELL, "pairs": [entry(1)]}, {**WELL, "pairs": [entry(0, 0.3)]}


@pytest.mark.parametrize(
    ("two", "backend", "why"),
    [
        ((CPU, CPU), "gloo", ""),
        ((GPU, GPU), "nccl", ""),
        ((CPU, SLOW), "gloo", ""),
        ((GPU, CPU), "", "torch finds GPUs on some machines and none on others"),
        ((CPU, BROKEN), "", "torch cannot be imported on n2 (libcudart.so.13: cannot open shared object file)"),
    ],
    ids=["cpu", "gpu", "slow-import", "some", "broken"],
)
def test_the_backend_is_the_runs(two: tuple[dict, dict], backend: str, why: str) -> None:
    assert backend_of(dict(zip(("n1", "n2"), two, strict=True))) == (backend, why)


def test_who_failed_is_named_once_and_not_who_waited_for_it() -> None:
    well = summary("gloo", {"n1": ONE, "n2": OTHER})
    assert (well.status, checks_of(well)) == ("ok", []) and "64 MiB in 64 ms (1000 MiB/s)" in well.found
    (found,) = checks_of(summary("gloo", {"n1": {"error": WAITED}, "n2": {"error": "no interface ib0"}}))
    assert (found.nodes, found.found, found.status) == (("n2",), "over gloo: n2: no interface ib0", "fail")
    (found,) = checks_of(summary("gloo", {"n1": {"error": WAITED}, "n2": {"error": WAITED}}))
    assert found.nodes == ("n1", "n2")


def test_two_machines_are_slow_only_where_it_would_slow_down_any_training() -> None:
    (link,) = summary("gloo", {"n1": ONE, "n2": OTHER}).pairs
    assert (link.status, link.latency_ms, link.mib_per_s) == ("ok", 0.3, 1000.0)
    slow = summary("gloo", {"n1": ONE, "n2": {**WELL, "pairs": [entry(0, 0.2, 5.0)]}})
    assert [(one.status, one.found) for one in checks_of(slow)] == [("warn", "slow: n1 and n2: 0.2 ms, 5 MiB/s")]


def test_a_pair_has_the_slower_figures_of_its_ends_and_is_dead_where_one_of_them_failed() -> None:
    results = {
        "n0": {"pairs": [entry(1), entry(2, 0.3, 900.0), entry(3)]},
        "n4": {"pairs": [entry(0, 0.1, 400.0), entry(2, None, None, "no result in time"), entry(3)]},
        "n7": {"pairs": [entry(0), entry(1, 0.2, 900.0)]},  # its process hangs
        "n9": {"pairs": [entry(0), entry(1)]},
    }
    reduced = summary("gloo", results)
    assert {(one.start, one.end): (one.status, one.latency_ms, one.mib_per_s) for one in reduced.pairs} == {
        ("n0", "n4"): ("slow", 0.2, 400.0),
        ("n0", "n7"): ("ok", 0.3, 900.0),
        ("n0", "n9"): ("ok", 0.2, 1000.0),
        ("n4", "n7"): ("dead", None, None),
        ("n4", "n9"): ("ok", 0.2, 1000.0),
        ("n7", "n9"): ("not tried", None, None),
    }
    assert (reduced.status, reduced.found) == ("failed", "over gloo: n4 and n7: no result in time")
    assert [(one.status, one.nodes) for one in checks_of(reduced)] == [("fail", ("n4", "n7")), ("warn", ("n0", "n4"))]


@pytest.mark.parametrize("number", [3, 5, 16, 64])
def test_the_pairs_of_a_slow_machine_are_named_and_the_slowest_of_them(number: int) -> None:
    results: dict[str, Any] = {f"n{rank}": {**WELL, "pairs": []} for rank in range(number)}
    for one, other in pairs_of(number):
        for rank, with_ in ((one, other), (other, one)):
            results[f"n{rank}"]["pairs"].append(entry(with_, 0.2, 90.0 if 2 in (one, other) else 200.0))
    reduced = summary("gloo", results)
    (found,) = checks_of(reduced)
    assert (found.name, found.status) == ("all-reduce", "warn") and "n2" in found.nodes and "90 MiB/s" in found.found
    assert "the slowest pair is" in reduced.found and "n2" in reduced.found


def test_each_pair_of_few_machines_is_tried_and_each_of_many_is_in_two() -> None:
    assert pairs_of(2) == [(0, 1)] and len(set(pairs_of(8))) == 28
    met = [node for pair in pairs_of(65) for node in pair]
    assert len(pairs_of(65)) == 65 and all(met.count(node) == 2 for node in range(65))


def test_three_processes_reduce_in_pairs_and_together_and_one_that_cannot_says_why() -> None:
    port = free_port()
    results: dict[int, dict[str, Any]] = {}

    def run(rank: int) -> None:
        order = {"backend": "gloo", "rank": rank, "world": 3, "address": "127.0.0.1", "port": port}
        results[rank] = take_part(order, {"GLOO_SOCKET_IFNAME": "absent0" if rank > 2 else "lo"})

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "absent0" in results.pop(3)["error"]
    reduced = summary("gloo", {f"n{rank}": results[rank] for rank in range(3)})
    assert reduced.status == "ok", results
    assert {(one.start, one.end) for one in reduced.pairs} == {("n0", "n1"), ("n0", "n2"), ("n1", "n2")}
    assert all(one.status in ("ok", "slow") and one.latency_ms and one.mib_per_s for one in reduced.pairs), reduced
