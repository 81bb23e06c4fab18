"""What moves on a machine that no counter of a process tells: what TCP brings it, and what the storage takes in (Linux).

Bytes received from a socket are in no counter of /proc/PID/io; TCP itself counts them, and tells of every connection together
with the inode of its socket (sock_diag). What a process has written the kernel writes back when it likes, under nobody's name.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from packtrain.launch.processes import text_of

_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY, _ALL, _WITH_TCP_INFO = 20, 0x301, 2
# bytes of nlmsghdr, inet_diag_msg; before fields of it and tcp_info
_HEAD, _CONNECTION, _INODE, _RECEIVED = 16, 72, 68, 128
_ENDS = (2, 3)  # NLMSG_ERROR, NLMSG_DONE
_LIMIT_S = 1.0
_INFINIBAND = Path("/sys/class/infiniband")


def received(processes: Mapping[int, Iterable[int]]) -> dict[int, int]:
    """By key of `processes`: bytes that their open TCP connections have received so far; 0 where that is not told."""
    by_socket: dict[int, int] = {}
    with suppress(OSError, struct.error, AttributeError):  # another system, or one that does not tell
        by_socket = _by_socket()
    return {key: sum(by_socket.get(one, 0) for pid in pids for one in _sockets(pid)) for key, pids in processes.items()}


def stored() -> int:
    """Bytes that have left this machine's memory for its disks and its networks so far, of all processes; 0 where that is not
    told. Some are counted twice."""
    kernel = dict(
        line.split() for line in text_of("/proc/vmstat").splitlines() if line.startswith(("nr_written ", "pgpgout "))
    )
    sent = sum(_sent(line) for line in text_of("/proc/net/dev").splitlines()[2:])
    words = [text_of(file).strip() for file in _INFINIBAND.glob("*/ports/*/counters/port_xmit_data")]
    # words of four bytes; some drivers say that they do not count: "N/A (no PMA)"
    sent += sum(4 * int(one) for one in words if one.isdigit())
    return int(kernel.get("nr_written", 0)) * mmap.PAGESIZE + int(kernel.get("pgpgout", 0)) * 1024 + sent


def _sent(line: str) -> int:
    name, _, numbers = line.partition(":")
    return 0 if name.strip() == "lo" else int(numbers.split()[8])


def _by_socket() -> dict[int, int]:
    """Inode of each TCP connection of this network namespace → bytes received."""
    found: dict[int, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _DIAG) as kernel:
        kernel.settimeout(_LIMIT_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            wish = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, _WITH_TCP_INFO, 0, 0xFFFFFFFF)
            kernel.send(struct.pack("=IHHII", _HEAD + len(wish), _BY_FAMILY, _ALL, 1, 0) + wish)
            while _take(kernel.recv(2**18), found):
                pass
    return found


def _take(answer: bytes, found: dict[int, int]) -> bool:
    """Notes the connections of a piece of the answer; whether there are more pieces."""
    while answer:
        length, kind = struct.unpack_from("=IH", answer)
        if kind in _ENDS:
            return False
        (inode,) = struct.unpack_from("=I", answer, _HEAD + _INODE)
        place = _HEAD + _CONNECTION
        while place < length:
            size, attribute = struct.unpack_from("=HH", answer, place)
            if attribute == _WITH_TCP_INFO and size >= 4 + _RECEIVED + 8:
                (found[inode],) = struct.unpack_from("=Q", answer, place + 4 + _RECEIVED)
            place += (size + 3) & ~3
        answer = answer[(length + 3) & ~3 :]
    return True


def _sockets(pid: int) -> Iterable[int]:
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                kind, _, inode = os.readlink(f"{folder}/{name}").partition(":")
                if kind == "socket":
                    yield int(inode[1:-1])
