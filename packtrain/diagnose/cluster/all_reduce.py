"""All-reduces between the machines of a run, over the backend that it would use, and what their times say of the network.

One process on each machine (`python -m packtrain.diagnose.cluster.all_reduce`) reduces alone first, to find what is its own
machine's fault; then in pairs, one after another, so that no figure is of two streams; and at last with all, unless a pair
has failed. Each pair is a process group of its own: one that fails takes no other down. What is known is printed as it comes,
each JSON line in place of the one before, so a process that had to be killed has still said which pair it was in.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

from packtrain.diagnose.cluster.compare import Folded
from packtrain.diagnose.probe import Unanswered, command, first_line
from packtrain.wording import listed

if TYPE_CHECKING:
    import torch.distributed as dist

TOGETHER_S = 40.0
"""Until all have imported torch: a busy machine takes half of it."""
COLLECTIVE_S = 10.0
"""For one operation of all; gloo tries five times as long to connect to a machine that does not answer."""
PAIRS_S = 30.0
"""After which no pair begins."""
LATE_S = 20.0
"""For a machine that is late to a pair: as long as a pair takes that cannot connect."""
LIMIT_S = TOGETHER_S + 2 * COLLECTIVE_S + PAIRS_S + LATE_S
"""For everything."""
WAITED = "waited for the others"
_PAIR_S = 3.0  # for one operation of a pair
_ENOUGH_S = 1.0  # an operation that takes longer is timed once
_MIB = 2**20
_SIZES = {"kib_ms": (2**10, 10), "mib_64_ms": (64 * _MIB, 3)}  # bytes, and how many are timed
_PAIR_MIB = {"nccl": 16, "gloo": 4}
_MOST_FOR_ALL_PAIRS = 8
_SLOW_MIB_PER_S = 20.0
_FIX = "Look at the interfaces that NCCL and gloo take (packtrain plan) and at firewalls between the machines: they use free ports. "
_FIX += "NCCL_DEBUG=INFO, or TORCH_CPP_LOG_LEVEL=INFO for gloo, shows what they try."
_FIX_SLOW = "Look at its cable, port, MTU and interface (ethtool, ibstat), and at what else uses it."


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """What two machines measured: milliseconds of an all-reduce of 1 KiB, and the rate of a large one; `found`: why not."""

    start: str
    end: str
    latency_ms: float | None = None
    mib_per_s: float | None = None
    status: Literal["ok", "slow", "dead", "not tried"] = "ok"
    found: str = ""

    @property
    def figures(self) -> str:
        """In words."""
        return f"{self.latency_ms or 0:.2g} ms, {self.mib_per_s or 0:.0f} MiB/s"

    def to_json(self) -> dict[str, Any]:
        """Plain containers."""
        plain = asdict(self)
        return {"from": plain.pop("start"), "to": plain.pop("end"), **plain}


@dataclass(frozen=True, slots=True)
class Reduced:
    """What came of it all: `found` in words, `nodes` has milliseconds or an `error` of each machine that took part, `blamed`
    are those that failed, and those of dead pairs."""

    status: Literal["ok", "failed", "skipped"] = "skipped"
    found: str = ""
    backend: str = ""
    nodes: Mapping[str, Mapping[str, Any]] | None = None
    pairs: tuple[MeasuredLink, ...] = ()
    blamed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain containers."""
        plain = {**asdict(self), "pairs": [one.to_json() for one in self.pairs]}
        del plain["blamed"]
        return plain


def backend_of(reports: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """The backend for these machines, or "" and why there can be no all-reduce."""
    torch = {name: one["facts"]["torch"] for name, one in reports.items()}
    for name, one in torch.items():
        if one["error"] and not one["error"].startswith("no answer"):  # slow is not broken
            return "", f"torch cannot be imported on {name} ({one['error']})"
    gpus = {bool(one["available"]) for one in torch.values()}
    if len(gpus) > 1:
        return "", "torch finds GPUs on some machines and none on others"
    return "nccl" if gpus == {True} else "gloo", ""


def take_part(order: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """This machine's process, to its end: its `pairs`, then milliseconds by size, or `error` where it cannot take part."""
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    blocking = {"TORCH_NCCL_BLOCKING_WAIT": "1"}  # what takes too long is then an error, and not the process' end
    argv = (sys.executable, "-m", "packtrain.diagnose.cluster.all_reduce", json.dumps(order))
    why = "its process said nothing"
    try:
        output = command(argv, LIMIT_S, {**quiet, **blocking, **env})
    except Unanswered as refusal:
        output, why = refusal.output, str(refusal)
    try:
        return dict(json.loads(output.splitlines()[-1]))
    except (ValueError, IndexError):
        return {"error": why}


def summary(backend: str, results: Mapping[str, Mapping[str, Any]]) -> Reduced:
    """The results of all machines, by name in the order of their ranks, as one; who only waited is not to blame."""
    nodes = {name: {key: one[key] for key in one if key != "pairs"} for name, one in results.items()}
    errors = {name: str(one["error"]) for name, one in nodes.items() if "error" in one}
    errors = {name: error for name, error in errors.items() if error != WAITED} or errors
    links = _links(results)
    dead = [one for one in links if one.status == "dead"]
    failed = [f"{name}: {error}" for name, error in errors.items()]
    if failed := [*failed, *(f"{one.start} and {one.end}: {one.found}" for one in dead)]:
        blamed = dict.fromkeys([*errors, *(name for one in dead for name in (one.start, one.end))])
        return Reduced("failed", f"over {backend}: {'; '.join(failed[:4])}", backend, nodes, links, tuple(blamed))
    if not all("kib_ms" in one for one in results.values()):
        return Reduced("skipped", f"over {backend}: there was no time", backend, nodes, links)
    kib, mib = (max(float(one[key]) for one in results.values()) for key in _SIZES)
    slowest = min(links, key=lambda one: one.mib_per_s or float("inf"))
    found = f"over {backend}: 1 KiB in {kib:.2g} ms, 64 MiB in {mib:.0f} ms ({64e3 / mib:.0f} MiB/s)"
    found += f"; the slowest pair is {slowest.start} and {slowest.end}: {slowest.figures}"
    return Reduced("ok", found, backend, nodes, links)


def _links(results: Mapping[str, Mapping[str, Any]]) -> tuple[MeasuredLink, ...]:
    """Every pair that was to be tried, with the slower figures of its two ends; slow are those of less than half of the rate
    that a quarter of them reach (of two machines: less than any training needs)."""
    names, links = list(results), []
    for pair in pairs_of(len(names)):
        said = [(results[names[one]].get("pairs", ()), sum(pair) - one) for one in pair]
        known = [one for pairs, other in said for one in pairs if one["other"] == other]
        failed = [str(one["found"]) for one in known if one["mib_per_s"] is None]
        link = MeasuredLink(names[pair[0]], names[pair[1]])
        if failed or not known:
            links.append(replace(link, status="dead" if known else "not tried", found=failed[0] if failed else ""))
        else:
            latency = max(float(one["latency_ms"]) for one in known)
            links.append(replace(link, latency_ms=latency, mib_per_s=min(float(one["mib_per_s"]) for one in known)))
    rates = sorted((one.mib_per_s for one in links if one.mib_per_s), reverse=True)
    least = rates[len(rates) // 4] / 2 if len(rates) > 2 else _SLOW_MIB_PER_S
    return tuple(replace(one, status="slow") if one.mib_per_s and one.mib_per_s < least else one for one in links)


def checks_of(reduced: Reduced) -> list[Folded]:
    """That it failed, and which pairs are slow."""
    found = [Folded("all-reduce", "fail", reduced.found, _FIX, reduced.blamed)] if reduced.status == "failed" else []
    if slow := [one for one in reduced.pairs if one.status == "slow"]:
        words = listed([f"{one.start} and {one.end}: {one.figures}" for one in slow])
        nodes = dict.fromkeys(name for one in slow for name in (one.start, one.end))
        found.append(Folded("all-reduce", "warn", f"slow: {words}", _FIX_SLOW, tuple(nodes)))
    return found


def pairs_of(machines: int) -> list[tuple[int, int]]:
    """The pairs that are tried, one after another: each of few machines, the neighbours in a ring of more."""
    if machines <= _MOST_FOR_ALL_PAIRS:
        return list(combinations(range(machines), 2))
    return [(one, (one + 1) % machines) for one in range(machines)]


def _measure(order: Mapping[str, Any], say: Callable[..., None]) -> None:
    """Says what there is to know. Raises whatever torch does where this machine cannot take part."""
    import torch.distributed as dist

    backend, rank, world = order["backend"], order["rank"], order["world"]
    with _group(backend, dist.HashStore(), 0, 1, COLLECTIVE_S):
        _milliseconds(backend, 2**10, 1)
    together = timedelta(seconds=TOGETHER_S)
    store = dist.TCPStore(order["address"], order["port"], world, is_master=rank == 0, timeout=together)
    if _pairs(store, backend, rank, world, say):
        with _group(backend, dist.PrefixStore("all", store), rank, world, COLLECTIVE_S):
            say(**{key: round(_milliseconds(backend, *size), 3) for key, size in _SIZES.items()})
    store.add("done", 1)
    if rank == 0:  # the store is in this process, which ends last
        _all_at(store, "done", world, 0)


def _pairs(store: dist.Store, backend: str, rank: int, world: int, say: Callable[..., None]) -> bool:
    """Whether all pairs that were tried work, and no machine was late."""
    import torch.distributed as dist

    done, end, late = [], time.monotonic() + PAIRS_S, False
    say(pairs=done)
    for pair in pairs_of(world):
        if time.monotonic() > end:
            store.add(f"no time for {pair}", 1)
        late = not _all_at(store, f"before {pair}", world)
        if late or store.add(f"no time for {pair}", 0):  # all go on, or none
            break
        if rank in pair:
            own: dict[str, Any] = {"other": sum(pair) - rank, "latency_ms": None, "mib_per_s": None}
            say(pairs=[*done, {**own, "found": "no result in time"}])
            try:
                with _group(backend, dist.PrefixStore(f"{pair}", store), pair.index(rank), 2, _PAIR_S):
                    own["latency_ms"] = round(_milliseconds(backend, 2**10, 10), 3)
                    taken = _milliseconds(backend, _PAIR_MIB[backend] * _MIB, 3)
                own.update(mib_per_s=round(1e3 * _PAIR_MIB[backend] / taken, 1), found="")
            except Exception as error:  # whatever torch or a backend raises is the answer
                own["found"] = first_line(str(error)) or type(error).__name__
                store.add("failed", 1)
            done.append(own)
            say(pairs=done)
    return not late and _all_at(store, "pairs", world) and store.add("failed", 0) == 0


def _all_at(store: dist.Store, name: str, wanted: int, own: int = 1) -> bool:
    """Whether all processes have come to this point within LATE_S."""
    end = time.monotonic() + LATE_S
    count = store.add(name, own)
    while count < wanted and time.monotonic() < end:
        time.sleep(0.002)
        count = store.add(name, 0)
    return count >= wanted


@contextmanager
def _group(backend: str, store: dist.Store, rank: int, world: int, limit_s: float) -> Iterator[None]:
    """torch's default process group inside the block; no operation in it takes longer than `limit_s`."""
    import torch.distributed as dist

    limit = timedelta(seconds=limit_s)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    except Exception:
        # torch numbers groups in their keys, and counts one that fails until another one is destroyed
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        raise
    try:
        yield
    finally:
        dist.destroy_process_group()


def _milliseconds(backend: str, size: int, times: int) -> float:
    """Of an all-reduce of `size` bytes: the median of `times` after the first one, which also connects. Raises ValueError where
    the sum is wrong."""
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.empty(size // 4, device="cuda:0" if backend == "nccl" else "cpu")
    seconds: list[float] = []
    for number in range(times + 1):
        data.fill_(rank + 1)
        begun = time.monotonic()
        dist.all_reduce(data)
        ends = data[[0, -1]].tolist()  # waits for a GPU, too
        seconds.append(time.monotonic() - begun)
        if ends != [world * (world + 1) / 2] * 2:
            raise ValueError(f"a wrong sum: {ends[0]:g}, not {world * (world + 1) // 2}")
        if number == 1 and times > 1:
            longest = torch.tensor(seconds[1:], device=data.device)
            dist.all_reduce(longest, dist.ReduceOp.MAX)  # all go on, or none
            if longest.item() > _ENOUGH_S:
                break
    return statistics.median(seconds[1:]) * 1000


if __name__ == "__main__":
    known: dict[str, Any] = {}

    def say(**facts: Any) -> None:
        known.update(facts)
        print(json.dumps(known), flush=True)

    try:
        _measure(json.loads(sys.argv[1]), say)
    except Exception as error:  # whatever torch or a backend raises is the answer
        say(error=first_line(str(error)) or type(error).__name__)
