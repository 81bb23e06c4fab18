"""Machine 0's part of `packtrain env --cluster`: who has come, their reports, the links between them, and the comparison.

Whoever is missing, silent or strange costs its own lines of the result and no one else's; each phase has a limit. Machine 0
also listens at the port after the run's: a machine that only finds it there is compared like the others, and its report says
which port is closed.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from packtrain.diagnose.cluster.all_reduce import (
    WAITED,
    Reduced,
    able,
    backend_of,
    checked,
    limit_s,
    outcome,
    pair_remarks,
    pairs_of,
    remark,
)
from packtrain.diagnose.cluster.compare import Folded, differences, folded, named
from packtrain.diagnose.cluster.doors import Door, closed_to, next_door, port_remarks, shut_links, ways_of
from packtrain.diagnose.cluster.links_table import Link, Pair, judged, remarks, rounds_of
from packtrain.diagnose.cluster.station import KNOCK_S, LONGEST_S, Station
from packtrain.diagnose.cluster.view import Comparison
from packtrain.diagnose.facts.ask import NoAnswer, Question
from packtrain.diagnose.facts.output_folder import Output
from packtrain.errors import CheckFailed, PacktrainError
from packtrain.launch.arrival import PROGRESS_S
from packtrain.launch.exchange import Exchange, part
from packtrain.launch.line import BEAT_S
from packtrain.launch.members import Member, names_of, twice
from packtrain.launch.place import Place
from packtrain.launch.rollcall import check_address, listening
from packtrain.launch.wire import Wire, stop_message

_PART_S = 3.0
_LATE_S = 3.0  # more than a report takes, for its way
_LOOK_S = 5.0  # for a disk
_LINKS_S = 60.0  # after which no round begins


class Hub:
    """The other machines as machine 0 sees them. `own` returns this machine's report, which others' do not wait for."""

    def __init__(
        self,
        me: Member,
        place: Place,
        own: Callable[[], dict[str, Any]],
        station: Station,
        report_s: float,
        env: Callable[[dict[str, Any]], dict[str, str]],
        output: Output,
    ) -> None:
        self._output = output
        self._seen: dict[int, bool] = {}  # who sees what this machine writes there
        self._env = env  # what a report says that the run's processes would be told
        self._reduced = Reduced()
        self._pairs: list[Link] = []  # by all-reduces
        self._results: dict[int, dict[str, Any]] = {}  # of the all-reduce
        self._me, self._place, self._own, self._station, self._report_s = me, place, own, station, report_s
        self._exchange = Exchange()
        self._members: dict[int, Member] = {0: me}
        self._wires: dict[int, Wire] = {}
        self._strangers: list[Wire] = []
        self._reports: dict[int, dict[str, Any]] = {}
        self._stations: dict[int, tuple[int, str]] = {0: (station.port, station.word)}
        self._doors: list[Door] = []
        self._asked: set[int] = set()  # doors that are being tried
        self._no_port: dict[int, str] = {}  # why a machine cannot listen on the run's port, "" where it does
        self._offsets: dict[int, float] = {0: 0.0}
        self._left: dict[int, str] = {}
        self._checks: list[Folded] = []
        self._open: dict[int, Pair] = {}  # links that are being measured
        self._links: list[Link] = []
        self._next_beat = 0.0
        self._begun = self._newest = time.monotonic()  # and when the newest machine has come

    def run(self) -> Comparison:
        """The comparison of all that answered; the others have been told its exit code."""
        check_address(self._me, self._place)
        last: dict[str, Any] = {"kind": "bye", "why": "its packtrain env was stopped"}
        try:
            with ExitStack() as stack:
                listeners = [stack.enter_context(listening(self._place))]
                with suppress(CheckFailed):  # taken
                    listeners.append(stack.enter_context(listening(next_door(self._place))))
                self._await_members(listeners)
            self._await_reports()
            self._look()
            self._knock()
            self._measure()
            self._reduce()
            found = self._compared()
            last = {"kind": "done", "code": found.exit_code}
            return found
        except PacktrainError as error:
            last = stop_message(error)
            raise
        finally:
            part(self._exchange, list(self._wires.values()), last, _PART_S)
            self._exchange.close()

    def _await_members(self, listeners: list[socket.socket]) -> None:
        begun = time.monotonic()
        next_word = begun + PROGRESS_S
        for listener in listeners:
            self._exchange.watch(listener)

        def waiting() -> bool:
            nonlocal next_word
            now = time.monotonic()
            if now >= next_word and (absent := self._absent()):
                next_word += PROGRESS_S
                print(f"waiting {now - begun:.0f} s for {named(absent)}", file=sys.stderr, flush=True)
            return len(self._members) < self._me.nodes

        self._poll(self._place.timeout_s, waiting)
        for listener in listeners:
            self._exchange.unwatch(listener)
        if absent := self._absent():
            what = f"{named(absent, 16)} did not connect to {self._me.host} within {self._place.timeout_s:.0f} s"
            print(f"{what}; the others go on", file=sys.stderr, flush=True)
        names = self._names()
        for wire in self._wires.values():
            self._exchange.send(wire, {"kind": "go", "names": [names[node] for node in sorted(names)]})

    def _await_reports(self) -> None:
        """Each is begun before its machine arrives; who is silent is named as early as who is missing."""
        end = max(self._begun + self._place.timeout_s, self._newest + self._report_s + _LATE_S)
        self._poll(max(_LATE_S, end - time.monotonic()), lambda: bool(set(self._wires) - set(self._reports)))
        for node in set(self._wires) - set(self._reports):
            self._lose(node, "connected, but made no report")
        self._reports[0] = self._own()

    def _look(self) -> None:
        """Whether the others see in the output folder what this machine leaves there for a moment."""
        try:
            mark = Question(self._output.leave_mark).answer()
        except NoAnswer:  # a check of the folder says why
            return
        try:
            for wire in self._wires.values():
                self._exchange.send(wire, {"kind": "look", "name": mark.name})
            self._poll(_LOOK_S, lambda: bool(set(self._wires) - set(self._seen)))
        finally:
            Question(mark.unlink).wait()

    def _knock(self) -> None:
        """Both ports of both ends of each pair, all at once."""
        self._no_port[0] = self._station.open(self._place.port)
        for start, end in ways_of(rounds_of(sorted(self._stations))):
            why = f"{self._names()[end]} has left" if end in self._left else self._no_port[end]
            self._doors.append(Door(start, end, self._stations[end][0], of_run=False))
            self._doors.append(Door(start, end, self._place.port, of_run=True, why=why))
        for number, door in enumerate(self._doors):
            if not (door.why or {door.start, door.end} & set(self._left)):
                self._asked.add(number)
                self._try(number, door)
        self._poll(KNOCK_S + _LATE_S, lambda: bool(self._asked))
        self._station.leave()  # it is the port of torch's store, too; who tries things has several machines on one
        for wire in self._wires.values():
            self._exchange.send(wire, {"kind": "leave"})

    def _try(self, number: int, door: Door) -> None:
        if door.start == 0:
            self._station.knock(number, self._wires[door.end].peer, door.port, self._stations[door.end][1])
            return
        address, word = self._wires[door.end].peer if door.end else "", self._stations[door.end][1]
        order = {"kind": "knock", "number": number, "address": address, "port": door.port, "word": word}
        self._exchange.send(self._wires[door.start], order)

    def _measure(self) -> None:
        """All rounds, one after another, until _LINKS_S are over; not the pairs that cannot reach each other."""
        end, shut = time.monotonic() + _LINKS_S, shut_links(self._doors)
        for everyone in rounds_of(sorted(self._stations)):
            dead = {(one, other): shut.get((one, other)) or shut.get((other, one)) for one, other in everyone}
            self._links += [link for link in dead.values() if link]
            pairs = [pair for pair in everyone if not dead[pair]]
            if time.monotonic() > end:
                self._links += [Link(*pair, status="not tried") for pair in pairs]
                continue
            for pair in pairs:
                self._order(pair)
            self._poll(LONGEST_S + _LATE_S, lambda: bool(self._open))
            for number in list(self._open):
                self._note({"number": number, "found": "no result in time"})
        self._links = judged(self._links)

    def _order(self, pair: Pair) -> None:
        start, end = pair
        number = len(self._links) + len(self._open)
        self._open[number] = pair
        if gone := [node for node in pair if node in self._left]:
            self._note({"number": number, "found": f"{self._names()[gone[0]]} has left"})
        elif start == 0:
            self._station.measure(number, self._wires[end].peer, *self._stations[end])
        else:  # machine 0 is where `start` has found it
            address = self._wires[end].peer if end else ""
            port, word = self._stations[end]
            order = {"kind": "measure", "number": number, "address": address, "port": port, "word": word}
            self._exchange.send(self._wires[start], order)

    def _reduce(self) -> None:
        """The all-reduces over all that reported, where nothing speaks against them already."""
        names = self._names()
        nodes = [
            node for node in sorted(self._reports) if node not in self._left and "error" not in self._reports[node]
        ]
        backend, why = backend_of({names[node]: self._reports[node] for node in nodes})
        closed = closed_to(self._doors, 0)
        here, apart = able(nodes, closed, self._links)
        if len(here) < 2 or here[0] != 0 or (len(here) == 2 and apart):
            shut = f"port {self._place.port} of {names[0]} is closed to {named([names[node] for node in closed])}"
            why = (
                shut if closed else why or ("a link is dead" if len(nodes) > 1 else "fewer than two machines reported")
            )
        if why:
            self._reduced = Reduced(found=why)
            return
        without = named([names[node] for node in nodes if node not in here])
        nodes, world = here, {"world": len(here), "apart": apart}
        for rank, node in enumerate(nodes):
            order = {"kind": "reduce", "backend": backend, "rank": rank, **world, "port": self._place.port}
            if node:
                self._exchange.send(self._wires[node], order)
            else:
                self._station.reduce({**order, "address": self._place.address}, self._env(self._reports[0]))

        def waits() -> bool:
            return bool(set(nodes) - set(self._results) - set(self._left))

        def alone() -> bool:  # a machine could not take part: the others only wait for it
            return any("error" in one and "pairs" not in one for one in self._results.values())

        self._poll(limit_s(len(nodes)) + _LATE_S, lambda: waits() and not alone())
        self._poll(_LATE_S, waits)
        results = {names[node]: self._results.get(node, {"error": WAITED}) for node in nodes}
        self._reduced, self._pairs = outcome(backend, results), pairs_of(nodes, self._results, apart)
        if without:
            self._reduced = replace(self._reduced, found=f"{self._reduced.found}; without {without}")

    def _compared(self) -> Comparison:
        names = self._names()
        good = {names[node]: one for node, one in sorted(self._reports.items()) if "error" not in one}
        for node, one in sorted(self._reports.items()):
            if "error" in one:
                text = f"it could not make its report: {one['error']}"
                self._checks.append(Folded("report", "fail", text, "Start packtrain env there.", (names[node],)))
        offsets = {names[node]: offset for node, offset in sorted(self._offsets.items())}
        missing = {names[node]: self._left.get(node, self._why_missing()) for node in sorted(self._lost())}
        return Comparison(
            names=names,
            reports={names[node]: one for node, one in sorted(self._reports.items())},
            differences=differences(good, offsets),
            links=self._links,
            doors=self._doors,
            checks=[
                *(*self._checks, *folded(good), *self._output.remark(self._seen, names)),
                *(*port_remarks(self._doors, names), *remarks(self._links, names)),
                *(*remark(self._reduced), *pair_remarks(self._pairs, names, self._reduced)),
            ],
            reduced=self._reduced,
            pairs=self._pairs,
            missing=missing,
        )

    def _poll(self, limit_s: float, goes_on: Callable[[], bool]) -> None:
        """Hears and answers the others while `goes_on`, at most `limit_s`."""
        end = time.monotonic() + limit_s
        while goes_on() and (now := time.monotonic()) < end:
            if now >= self._next_beat:
                self._next_beat = now + BEAT_S
                for wire in self._wires.values():
                    self._exchange.send(wire, {"kind": "beat"})
            for source, what in self._exchange.poll(min(0.05, end - now)):
                self._handle(source, what)
            while not self._station.results.empty():
                self._heard(0, self._station.results.get())

    def _handle(self, source: Any, what: dict[str, Any] | Exception | None) -> None:
        if isinstance(source, socket.socket):
            self._open_door(source)
        elif source in self._strangers:
            if isinstance(what, dict) and what["kind"] == "hello":
                self._welcome(source, what)
            elif isinstance(what, Exception):
                self._strangers.remove(source)
                self._exchange.remove(source)
        elif (node := next((one for one, wire in self._wires.items() if wire is source), None)) is not None:
            try:
                self._heard(node, what)
            except (KeyError, TypeError, ValueError):
                self._lose(node, "said something that makes no sense")

    def _open_door(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it has hung up already
            return
        self._strangers.append(Wire(connection))
        self._exchange.add(self._strangers[-1])

    def _welcome(self, wire: Wire, hello: dict[str, Any]) -> None:
        try:
            member = Member.from_json(hello.get("member"))
        except ValueError:
            error = CheckFailed(f"{self._me.host} runs another version of packtrain", where="versions")
            self._refuse(wire, error, wire.peer)
            return
        if hello.get("job") != self._place.job:
            what = (
                f"at {self._place.address}:{self._place.port} machines meet for packtrain env --cluster, not for a run"
            )
            self._refuse(wire, CheckFailed(what, where="topology.main_port", fix="Wait until it is done."), member.host)
        elif member.node in self._members:
            self._refuse(wire, twice(self._members[member.node], member), member.host)
        elif member.node >= self._me.nodes:
            what = f"{member.host} says that it is machine {member.node}, but there are {self._me.nodes} (from 0)"
            self._refuse(wire, CheckFailed(what, where="topology.nodes, topology.node_rank"), member.host)
        else:
            self._strangers.remove(wire)
            self._members[member.node], self._wires[member.node] = member, wire
            self._newest = time.monotonic()
            self._exchange.send(wire, {"kind": "welcome"})

    def _refuse(self, wire: Wire, error: PacktrainError, host: str) -> None:
        self._exchange.send(wire, stop_message(error))
        for one in error.problems:
            self._checks.append(Folded("roll call", "fail", f"{one.where}: {one.what}", one.fix, (host,)))

    def _heard(self, node: int, what: dict[str, Any] | Exception | None) -> None:
        if isinstance(what, Exception):
            self._lose(node, f"left: {what}")
        elif what is not None and what["kind"] == "report" and isinstance(what["report"], dict):
            self._offsets[node] = float(what["clock"]) - time.time()
            self._stations[node] = int(what["port"]), str(what["word"])
            other = what.get("run_port") != self._place.port
            self._no_port[node] = "it listens at another one" if other else str(what["no_port"])[:300]
            self._reports[node] = what["report"]
        elif what is not None and what["kind"] == "knocked" and (number := int(what["number"])) in self._asked:
            self._asked.remove(number)
            self._doors[number] = replace(self._doors[number], found=str(what["found"])[:300])
        elif what is not None and what["kind"] == "seen":
            self._seen[node] = bool(what["seen"])
        elif what is not None and what["kind"] == "link":
            self._note(what)
        elif what is not None and what["kind"] == "reduced":
            self._results[node] = checked(what["result"])

    def _note(self, result: dict[str, Any]) -> None:
        """The end of a measurement that was ordered; others are late, and not counted."""
        pair = self._open.pop(int(result["number"]), None)
        if pair is None:
            return
        ms, rate = result.get("latency_ms"), result.get("mib_per_s")
        alive = isinstance(ms, (int, float)) and isinstance(rate, (int, float))
        found = str(result["found"])[:300]
        self._links.append(Link(*pair, ms, rate, "ok", found) if alive else Link(*pair, status="dead", found=found))

    def _lose(self, node: int, why: str) -> None:
        self._left[node] = why
        print(f"{self._names()[node]}: {why}; the others go on", file=sys.stderr, flush=True)
        self._exchange.remove(self._wires.pop(node))
        self._asked -= {number for number, one in enumerate(self._doors) if node in (one.start, one.end)}
        for number, pair in list(self._open.items()):
            if node in pair:
                self._note({"number": number, "found": f"{self._names()[node]} has left"})

    def _lost(self) -> set[int]:
        return (set(range(self._me.nodes)) - set(self._members)) | set(self._left)

    def _absent(self) -> list[str]:
        return [name for node, name in self._names().items() if node not in self._members]

    def _names(self) -> dict[int, str]:
        """Of all machines, as they call themselves, or as Slurm or the number calls those that are not here."""
        known = names_of([self._members[node] for node in sorted(self._members)])
        hosts = dict(enumerate(self._place.names))
        return {node: known.get(node) or hosts.get(node) or f"machine {node}" for node in range(self._me.nodes)}

    def _why_missing(self) -> str:
        fix = "is packtrain env started there, and does the port answer?"
        where = f"{self._me.host} ({self._place.address}:{self._place.port})"
        return f"did not connect to {where} within {self._place.timeout_s:.0f} s; {fix}"
