"""The all-reduces of `packtrain env --cluster`: what their results mean, and real processes over gloo."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from packtrain.diagnose.all_reduce import check_all_reduce, pairs_of, summary, take_part
from tests.ports import free_port

WELL = {"backend": "gloo", "kib_ms": 0.1, "mib_64_ms": 64.0}


def entry(one: int, other: int, rate: float = 1000.0, found: tuple[str, str] = ("", "")) -> dict[str, Any]:
    return {
        "ranks": [one, other],
        "ends": [{"latency_ms": 0.2, "mib_per_s": rate, "found": found[0]}, {"found": found[1]}],
    }


def results(number: int, *pairs: dict[str, Any]) -> dict[str, Any]:
    return {f"n{rank}": {**WELL, "pairs": list(pairs)} if rank == 0 else WELL for rank in range(number)}


def test_who_failed_is_named_and_who_could_not_take_part_is_the_reason_that_there_was_none() -> None:
    well = summary(results(2, entry(0, 1)))
    assert (well["status"], check_all_reduce(well)) == ("ok", []) and "64 MiB in 64 ms (1000 MiB/s)" in well["found"]
    assert well["nodes"] == {"n0": {"kib_ms": 0.1, "mib_64_ms": 64.0}, "n1": {"kib_ms": 0.1, "mib_64_ms": 64.0}}
    (found,) = check_all_reduce(summary({**results(2), "n1": {"backend": "gloo", "error": "no interface ib0"}}))
    assert (found["nodes"], found["found"], found["status"]) == (["n1"], "over gloo: n1: no interface ib0", "fail")
    none = summary({**results(2), "n1": {"skipped": "torch cannot be imported on n1"}})
    assert (none["status"], none["found"], check_all_reduce(none)) == ("skipped", "torch cannot be imported on n1", [])


def test_two_machines_are_slow_only_where_it_would_slow_down_any_training() -> None:
    (link,) = summary(results(2, entry(0, 1)))["pairs"]
    assert (link["status"], link["latency_ms"], link["mib_per_s"]) == ("ok", 0.2, 1000.0)
    (slow,) = check_all_reduce(summary(results(2, entry(0, 1, 5.0))))
    assert (slow["status"], slow["found"]) == ("warn", "slow: n0 and n1: 0.2 ms, 5 MiB/s, slow")


def test_a_pair_is_dead_where_one_of_its_ends_failed_and_says_which() -> None:
    pairs = (entry(0, 1, 400.0), entry(0, 2), entry(1, 2, 900.0, ("", "no result in time")))
    reduced = summary(results(4, *pairs))
    assert {(one["from"], one["to"]): one["status"] for one in reduced["pairs"]} == {
        ("n0", "n1"): "slow",
        ("n0", "n2"): "ok",
        ("n0", "n3"): "not tried",
        ("n1", "n2"): "dead",
        ("n1", "n3"): "not tried",
        ("n2", "n3"): "not tried",
    }
    assert (reduced["status"], reduced["found"]) == ("failed", "over gloo: n1 and n2: n2: no result in time")
    assert [(one["status"], one["nodes"]) for one in check_all_reduce(reduced)] == [
        ("fail", ["n1", "n2"]),
        ("warn", ["n0", "n1"]),
    ]


@pytest.mark.parametrize("number", [3, 5, 16, 64])
def test_the_pairs_of_a_slow_machine_are_named_and_the_slowest_of_them(number: int) -> None:
    pairs = (entry(*pair, 90.0 if 2 in pair else 200.0) for pair in pairs_of(number))
    reduced = summary(results(number, *pairs))
    (found,) = check_all_reduce(reduced)
    assert (found["name"], found["status"]) == ("all-reduce", "warn")
    assert "n2" in found["nodes"] and "90 MiB/s" in found["found"]
    assert "the slowest pair is" in reduced["found"] and "n2" in reduced["found"]


def together(number: int, backends: dict[int, str] | None = None, **absent: int) -> dict[str, dict[str, Any]]:
    """What so many processes find; one by the number `interface` has an interface that is not there."""
    port, found = free_port(), {}

    def run(rank: int) -> None:
        backend = (backends or {}).get(rank, "gloo")
        order = {"backend": backend, "rank": rank, "world": number, "address": "127.0.0.1", "port": port}
        found[f"n{rank}"] = take_part(order, {"GLOO_SOCKET_IFNAME": "absent0" if rank in absent.values() else "lo"})

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(found.items()))


def test_a_process_that_cannot_reduce_says_why_and_the_others_still_do() -> None:  # tests/cluster has all together
    reduced = summary(together(3, interface=1))
    assert {(one["from"], one["to"]) for one in reduced["pairs"]} == {("n0", "n1"), ("n0", "n2"), ("n1", "n2")}
    first, others, last = reduced["pairs"]
    assert (first["status"], last["status"]) == ("dead", "dead"), reduced
    assert others["status"] in ("ok", "slow") and others["latency_ms"] and others["mib_per_s"], reduced
    assert reduced["status"] == "failed" and "absent0" in reduced["pairs"][0]["found"]


def test_machines_with_gpus_and_without_have_no_backend_in_common() -> None:
    reduced = summary(together(2, {1: "nccl"}))
    assert reduced["status"] == "failed" and "GPUs on some machines and none on others" in reduced["found"]
