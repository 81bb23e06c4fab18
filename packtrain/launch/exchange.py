"""All wires of a launcher in one select loop: what came, and who is gone, as a list of events."""

from __future__ import annotations

import selectors
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from packtrain.launch.wire import Closed, NotOurs, Wire

Event = tuple[Any, "dict[str, Any] | Closed | NotOurs | None"]


class Readable(Protocol):
    """A socket that is only watched: one that listens, or a doorbell."""

    def fileno(self) -> int:
        """Its descriptor."""
        ...


class Exchange:
    """Wires that are read and written without ever waiting for one of them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._next: list[Event] = []

    def add(self, wire: Wire) -> None:
        """Reads and writes `wire` from now on."""
        self._selector.register(wire, selectors.EVENT_READ, wire)

    def watch(self, readable: Readable) -> None:
        """Has `poll` say (`readable`, None) when it can be read."""
        self._selector.register(readable, selectors.EVENT_READ, None)

    def unwatch(self, readable: Readable) -> None:
        """Forgets what `watch` was told."""
        self._selector.unregister(readable)

    def remove(self, wire: Wire) -> None:
        """Hangs up; a wire that is not here any more is none of our business."""
        if wire.fileno() != -1 and wire.fileno() in self._selector.get_map():
            self._selector.unregister(wire)
        wire.close()

    def send(self, wire: Wire, message: Mapping[str, Any]) -> None:
        """Sends a line, now or as soon as it goes out; a wire that is gone is the next `poll`'s event."""
        try:
            wire.send(message)
        except Closed as error:
            self._next.append((wire, error))
            return
        self._want(wire)

    def poll(self, timeout_s: float) -> list[Event]:
        """What happened within `timeout_s`: (wire, message), (wire, Closed or NotOurs) once per wire, (watched, None)."""
        events, self._next = self._next, []
        for key, mask in self._selector.select(0 if events else max(timeout_s, 0)):
            if key.data is None:
                events.append((key.fileobj, None))
                continue
            events += self._of(key.data, mask)
        return events

    def put_back(self, events: Sequence[Event]) -> None:
        """The next `poll` says these first: they are for somebody else."""
        self._next = [*events, *self._next]

    def forgive(self, seconds: float) -> None:
        """Nobody could be heard for so long, and none is to blame."""
        for key in self._selector.get_map().values():
            if key.data is not None:
                key.data.heard += seconds

    def close(self) -> None:
        """Hangs up every wire."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self.remove(key.data)
        self._selector.close()

    def _of(self, wire: Wire, mask: int) -> list[Event]:
        try:
            if mask & selectors.EVENT_WRITE:
                wire.flush()
                self._want(wire)
            return [(wire, message) for message in wire.receive()] if mask & selectors.EVENT_READ else []
        except (Closed, NotOurs) as error:
            return [(wire, error)]

    def _want(self, wire: Wire) -> None:
        if wire.fileno() in self._selector.get_map():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.pending else 0)
            self._selector.modify(wire, wanted, wire)


def part(exchange: Exchange, wires: list[Wire], message: Mapping[str, Any], limit_s: float) -> None:
    """Tells `wires` a last line and waits, at most `limit_s`, for them to hang up: closing at once may lose the line."""
    for wire in wires:
        exchange.send(wire, message)
    left, end = set(wires), time.monotonic() + limit_s
    while left and (now := time.monotonic()) < end:
        for wire, what in exchange.poll(end - now):
            if isinstance(what, Exception):
                exchange.remove(wire)
                left.discard(wire)
    for wire in left:
        exchange.remove(wire)
