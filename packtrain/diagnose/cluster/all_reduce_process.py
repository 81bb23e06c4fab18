"""One machine's process in the all-reduces of `packtrain env --cluster`: `python -m packtrain.diagnose.cluster.all_reduce_process`.

It imports torch, which nothing else of a report does in its own process. First it reduces alone (what is wrong then is this
machine's own fault), then in pairs, in the rounds of links_table.rounds_of, and with all where no pair has failed, for that
would take gloo a minute to find out. Each pair is a process group of its own over one store, so that one that fails takes
nobody else down. A round begins when machine 0's process says that all have come: no figure is of two streams at once, and
who hangs or is gone holds up the others once.

What is known is printed as it comes, each JSON line in place of the one before: a process that had to be killed has said in
which pair it was. The sums are of known content, so a backend that adds wrongly is found as well as one that hangs.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from packtrain.diagnose.cluster.links_table import rounds_of

if TYPE_CHECKING:
    import torch.distributed as dist

TOGETHER_S = 40.0
"""Until all have imported torch."""
COLLECTIVE_S = 10.0
"""For one operation of all; gloo tries five times as long to connect to who does not answer."""
PAIRS_S = 30.0
"""After which no round of pairs begins."""
PATIENCE_S = 20.0
"""For who is late to a round: as long as a pair takes that cannot connect."""
_PAIR_S = 3.0  # for one operation of a pair
_ENOUGH_S = 1.0  # what takes longer is timed once
_KIB, _MIB = 2**10, 2**20
_SIZES = {"kib_ms": (_KIB, 10), "mib_64_ms": (64 * _MIB, 3)}  # bytes, and how many are timed
_PAIR_MIB = {"nccl": 16, "gloo": 4}

Say = Callable[..., None]


def take_part(asked: Mapping[str, Any], say: Say) -> None:
    """Says what there is to know of machine `rank` of `world`: of more than two `pairs`, then `kib_ms` and `mib_64_ms`.

    A pair has the rank of the `other`, `latency_ms` of 1 KiB and `mib_per_s`, both None where `found` says why. Raises
    whatever torch does where this machine cannot take part.
    """
    import torch.distributed as dist

    backend, rank, world = asked["backend"], asked["rank"], asked["world"]
    with _group(backend, dist.HashStore(), 0, 1, COLLECTIVE_S):
        _milliseconds(backend, _KIB, 1)
    together = timedelta(seconds=TOGETHER_S)
    store = dist.TCPStore(asked["address"], asked["port"], world, is_master=rank == 0, timeout=together)
    if world > 2 and not _pairs(store, backend, rank, world, asked["apart"], say):
        return
    with _group(backend, dist.PrefixStore("all", store), rank, world, COLLECTIVE_S):
        say(**{key: round(_milliseconds(backend, *size), 3) for key, size in _SIZES.items()})


def _pairs(store: dist.Store, backend: str, rank: int, world: int, apart: Sequence[Sequence[int]], say: Say) -> bool:
    """Whether all machines are well enough for an all-reduce together; pairs that are `apart` are not tried."""
    here, done, end = list(range(world)), [], time.monotonic() + PAIRS_S
    say(pairs=done)
    for number, pairs in enumerate(rounds_of(here.copy())):
        come = _come(store, str(number), rank, here, end)
        if not come:
            break
        here = come
        pair = next((one for one in pairs if rank in one), ())
        if pair and set(pair) <= set(here) and sorted(pair) not in map(list, apart):
            own = {"other": sum(pair) - rank, "latency_ms": None, "mib_per_s": None}
            say(pairs=[*done, {**own, "found": "no result in time"}])
            done.append({**own, **_of_two(store, backend, pair, rank)})
            say(pairs=done)
    store.set(f"failed {rank}", str(sum(one["latency_ms"] is None for one in done)))
    well = len(_come(store, "well", rank, here, math.inf)) == world
    well = well and not apart and not any(int(store.get(f"failed {one}")) for one in range(world))
    store.set(f"done {rank}", "")
    if rank == 0 and not well:  # the store is in this process, which ends last
        _awaited(store, "done", here)
    return well


def _come(store: dist.Store, name: str, rank: int, wanted: Sequence[int], end: float) -> list[int]:
    """Who of `wanted` has come to this round, as machine 0's process says; nobody after its `end`."""
    store.set(f"{name} {rank}", "")
    if rank == 0:
        store.set(f"{name} come", json.dumps(_awaited(store, name, wanted) if time.monotonic() < end else []))
    return json.loads(store.get(f"{name} come"))


def _awaited(store: dist.Store, name: str, wanted: Sequence[int]) -> list[int]:
    """Who of `wanted` is there within PATIENCE_S."""
    missing, end = set(wanted), time.monotonic() + PATIENCE_S
    while missing and time.monotonic() < end:
        missing = {one for one in missing if not store.check([f"{name} {one}"])}
        time.sleep(0.002)
    return [one for one in wanted if one not in missing]


def _of_two(store: dist.Store, backend: str, pair: Sequence[int], rank: int) -> dict[str, Any]:
    import torch.distributed as dist

    mib = _PAIR_MIB[backend]
    try:
        own = dist.PrefixStore(f"{pair[0]} and {pair[1]}", store)
        with _group(backend, own, pair.index(rank), 2, _PAIR_S):
            latency, taken = _milliseconds(backend, _KIB, 10), _milliseconds(backend, mib * _MIB, 3)
        return {"latency_ms": round(latency, 3), "mib_per_s": round(1e3 * mib / taken, 1), "found": ""}
    except Exception as error:  # whatever torch or a backend raises is the answer
        return {"found": _first_line(error)}


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
    """Of an all-reduce of `size` bytes: the median of `times` after the first one, which also connects; of slow ones the first of them."""
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


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def main() -> None:
    """JSON lines on stdout, the last of which counts."""
    known: dict[str, Any] = {}

    def say(**facts: Any) -> None:
        known.update(facts)
        print(json.dumps(known), flush=True)

    try:
        take_part(json.loads(sys.stdin.read()), say)
    except Exception as error:  # whatever torch or a backend raises is the answer
        say(error=_first_line(error))


if __name__ == "__main__":
    main()
