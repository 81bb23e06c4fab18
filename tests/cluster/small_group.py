"""Collective operations of workers that import no torch: over plain sockets, and in a flight recorder as torch keeps one.

Rank 0 hears all and answers each; operations of different names wait for ever, as they do in gloo. What the launchers ask a
rank for (monitor/heartbeat.py) is thereby the same as of a real one.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from pathlib import Path
from types import ModuleType

from packtrain.errors import LostPeers
from packtrain.monitor.foreign_launch import beat_to_rank_0
from packtrain.monitor.heartbeat import own_heartbeat

_HEAD = struct.Struct("!16sdI")
_JOIN_S = 30


class Group:
    """The ranks of the launch that this process belongs to."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.heartbeat = own_heartbeat()
        self.heartbeat.enter("join")
        self._entries: list[dict] = []
        recorder = ModuleType("torch._C._distributed_c10d")
        recorder.__dict__["_dump_fr_trace_json"] = lambda: json.dumps({"entries": self._entries[-9:]})
        sys.modules |= {"torch.distributed": ModuleType("torch.distributed"), recorder.__name__: recorder}
        self._peers = self._met()
        beat_to_rank_0(self.share)

    def share(self, said: str) -> str:
        """What rank 0 says, on all ranks."""
        file, limit = Path("shared"), time.monotonic() + _JOIN_S
        if self.rank == 0:
            Path("shared.partial").write_text(said)
            os.replace("shared.partial", file)
        while not file.exists() and time.monotonic() < limit:
            time.sleep(0.05)
        return file.read_text()

    def all_reduce(self, value: float = 0.0, *, name: str = "all_reduce", payload: bytes = b"") -> float:
        """The sum of the values of all; `payload` is what every rank sends besides. Raises LostPeers."""
        entry = {"profiling_name": f"gloo:{name}", "collective_seq_id": len(self._entries) + 1, "pg_id": 0}
        self._entries.append({**entry, "is_p2p": False, "retired": False} | _SHAPE)
        own = _HEAD.pack(name.encode(), value, len(payload)) + payload
        try:
            with self.heartbeat.waiting(f"gloo:{name} of all ranks"):
                value = self._exchanged(own, name, value, payload)
        except OSError as error:
            raise LostPeers(f"rank {self.rank} lost the other processes: {error}") from error
        self._entries[-1]["retired"] = True
        return value

    def _exchanged(self, own: bytes, name: str, value: float, payload: bytes) -> float:
        if self.rank:
            self._peers[0].sendall(own)
            return self._take(self._peers[0], name)
        value += sum(self._take(peer, name) for peer in self._peers)
        for peer in self._peers:
            peer.sendall(_HEAD.pack(name.encode(), value, len(payload)) + payload)
        return value

    def _take(self, peer: socket.socket, name: str) -> float:
        other, value, length = _HEAD.unpack(_received(peer, _HEAD.size))
        while other.rstrip(b"\0") != name.encode():  # they will never meet
            time.sleep(1)
        _received(peer, length)
        return value

    def _met(self) -> list[socket.socket]:
        taken = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun itself
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + taken
        if not self.rank:
            with socket.create_server(("", address[1])) as listener:
                return [listener.accept()[0] for _ in range(1, self.size)]
        limit = time.monotonic() + _JOIN_S
        while True:
            try:
                return [socket.create_connection(address)]
            except OSError:
                if time.monotonic() > limit:
                    raise
                time.sleep(0.05)


_SHAPE = {"input_dtypes": ["Float"], "input_sizes": [[3]]}


def _received(peer: socket.socket, number: int) -> bytes:
    parts = bytearray()
    while len(parts) < number:
        part = peer.recv(min(number - len(parts), 2**16))
        if not part:
            raise ConnectionError("connection closed by peer")
        parts += part
    return bytes(parts)
