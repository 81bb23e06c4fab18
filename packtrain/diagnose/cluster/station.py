"""One machine's end of the links between machines: it answers whoever knows the word, and measures a link when it is told to.

It listens on a free port, and on the run's own port as long as nobody else needs that one: which of them other machines
reach tells a firewall from a dead link.

Plain TCP by one stream of Python: the figures are for comparing links with each other, not what a network card can do.
The rate is counted where the bytes arrive, so that what lies in buffers is not counted, and a slow link takes a second.
"""

from __future__ import annotations

import hmac
import json
import os
import queue
import secrets
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from packtrain.diagnose.cluster.all_reduce import take_part
from packtrain.diagnose.redact import Redactor
from packtrain.errors import CheckFailed, PeerFailed
from packtrain.launch.place import Place
from packtrain.launch.rollcall import listening
from packtrain.launch.wire import stop_message

CONNECT_S = 3.0
ANSWER_S = 5.0
REACH_S = 1.0
"""For a connection to who may not be there."""
_PINGS, _PINGS_S = 10, 1.0
_STREAM_S, _STREAM_BYTES = 0.3, 64 * 2**20
_MOST_S = 1.0  # how long the other end receives
_CHUNK = 2**18
_WORD = 32  # letters
_AMOUNT = struct.Struct("!Qd")  # bytes, seconds
KNOCK_S = CONNECT_S + ANSWER_S
"""No knock takes longer, either."""
LONGEST_S = 2 * CONNECT_S + _PINGS_S + 3 * ANSWER_S
"""No measurement takes longer, whatever the link does."""


class Station:
    """Listens on a free port, `port`; `word` is what others must say. Messages for machine 0 are in `results`."""

    def __init__(self) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=64, dualstack_ipv6=dual)
        self._run_port = ExitStack()
        self.port: int = self._listener.getsockname()[1]
        self.word = secrets.token_hex(_WORD // 2)
        self.results: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answer_at(self._listener)

    def open(self, port: int) -> str:
        """Listens on the run's port, too; returns why it cannot, "" where it does."""
        try:
            listener = self._run_port.enter_context(listening(Place("", port, 0, "")))
        except CheckFailed as error:
            return Redactor(os.environ).text(error.problems[0].what)  # by whom: a command
        except OSError as error:
            return f"port {port}: {(error.strerror or str(error)).lower()}"
        listener.setblocking(True)
        self._run_port.callback(_wake, listener)
        self._answer_at(listener)
        return ""

    def leave(self) -> None:
        """Gives the run's port back."""
        self._run_port.close()

    def knock(self, number: int, address: str, port: int, word: str) -> None:
        """Tries a port of another station in a thread; its message has `number` and what `knocked` returns."""

        def work() -> None:
            self.results.put({"kind": "knocked", "number": number, "found": knocked(address, port, word)})

        threading.Thread(target=work, name="knock", daemon=True).start()

    def measure(self, number: int, address: str, port: int, word: str) -> None:
        """Measures the link to a station in a thread; its message has `number` and what `measured` returns."""

        def work() -> None:
            self.results.put({"kind": "link", "number": number, **measured(address, port, word)})

        threading.Thread(target=work, name="link", daemon=True).start()

    def reduce(self, order: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """Takes part in an all-reduce in a thread; its message has what `take_part` returns."""

        def work() -> None:
            self.results.put({"kind": "reduced", "result": take_part(order, env)})

        threading.Thread(target=work, name="all-reduce", daemon=True).start()

    def close(self) -> None:
        """Answers nobody any more."""
        self.leave()
        _wake(self._listener)
        self._listener.close()

    def _answer_at(self, listener: socket.socket) -> None:
        def work() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

        threading.Thread(target=work, name="station", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(ANSWER_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            said = connection.recv(_WORD, socket.MSG_WAITALL)
            if not hmac.compare_digest(said, self.word.encode()):
                if said.startswith(b"{"):
                    _send_away(connection)
                return
            while (asked := connection.recv(1)) == b"p":
                connection.sendall(b"p")
            if asked == b"s":
                connection.sendall(_AMOUNT.pack(*_received(connection)))
                connection.recv(1)  # until the other end hangs up
            elif asked == b"r":
                _pour(connection)
                connection.recv(1)


def _wake(listener: socket.socket) -> None:
    """The thread that accepts ends."""
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)


def _send_away(connection: socket.socket) -> None:
    """Tells the launcher of a machine, which takes this for a roll call, that it is none (any more)."""
    what = "packtrain env --cluster has begun to measure here, and takes no more machines"
    error = PeerFailed(
        what, where="roll call", fix="Wait until it is done; machines of a comparison are started within 20 s."
    )
    connection.sendall(json.dumps(stop_message(error)).encode() + b"\n")
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(_CHUNK):  # what is not read when a socket is closed takes along what was sent
        pass


def _received(connection: socket.socket) -> tuple[int, float]:
    """Bytes, and the seconds in which they came, until the other end is done or _MOST_S seconds are over."""
    begun = time.monotonic()
    last, amount, buffer = begun, 0, bytearray(_CHUNK)
    while (left := begun + _MOST_S - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            got = connection.recv_into(buffer)
        except TimeoutError:
            break
        if not got:
            return amount, last - begun
        amount, last = amount + got, time.monotonic()
    connection.settimeout(ANSWER_S)
    return amount, time.monotonic() - begun


def reached(address: str, port: int) -> str:
    """ "" where anything listens at this port, else why there is no connection to it."""
    try:
        socket.create_connection((address, port), timeout=REACH_S).close()
    except OSError as error:
        return _said(error, address, port)
    return ""


def knocked(address: str, port: int, word: str) -> str:
    """ "" where the station at this port answers, else why it does not."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            connection.settimeout(ANSWER_S)
            connection.sendall(word.encode() + b"p")
            if connection.recv(1) != b"p":
                raise ConnectionResetError("the connection was closed")
    except OSError as error:
        return _said(error, address, port)
    return ""


def _said(error: OSError, address: str, port: int) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer from {address}:{port}"
    return f"{address}:{port}: {(error.strerror or str(error)).lower()}"


def measured(address: str, port: int, word: str) -> dict[str, float | str | None]:
    """`latency_ms` (median round trip) and `mib_per_s` to a station, both None where `found` says why there are none.

    The rate is that of the slower direction, each by a connection of its own.
    """
    try:
        with _connected(address, port, word) as connection:
            latency = _latency_ms(connection)
            there = _rate(connection)
        with _connected(address, port, word) as connection:
            back = _rate_back(connection)
    except OSError as error:
        return {"latency_ms": None, "mib_per_s": None, "found": _said(error, address, port)}
    return {"latency_ms": latency, "mib_per_s": min(there, back), "found": ""}


@contextmanager
def _connected(address: str, port: int, word: str) -> Iterator[socket.socket]:
    with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
        connection.settimeout(ANSWER_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(word.encode())
        yield connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # drop what is unsent


def _latency_ms(connection: socket.socket) -> float:
    """Of the pings after the first, which also waits for the other end's thread."""
    times, end = [], time.monotonic() + _PINGS_S
    while len(times) <= _PINGS and (not times or time.monotonic() < end):
        begun = time.monotonic()
        connection.sendall(b"p")
        if not connection.recv(1):
            raise ConnectionResetError("the connection was closed")
        times.append(time.monotonic() - begun)
    return statistics.median(times[1:] or times) * 1000


def _rate(connection: socket.socket) -> float:
    """MiB/s from here to there."""
    connection.sendall(b"s")
    _pour(connection)
    answer = connection.recv(_AMOUNT.size, socket.MSG_WAITALL)
    if len(answer) < _AMOUNT.size:
        raise ConnectionResetError("the connection was closed")
    return _mib_per_s(*_AMOUNT.unpack(answer))


def _rate_back(connection: socket.socket) -> float:
    """MiB/s from there to here."""
    connection.sendall(b"r")
    amount, seconds = _received(connection)
    if not amount:
        raise ConnectionResetError("the connection was closed")
    return _mib_per_s(amount, seconds)


def _mib_per_s(amount: int, seconds: float) -> float:
    return amount / max(seconds, 1e-6) / 2**20


def _pour(connection: socket.socket) -> None:
    """Sends as much as goes out in _STREAM_S, and no more."""
    block, left, end = memoryview(bytes(_CHUNK)), _STREAM_BYTES, time.monotonic() + _STREAM_S
    while left > 0 and (rest := end - time.monotonic()) > 0:
        connection.settimeout(rest)
        try:
            left -= connection.send(block[:left])
        except TimeoutError:  # a full buffer
            break
    connection.settimeout(ANSWER_S)
    connection.shutdown(socket.SHUT_WR)
