"""The roll call as the other machines see it: find machine 0, say who we are, wait for its answer."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import asdict, dataclass, field

from packtrain.errors import CheckFailed, PacktrainError, PeerFailed
from packtrain.launch.exchange import Exchange
from packtrain.launch.line import BEAT_S
from packtrain.launch.members import Member
from packtrain.launch.place import Place, is_own, resolve
from packtrain.launch.wire import Closed, NotOurs, Wire, error_of

PROGRESS_S = 10
CERTAIN_S = 10  # how long what looks like a mistake may also be a machine 0 that is about to start
_ATTEMPT_S = 8  # a link that takes 2 s there and 2 s back is slow, not dead
_CALL_S = 5
_PAUSE_S = 0.5


class _NoAnswer(Exception):
    """An attempt that led to no machine 0; the text says what happened."""


@dataclass(slots=True)
class _Search:
    """The attempts so far: since when, and since when each sign of a mistake has been seen without a break."""

    begun: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)
    signs: dict[str, float] = field(default_factory=dict)

    def lasts(self, sign: str) -> bool:
        """Whether `sign` is by now certain; forgets the others."""
        self.signs = {sign: self.signs.get(sign, time.monotonic())}
        return time.monotonic() - self.signs[sign] >= CERTAIN_S


def arrive(me: Member, place: Place, exchange: Exchange) -> tuple[Wire, dict[int, str]]:
    """Returns the wire to machine 0 and all machines' names once it has said go.

    Raises what machine 0 says is wrong; CheckFailed where the address or port is certainly not machine 0's; PeerFailed
    where it could not be reached for `place.timeout_s` seconds.
    """
    search = _Search()
    while True:
        try:
            wire = _connect(place, search, search.begun + place.timeout_s)
            exchange.add(wire)
            return wire, _register(wire, me, place, exchange, search)
        except _NoAnswer as error:
            now = time.monotonic()
            if now - search.begun >= place.timeout_s:
                raise _not_found(place, str(error), now - search.begun) from None
            if now - search.told >= PROGRESS_S:
                search.told = now
                waited = f"waiting {now - search.begun:.0f} s for {_main(place)} at {place.address}:{place.port}"
                print(f"{waited}: {error}", file=sys.stderr, flush=True)
            time.sleep(min(_PAUSE_S, max(0.0, search.begun + place.timeout_s - now)))


def call_out(me: Member, place: Place) -> None:
    """Tells a machine 0 that there is another one. Raises what it answers; returns where none does within a few seconds."""
    exchange, end = Exchange(), time.monotonic() + _CALL_S
    try:
        while time.monotonic() < end:
            try:
                wire = _connect(place, _Search(), end)
                exchange.add(wire)
                _register(wire, me, place, exchange, _Search())
            except _NoAnswer:
                time.sleep(_PAUSE_S)
    finally:
        exchange.close()


def _connect(place: Place, search: _Search, end: float) -> Wire:
    """One attempt at every address of machine 0, until `end` at most. Raises _NoAnswer, or CheckFailed where it is certain that none will do."""
    try:
        addresses = resolve(place.address, place.port)
    except OSError as error:
        said = f"the name {place.address!r} is not known here ({error.strerror})"
        if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN and search.lasts("unknown name"):
            fix = "Use an address, or make the name known on this machine (DNS, /etc/hosts)."
            raise CheckFailed(said, where="topology.main_address", fix=fix) from error
        raise _NoAnswer(said) from error
    said, by_name = [], addresses != [place.address]
    for address in addresses:
        try:
            left = max(min(_ATTEMPT_S, end - time.monotonic()), _PAUSE_S)
            return Wire(socket.create_connection((address, place.port), timeout=left))
        except TimeoutError:
            said.append(f"no answer from {address}" if by_name else "no answer")
        except ConnectionRefusedError:
            said.append(f"connection refused by {address}" if by_name else "connection refused")
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            said.append(f"{address}: {why}" if by_name else why)
    text = ", ".join(said)
    if not all(is_own(address) for address in addresses):
        search.signs.clear()
    elif search.lasts("own address"):
        here = f"{', '.join(addresses)} here, " if by_name else ""
        raise CheckFailed(
            f"{place.address} is {here}an address of this machine itself, and nobody listens there",
            where="topology.main_address",
            fix="Name an address of machine 0 that the other machines can reach; look at /etc/hosts for names that lead "
            "to 127.0.0.1. If this is machine 0, it needs topology.node_rank=0.",
        )
    raise _NoAnswer(text)


def _register(wire: Wire, me: Member, place: Place, exchange: Exchange, search: _Search) -> dict[int, str]:
    """The names that come with go. Raises machine 0's error, PeerFailed where it left, _NoAnswer where it is no machine 0."""
    exchange.send(wire, {"kind": "hello", "job": place.job, "member": asdict(me)})
    begun, next_beat, welcomed = time.monotonic(), time.monotonic() + BEAT_S, False
    while True:
        now = time.monotonic()
        if not welcomed and now - begun > CERTAIN_S:
            exchange.remove(wire)
            raise _other_program(place, "does not answer")
        if now - wire.heard > place.silence_s and welcomed:
            exchange.remove(wire)
            raise _left(place, f"silent for {place.silence_s:.0f} s")
        if now >= next_beat and welcomed:
            next_beat = now + BEAT_S
            exchange.send(wire, {"kind": "beat"})
        events = exchange.poll(0.2 if not welcomed else next_beat - now)
        for number, (_, what) in enumerate(events, start=1):
            if isinstance(what, Closed) and welcomed:
                exchange.remove(wire)
                raise _left(place, str(what))
            if isinstance(what, (Closed, NotOurs)):
                exchange.remove(wire)
                said = f"what listens there does not speak packtrain's language ({what})"
                if search.lasts("another program"):
                    raise _other_program(place, f"does not speak packtrain's language ({what})")
                raise _NoAnswer(said)
            if what is not None and (answer := _answer(what, place)) is not None:
                exchange.put_back(events[number:])  # what came with it is for the line: an order, maybe
                return answer
            welcomed = welcomed or (what is not None and what["kind"] == "welcome")


def _answer(message: dict, place: Place) -> dict[int, str] | None:
    """What a line from machine 0 decides, if it decides anything."""
    if message["kind"] == "stop":
        raise error_of(message)
    if message["kind"] == "bye":
        raise _left(place, str(message.get("why", "")))
    if message["kind"] == "waiting":
        print(message["text"], file=sys.stderr, flush=True)
    return dict(enumerate(map(str, message["names"]))) if message["kind"] == "go" else None


def _main(place: Place) -> str:
    return f"{place.names[0]} (machine 0)" if place.names else "machine 0"


def _not_found(place: Place, last: str, waited: float) -> PacktrainError:
    return PeerFailed(
        f"{_main(place)} could not be reached at {place.address}:{place.port} for {waited:.0f} s: {last}",
        where="roll call",
        fix="Is packtrain started there, with topology.node_rank=0? Does a firewall let the port through? "
        "topology.join_timeout is how long the others wait.",
    )


def _other_program(place: Place, what: str) -> CheckFailed:
    return CheckFailed(
        f"what listens at {place.address}:{place.port} {what}: it is not a packtrain that waits for this machine",
        where="topology.main_address, topology.main_port",
        fix=f"The port is taken there, or a run goes on already. Set another one on every machine, e.g. "
        f"topology.main_port={place.port + 1}.",
    )


def _left(place: Place, why: str) -> PeerFailed:
    what = f"{_main(place)} left before the run began: {why}"
    return PeerFailed(what, where="roll call", fix="Its terminal or log says why; start all machines again.")
