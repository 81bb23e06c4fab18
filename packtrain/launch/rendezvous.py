"""The rendezvous: the launchers of all machines meet before a worker is started, and compare what they are about to do.

Machine 0 serves the control channel on the run's port; the others call `join` again and again, each with a description of its
machine, and all get the same answer: wait, go, or stop with the reason. What torchrun would wait for in silence, or train
wrongly, is then an error within seconds that names the machine. The channel stays open for the whole run (supervisor.py);
the port for torch's own store is another one, which the answer tells.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil

from packtrain.errors import CheckFailed, PacktrainError, PeerFailed, Problem, UserError
from packtrain.monitor.channel import SECRET, Client, NoAnswer, Refused, Server, new_secret
from packtrain.plan.agreement import Member, names_of, twice, unlike, unlike_counts
from packtrain.plan.network_settings import addresses_by_interface, is_loopback
from packtrain.plan.surroundings import free_port
from packtrain.wording import listed, ranks_in_words

PROGRESS_S = 10
CERTAIN_S = 15
"""How long what looks like a mistake may also be a machine 0 that is about to start, or is busy."""
_POLL_S = 0.3
_GONE_S = 5  # who has not called for so long has left, and is waited for again
_TELL_S = 5  # so long machine 0 stays to tell why it goes, also to those that come a little later
_CALL_OUT_S = 5
_OTHER_RUN = "the machines of another run meet: its folder is another one"
_OF_ONE_LINK = ("169.254.", "fe80:")


@dataclass(frozen=True, slots=True)
class Place:
    """Machine 0 listens on `port`, the others reach it at `address` within `timeout_s` seconds of their own start.

    `job` is the run's folder, by which its launchers know each other, `names` are host names by number as far as they are known beforehand; `partial`: whoever
    is missing then is done without.
    """

    address: str
    port: int
    timeout_s: float
    job: str
    names: tuple[str, ...] = ()
    partial: bool = False

    def machine(self, node: int, per_node: int = 0) -> str:
        """A machine in words: "n2 (machine 1, ranks 4 to 7)"."""
        about = [ranks_in_words(range(node * per_node, (node + 1) * per_node))] if per_node else []
        if node < len(self.names):
            name, about = self.names[node], [f"machine {node}", *about]
        else:
            name = f"machine {node}"
        return f"{name} ({', '.join(about)})" if about else name


@dataclass(frozen=True, slots=True)
class Group:
    """The machines of a run, once they have met: names by number, where the channel is, and the port for torch's store.

    `server` is machine 0's, `client` that of any other.
    """

    names: Mapping[int, str]
    address: str
    port: int
    secret: str
    store_port: int
    server: Server | None = None
    client: Client | None = None


@contextmanager
def meet(me: Member, place: Place, prepare: Callable[[], object] = lambda: None) -> Iterator[Group]:
    """Inside the block every machine is there, they all agree, and machine 0 serves the channel.

    Machine 0 calls `prepare` when all are there and none goes on yet; what it raises is an error for all. Raises CheckFailed,
    the same on every machine, where they do not fit or cannot meet here; PeerFailed where one is missing after `place.timeout_s`
    seconds. Prints what it waits for on stderr every PROGRESS_S seconds.
    """
    if me.node:
        yield _arrive(me, place)
        return
    _check_address(me, place)
    server = _serving(place.port)
    try:
        yield _gather(me, place, server, prepare)
    finally:
        server.close()


def _gather(me: Member, place: Place, server: Server, prepare: Callable[[], object]) -> Group:
    """Machine 0's part."""
    hall = _Hall(me, place)
    server.serve("join", hall.join, open=SECRET not in os.environ)
    store_port = _free_port(place.port + 1)
    try:
        hall.wait()
        prepare()
    except PacktrainError as error:
        hall.answer({"stop": _to_json(error)})
        raise
    except BaseException:  # a signal
        hall.answer({"left": "its launcher was stopped"})
        raise
    names = names_of(hall.members())
    go = {"names": list(names.items()), "secret": server.secret, "store_port": store_port}
    hall.answer({"go": go})
    return Group(names, "127.0.0.1", place.port, server.secret, store_port, server=server)


@dataclass(frozen=True, slots=True)
class _Guest:
    """A launcher that has joined: when it called last (time.monotonic()), and whether it has had the answer."""

    member: Member
    heard: float
    answered: bool


class _Hall:
    """Who has come so far, at machine 0; `join` is called by the channel's threads."""

    def __init__(self, me: Member, place: Place) -> None:
        self._me, self._place = me, place
        self._guests: dict[str, _Guest] = {}  # by their token, which tells two of one number apart
        self._answer: dict[str, Any] | None = None
        self._waiting = ""
        self._error: PacktrainError | None = None
        self._lock = threading.Lock()
        self._news = threading.Event()

    def members(self) -> list[Member]:
        """Those that are here, by number."""
        return sorted([self._me, *(one.member for one in dict(self._guests).values())], key=lambda one: one.node)

    def join(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answers a launcher: {"wait": text}, {"go": …}, {"stop": problems}, or {"left": why}."""
        try:
            member, token = Member.from_json(body.get("member")), str(body["token"])
        except (ValueError, KeyError, TypeError):
            return {"stop": _to_json(_not_for_us(self._place, "machine 0 has another version of packtrain"))}
        if body.get("job") != self._place.job:
            return {"stop": _to_json(_not_for_us(self._place, _OTHER_RUN))}
        with self._lock:
            answer = self._answer
            if token not in self._guests:
                if answer is not None and "go" in answer:
                    return {"stop": _to_json(_not_for_us(self._place, "a run goes on already, with all its machines"))}
                others = self.members()
                same = next((twice(one, member) for one in others if one.node == member.node), None)
                self._error = self._error or same or unlike_counts([*others, member])
            self._guests[token] = _Guest(member, time.monotonic(), answer is not None)
        self._news.set()
        return answer or {"wait": self._waiting}

    def wait(self) -> None:
        """Until all are here and agree. Raises PacktrainError where they do not, or one is missing."""
        begun = said = time.monotonic()
        while self._error is None and (missing := self._missing()):
            now = time.monotonic()
            if now - begun >= self._place.timeout_s:
                if self._place.partial:
                    break
                raise self._not_here(missing)
            if now - said >= PROGRESS_S:
                said = now
                are = f"{self._here()} {'are' if self._guests else 'is'} here"
                self._waiting = f"waiting {now - begun:.0f} s for {self._words(missing)}: not connected; {are}"
                print(self._waiting, file=sys.stderr, flush=True)
            self._news.wait(_POLL_S)
            self._news.clear()
        if error := self._error or unlike(self.members()):
            raise error

    def answer(self, answer: dict[str, Any]) -> None:
        """Gives all the same answer; where it is not go, returns when all have it, or after _TELL_S."""
        with self._lock:
            self._answer = answer
        end = time.monotonic() + _TELL_S
        while "go" not in answer and time.monotonic() < end:
            answered = [one.answered for one in dict(self._guests).values()]
            if len(answered) >= self._me.nodes - 1 and all(answered):
                return
            time.sleep(_POLL_S / 3)

    def _here(self) -> str:
        return listed(list(names_of(self.members()).values()))

    def _missing(self) -> list[int]:
        """Machines that have not joined, or do not call any more."""
        since = time.monotonic() - _GONE_S
        with self._lock:
            self._guests = {token: one for token, one in self._guests.items() if one.heard > since}
            here = {one.member.node for one in self._guests.values()}
        return [node for node in range(1, self._me.nodes) if node not in here]

    def _words(self, nodes: Sequence[int]) -> str:
        return listed([self._place.machine(node, self._me.per_node) for node in nodes])

    def _not_here(self, missing: Sequence[int]) -> PeerFailed:
        absent, here = self._words(missing), f"(here: {self._here()})"
        return PeerFailed(
            f"{absent} did not connect to {self._me.host} within {self._place.timeout_s:.0f} s {here}",
            where="rendezvous",
            fix=f"Is packtrain started there, with topology.node_rank={missing[0]}? If so, does {self._place.address}:"
            f"{self._place.port} answer there (name, firewall)? topology.join_timeout is how long the others wait.",
        )


class _NotYet(Exception):
    """An attempt that led to no machine 0; the text says what happened, `mistake` what it is where it goes on for long."""

    def __init__(self, text: str, mistake: CheckFailed | None = None) -> None:
        super().__init__(text)
        self.mistake = mistake


def _arrive(me: Member, place: Place) -> Group:
    """The part of the other machines: finds machine 0 and waits for its answer.

    Raises what machine 0 says is wrong; CheckFailed where the address or port is certainly not machine 0's; PeerFailed
    where it could not be reached for `place.timeout_s` seconds, or left.
    """
    token, begun, joined = new_secret(), time.monotonic(), False
    said = certain = begun
    while True:
        trouble = None
        try:
            answer = _asked(me, place, token, place.timeout_s - (time.monotonic() - begun))
            if isinstance(answer, Group):
                return answer
            joined, words = True, answer
        except _NotYet as error:
            trouble = error
            words = f"waiting {time.monotonic() - begun:.0f} s for {place.machine(0)} at {place.address}:{place.port}: {error}"
        now = time.monotonic()
        if trouble is None or not (joined or trouble.mistake):
            certain = now
        if trouble is not None and now - certain >= CERTAIN_S:
            raise trouble.mistake if trouble.mistake and not joined else _left(place, str(trouble))
        if trouble is not None and not joined and now - begun >= place.timeout_s:
            raise _not_found(place, str(trouble), now - begun)
        if words and now - said >= PROGRESS_S:
            said = now
            print(words, file=sys.stderr, flush=True)
        time.sleep(_POLL_S)


def _asked(me: Member, place: Place, token: str, limit_s: float) -> Group | str:
    """One attempt: the group, or what it waits for. Raises machine 0's error, or _NotYet."""
    limit_s = max(min(CERTAIN_S, limit_s), 1)
    try:
        with socket.create_connection((place.address, place.port), timeout=limit_s) as found:
            address = str(found.getpeername()[0])  # the name server is not asked again, which may be slow
    except socket.gaierror as error:
        unknown = _unknown(place, error)
        raise _NotYet(unknown.problems[0].what, None if error.errno == socket.EAI_AGAIN else unknown) from error
    except OSError as error:
        raise _NotYet((error.strerror or str(error)).lower(), _means_itself(place)) from error
    client = Client(address, place.port, secret=os.environ.get(SECRET, ""))
    try:
        answer = client.call("join", {"member": asdict(me), "token": token, "job": place.job}, timeout_s=limit_s)
    except NoAnswer as error:
        text = "a program listens that does not answer as packtrain does"
        raise _NotYet(text, _not_for_us(place, text)) from error
    except Refused as error:
        if error.unknown:
            raise _NotYet("it has only begun to listen") from error
        raise _not_for_us(place, _OTHER_RUN) from error
    return _group_of(answer, client, place)


def _group_of(answer: Mapping[str, Any], client: Client, place: Place) -> Group | str:
    if "stop" in answer:
        raise _from_json(answer["stop"])
    if "left" in answer:
        raise _left(place, str(answer["left"]))
    if "go" not in answer:
        return str(answer.get("wait", ""))
    go = answer["go"]
    client.secret = go["secret"]
    names = {int(node): str(name) for node, name in go["names"]}
    return Group(names, client.address, place.port, go["secret"], int(go["store_port"]), client=client)


def _check_address(me: Member, place: Place) -> None:
    """Whether machine 0 is where the others will look for it. Raises CheckFailed where it is not."""
    try:
        found = resolve(place.address, place.port)
    except OSError as error:
        raise _unknown(place, error) from error
    if any(is_own(address) for address in found):
        return
    with suppress(PeerFailed):  # where the real machine 0 listens, both are told
        _arrive(me, replace(place, timeout_s=_CALL_OUT_S))
    means = f" ({', '.join(found)})" if found != [place.address] else ""
    raise CheckFailed(
        f"this machine ({me.host}) has topology.node_rank=0, but topology.main_address={place.address}{means} "
        f"is not one of its addresses ({', '.join(own_addresses()) or 'none'})",
        where="topology.node_rank, topology.main_address",
        fix="Number the machines from 0, each once; topology.main_address is that of number 0.",
    )


def _serving(port: int) -> Server:
    """The channel on the run's port. Raises CheckFailed where it is taken, and says by whom."""
    try:
        return Server(port, secret=os.environ.get(SECRET) or new_secret())
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        what = f"port {port} is taken{holder_of(port)}" if taken else f"port {port} cannot be had: {error.strerror}"
        fix = f"Set another one on every machine, e.g. topology.main_port={port + 1}."
        raise CheckFailed(what, where="topology.main_port", fix=fix) from error


def holder_of(port: int) -> str:
    """ " by process 4711 (python)", as far as the system says."""
    with suppress(OSError, psutil.Error):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr[1] == port and one.pid:
                return f" by process {one.pid} ({psutil.Process(one.pid).name()})"
    return ""


def resolve(address: str, port: int) -> list[str]:
    """The addresses of a host name, in the system's order. Raises OSError (socket.gaierror)."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def is_own(address: str) -> bool:
    """Whether `address` is one of this machine's: only such an address can be bound to."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def own_addresses() -> tuple[str, ...]:
    """This machine's addresses that others may know it by; () where they cannot be found out."""
    found = [one for listed in (addresses_by_interface() or {}).values() for one in listed]
    return tuple(dict.fromkeys(one for one in found if not is_loopback(one) and not one.startswith(_OF_ONE_LINK)))


def _free_port(preferred: int) -> int:
    """`preferred` where nobody has it, else any free one."""
    with suppress(OSError), socket.create_server(("", preferred)):
        return preferred
    return free_port()


def _to_json(error: PacktrainError) -> dict[str, Any]:
    return {"code": error.exit_code, "problems": [asdict(one) for one in error.problems]}


def _from_json(values: Mapping[str, Any]) -> PacktrainError:
    kind = {one.exit_code: one for one in (UserError, CheckFailed, PeerFailed)}.get(values["code"], PeerFailed)
    return kind([Problem(**one) for one in values["problems"]])


def _not_for_us(place: Place, what: str) -> CheckFailed:
    return CheckFailed(
        f"at {place.address}:{place.port} {what}",
        where="trainer.output_dir, topology.main_address, topology.main_port",
        fix="Give all machines of a run the same packtrain and trainer.output_dir, and another run, or program, another port, "
        f"e.g. topology.main_port={place.port + 1}. A run that goes on cannot be joined.",
    )


def _unknown(place: Place, error: OSError) -> CheckFailed:
    what = f"the name {place.address!r} is not known here ({error.strerror})"
    fix = "Use an address, or make the name known on this machine (DNS, /etc/hosts)."
    return CheckFailed(what, where="topology.main_address", fix=fix)


def _means_itself(place: Place) -> CheckFailed | None:
    """The mistake where machine 0's address leads to this very machine; None where it does not."""
    try:
        addresses = resolve(place.address, place.port)
    except OSError:
        return None
    if not all(map(is_own, addresses)):
        return None
    here = f"{', '.join(addresses)} here, " if addresses != [place.address] else ""
    return CheckFailed(
        f"{place.address} is {here}an address of this machine itself, and nobody listens there",
        where="topology.main_address",
        fix="Name an address of machine 0 that the other machines can reach; look at /etc/hosts for names that lead "
        "to 127.0.0.1. If this is machine 0, it needs topology.node_rank=0.",
    )


def _not_found(place: Place, last: str, waited_s: float) -> PeerFailed:
    return PeerFailed(
        f"{place.machine(0)} could not be reached at {place.address}:{place.port} for {waited_s:.0f} s: {last}",
        where="rendezvous",
        fix="Is packtrain started there, with topology.node_rank=0? Does a firewall let the port through? "
        "topology.join_timeout is how long the others wait.",
    )


def _left(place: Place, why: str) -> PeerFailed:
    what = f"{place.machine(0)} left before the run began: {why}"
    return PeerFailed(what, where="rendezvous", fix="Its terminal or log says why; start all machines again.")
