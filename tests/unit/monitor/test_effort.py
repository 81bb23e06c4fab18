"""Whether a process that stands still is seen to be at work: by made-up counts, and by real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from packtrain.diagnose import host
from packtrain.launch import effort, traffic
from packtrain.launch.effort import Counts, Effort, count
from packtrain.launch.processes import sight
from packtrain.launch.waits import may_wait_for_storage

MIB = 2**20


def after(**more: float) -> Effort:
    """Ten idle seconds, and then five in which it did `more`."""
    one = Effort()
    one.measure(Counts(7, 7, 7, 7), writes=False)
    one.passes(10, runs=False)
    one.measure(Counts(7, 7, 7, 7), writes=False)
    one.passes(5, runs=False)
    writes = bool(more.pop("writes", False))
    one.measure(Counts(*(7 + int(more.get(name, 0)) for name in ("cpu", "moved", "wakes", "stored"))), writes=writes)
    return one


@pytest.mark.parametrize(
    ("more", "cores", "moves"),
    [
        ({}, 0, False),
        ({"cpu": 1}, 0.2, True),
        ({"moved": 5 * effort.LOADS}, 1, True),  # a download by a thin line
        ({"moved": effort.LOADS}, 0, False),  # the words that it says when asked for its stacks
        ({"wakes": 4}, 0, False),
        ({"wakes": 5}, 0, True),  # a file a second
        ({"stored": 5 * MIB, "writes": True}, 0, True),
        ({"stored": 4 * MIB, "writes": True}, 0, False),
        ({"stored": 500 * MIB}, 0, False),  # what others write is nothing to one that does not
    ],
)
def test_what_a_rank_does_while_it_stands_still(more: dict, cores: float, moves: bool) -> None:
    one = after(**more)
    assert (one.cores(45), one.moves(45)) == (cores, moves)
    one.passes(44, runs=False)
    assert (one.cores(45), one.moves(45)) == (cores, moves)
    one.passes(1, runs=False)
    assert (one.cores(45), one.moves(45)) == (0, False)


def test_one_that_waits_for_a_core_is_at_work() -> None:
    one = Effort()
    one.passes(30, runs=False)
    one.passes(1, runs=True)
    one.passes(40, runs=False)
    assert one.cores(45) == 1


@contextmanager
def python(code: str, *arguments: object) -> Iterator[subprocess.Popen]:
    """A process that has printed a line."""
    argv = [sys.executable, "-uc", code, *map(str, arguments)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout and process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


FORKS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-uc", "import sys\\nprint()\\nsys.stdin.read(1)\\nsum(range(10**7))\\nprint()"])
child.wait()
"""
GETS = """
import socket, sys
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
left = 10**6
while left: left -= len(line.recv(left))
print()
input()
"""
MAPS = """
import mmap, sys
file = open(sys.argv[1], "rb")
pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print()
input()
for place in range(0, len(pages), mmap.PAGESIZE): pages[place]
print()
input()
"""
SLEEPS = "print(); input()"
WRITES = """
import os, threading, time
line, full = os.pipe()
print()
threading.Thread(target=os.write, args=(full, bytes(2**24))).start()
time.sleep(600)
"""
STIRS = """
import time
print()
while True: time.sleep(0.02)
"""


@pytest.fixture
def linux() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux tells")


def test_what_children_compute_counts(linux: None) -> None:
    with python(FORKS) as process:
        before = count([process.pid])[process.pid]
        assert process.stdin and process.stdout
        process.stdin.write(b"x")
        process.stdout.readline()
        assert count([process.pid])[process.pid].cpu > before.cpu


def test_bytes_that_come_by_tcp_count(linux: None) -> None:
    if not traffic._by_socket():
        pytest.skip("the kernel does not tell of its sockets")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            connection, _ = server.accept()
            connection.sendall(bytes(10**6))
            connection.close()

        threading.Thread(target=send, daemon=True).start()
        with python(GETS, server.getsockname()[1]) as process:
            came = traffic.received({1: [process.pid], 2: [2**22 + 1]})
    assert came[1] in (10**6, 10**6 + 1) and came[2] == 0  # the end of a connection counts as a byte


def test_pages_that_are_mapped_from_a_file_count(linux: None, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(bytes(16 * MIB))
    with python(MAPS, weights) as process:
        before = count([process.pid])[process.pid].moved
        assert process.stdin and process.stdout
        process.stdin.write(b"\n")
        process.stdout.readline()
        assert count([process.pid])[process.pid].moved - before >= 2 * effort.LOADS  # a fault brings many pages


def test_only_who_is_in_a_call_that_writes_may_be_waiting_for_the_storage(linux: None, tmp_path: Path) -> None:
    with python(SLEEPS) as still, python(WRITES) as writing:
        limit = time.monotonic() + 120
        while may_wait_for_storage(still.pid) or not may_wait_for_storage(writing.pid):
            if may_wait_for_storage(writing.pid) is None and time.monotonic() > limit - 110:
                pytest.skip("the system does not tell of system calls")
            assert time.monotonic() < limit
            time.sleep(0.05)
        assert count([still.pid])[still.pid].writes is False and count([writing.pid])[writing.pid].writes


def test_a_sleeping_process_does_nothing_and_one_that_asks_again_and_again_stirs(linux: None) -> None:
    with python(SLEEPS) as still, python(STIRS) as stirring:
        pids, limit = [still.pid, stirring.pid], time.monotonic() + 120
        while sight(still.pid).state != "S":  # it has printed its line, and may not have come to its sleep yet
            assert time.monotonic() < limit
            time.sleep(0.01)
        before = count(pids)
        while count(pids)[stirring.pid].wakes < before[stirring.pid].wakes + 5:
            assert time.monotonic() < limit
            time.sleep(0.05)
        now = count(pids)[still.pid]
    assert (now.cpu, now.moved, now.wakes) == (before[still.pid].cpu, before[still.pid].moved, before[still.pid].wakes)


def test_a_network_card_that_does_not_count_is_nothing_to_end_a_run_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for card, said in (("efa_0", "N/A (no PMA)\n"), ("mlx5_0", f"{10**15}\n")):
        counters = tmp_path / card / "ports/1/counters"
        counters.mkdir(parents=True)
        (counters / "port_xmit_data").write_text(said)
    monkeypatch.setattr(traffic, "_INFINIBAND", tmp_path)
    assert traffic.stored() >= 4 * 10**15


def test_what_is_written_comes_to_the_storage(linux: None, tmp_path: Path) -> None:
    kind = host.read_folder("here", str(tmp_path)).kind
    if kind not in ("ext4", "xfs", "btrfs", "overlay"):
        pytest.skip(f"these files ({kind}) may be in memory, or nobody counts them")
    before = traffic.stored()
    with (tmp_path / "written").open("wb") as file:
        file.write(os.urandom(4 * MIB))
        os.fsync(file.fileno())
    if traffic.stored() == before:
        pytest.skip("nobody counts them")
    assert traffic.stored() - before >= 4 * MIB
