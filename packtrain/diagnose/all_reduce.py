"""All-reduces between the machines of a run, timed over the run's backend.

One process on each machine (`python -m packtrain.diagnose.all_reduce`) reduces in pairs, one pair after another, so that pairs do not
disturb each other. At the end all reduce together, unless a pair has failed. Each pair is a process group of its own, so that its
failure ends no other. Every result is printed at once, as a JSON line that replaces the earlier one: a process that hangs has reported.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from packtrain.diagnose.machine import ask_python
from packtrain.errors import Json
from packtrain.wording import first_line, listed

if TYPE_CHECKING:
    from torch.distributed import Store

TOGETHER_S = 40.0  # for all machines to import torch; a busy one takes half of them
PAIRS_S = 30.0  # after it no further pair begins
LATE_S = 20.0  # for both ends of a pair: gloo's limit to connect is five times its limit for an operation
PROCESS_S = TOGETHER_S + PAIRS_S + 2 * LATE_S
_PAIR_S, _ALL_S = 3.0, 10.0  # for one operation
_MIB = 2**20
_PAIR_MIB = {"nccl": 16, "gloo": 4}
_SLOW_MIB_PER_S = 20.0
_FIX = "Check the interfaces that NCCL and gloo take (packtrain plan) and firewalls between the machines: they use free ports. "
_FIX += "NCCL_DEBUG=INFO, or TORCH_CPP_LOG_LEVEL=INFO for gloo, shows what they try."
_FIX_SLOW = "Check its cable, port, MTU and interface (ethtool, ibstat), and what else uses it."


def pairs_of(machines: int) -> list[tuple[int, int]]:
    """Return the pairs to try, one after another: the neighbours in a ring."""
    return [(0, 1)] if machines == 2 else [(rank, (rank + 1) % machines) for rank in range(machines)]


def untried(names: Sequence[str]) -> list[Json]:
    """Return the results of all pairs of these machines before they are tried."""
    unknown = {"latency_ms": None, "mib_per_s": None, "status": "not tried", "found": ""}
    return [{"from": names[first], "to": names[second], **unknown} for first, second in pairs_of(len(names))]


def take_part(order: Json, env: Mapping[str, str]) -> Json:
    """Run this machine's process to its end. Return milliseconds by size, or an `error`.

    Rank 0 also returns the `pairs`. `order` has `backend`, its `rank`, the `names` of all machines, and `address` and `port` of rank 0's store.
    """
    quiet = {
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "1",  # a timeout of NCCL then raises an error instead of ending the process
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    output, error = ask_python(
        "packtrain.diagnose.all_reduce", json.dumps(order), limit_s=PROCESS_S, env={**quiet, **env}
    )
    lines = [line for line in output.splitlines() if line.endswith("}")] or ['{"error": "its process said nothing"}']
    return {"backend": order["backend"], **json.loads(lines[-1]), **({"error": error} if error else {})}


def summarize(results: Mapping[str, Json]) -> Json:
    """Combine the results of all machines: status, words, and the figures of each pair.

    Results are by name, in the order of ranks. A machine that did not take part has only `skipped`, the reason.
    """
    if skipped := [str(result["skipped"]) for result in results.values() if "skipped" in result]:
        return {"status": "skipped", "found": skipped[0], "backend": "", "nodes": None, "pairs": []}
    main = next(iter(results.values()))
    pairs = main.get("pairs") or untried(list(results))
    fastest = max(pair["mib_per_s"] or 0 for pair in pairs)
    for pair in pairs:
        if pair["status"] == "ok" and pair["mib_per_s"] < max(fastest / 2, _SLOW_MIB_PER_S):
            pair["status"] = "slow"
    nodes = {
        name: {key: value for key, value in result.items() if key not in ("backend", "pairs")}
        for name, result in results.items()
    }
    words = [f"{pair['from']} and {pair['to']}: {pair['found']}" for pair in pairs if pair["status"] == "dead"]
    words = words or [f"{name}: {node['error']}" for name, node in nodes.items() if "error" in node]
    status = "failed" if words else "ok"
    if not words:
        kib, mib = (max(float(node[key]) for node in nodes.values()) for key in ("kib_ms", "mib_64_ms"))
        words = [f"1 KiB in {kib:.2g} ms, 64 MiB in {mib:.0f} ms ({64e3 / mib:.0f} MiB/s)"]
    found = f"over {main['backend']}: {'; '.join(words[:4])}"
    return {"status": status, "found": found, "backend": main["backend"], "nodes": nodes, "pairs": pairs}


def describe_pair(pair: Json) -> str:
    """Describe a pair: "n1 and n2: 0.2 ms, 900 MiB/s, ok"."""
    figures = f"{pair['latency_ms']:.2g} ms, {pair['mib_per_s']:.0f} MiB/s, " if pair["mib_per_s"] else ""
    return f"{pair['from']} and {pair['to']}: {figures}{pair['status']}"


def check_all_reduce(reduced: Json) -> list[Json]:
    """Return the checks: a failed all-reduce, and slow pairs."""
    ends: dict[str, list[str]] = {"dead": [], "slow": []}
    for pair in reduced["pairs"]:
        ends.get(pair["status"], []).extend((pair["from"], pair["to"]))
    dead, slow = (list(dict.fromkeys(names)) for names in ends.values())
    checks = []
    if reduced["status"] == "failed":
        nodes = dead or [name for name, node in reduced["nodes"].items() if "error" in node]
        checks.append({"status": "fail", "found": reduced["found"], "fix": _FIX, "nodes": nodes})
    if slow:
        words = listed([describe_pair(pair) for pair in reduced["pairs"] if pair["status"] == "slow"])
        checks.append({"status": "warn", "found": f"slow: {words}", "fix": _FIX_SLOW, "nodes": slow})
    return [{"name": "all-reduce", **check} for check in checks]


def _measure(order: Json, report: Callable[..., None]) -> None:
    """Measure and report the results. Raises torch's error if this machine cannot take part.

    Rank 0 has the store, starts each pair, and collects the results of both ends.
    """
    import torch.distributed as dist

    backend, rank, names = order["backend"], order["rank"], order["names"]
    world, limit, late = len(names), timedelta(seconds=TOGETHER_S), timedelta(seconds=LATE_S)
    store = dist.TCPStore(order["address"], order["port"], world, is_master=rank == 0, timeout=limit)

    def begins(what: str, wanted: bool) -> bool:
        """Return rank 0's `wanted` on all ranks: either all begin the operation, or none."""
        if rank == 0:
            store.set(f"begin {what}", str(wanted))
        return store.get(f"begin {what}") == b"True"

    def result(what: str) -> Json:
        """Return a rank's result from the store, waiting at most LATE_S."""
        try:
            store.wait([what], late)
        except dist.DistError:
            return {"found": "no result in time"}
        return json.loads(store.get(what))

    pairs, end = untried(names), time.monotonic() + PAIRS_S
    for ranks, pair in zip(pairs_of(world), pairs, strict=True):
        if not begins(f"{ranks}", time.monotonic() < end):
            break
        if rank in ranks:
            store.set(f"{ranks} {rank}", json.dumps(_measure_pair(store, backend, ranks, ranks.index(rank))))
        if rank == 0:
            ends = {names[other]: result(f"{ranks} {other}") for other in ranks}
            failed = ", ".join(f"{name}: {figures['found']}" for name, figures in ends.items() if figures["found"])
            pair.update({"status": "dead", "found": failed} if failed else {**ends[pair["from"]], "status": "ok"})
            report(pairs=pairs)
    if begins("all", not any(pair["status"] == "dead" for pair in pairs)):
        with _group(backend, dist.PrefixStore("all", store), rank, world, _ALL_S):
            report(kib_ms=_milliseconds(backend, 2**10, 10), mib_64_ms=_milliseconds(backend, 64 * _MIB, 3))
    store.set(f"end {rank}", "{}")
    for other in range(world if rank == 0 else 0):  # the store is in this process, so it ends last
        result(f"end {other}")


def _measure_pair(store: Store, backend: str, pair: tuple[int, int], rank: int) -> Json:
    """Measure a pair from this end; `found` is the reason if it fails."""
    import torch.distributed as dist

    size = _PAIR_MIB[backend]
    try:
        with _group(backend, dist.PrefixStore(f"{pair}", store), rank, 2, _PAIR_S):
            latency, taken = _milliseconds(backend, 2**10, 10), _milliseconds(backend, size * _MIB, 3)
    except Exception as error:  # the error of torch or a backend is the answer
        return {"found": first_line(error)}
    return {"latency_ms": latency, "mib_per_s": round(1e3 * size / taken, 1), "found": ""}


@contextmanager
def _group(backend: str, store: Store, rank: int, world: int, limit_s: float) -> Iterator[None]:
    """Open torch's default process group inside the block; no operation takes longer than `limit_s`."""
    import torch.distributed as dist

    limit = timedelta(seconds=limit_s)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    except Exception:
        # torch numbers groups in their keys, and counts a failed one until another one is destroyed
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        raise
    try:
        yield
    finally:
        dist.destroy_process_group()


def _milliseconds(backend: str, size: int, times: int) -> float:
    """Return the time of an all-reduce of `size` bytes. It is the median of `times` runs after the first, which also connects."""
    import torch
    import torch.distributed as dist

    data = torch.ones(size // 4, device="cuda:0" if backend == "nccl" else "cpu")
    seconds: list[float] = []
    for _ in range(times + 1):
        begun = time.monotonic()
        dist.all_reduce(data)
        data[0].item()  # waits for a GPU, too
        seconds.append(time.monotonic() - begun)
    return round(statistics.median(seconds[1:]) * 1000, 3)


if __name__ == "__main__":
    known: Json = {}

    def report(**facts: object) -> None:
        known.update(facts)
        print(json.dumps(known), flush=True)

    try:
        _measure(json.loads(sys.argv[1]), report)
    except Exception as error:  # the error of torch or a backend is the answer
        report(error=first_line(error))
