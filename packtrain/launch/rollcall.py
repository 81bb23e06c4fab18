"""The roll call: the launchers of all machines meet before a single worker is started, and compare what they are about to do.

Machine 0 listens on the run's port, the others connect, each describes itself (members.py), and all get the same answer:
go, or stop with the reason. What torchrun would wait for in silence, or train wrongly, is then an error within seconds that
names the machine. Afterwards the port is free again for torch's own store, while the connections stay open as the line
between the launchers (line.py). One hub for all is enough: a thousand machines are a thousand short lines every two seconds.
"""

from __future__ import annotations

import errno
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from packtrain.errors import CheckFailed, PacktrainError, PeerFailed
from packtrain.launch.arrival import PROGRESS_S, arrive, call_out
from packtrain.launch.exchange import Exchange, part
from packtrain.launch.line import BEAT_S, HubLine, Line, SpokeLine
from packtrain.launch.members import (
    Member,
    clock_remarks,
    differences,
    listed,
    names_of,
    twice,
    wrong_counts,
)
from packtrain.launch.place import Place, is_own, own_addresses, resolve
from packtrain.launch.wire import NotOurs, Wire, stop_message

_HELLO_S = 10  # a connection that has not said who it is by then is a stranger's
_PART_S = 3
_FULL_PICTURE_S = 3  # how long others are waited for once two are known not to fit


@contextmanager
def meet(me: Member, place: Place, prepare: Callable[[], object] = lambda: None) -> Iterator[Line]:
    """Inside the block every machine is there, they all agree, and the line between them is open.

    Machine 0 calls `prepare` when all are there and none goes on yet; what it raises is an error for all. Raises CheckFailed,
    the same on every machine, where they do not fit or cannot meet here; PeerFailed where one is missing after `place.timeout_s`
    seconds. Tells what it waits for on stderr every PROGRESS_S seconds.
    """
    exchange = Exchange()
    try:
        line = _met(me, place, exchange, prepare)
    except BaseException:
        exchange.close()  # machine 0 waits for it, so that its last line is not lost
        raise
    with line:
        yield line


def _met(me: Member, place: Place, exchange: Exchange, prepare: Callable[[], object]) -> Line:
    if me.node == 0:
        wires, names = _gather(me, place, exchange, prepare)
        return HubLine(me.per_node, names, wires, exchange, place)
    wire, names = arrive(me, place, exchange)
    return SpokeLine(me.node, me.per_node, names, wire, exchange, place)


def _gather(
    me: Member, place: Place, exchange: Exchange, prepare: Callable[[], object]
) -> tuple[dict[int, Wire], dict[int, str]]:
    check_address(me, place)
    with listening(place) as listener:
        hall = _Hall(me, place, exchange, listener)
        try:
            hall.wait()
            prepare()
        except PacktrainError as error:
            part(exchange, hall.everyone(), stop_message(error), _PART_S)
            raise
        except BaseException:  # a signal
            part(exchange, hall.everyone(), {"kind": "bye", "why": "its launcher was stopped"}, _PART_S)
            raise
        exchange.unwatch(listener)
    names = names_of(hall.members())  # the port is free again, and only now the others may go on
    for wire in hall.wires.values():
        exchange.send(wire, {"kind": "go", "names": [names[node] for node in sorted(names)]})
    return hall.wires, names


class _Hall:
    """Who has come so far, at machine 0."""

    def __init__(self, me: Member, place: Place, exchange: Exchange, listener: socket.socket) -> None:
        self.wires: dict[int, Wire] = {}
        self._me, self._place, self._exchange, self._listener = me, place, exchange, listener
        self._present: dict[int, Member] = {0: me}
        self._offsets: dict[int, float] = {}
        self._strangers: dict[Wire, float] = {}  # until when they may say who they are, or hang up
        self._sent_away: dict[str, str] = {}
        self._begun = time.monotonic()
        self._end = self._begun + place.timeout_s
        exchange.watch(listener)

    def members(self) -> list[Member]:
        """Those that are here, by number."""
        return [self._present[node] for node in sorted(self._present)]

    def everyone(self) -> list[Wire]:
        """The wires of those that wait for an answer."""
        return list(self.wires.values())

    def wait(self) -> None:
        """Until all are here and agree. Raises PacktrainError where they do not, or one is missing."""
        next_beat = self._begun
        next_word = self._begun + PROGRESS_S
        while len(self._present) < self._me.nodes and (now := time.monotonic()) < self._end:
            if now >= next_beat:
                next_beat = now + BEAT_S
                self._tell({"kind": "beat"})
                self._drop_silent(now)
            if now >= next_word:
                next_word += PROGRESS_S
                self._tell({"kind": "waiting", "text": self._waiting(now)})
                print(self._waiting(now), file=sys.stderr, flush=True)
            for source, what in self._exchange.poll(min(next_beat, next_word, self._end) - now):
                self._handle(source, what)
        if error := differences(self.members()):
            raise error
        if len(self._present) < self._me.nodes:
            raise self._missing()
        for remark in clock_remarks(self.members(), self._offsets):
            print(remark, file=sys.stderr, flush=True)

    def _handle(self, source: object, what: dict | Exception | None) -> None:
        if source is self._listener:
            self._open_door()
        elif isinstance(source, Wire):
            if isinstance(what, Exception):
                if isinstance(what, NotOurs):
                    self._sent_away[source.peer] = "does not speak packtrain's language"
                self._forget(source)
            elif source in self._strangers and what is not None and what["kind"] == "hello":
                self._welcome(source, what)

    def _open_door(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has hung up already
            return
        wire = Wire(connection)
        self._strangers[wire] = time.monotonic() + _HELLO_S
        self._exchange.add(wire)

    def _welcome(self, wire: Wire, hello: dict) -> None:
        try:
            member = Member.from_json(hello.get("member"))
        except ValueError:
            self._sent_away[wire.peer] = "runs another version of packtrain"
            self._refuse(wire, _other_version(self._me))
            return
        if hello.get("job") != self._place.job:
            self._sent_away[member.host] = "is of a run with another trainer.output_dir"
            self._refuse(wire, _other_run(self._place, self._me))
            return
        del self._strangers[wire]
        known = self._present.get(member.node)
        if known is not None and not self._replaces(member, known):
            self.wires[-1 - len(self.wires)] = wire  # it gets the answer, too
            raise twice(known, member)
        self._present[member.node] = member
        self.wires[member.node] = wire
        self._offsets[member.node] = member.clock - time.time()
        self._exchange.send(wire, {"kind": "welcome"})
        if wrong_counts(self.members()):
            self._end = min(self._end, time.monotonic() + _FULL_PICTURE_S)

    def _replaces(self, member: Member, known: Member) -> bool:
        """Whether a machine that comes twice is one that was started again: its first launcher is silent by now."""
        old = self.wires.get(known.node)
        if old is None or member.host != known.host or time.monotonic() - old.heard < 3 * BEAT_S:
            return False
        self._exchange.remove(old)
        return True

    def _refuse(self, wire: Wire, error: PacktrainError) -> None:
        self._exchange.send(wire, stop_message(error))
        self._strangers[wire] = time.monotonic() + _PART_S

    def _drop_silent(self, now: float) -> None:
        for wire, until in list(self._strangers.items()):
            if now > until:
                self._forget(wire)
        for wire in self.everyone():
            if now - wire.heard > self._place.silence_s:
                self._forget(wire)

    def _forget(self, wire: Wire) -> None:
        self._exchange.remove(wire)
        self._strangers.pop(wire, None)
        for node in [node for node, one in self.wires.items() if one is wire]:
            del self.wires[node], self._present[node]

    def _tell(self, message: dict) -> None:
        for wire in self.everyone():
            self._exchange.send(wire, message)

    def _waiting(self, now: float) -> str:
        here = list(names_of(self.members()).values())
        are = f"{listed(here)} {'is' if len(here) == 1 else 'are'} here"
        return f"waiting {now - self._begun:.0f} s for {listed(self._absent())}: not connected; {are}"

    def _absent(self) -> list[str]:
        per_node = self._me.per_node
        return [self._place.machine(node, per_node) for node in range(self._me.nodes) if node not in self._present]

    def _missing(self) -> PeerFailed:
        first = min(set(range(self._me.nodes)) - set(self._present))
        what = f"{listed(self._absent())} did not connect to {self._me.host} within {self._place.timeout_s:.0f} s"
        here = listed(list(names_of(self.members()).values()))
        turned = "".join(f"; {who}, which was sent away, {why}" for who, why in list(self._sent_away.items())[:3])
        fix = (
            f"Is packtrain started there, with topology.node_rank={first}? If so, does {self._place.address}:{self._place.port} "
            f"answer there (name, firewall)? topology.join_timeout is how long the others wait."
        )
        return PeerFailed(f"{what} (here: {here}){turned}", where="roll call", fix=fix)


def _other_version(me: Member) -> PacktrainError:
    what = f"{me.host} runs another version of packtrain ({me.versions.get('packtrain', '?')})"
    return CheckFailed(what, where="versions", fix="Install the same version on every machine.")


def _other_run(place: Place, me: Member) -> PacktrainError:
    host = f" ({me.host})" if me.host != place.address else ""
    what = f"at {place.address}:{place.port}{host} the machines of another run meet: its folder is another one"
    fix = "Give all machines of a run the same trainer.output_dir, and two runs on one machine two ports."
    return CheckFailed(what, where="trainer.output_dir, topology.main_port", fix=fix)


def check_address(me: Member, place: Place) -> None:
    """Whether machine 0 is where the others will look for it. Raises CheckFailed where it is not."""
    try:
        found = resolve(place.address, place.port)
    except OSError as error:
        what = f"{place.address!r} is not known on {me.host}: {error.strerror}"
        raise CheckFailed(what, where="topology.main_address", fix="Name an address of machine 0.") from error
    if any(is_own(address) for address in found):
        return
    call_out(me, place)  # where the real machine 0 listens, both are told
    means = f" ({', '.join(found)})" if found != [place.address] else ""
    raise CheckFailed(
        f"this machine ({me.host}) has topology.node_rank=0, but topology.main_address={place.address}{means} "
        f"is not one of its addresses ({', '.join(own_addresses()) or 'none'})",
        where="topology.node_rank, topology.main_address",
        fix="Number the machines from 0, each once; topology.main_address is that of number 0.",
    )


@contextmanager
def listening(place: Place) -> Iterator[socket.socket]:
    """The open port. Raises CheckFailed where it is taken, and says by whom."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        # create_server sets SO_REUSEADDR: torch can bind the port again while accepted connections are open
        listener = socket.create_server(("", place.port), family=family, backlog=1024, dualstack_ipv6=dual)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        taken = error.errno == errno.EADDRINUSE
        what = f"port {place.port} is taken{holder_of(place.port)}" if taken else f"port {place.port} is not allowed"
        fix = f"Set another one on every machine, e.g. topology.main_port={place.port + 1 if taken else 29500}."
        raise CheckFailed(what, where="topology.main_port", fix=fix) from error
    listener.setblocking(False)
    with listener:
        yield listener


def holder_of(port: int) -> str:
    """ " by process 4711 (python serve.py)", as far as the system tells."""
    try:
        import psutil

        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr[1] == port and one.pid:
                program, *rest = psutil.Process(one.pid).cmdline() or ["?"]
                script = [
                    word for word in rest[:1] if not word.startswith("-")
                ]  # an option, or what follows, may be secret
                command = " ".join([program, *script])
                return f" by process {one.pid} ({command[:100]})"
    except (ImportError, OSError, RuntimeError, psutil.Error):
        pass
    return ""
