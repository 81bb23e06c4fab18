"""What heartbeats and the watchdog cost the launcher of machine 0 in a run of 1,024 ranks: 128 machines of 8.

    python benchmarks/heartbeat_load.py [MACHINES]

Real in it: the roll call, the line of every launcher over TCP, the heartbeat files of machine 0's ranks, and its watchdog. The
other launchers are threads of a few processes, so that one machine can have them all. First all is well; then every machine
tells at once that its ranks stand still, with their stacks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory

from packtrain.launch.children import _LOOK_S
from packtrain.launch.line import Line
from packtrain.launch.members import Member
from packtrain.launch.place import Place
from packtrain.launch.rollcall import meet
from packtrain.monitor.old.diagnosis import RankState, diagnose
from packtrain.monitor.old.heartbeat import Beat, Pulse
from packtrain.monitor.old.stacks import Collective, Frame
from packtrain.monitor.old.watchdog import Watchdog

PER_NODE = 8
PROCESSES = 4
WELL_S = 20
PHASES_PER_S = 30  # ten a step, three steps a second


def main(machines: int) -> None:
    """Prints the figures."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = Place("127.0.0.1", probe.getsockname()[1], 120.0, "job")
    stalled, over = multiprocessing.Event(), multiprocessing.Event()
    children = [
        multiprocessing.Process(
            target=_machines, args=(range(first, machines, PROCESSES), machines, place, stalled, over)
        )
        for first in range(1, PROCESSES + 1)
    ]
    with TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        folder = Path(name)
        children.append(multiprocessing.Process(target=_ranks, args=(folder, stalled)))
        for child in children:
            child.start()
        begun = time.perf_counter()
        with meet(_member(0, machines), place) as line:
            print(f"roll call of {machines} machines: {time.perf_counter() - begun:.2f} s")
            _well(line, folder, machines)
            stalled.set()
            _still(line, machines)
            over.set()
        for child in children:
            child.join(10)


def _well(line: Line, folder: Path, machines: int) -> None:
    watchdog = Watchdog(folder, folder, ranks=range(PER_NODE), host="n0", step_timeout=600, machines=machines)
    cpu, begun, heard = time.process_time(), time.perf_counter(), _counted(line)
    while time.perf_counter() - begun < WELL_S:
        assert watchdog.look({}) is None
        time.sleep(_LOOK_S)
    wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    print(
        f"all is well: {len(heard) / wall:.0f} lines heard a second, and as many said; {100 * cpu / wall:.2f} % of a core"
    )


def _counted(line: Line) -> list[None]:
    heard: list[None] = []
    hear = line._heard
    line._heard = lambda wire, message: (heard.append(None), hear(wire, message))[1]
    return heard


def _still(line: Line, machines: int) -> None:
    cpu, begun = time.process_time(), time.perf_counter()
    while len(line.reports) < machines - 1:
        time.sleep(0.01)
    took, cpu = time.perf_counter() - begun, time.process_time() - cpu
    size = len(json.dumps([one.to_json() for one in _states(1)])) / 1024
    reports = f"{machines - 1} reports of {size:.0f} KiB"
    print(f"all tell of ranks that stand still: {reports} within {took:.2f} s, {cpu:.2f} s of a core")
    begun = time.perf_counter()
    told = [RankState.from_json(one) for _, states in line.reports.values() for one in states]
    found = diagnose([*_states(0), *told])
    assert found is not None and found.ranks == (PER_NODE + 1,)
    print(f"diagnosis of {machines * PER_NODE} ranks: {1000 * (time.perf_counter() - begun):.0f} ms ({found.what})")


def _machines(nodes: range, machines: int, place: Place, stalled: Event, over: Event) -> None:
    threads = [threading.Thread(target=_machine, args=(node, machines, place, stalled, over)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _machine(node: int, machines: int, place: Place, stalled: Event, over: Event) -> None:
    with meet(_member(node, machines), place) as line:
        stalled.wait()
        line.tell_ranks([one.to_json() for one in _states(node)])
        over.wait()


def _states(node: int) -> list[RankState]:
    """All wait in the same operation, but the second rank of machine 1, which reads."""
    stack = tuple(
        Frame(f"/usr/lib/python3/site-packages/torch/distributed/file_{line}.py", line, "call") for line in range(30)
    )
    waits = Collective("nccl:all_reduce", 37, "0", "Float 134515008")
    states = []
    for rank in range(node * PER_NODE, (node + 1) * PER_NODE):
        reads = rank == PER_NODE + 1
        beat = Beat(100, 1000 + rank, "data" if reads else "backward", 8, 0, 0.0, 1.0)
        pending = None if reads else waits
        states.append(RankState(rank, f"n{node}", beat, 45.0, stack=stack, pending=pending, told=True))
    return states


def _ranks(folder: Path, stalled: Event) -> None:
    pulses = [Pulse(folder, rank) for rank in range(PER_NODE)]
    step = 0
    while not stalled.wait(1 / PHASES_PER_S):
        step += 1
        for pulse in pulses:
            pulse.enter("forward", step=step)


def _member(node: int, machines: int) -> Member:
    config = {f"group.key_{number}": "a value" for number in range(150)}
    versions = {"torch": "2.13.0"}
    addresses = (f"10.0.{node}.1",)
    return Member(
        node, machines, PER_NODE, machines * PER_NODE, 8, f"n{node}", addresses, versions, config, time.time()
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 128)
