"""The rendezvous: the launchers of all machines connect before a worker is started, and compare configs, versions and counts.

Machine 0 serves the control channel on the run's port; the others call `join` repeatedly, each with a description of its machine,
and all get the same answer: wait, go, or stop with the reason. Faults on which torchrun would hang silently, or train wrongly,
become errors that name the machine. The channel stays open for the whole run (coordinator.py); torch's own store gets another
port, which the answer contains.
"""

from __future__ import annotations

import errno
import hmac
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from packtrain.errors import CheckFailed, PacktrainError, PeerFailed, error_from_json
from packtrain.monitor.channel import SECRET, Client, NoAnswer, Refused, Server, new_secret
from packtrain.plan.agreement import Member, names_of, twice, unlike, unlike_counts
from packtrain.plan.network_settings import addresses_by_interface, is_loopback
from packtrain.plan.surroundings import free_port
from packtrain.wording import listed, ranks_in_words

PROGRESS_S = 10
CERTAIN_S = 15
"""Seconds of silence after which machine 0 has left the rendezvous."""
_POLL_S = 0.3
_ABSENT_S = 5  # a machine that is silent this long counts as not joined
_FAREWELL_S = 3  # that machine 0 keeps answering after a failure, so that the others get the reason
_ANOTHER_RUN = "another run, with another trainer.output_dir, uses this port"
_LINK_LOCAL = ("169.254.", "fe80:")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the machines connect: machine 0 listens on `port`, the others call `address` for up to `timeout_s` seconds.

    `job` is the run's folder, by which its launchers recognise each other, `names` are host names by number as far as they are
    known beforehand. Those waited for are the numbers `expected` (all of them), and more until there are `least` (all); when the
    time is over, `least` are enough.
    """

    address: str
    port: int
    timeout_s: float
    job: str
    names: tuple[str, ...] = ()
    expected: frozenset[int] | None = None
    least: int | None = None

    def machine(self, node: int, per_node: int = 0) -> str:
        """A machine in words: "n2 (machine 1, ranks 4 to 7)"."""
        ranks = [ranks_in_words(range(node * per_node, (node + 1) * per_node))] if per_node else []
        known = node < len(self.names)
        about = ", ".join([f"machine {node}", *ranks] if known else ranks)
        return f"{self.names[node] if known else f'machine {node}'}{f' ({about})' if about else ''}"


@dataclass(frozen=True, slots=True)
class Group:
    """The machines of a run after the rendezvous: names by number, the channel's place, and the port for torch's store.

    `server` is machine 0's, `client` that of any other. `prepared` is what machine 0 has prepared for all.
    """

    names: Mapping[int, str]
    address: str
    port: int
    secret: str
    store_port: int
    prepared: str
    server: Server | None = None
    client: Client | None = None


Prepare = Callable[[Mapping[int, str]], str]


@contextmanager
def meet(me: Member, place: Place, prepare: Prepare = lambda names: "") -> Iterator[Group]:
    """Inside the block every machine has joined, they all agree, and machine 0 serves the channel.

    Machine 0 calls `prepare` with the names of those that have joined, before they go on: all get what it returns, and its
    errors end all machines. Raises CheckFailed, the same on every machine, if they disagree, and where machine 0 has not the
    address or the port; PeerFailed if a machine is missing after `place.timeout_s` seconds, or comes when the run has started.
    Prints what it waits for on stderr every PROGRESS_S seconds.
    """
    if me.node:
        yield _join_machine_0(me, place)
        return
    _check_address(me, place)
    server = _serve(place.port)
    try:
        yield _gather(me, place, server, prepare)
    finally:
        server.close()


def _gather(me: Member, place: Place, server: Server, prepare: Prepare) -> Group:
    """The rendezvous on machine 0: waits for the others and answers all of them."""
    joining = _JoinServer(me, place)
    server.serve("join", joining.join, open=True)
    store_port = free_port()
    with suppress(OSError), socket.create_server(("", place.port + 1)):
        store_port = place.port + 1
    try:
        joining.wait()
        names = names_of(joining.members())
        prepared = prepare(names)
    except BaseException as error:  # a signal, too
        why = error if isinstance(error, PacktrainError) else _departed(place, "its launcher was stopped")
        joining.answer({"stop": why.to_json()})
        time.sleep(_FAREWELL_S)
        raise
    go = {"names": list(names.items()), "secret": server.secret, "store_port": store_port, "prepared": prepared}
    joining.answer({"go": go})
    return Group(names, "127.0.0.1", place.port, server.secret, store_port, prepared, server=server)


class _JoinServer:
    """Machine 0's record of the launchers that have joined; `join` is called by the channel's threads."""

    def __init__(self, me: Member, place: Place) -> None:
        self._me, self._place = me, place
        self._least = place.least or me.nodes
        # with the time of the last call (time.monotonic()), by token: two launchers may have the same number
        self._joined: dict[str, tuple[Member, float]] = {}
        self._answer: dict[str, Any] | None = None
        self._waiting = ""
        self._error: PacktrainError | None = None
        self._lock = threading.Lock()
        self._news = threading.Event()

    def members(self) -> list[Member]:
        """The machines that have joined: this one, and the others by number."""
        others = [member for member, _ in dict(self._joined).values()]
        return [self._me, *sorted(others, key=lambda member: member.node)]

    def join(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answers a launcher: {"wait": text}, {"go": …}, or {"stop": problems}."""
        secret = str(body.get("secret", "")).encode()
        if not hmac.compare_digest(secret, os.environ.get(SECRET, "").encode()):
            return {"stop": _reject(self._place, _ANOTHER_RUN).to_json()}
        try:
            member, token = Member.from_json(body.get("member")), str(body["token"])
        except (ValueError, KeyError, TypeError):
            return {"stop": _reject(self._place, "machine 0 has another version of packtrain").to_json()}
        if body.get("job") != self._place.job:
            return {"stop": _reject(self._place, _ANOTHER_RUN).to_json()}
        with self._lock:
            answer = self._answer
            if token not in self._joined:
                if answer is not None and "go" in answer:
                    return {"stop": _too_late(self._place).to_json()}
                others = self.members()
                same = next((twice(other, member) for other in others if other.node == member.node), None)
                self._error = self._error or same or unlike_counts([*others, member])
            self._joined[token] = member, time.monotonic()
        self._news.set()
        return answer or {"wait": self._waiting}

    def wait(self) -> None:
        """Returns when all have joined and agree. Raises PacktrainError if they disagree, or a machine is missing."""
        begun = printed = time.monotonic()
        while self._error is None and (missing := self.missing()):
            now = time.monotonic()
            if now - begun >= self._place.timeout_s:
                if self._me.nodes - len(self._absent()) >= self._least:
                    break
                raise self.missing_error(missing)
            if now - printed >= PROGRESS_S:
                printed = now
                here = f"{self._here()} {'are' if self._joined else 'is'} here"
                self._waiting = f"waiting {now - begun:.0f} s for {self._describe(missing)}: not connected; {here}"
                print(self._waiting, file=sys.stderr, flush=True)
            self._news.wait(_POLL_S)
            self._news.clear()
        if error := self._error or unlike(self.members()):
            raise error

    def answer(self, answer: dict[str, Any]) -> None:
        """Sets the final answer for all."""
        with self._lock:
            self._answer = answer

    def missing(self) -> list[int]:
        """The machines that are waited for."""
        absent, expected = self._absent(), self._place.expected
        awaited = absent if expected is None else [node for node in absent if node in expected]
        return awaited or (absent if self._me.nodes - len(absent) < self._least else [])

    def _absent(self) -> list[int]:
        """The machines that have not joined, or have stopped calling."""
        since = time.monotonic() - _ABSENT_S
        with self._lock:
            self._joined = {token: known for token, known in self._joined.items() if known[1] > since}
            here = {member.node for member, _ in self._joined.values()}
        return [node for node in range(self._me.nodes) if node not in {self._me.node, *here}]

    def missing_error(self, missing: Sequence[int]) -> PeerFailed:
        """The error that these machines did not join in time."""
        place, here = self._place, f"(here: {self._here()})"
        return PeerFailed(
            f"{self._describe(missing)} did not connect to {self._me.host} within {place.timeout_s:.0f} s {here}",
            where="rendezvous",
            fix=f"Is packtrain started there, with topology.node_rank={missing[0]}? If so, does {place.address}:"
            f"{place.port} answer there (name, firewall)? topology.join_timeout is how long the others wait.",
        )

    def _here(self) -> str:
        return listed(list(names_of(self.members()).values()))

    def _describe(self, nodes: Sequence[int]) -> str:
        return listed([self._place.machine(node, self._me.per_node) for node in nodes])


class _NotYet(Exception):
    """Why an attempt did not reach machine 0, in words."""


def _join_machine_0(me: Member, place: Place) -> Group:
    """The rendezvous on the other machines: finds machine 0 and waits for its answer.

    Raises the error that machine 0 answers; PeerFailed if machine 0 could not be reached for `place.timeout_s` seconds, or left.
    """
    token, joined = new_secret(), False
    begun = heard = printed = time.monotonic()
    while True:
        waited_s = time.monotonic() - begun
        try:
            answer = _call_join(me, place, token, max(min(CERTAIN_S, place.timeout_s - waited_s), 1))
            if isinstance(answer, Group):
                return answer
            joined, words, heard = True, answer, time.monotonic()
        except _NotYet as reason:
            words = f"waiting {waited_s:.0f} s for {place.machine(0)} at {place.address}:{place.port}: {reason}"
            if joined and time.monotonic() - heard >= CERTAIN_S:
                raise _departed(place, str(reason)) from None
            if not joined and time.monotonic() - begun >= place.timeout_s:
                raise _unreached(place, str(reason), time.monotonic() - begun) from None
        if words and time.monotonic() - printed >= PROGRESS_S:
            printed = time.monotonic()
            print(words, file=sys.stderr, flush=True)
        time.sleep(_POLL_S)


def _call_join(me: Member, place: Place, token: str, limit_s: float) -> Group | str:
    """One attempt: the group, or the text of "wait". Raises machine 0's error, or _NotYet."""
    try:
        with socket.create_connection((place.address, place.port), timeout=limit_s) as connection:
            address = str(
                connection.getpeername()[0]
            )  # so that later calls do not ask the name server, which may be slow
    except socket.gaierror as error:
        raise _NotYet(f"the name {place.address!r} is not known here ({error.strerror})") from error
    except OSError as error:
        raise _NotYet(f"{(error.strerror or str(error)).lower()}{_resolved(place)}") from error
    client, secret = Client(address, place.port), os.environ.get(SECRET, "")
    body = {"member": asdict(me), "token": token, "job": place.job, "secret": secret}
    try:
        answer = client.call("join", body, timeout_s=limit_s)
    except NoAnswer as error:
        raise _NotYet("a program listens that does not answer as packtrain does") from error
    except Refused as error:
        if error.unknown:
            raise _NotYet("it is not ready yet") from error
        raise _reject(place, _ANOTHER_RUN) from error
    if "stop" in answer:
        raise error_from_json(answer["stop"])
    if "go" not in answer:
        return str(answer.get("wait", ""))
    go = answer["go"]
    client.secret = go["secret"]
    names = {int(node): str(name) for node, name in go["names"]}
    return Group(names, client.address, place.port, go["secret"], go["store_port"], go["prepared"], client=client)


def _resolved(place: Place) -> str:
    """ "; n1 is 127.0.0.1 here": a name may lead to this machine itself."""
    with suppress(OSError):
        addresses = resolve(place.address, place.port)
        if addresses != [place.address]:
            return f"; {place.address} is {', '.join(addresses)} here"
    return ""


def _check_address(me: Member, place: Place) -> None:
    """Raises CheckFailed if topology.main_address, which the others call, is not an address of this machine 0."""
    try:
        addresses = resolve(place.address, place.port)
    except OSError as error:
        what = f"the name {place.address!r} is not known here ({error.strerror})"
        fix = "Use an address, or make the name known on this machine (DNS, /etc/hosts)."
        raise CheckFailed(what, where="topology.main_address", fix=fix) from error
    if any(map(is_own, addresses)):
        return
    means = f" ({', '.join(addresses)})" if addresses != [place.address] else ""
    raise CheckFailed(
        f"this machine ({me.host}) has topology.node_rank=0, but topology.main_address={place.address}{means} "
        f"is not one of its addresses ({', '.join(own_addresses()) or 'none'})",
        where="topology.node_rank, topology.main_address",
        fix="Number the machines from 0, each once; topology.main_address is that of number 0.",
    )


def _serve(port: int) -> Server:
    """The channel on the run's port. Raises CheckFailed if it is taken, with the process that has it."""
    try:
        return Server(port, secret=new_secret())
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        what = f"port {port} is taken{_holder_of(port)}" if taken else f"port {port} cannot be had: {error.strerror}"
        fix = f"Set another one on every machine, e.g. topology.main_port={port + 10}."
        raise CheckFailed(what, where="topology.main_port", fix=fix) from error


def _holder_of(port: int) -> str:
    """ " by process 4711 (python)"; "" if the system does not say."""
    with suppress(OSError, psutil.Error):
        for socket_ in psutil.net_connections("tcp"):
            if socket_.status == psutil.CONN_LISTEN and getattr(socket_.laddr, "port", None) == port and socket_.pid:
                return f" by process {socket_.pid} ({psutil.Process(socket_.pid).name()})"
    return ""


def resolve(address: str, port: int) -> list[str]:
    """The addresses of a host name, in the system's order. Raises OSError (socket.gaierror)."""
    answers = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in answers))


def is_own(address: str) -> bool:
    """Whether `address` is one of this machine's: only such an address can be bound to."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def own_addresses() -> tuple[str, ...]:
    """The addresses of this machine that others may use; () if they cannot be found out."""
    addresses = [address for interface in (addresses_by_interface() or {}).values() for address in interface]
    usable = (address for address in addresses if not is_loopback(address) and not address.startswith(_LINK_LOCAL))
    return tuple(dict.fromkeys(usable))


def _reject(place: Place, what: str) -> CheckFailed:
    return CheckFailed(
        f"at {place.address}:{place.port} {what}",
        where="trainer.output_dir, topology.main_address, topology.main_port",
        fix="Give all machines of a run the same packtrain and trainer.output_dir, and use another port for another run or program, "
        f"e.g. topology.main_port={place.port + 10}.",
    )


def _too_late(place: Place) -> PeerFailed:
    return PeerFailed(
        f"at {place.address}:{place.port} the run has started, and goes on without this machine",
        where="rendezvous",
        fix="A run that has started cannot be joined. If it has to wait for this machine (trainer.restarts without "
        "topology.min_nodes), machine 0 says so: start the same command here then; else wait for its end.",
    )


def _unreached(place: Place, reason: str, waited_s: float) -> PeerFailed:
    return PeerFailed(
        f"{place.machine(0)} could not be reached at {place.address}:{place.port} for {waited_s:.0f} s: {reason}",
        where="rendezvous",
        fix="Is packtrain started there, with topology.node_rank=0? Does the name lead there from here (/etc/hosts), and does a "
        "firewall let the port through? topology.join_timeout is how long the others wait.",
    )


def _departed(place: Place, why: str) -> PeerFailed:
    what = f"{place.machine(0)} left before the run began: {why}"
    return PeerFailed(what, where="rendezvous", fix="Its terminal or log says why; start all machines again.")
