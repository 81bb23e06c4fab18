"""JSON lines over TCP: how the launchers of a run talk to each other, whoever else may connect to their port.

A line is one JSON object with a `kind`. What is no such line, or is longer than LINE_LIMIT, is refused before anything
is made of it; nothing is ever unpickled. Nobody's identity is proved: like torch's own store, the port trusts the network
it is in. Sockets never block, so that one launcher that does not read cannot hold up the others.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from packtrain.errors import CheckFailed, PacktrainError, PeerFailed, Problem, UserError

LINE_LIMIT = 2**20  # bytes; a config of a thousand keys is 50 KiB
_CHUNK = 2**16
_INFO_BYTES = 256
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


class Closed(Exception):
    """The other end is gone; the text says how."""


class NotOurs(Exception):
    """What came is no line of ours."""


class Wire:
    """One end of a connection; `heard` is when anything came last (time.monotonic())."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection = connection
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.heard = time.monotonic()

    def fileno(self) -> int:
        """For selectors; -1 once it is closed."""
        return self._connection.fileno()

    @property
    def peer(self) -> str:
        """Address of the other end."""
        try:
            return plain_address(self._connection.getpeername()[0])
        except OSError:
            return "an unknown address"

    @property
    def pending(self) -> bool:
        """Whether something waits to be sent: call `flush` when the socket can be written to."""
        return bool(self._outgoing)

    def send(self, message: Mapping[str, Any]) -> None:
        """Queues a line and sends what goes out at once. Raises Closed."""
        self._outgoing += json.dumps(message, ensure_ascii=False).encode() + b"\n"
        if len(self._outgoing) > 4 * LINE_LIMIT:
            raise Closed("it does not read what it is sent")
        self.flush()

    def flush(self) -> None:
        """Sends what goes out without waiting. Raises Closed."""
        try:
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise Closed(f"{error.strerror or error}") from error

    def receive(self) -> list[dict[str, Any]]:
        """The complete lines that have come, without waiting. Raises Closed (after the last of them), NotOurs."""
        ended: Closed | None = None
        while True:
            try:
                chunk = self._connection.recv(_CHUNK)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                ended = Closed(f"{error.strerror or error}")
                break
            if not chunk:
                ended = Closed("the connection was closed")
                break
            self.heard = time.monotonic()
            self._incoming += chunk
            if len(self._incoming) > LINE_LIMIT:
                break
        messages = self._take_lines()
        if ended and not messages:
            raise ended
        return messages

    def _take_lines(self) -> list[dict[str, Any]]:
        *lines, rest = self._incoming.split(b"\n")
        if any(len(line) > LINE_LIMIT for line in (*lines, rest)):
            raise NotOurs(f"a line of more than {LINE_LIMIT} bytes")
        self._incoming = bytearray(rest)
        return [_parsed(line) for line in lines]

    @property
    def info(self) -> bytes:
        """What the system tells of the connection (Linux: struct tcp_info); b"" where it tells nothing."""
        try:
            return self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except (AttributeError, OSError):
            return b""

    def close(self) -> None:
        """Hangs up, without waiting for what could not be sent."""
        self._connection.close()


def _parsed(line: bytes | bytearray) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotOurs("no JSON") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise NotOurs("no message of packtrain")
    return message


def plain_address(address: str) -> str:
    """An address without what IPv6 sockets add to those of IPv4."""
    return address.removeprefix("::ffff:").partition("%")[0]


def stop_message(error: PacktrainError) -> dict[str, Any]:
    """An error as a line that ends the launcher which gets it."""
    problems = [{"what": one.what, "where": one.where, "fix": one.fix} for one in error.problems]
    return {"kind": "stop", "code": error.exit_code, "problems": problems}


def error_of(message: Mapping[str, Any]) -> PacktrainError:
    """The error that `stop_message` wrote down."""
    kind = {one.exit_code: one for one in (UserError, CheckFailed, PeerFailed)}.get(message.get("code", 4), PeerFailed)
    return kind([Problem(str(one["what"]), str(one["where"]), str(one["fix"])) for one in message["problems"]])
