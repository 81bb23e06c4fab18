"""The all-reduce of `packtrain env --cluster`: which backend, what its results mean, and real processes over gloo."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from packtrain.diagnose.cluster import all_reduce_process
from packtrain.diagnose.cluster.all_reduce import (
    WAITED,
    Reduced,
    able,
    backend_of,
    checked,
    outcome,
    pair_remarks,
    pairs_of,
    remark,
    take_part,
)
from packtrain.diagnose.cluster.links_table import Link
from tests.ports import free_port
from tests.unit.diagnose.test_cluster_compare import with_fact

CPU = with_fact("torch", "available", False)
GPU = with_fact("torch", "available", True)
BROKEN = with_fact("torch", "error", "libcudart.so.13: cannot open shared object file")
SLOW = with_fact("torch", "error", "no answer within 4.5 s")


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


def test_who_failed_is_named_and_not_who_waited_for_it() -> None:
    well = {"kib_ms": 0.1, "mib_64_ms": 64.0}
    assert "64 MiB in 64 ms (1000 MiB/s)" in outcome("gloo", {"n1": well, "n2": well}).found
    assert remark(outcome("gloo", {"n1": well, "n2": well})) == []
    (found,) = remark(outcome("gloo", {"n1": {"error": WAITED}, "n2": {"error": "no interface ib0"}}))
    assert found.nodes == ("n2",) and found.found == "over gloo: n2: no interface ib0"
    (found,) = remark(outcome("gloo", {"n1": {"error": WAITED}, "n2": {"error": WAITED}}))
    assert found.nodes == ("n1", "n2")


def entry(other: int, ms: float | None = 0.2, rate: float | None = 1000.0, found: str = "") -> dict[str, Any]:
    return {"other": other, "latency_ms": ms, "mib_per_s": rate, "found": found}


def test_a_pair_has_the_slower_figures_of_its_ends_and_is_dead_where_one_of_them_failed() -> None:
    results = {
        0: {"pairs": [entry(1), entry(2, 0.3, 900.0), entry(3)]},
        4: {"pairs": [entry(0, 0.1, 400.0), entry(2, None, None, "no result in time"), entry(3)]},
        7: {"pairs": [entry(0), entry(1, 0.2, 900.0)]},  # its process hangs
        9: {"pairs": [entry(0), entry(1)]},
    }
    pairs = {(one.start, one.end): one for one in pairs_of([0, 4, 7, 9], results)}
    found = {tuple(sorted(ends)): (one.status, one.latency_ms, one.mib_per_s) for ends, one in pairs.items()}
    assert found == {
        (0, 4): ("slow", 0.2, 400.0),
        (0, 7): ("ok", 0.3, 900.0),
        (0, 9): ("ok", 0.2, 1000.0),
        (4, 7): ("dead", None, None),
        (4, 9): ("ok", 0.2, 1000.0),
        (7, 9): ("not tried", None, None),
    }
    names = {node: f"n{node}" for node in (0, 4, 7, 9)}
    said = {(one.status, one.nodes) for one in pair_remarks(list(pairs.values()), names, Reduced("skipped"))}
    assert {(status, tuple(sorted(nodes))) for status, nodes in said} == {
        ("fail", ("n4", "n7")),
        ("warn", ("n0", "n4")),
    }
    assert outcome("gloo", {names[node]: one for node, one in results.items()}).status == "skipped"


def test_the_machine_all_of_whose_pairs_are_slow_is_named_and_not_each_of_them() -> None:
    slow = {
        rank: {"pairs": [entry(other, 0.2, 90.0 if 3 in (rank, other) else 200.0) for other in range(5)]}
        for rank in range(5)
    }
    (found,) = pair_remarks(pairs_of(range(5), slow), {rank: f"n{rank}" for rank in range(5)}, Reduced("ok"))
    assert (found.name, found.status, found.nodes) == ("machine", "warn", ("n3",))
    assert "all of its 4 all-reduces with one other machine are slow (0.2 ms, 90 MiB/s; usual here are" in found.found


def test_of_two_machines_the_one_over_all_is_that_of_the_pair_and_its_failure_is_said_once() -> None:
    well, broken = {"kib_ms": 0.1, "mib_64_ms": 64.0}, {"error": "no interface ib0"}
    (pair,) = pairs_of([0, 1], {0: well, 1: {**well, "kib_ms": 0.3}})
    assert (pair.status, pair.latency_ms, pair.mib_per_s) == ("ok", 0.3, 1000.0)
    (pair,) = pairs_of([0, 1], {0: {"error": WAITED}, 1: broken})
    assert pair.status == "dead"
    assert pair_remarks([pair], {0: "n1", 1: "n2"}, outcome("gloo", {"n1": {"error": WAITED}, "n2": broken})) == []


def dead(*ends: tuple[int, int]) -> list[Link]:
    return [Link(start, end, status="dead") for start, end in ends]


@pytest.mark.parametrize(
    ("closed", "links", "here", "apart"),
    [
        ([], dead(), [0, 4, 7, 9], []),
        ([7], dead(), [0, 4, 9], []),
        ([], dead((9, 4)), [0, 4, 7, 9], [(1, 3)]),
        ([], dead((0, 7), (7, 4), (9, 7)), [0, 4, 9], []),
        ([4, 9], dead((0, 7)), [0], []),
    ],
    ids=["well", "port-closed", "one-link", "one-machine", "nobody-left"],
)
def test_a_dead_link_costs_its_pair_and_a_closed_port_its_machine(
    closed: list[int], links: list[Link], here: list[int], apart: list[tuple[int, int]]
) -> None:
    assert able([0, 4, 7, 9], closed, links) == (here, apart)


class Store(dict[str, str]):
    """torch's, within one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> str:  # waits, as torch's does
        end = time.monotonic() + 20
        while key not in self and time.monotonic() < end:
            time.sleep(0.001)
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_pairs_that_cannot_reach_each_other_are_left_out_and_then_not_all_reduce_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = {"latency_ms": 1.0, "mib_per_s": 100.0, "found": ""}
    monkeypatch.setattr(all_reduce_process, "_of_two", lambda *_: figures)
    store, said, well = Store(), {rank: {} for rank in range(3)}, {}

    def run(rank: int) -> None:
        well[rank] = all_reduce_process._pairs(
            store, "gloo", rank, 3, [[1, 2]], lambda **facts: said[rank].update(facts)
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert well == {0: False, 1: False, 2: False}
    assert [sorted(one["other"] for one in said[rank]["pairs"]) for rank in range(3)] == [[1, 2], [0], [0]]
    pairs = pairs_of([0, 4, 7], said | {4: said[1], 7: said[2]}, [(1, 2)])
    assert [(one.status, 4 in (one.start, one.end) and 7 in (one.start, one.end)) for one in pairs] == [
        ("ok", False)
    ] * 2


@pytest.mark.parametrize("said", [3, {}, {"pairs": [4]}, {"pairs": [{"other": 1}]}, {"kib_ms": "x", "mib_64_ms": 1}])
def test_a_result_that_makes_no_sense_is_refused(said: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        checked(said)


def test_three_processes_reduce_in_pairs_and_together_and_one_that_cannot_says_why() -> None:
    port = free_port()
    results: dict[int, dict[str, Any]] = {}

    def run(rank: int) -> None:
        order = {"backend": "gloo", "rank": rank, "world": 3, "address": "127.0.0.1", "port": port, "apart": []}
        results[rank] = take_part(order, {"GLOO_SOCKET_IFNAME": "absent0" if rank > 2 else "lo"})

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "absent0" in results.pop(3)["error"]
    results = {rank: checked(one) for rank, one in results.items()}
    assert outcome("gloo", {f"n{rank}": one for rank, one in results.items()}).status == "ok", results
    pairs = pairs_of(range(3), results)
    assert {frozenset((one.start, one.end)) for one in pairs} == {frozenset(ends) for ends in ((0, 1), (0, 2), (1, 2))}
    assert all(one.status in ("ok", "slow") and one.latency_ms and one.mib_per_s for one in pairs), pairs
