"""What heartbeats and the watchdog cost the launcher of machine 0 in a run of 1,024 ranks: 128 machines of 8.

    python benchmarks/heartbeat_load.py [RANKS]

Real in it: the control channel and every beat over TCP, and the watchdog. The ranks are threads of a few processes, so that
one machine can have them all. First all is well; then all wait but one, which reads, and all are asked for their stacks and
pending collectives at once.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packtrain.monitor import heartbeat as module
from packtrain.monitor.channel import Client, Server
from packtrain.monitor.heartbeat import Heartbeat, TimeLimits
from packtrain.monitor.watchdog import POLL_S, Watchdog, diagnose

PER_NODE = 8
PROCESSES = 4
WELL_S = 30
READS = 9
FRAMES = "\n".join(
    f'  File "/usr/lib/python3/site-packages/torch/file_{one}.py", line {one} in call' for one in range(30)
)
THREAD = f"Thread 0x1 (most recent call first):\n{FRAMES}\n"


def main(ranks: int) -> None:
    """Prints the figures."""
    server = Server(secret="secret", host="127.0.0.1")
    stalled, over = multiprocessing.Event(), multiprocessing.Event()
    children = [
        multiprocessing.Process(target=_ranks, args=(range(first, ranks, PROCESSES), ranks, server.port, stalled, over))
        for first in range(PROCESSES)
    ]
    for child in children:
        child.start()
    with TemporaryDirectory() as logs:
        machines = [(f"n{node}", range(PER_NODE * node, PER_NODE * (node + 1))) for node in range(ranks // PER_NODE)]
        watchdog, heard = Watchdog(machines, TimeLimits(), Path(logs)), [0]
        watchdog.attach(server)
        hear = watchdog.hear
        server.serve("beat", lambda message: (heard.__setitem__(0, heard[0] + 1), hear(message))[1])
        while any(one.heard_s is None for one in watchdog.states()):
            time.sleep(0.1)
        _well(watchdog, heard)
        stalled.set()
        _still(watchdog, ranks)
        over.set()
    for child in children:
        child.join(10)
    server.close()


def _well(watchdog: Watchdog, heard: list[int]) -> None:
    before, cpu, begun = heard[0], time.process_time(), time.perf_counter()
    while time.perf_counter() - begun < WELL_S:
        assert watchdog.look() is None
        time.sleep(POLL_S)
    wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    print(f"all is well: {(heard[0] - before) / wall:.0f} beats heard a second; {100 * cpu / wall:.1f} % of a core")


def _still(watchdog: Watchdog, ranks: int) -> None:
    while sum(bool(one.waits) for one in watchdog.states()) < ranks - 1:
        time.sleep(0.1)
    cpu, begun = time.process_time(), time.perf_counter()
    watchdog._ask(watchdog.states(), 0)
    while not all(one.stack for one in watchdog.states()):
        time.sleep(0.1)
    took, cpu = time.perf_counter() - begun, time.process_time() - cpu
    print(f"all are asked: {ranks} answers of {len(8 * THREAD) / 1024:.0f} KiB in {took:.1f} s, {cpu:.1f} s of a core")
    begun = time.perf_counter()
    found = diagnose(watchdog.states())
    assert found is not None and found.ranks == (READS,)
    print(f"diagnosis of {ranks} ranks: {1000 * (time.perf_counter() - begun):.0f} ms ({found.what})")


def _ranks(numbers: range, ranks: int, port: int, stalled: Event, over: Event) -> None:
    """Those of a process, each with its thread; a stack is as that of a rank of eight threads."""
    one = {"name": "nccl:all_reduce", "number": 37, "group": "0", "what": "Float 134515008"}
    module.own_stacks = lambda: 8 * THREAD
    module.own_collectives = lambda: {"pending": one, "finished": one}
    client, heartbeats = Client("127.0.0.1", port, secret="secret"), [Heartbeat(rank) for rank in numbers]
    for heartbeat in heartbeats:
        heartbeat.connect(client, ranks)
    step = 0
    while not stalled.wait(0.3):
        step += 1
        for heartbeat in heartbeats:
            heartbeat.enter("forward", step=step)
    for heartbeat in heartbeats:
        heartbeat.enter("data" if heartbeat.rank == READS else "backward", step=step + 1)
        if heartbeat.rank == READS:
            heartbeat.message = functools.partial(_reader, heartbeat)  # type: ignore[method-assign]
        else:
            heartbeat._state = heartbeat._state._replace(waits="the gradients of all ranks")
    over.wait()


def _reader(heartbeat: Heartbeat, *, asked: bool = False) -> dict[str, Any]:
    message = Heartbeat.message(heartbeat, asked=asked)
    return {**message, "collectives": {}} if asked else message


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1024)
