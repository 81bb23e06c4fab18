"""What the stages before training, at which all ranks speak and wait for one verdict, ask of the store of a run of 1,024 ranks.

    python benchmarks/store_load.py [RANKS]

Real in it: torch's TCPStore, a connection of its own for each rank, and `Peers.settle`. The ranks are threads of a few processes, so
that one machine can have them all; the store is a process of its own, as torchrun's is. First all come to a stage at
once; then all but one wait for the last, which comes WAIT_S later, as for a machine that prepares its data longest.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

from torch.distributed import PrefixStore, TCPStore

from packtrain.train.sync import Peers

PROCESSES = 4
PER_NODE = 8
WAIT_S = 30
FACTS = dict.fromkeys(("config", "packtrain", "torch", "transformers", "data", "cuda", "nccl", "devices"), "x" * 64)


def main(ranks: int) -> None:
    """Prints the figures."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ready, over = multiprocessing.Event(), multiprocessing.Event()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=_serve, args=(port, ready, over, theirs))
    server.start()
    ready.wait()
    barrier = multiprocessing.Barrier(PROCESSES + 1)
    groups = [range(first, ranks, PROCESSES) for first in range(PROCESSES)]
    children = [multiprocessing.Process(target=_ranks, args=(port, ranks, one, barrier)) for one in groups]
    for child in children:
        child.start()
    for said in ("", "all come at once", f"the last comes after {WAIT_S} s"):
        barrier.wait()
        cpu, begun = _cpu(ours), time.perf_counter()
        barrier.wait()
        wall = time.perf_counter() - begun
        if said:  # to connect takes as long as the name server does: so many threads ask it at once
            print(f"{said}: {wall:.2f} s, {100 * (_cpu(ours) - cpu) / wall:.1f} % of a core at the store")
    for child in children:
        child.join()
    over.set()
    ours.send(None)
    server.join()


def _serve(port: int, ready: object, over: object, asked: Connection) -> None:
    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False)
    ready.set()
    while not over.is_set():
        asked.recv()
        used = resource.getrusage(resource.RUSAGE_SELF)
        asked.send(used.ru_utime + used.ru_stime)
    del store


def _cpu(store: Connection) -> float:
    store.send("cpu")
    return store.recv()


def _ranks(port: int, world_size: int, ours: range, barrier: Barrier) -> None:
    inside = threading.Barrier(len(ours) + 1)

    def run(rank: int) -> None:
        inside.wait()
        kinds = {"wait_for_workers": False, "multi_tenant": True}
        store = TCPStore("127.0.0.1", port, world_size, False, timedelta(seconds=60), **kinds)
        host = f"n{rank // PER_NODE}"
        peers = Peers(PrefixStore("packtrain", store), world_size, rank, host)
        inside.wait()
        inside.wait()
        peers.settle("start", FACTS, {}, timeout_s=60)
        inside.wait()
        inside.wait()
        if rank == world_size - 1:
            time.sleep(WAIT_S)
        peers.settle("data", FACTS, {}, timeout_s=60)
        inside.wait()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ours]
    for thread in threads:
        thread.start()
    for _ in range(3):
        barrier.wait()
        inside.wait()
        inside.wait()
        barrier.wait()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1024)
