"""The all-reduces of `packtrain env --cluster`: what their results mean, and real processes over gloo."""

from __future__ import annotations

import threading
from typing import Any

from packtrain.diagnose.all_reduce import check_all_reduce, pairs_of, summarize, take_part, untried
from tests.ports import free_port

WELL = {"backend": "gloo", "kib_ms": 0.1, "mib_64_ms": 64.0}


def results(number: int, rates: dict[tuple[int, int], float], dead: dict[tuple[int, int], str]) -> dict[str, Any]:
    """Of so many machines, whose pairs have these rates or are dead; the others are not tried."""
    pairs = untried([f"n{rank}" for rank in range(number)])
    for ranks, pair in zip(pairs_of(number), pairs, strict=True):
        if ranks in rates:
            pair.update(status="ok", latency_ms=0.2, mib_per_s=rates[ranks])
        if ranks in dead:
            pair.update(status="dead", found=dead[ranks])
    return {f"n{rank}": {**WELL, "pairs": pairs} if rank == 0 else WELL for rank in range(number)}


def test_who_failed_is_named_and_who_could_not_take_part_is_the_reason_that_there_was_none() -> None:
    all_well = results(2, {(0, 1): 1000.0}, {})
    well = summarize(all_well)
    assert (well["status"], check_all_reduce(well)) == ("ok", []) and "64 MiB in 64 ms (1000 MiB/s)" in well["found"]
    assert well["nodes"] == {"n0": {"kib_ms": 0.1, "mib_64_ms": 64.0}, "n1": {"kib_ms": 0.1, "mib_64_ms": 64.0}}
    (check,) = check_all_reduce(summarize({**all_well, "n1": {"backend": "gloo", "error": "no interface ib0"}}))
    assert (check["nodes"], check["status"]) == (["n1"], "fail") and "no interface ib0" in check["found"]
    none = summarize({**all_well, "n1": {"skipped": "no torch on n1"}})
    assert (none["status"], none["found"], check_all_reduce(none)) == ("skipped", "no torch on n1", [])


def test_pairs_that_are_slow_or_dead_or_not_tried_are_named() -> None:
    reduced = summarize(results(4, {(0, 1): 400.0, (1, 2): 900.0}, {(2, 3): "n3: no result in time"}))
    assert [pair["status"] for pair in reduced["pairs"]] == ["slow", "ok", "dead", "not tried"]
    assert reduced["status"] == "failed" and "n2 and n3: n3: no result in time" in reduced["found"]
    assert [(check["status"], check["nodes"]) for check in check_all_reduce(reduced)] == [
        ("fail", ["n2", "n3"]),
        ("warn", ["n0", "n1"]),
    ]


def test_the_pairs_of_a_slow_machine_are_named_and_the_slowest_of_them() -> None:
    rates = {pair: 90.0 if 2 in pair else 200.0 for pair in pairs_of(64)}
    (check,) = check_all_reduce(summarize(results(64, rates, {})))
    assert (check["name"], check["status"]) == ("all-reduce", "warn")
    assert "n2" in check["nodes"] and "90 MiB/s" in check["found"]


def test_a_process_that_cannot_reduce_says_why_and_the_others_still_do() -> None:  # tests/cluster has all together
    port, found = free_port(), {}

    def run(rank: int) -> None:
        order = {"backend": "gloo", "rank": rank, "names": ["n0", "n1", "n2"], "address": "127.0.0.1", "port": port}
        found[f"n{rank}"] = take_part(order, {"GLOO_SOCKET_IFNAME": "absent0" if rank == 1 else "lo"})

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reduced = summarize(dict(sorted(found.items())))
    first, second, others = reduced["pairs"]
    assert (first["status"], second["status"]) == ("dead", "dead"), reduced
    assert others["status"] in ("ok", "slow") and others["latency_ms"] and others["mib_per_s"], reduced
    assert reduced["status"] == "failed" and "absent0" in first["found"]
