"""The line between the launchers while a run goes on: who asks all to stop, who is gone, and how it ended.

A star with machine 0 in the middle, served by one thread in each launcher. Every launcher says something each BEAT_S
seconds; one that hangs up, or is silent for longer than it may, is lost, and the others end their workers instead of
waiting for it in a collective. Lines of an unknown kind are ignored, so that more can be sent beside the beats.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from packtrain.launch.exchange import Event, Exchange, part
from packtrain.launch.link import LinkWatch
from packtrain.launch.members import listed
from packtrain.launch.place import Place
from packtrain.launch.verdict import Outcome, Verdict, judge
from packtrain.launch.wire import Wire

BEAT_S = 2
ENDING_S = 30  # how long after a failure the others may take to say how their processes ended
PROGRESS_S = 30
_PART_S = 3
_LATE_S = 3  # a beat that is so much behind its time


@dataclass(frozen=True, slots=True)
class Order:
    """What the other machines want of this one: pass on `signal`, or (None) end the workers; `why` is for the terminal."""

    signal: int | None
    why: str


class Line:
    """One launcher's end; used as a context. The methods may be called from any thread, and none of them waits but finish.

    Inside, everything happens in the line's own thread, so that nothing needs a lock.
    """

    def __init__(self, node: int, per_node: int, names: Mapping[int, str], exchange: Exchange, place: Place) -> None:
        self.names = dict(names)
        self.node = node
        self._per_node = per_node
        self._exchange = exchange
        self._place, self._silence_s = place, place.silence_s
        self.reports: dict[int, tuple[float, list[dict[str, Any]]]] = {}
        """At machine 0: what others told of their ranks (`tell_ranks`), and when (time.monotonic())."""
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._ears, self._bell = socket.socketpair()
        self._ears.setblocking(False)
        self._verdict: Verdict | None = None
        self._over = threading.Event()
        self._leaving: str | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="line", daemon=True)

    def __enter__(self) -> Line:
        self._exchange.watch(self._ears)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Hangs up. Without a verdict (an exception, a signal) the others are told, and end their workers."""
        why = "its launcher ended" if error is None else f"its launcher ended ({str(error) or type(error).__name__})"
        self._call(lambda: self._leave(why))
        self._over.wait(_PART_S)
        self._thread.join(2 * _PART_S)
        self._bell.close()

    def order(self) -> Order | None:
        """The next thing that the other machines want of this one, if there is any."""
        try:
            return self._orders.get_nowait()
        except queue.Empty:
            return None

    def trains(self) -> None:
        """The ranks of this machine have come through the start: the other machines may be silent for longer now."""
        self._silence_s = max(self._place.silence_s, self._place.training_silence_s)

    def tell_signal(self, number: int) -> None:
        """This launcher was sent a signal: all machines are to stop in order."""
        self._call(lambda: self._say({"kind": "signal", "number": number}))

    def tell_failure(self, why: str) -> None:
        """A worker of this machine has failed: the others need not wait for a collective's time limit to see it."""
        self._call(lambda: self._say({"kind": "failure", "why": why}))

    def tell_ranks(self, states: list[dict[str, Any]]) -> None:
        """What the watchdog of this machine knows of its ranks, which stand still and wait for those of others."""
        self._call(lambda: self._say({"kind": "ranks", "states": states}))

    def finish(self, outcome: Outcome) -> Verdict:
        """Says how this machine's workers ended, waits for the others to do so, and returns the verdict on all.

        It waits as long as the others are alive and nothing has failed, and ENDING_S seconds after a failure.
        """
        self._call(lambda: self._say({"kind": "outcome", **outcome.to_json()}))
        begun = told = time.monotonic()
        while not self._over.wait(0.5):  # in pieces, so that a signal is heard on every system
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                waits = f"the processes on {self.names[self.node]} have ended; waiting {told - begun:.0f} s for"
                print(f"{waits} those on {self._others()}", file=sys.stderr, flush=True)
        if self._error is not None:
            raise self._error
        assert self._verdict is not None
        return self._verdict

    def _call(self, what: Callable[[], object]) -> None:
        self._calls.put(what)
        with contextlib.suppress(OSError):  # rung already, or over
            self._bell.send(b"!")

    def _serve(self) -> None:
        try:
            next_beat = time.monotonic()
            while self._verdict is None and self._leaving is None:
                now = time.monotonic()
                if (
                    now - next_beat > _LATE_S
                ):  # this process was suspended (scontrol suspend), and maybe all of them were
                    self._exchange.forgive(now - next_beat)
                if now >= next_beat:
                    next_beat = now + BEAT_S
                    self._beat(now)
                for event in self._exchange.poll(next_beat - now):
                    self._handle(event)
        except Exception as error:
            self._error = error
        finally:
            self._hang_up()
            self._over.set()

    def _handle(self, event: Event) -> None:
        source, what = event
        if source is self._ears:
            with contextlib.suppress(BlockingIOError):
                self._ears.recv(4096)
            while not self._calls.empty():
                self._calls.get()()
        elif isinstance(source, Wire):
            if not isinstance(what, dict):
                self._broken(source, str(what))
                return
            try:
                self._heard(source, what)
            except (KeyError, TypeError, ValueError, AttributeError):
                self._broken(source, "it said something that makes no sense")

    def _others(self) -> str:
        """Whom `finish` waits for, as far as it is known here."""
        return "other machines"

    def _leave(self, why: str) -> None:
        self._leaving = why

    def _beat(self, now: float) -> None:
        raise NotImplementedError

    def _say(self, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _heard(self, wire: Wire, message: dict[str, Any]) -> None:
        raise NotImplementedError

    def _broken(self, wire: Wire, why: str) -> None:
        raise NotImplementedError

    def _hang_up(self) -> None:
        raise NotImplementedError


class HubLine(Line):
    """Machine 0's end: hears all, tells all, and judges."""

    def __init__(
        self,
        per_node: int,
        names: Mapping[int, str],
        wires: Mapping[int, Wire],
        exchange: Exchange,
        place: Place,
    ) -> None:
        super().__init__(0, per_node, names, exchange, place)
        self._nodes = {wire: node for node, wire in wires.items()}
        self._links = {node: LinkWatch() for node in wires}
        self._outcomes: dict[int, Outcome] = {}
        self._signal: int | None = None
        self._halted: float | None = None
        self._first = 0  # the machine that was the first to fail

    def _beat(self, now: float) -> None:
        for wire, node in list(self._nodes.items()):
            if now - wire.heard > self._silence_s:
                self._lost(node, f"silent for {now - wire.heard:.0f} s")
                continue
            self._exchange.send(wire, {"kind": "beat"})
            if bad := self._links[node].look(wire.info):
                print(
                    f"the network between {self.names[0]} and {self.names[node]} is bad: {bad}",
                    file=sys.stderr,
                    flush=True,
                )
        if self._halted is not None and now - self._halted > ENDING_S:
            for node in set(self.names) - set(self._outcomes):
                self._outcomes[node] = Outcome(lost=f"its processes had not ended {ENDING_S} s after the failure")
        self._settle()

    def _say(self, message: dict[str, Any]) -> None:
        self._note(0, message)

    def _heard(self, wire: Wire, message: dict[str, Any]) -> None:
        if wire in self._nodes:
            self._note(self._nodes[wire], message)

    def _note(self, node: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "signal" and self._signal is None:
            self._signal = int(message["number"])
            why = f"stop asked by {signal.Signals(self._signal).name} on {self.names[node]}"
            self._order(Order(self._signal, why), without=node)
        elif kind == "failure":
            self._halt(str(message["why"])[:1000], without=node)
        elif kind == "ranks":
            self.reports[node] = (time.monotonic(), list(message["states"]))
        elif kind == "bye":
            self._lost(node, str(message["why"])[:1000])
        elif kind == "outcome" and node not in self._outcomes:
            outcome = Outcome.from_json(message)
            self._outcomes[node] = outcome
            if outcome.failed:
                self._halt(f"the processes on {self.names[node]} failed", without=node)
            self._settle()

    def _broken(self, wire: Wire, why: str) -> None:
        if wire in self._nodes:
            self._lost(self._nodes[wire], why)

    def _lost(self, node: int, why: str) -> None:
        for wire in [wire for wire, one in self._nodes.items() if one == node]:
            del self._nodes[wire]
            self._exchange.remove(wire)
        if node not in self._outcomes:
            self._outcomes[node] = Outcome(lost=why)
            self._halt(f"{self.names[node]} was lost: {why}", without=node)
        self._settle()

    def _halt(self, why: str, without: int) -> None:
        if self._halted is None:
            self._halted, self._first = time.monotonic(), without
            self._order(Order(None, why), without)

    def _order(self, order: Order, without: int) -> None:
        if without != 0:
            self._orders.put(order)
        for wire, node in list(self._nodes.items()):
            if node != without:
                self._exchange.send(wire, {"kind": "order", "signal": order.signal, "why": order.why})

    def _others(self) -> str:
        return listed([name for node, name in self.names.items() if node not in self._outcomes] or ["none"])

    def _settle(self) -> None:
        if self._verdict is None and set(self._outcomes) == set(self.names):
            self._verdict = judge(self._outcomes, self.names, self._per_node, self._first)

    def _hang_up(self) -> None:
        if self._verdict is not None:
            last: dict[str, Any] = {"kind": "end", "code": self._verdict.code, "lines": list(self._verdict.lines)}
        else:
            last = {"kind": "bye", "why": self._leaving or "its launcher ended"}
        self._exchange.unwatch(self._ears)
        part(self._exchange, list(self._nodes), last, _PART_S)
        self._exchange.close()
        self._ears.close()


class SpokeLine(Line):
    """Any other machine's end: tells machine 0, and does as it says."""

    def __init__(
        self, node: int, per_node: int, names: Mapping[int, str], wire: Wire, exchange: Exchange, place: Place
    ) -> None:
        super().__init__(node, per_node, names, exchange, place)
        self._wire: Wire | None = wire
        self._outcome: Outcome | None = None
        self._hub_lost: str | None = None

    def _beat(self, now: float) -> None:
        if self._wire is None:
            return
        if now - self._wire.heard > self._silence_s:
            self._broken(self._wire, f"silent for {now - self._wire.heard:.0f} s")
        else:
            self._exchange.send(self._wire, {"kind": "beat"})

    def _say(self, message: dict[str, Any]) -> None:
        if message["kind"] == "outcome":
            self._outcome = Outcome.from_json(message)
        if self._wire is not None:
            self._exchange.send(self._wire, message)
        self._settle_alone()

    def _heard(self, wire: Wire, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "order":
            number = message["signal"]
            self._orders.put(Order(None if number is None else int(number), str(message["why"])))
        elif kind == "end":
            self._verdict = Verdict(int(message["code"]), [str(line) for line in message["lines"]])
        elif kind == "bye":
            self._broken(wire, str(message["why"]))

    def _broken(self, wire: Wire, why: str) -> None:
        self._exchange.remove(wire)
        if self._wire is not None:
            self._wire, self._hub_lost = None, why
            self._orders.put(Order(None, f"{self.names[0]} was lost: {why}"))
            self._settle_alone()

    def _settle_alone(self) -> None:
        """Machine 0 can judge no more: this machine does, by itself."""
        if self._hub_lost is not None and self._outcome is not None and self._verdict is None:
            names = {0: self.names[0], self.node: self.names[self.node]}
            known = {0: Outcome(lost=self._hub_lost), self.node: self._outcome}
            self._verdict = replace(judge(known, names, self._per_node), alone=True)

    def _hang_up(self) -> None:
        self._exchange.unwatch(self._ears)
        if self._wire is not None and self._verdict is None:
            part(self._exchange, [self._wire], {"kind": "bye", "why": self._leaving or "its launcher ended"}, _PART_S)
        self._exchange.close()
        self._ears.close()
