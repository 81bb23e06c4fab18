"""A link that delays or loses what it carries: a thread that passes frames on between the two hosts, as the link's wire.

Kernels without netem can do no such thing, packet sockets are everywhere. Each host's interface gets its other end within the
host's own network, and what comes out there is put into the other one's.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.two_hosts import ADDRESSES, INTERFACE, TwoHosts

_END = "wire0"
_CLONE_NEWNET = 0x40000000
_SIOCETHTOOL, _SET_CHECKSUMS = 0x8946, 0x17
_EVERY_PROTOCOL = 0x0003
_LONGEST_FRAME = 2**16


class BadLink:
    """The wire between two hosts: seconds that a frame takes, and the share of frames that are lost."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.loss = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._spaces: tuple[str, ...] = ()
        self._dice = random.Random(0)

    def open(self, hosts: TwoHosts) -> None:
        """Puts this wire in the place of the hosts' link."""
        self._spaces = tuple(hosts.space(host) for host in (1, 2))
        _ip("-n", self._spaces[0], "link", "del", INTERFACE)
        for space, address in zip(self._spaces, ADDRESSES, strict=True):
            _ip("-n", space, "link", "add", INTERFACE, "type", "veth", "peer", "name", _END)
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", INTERFACE)
            for end in (INTERFACE, _END):
                _ip("-n", space, "link", "set", end, "up")
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._over.set()
        self._thread.join()

    def _carry(self) -> None:
        ends = [_end_in(space) for space in self._spaces]
        on_the_way: list[tuple[float, int, int, bytes]] = []
        number = 0
        while not self._over.is_set():
            for end in select.select(ends, [], [], 0.002)[0]:
                frame, (*_, kind, _, _) = end.recvfrom(_LONGEST_FRAME)
                if kind != socket.PACKET_OUTGOING and self._dice.random() >= self.loss:
                    number += 1
                    due = time.monotonic() + self.delay_s
                    heapq.heappush(on_the_way, (due, number, 1 - ends.index(end), frame))
            while on_the_way and on_the_way[0][0] <= time.monotonic():
                *_, to, frame = heapq.heappop(on_the_way)
                ends[to].send(frame)
        for end in ends:
            end.close()


@contextmanager
def bad_link(hosts: TwoHosts) -> Iterator[BadLink]:
    """The hosts' link from now on; as good as any other until it is told otherwise."""
    link = BadLink()
    link.open(hosts)
    try:
        yield link
    finally:
        link.close()


def _end_in(space: str) -> socket.socket:
    """A socket on the wire's end in a network namespace, which this thread enters for it."""
    entered = os.open(f"/run/netns/{space}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(entered, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(entered)
    # the interface itself has to make checksums, and packets that fit, of what the kernel gives it
    settings = array.array("B", struct.pack("II", _SET_CHECKSUMS, 0))
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, struct.pack("16sP", INTERFACE.encode(), settings.buffer_info()[0]))
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
    end.bind((_END, 0))
    return end


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
