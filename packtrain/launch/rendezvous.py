"""The rendezvous: the launchers of all machines meet before a worker is started, and compare what they are about to do.

Machine 0 serves the control channel on the run's port; the others call `join` again and again, each with a description of its
machine, and all get the same answer: wait, go, or stop with the reason. What torchrun would wait for in silence, or train
wrongly, is then an error within seconds that names the machine. The channel stays open for the whole run (supervisor.py);
the port for torch's own store is another one, which the answer tells.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from packtrain.errors import CheckFailed, PacktrainError, PeerFailed, Problem, UserError
from packtrain.monitor.channel import SECRET, Client, NoAnswer, NotOurs, Refused, Server, new_secret
from packtrain.plan.agreement import Member, clock_remarks, names_of, twice, unlike, unlike_counts
from packtrain.plan.interfaces import addresses_by_interface, is_loopback
from packtrain.wording import listed

PROGRESS_S = 10
CERTAIN_S = 15
"""How long what looks like a mistake may also be a machine 0 that is about to start, or is busy."""
_POLL_S = 0.3
_FRESH_S = 3  # all must have called within so long before they may go: one of them may have left
_GONE_S = 6  # who has not called for so long may have been started again
_SILENT_S = 10  # who has not called for so long is waited for again
_FULL_PICTURE_S = 3  # how long others are waited for once two are known not to fit
_CALL_OUT_S = 5
_OF_ONE_LINK = ("169.254.", "fe80:")


@dataclass(frozen=True, slots=True)
class Place:
    """Machine 0 listens on `port`, the others reach it at `address` within `timeout_s` seconds of their own start.

    `job` is the run's name (job_of), `names` are host names by number as far as they are known beforehand; `partial`: whoever
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
        first, last = node * per_node, (node + 1) * per_node - 1
        ranks = "" if not per_node else f"rank {first}" if first == last else f"ranks {first} to {last}"
        if node < len(self.names):
            return f"{self.names[node]} ({', '.join(filter(None, [f'machine {node}', ranks]))})"
        return f"machine {node}" + (f" ({ranks})" if ranks else "")


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


def job_of(output_dir: str) -> str:
    """A name of the run by which its launchers know each other; machines of another run are sent away."""
    return hashlib.blake2b(output_dir.encode(), digest_size=8).hexdigest()


@contextmanager
def alone(name: str, port: int) -> Iterator[Group]:
    """The group of a run on one machine, whose channel is on a free port of it; `port` is for torch's store.

    It is reached from other machines too, where packtrain doctor may be started.
    """
    secret = os.environ.get(SECRET) or new_secret()
    server = Server(0, secret=secret)
    try:
        yield Group({0: name}, "127.0.0.1", server.port, secret, port, server=server)
    finally:
        server.close()


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
    server = _serving(place)
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


@dataclass(slots=True)
class _Guest:
    """A launcher that has joined: `token` tells two of one number apart, `heard` is when it called last (time.monotonic())."""

    member: Member
    token: str
    offset_s: float
    heard: float = field(default_factory=time.monotonic)
    answered: bool = False


class _Hall:
    """Who has come so far, at machine 0; `join` is called by the channel's threads."""

    def __init__(self, me: Member, place: Place) -> None:
        self._me, self._place = me, place
        self._guests: dict[int, _Guest] = {}
        self._rivals: list[_Guest] = []  # of a number that is taken
        self._sent_away: dict[str, str] = {}
        self._answer: dict[str, Any] | None = None
        self._waiting = ""
        self._error: PacktrainError | None = None
        self._begun = time.monotonic()
        self._end = self._begun + place.timeout_s
        self._lock = threading.Lock()
        self._news = threading.Event()

    def members(self) -> list[Member]:
        """Those that are here, by number."""
        return [self._me, *(self._guests[node].member for node in sorted(self._guests))]

    def join(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answers a launcher: {"wait": text}, {"go": …}, {"stop": problems}, or {"left": why}."""
        try:
            member, token = Member.from_json(body.get("member")), str(body["token"])
        except (ValueError, KeyError, TypeError):
            return {"stop": _to_json(_other_version(self._me))}
        if body.get("job") != self._place.job:
            self._sent_away[member.host] = "is of a run with another trainer.output_dir"
            return {"stop": _to_json(_other_run(self._place, self._me))}
        with self._lock:
            known = [one for one in (self._guests.get(member.node), *self._rivals) if one and one.token == token]
            if not known and self._answer is not None:
                return {"stop": _to_json(_goes_on(self._place, self._me))}
            guest = known[0] if known else self._admit(member, token)
            guest.heard = time.monotonic()
            guest.answered = self._answer is not None
        self._news.set()
        return self._answer or {"wait": self._waiting}

    def wait(self) -> None:
        """Until all are here and agree. Raises PacktrainError where they do not, or one is missing."""
        next_word = self._begun + PROGRESS_S
        while self._missing() and self._error is None and (now := time.monotonic()) < self._end:
            if now >= next_word:
                next_word += PROGRESS_S
                are = f"{self._here()} {'are' if self._guests else 'is'} here"
                waits = f"waiting {now - self._begun:.0f} s for {listed(self._words(self._missing()))}"
                self._waiting = f"{waits}: not connected; {are}"
                print(self._waiting, file=sys.stderr, flush=True)
            self._news.wait(min(_POLL_S, max(self._end - now, 0)))
            self._news.clear()
            with self._lock:  # who has left is waited for again
                here = {node: one for node, one in self._guests.items() if time.monotonic() - one.heard < _SILENT_S}
                self._guests = here
        if error := self._error or unlike(self.members()):
            raise error
        if (missing := self._missing()) and not self._place.partial:
            raise self._not_here(missing)
        offsets = {node: one.offset_s for node, one in self._guests.items()}
        for remark in clock_remarks(self.members(), offsets):
            print(remark, file=sys.stderr, flush=True)

    def answer(self, answer: dict[str, Any]) -> None:
        """Gives all the same answer; where it is not go, returns when all have it that still call."""
        with self._lock:
            self._answer = answer
        while "go" not in answer and any(
            not one.answered and time.monotonic() - one.heard < _GONE_S
            for one in [*self._guests.values(), *self._rivals]
        ):
            time.sleep(_POLL_S / 3)

    def _admit(self, member: Member, token: str) -> _Guest:
        guest = _Guest(member, token, member.clock - time.time())
        there = self._guests.get(member.node)
        again = there and there.member.host == member.host and time.monotonic() - there.heard > _GONE_S
        if member.node == self._me.node or (there and not again):
            self._rivals.append(guest)
            self._error = twice(there.member if there else self._me, member)
            return guest
        self._guests[member.node] = guest
        if unlike_counts(self.members()):
            self._end = min(self._end, time.monotonic() + _FULL_PICTURE_S)
        return guest

    def _here(self) -> str:
        return listed(list(names_of(self.members()).values()))

    def _missing(self) -> list[int]:
        """Machines that have not joined, or do not call any more."""
        since = time.monotonic() - _FRESH_S
        called = {node for node, one in dict(self._guests).items() if one.heard > since}
        return [node for node in range(1, self._me.nodes) if node not in called]

    def _words(self, nodes: Sequence[int]) -> list[str]:
        return [self._place.machine(node, self._me.per_node) for node in nodes]

    def _not_here(self, missing: Sequence[int]) -> PeerFailed:
        first, absent = missing[0], listed(self._words(missing))
        what = f"{absent} did not connect to {self._me.host} within {self._place.timeout_s:.0f} s"
        turned = "".join(f"; {who}, which was sent away, {why}" for who, why in list(self._sent_away.items())[:3])
        fix = (
            f"Is packtrain started there, with topology.node_rank={first}? If so, does {self._place.address}:{self._place.port} "
            f"answer there (name, firewall)? topology.join_timeout is how long the others wait."
        )
        return PeerFailed(f"{what} (here: {self._here()}){turned}", where="rendezvous", fix=fix)


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
    token, begun = new_secret(), time.monotonic()
    said, mistaken, joined = begun, begun, None
    while True:
        now = time.monotonic()
        try:
            group = _asked(me, place, token, place.timeout_s - (now - begun))
            if isinstance(group, Group):
                return group
            joined, mistaken = time.monotonic(), now
            if group and now - said >= PROGRESS_S:
                said = now
                print(group, file=sys.stderr, flush=True)
        except _NotYet as error:
            now = time.monotonic()
            mistaken = mistaken if error.mistake and joined is None else now
            if error.mistake and now - mistaken >= CERTAIN_S:
                raise error.mistake from None
            if joined is not None and now - joined >= CERTAIN_S:
                raise _left(place, str(error)) from None
            if joined is None and now - begun >= place.timeout_s:
                raise _not_found(place, str(error), now - begun) from None
            if now - said >= PROGRESS_S:
                said = now
                waited = f"waiting {now - begun:.0f} s for {place.machine(0)} at {place.address}:{place.port}"
                print(f"{waited}: {error}", file=sys.stderr, flush=True)
        time.sleep(_POLL_S)


def _asked(me: Member, place: Place, token: str, limit_s: float) -> Group | str:
    """One attempt at every address of machine 0: the group, or what it waits for. Raises its error, or _NotYet."""
    try:
        addresses = resolve(place.address, place.port)
    except OSError as error:
        text = f"the name {place.address!r} is not known here ({error.strerror})"
        known = not isinstance(error, socket.gaierror) or error.errno == socket.EAI_AGAIN
        fix = "Use an address, or make the name known on this machine (DNS, /etc/hosts)."
        raise _NotYet(text, None if known else CheckFailed(text, where="topology.main_address", fix=fix)) from error
    body = {"member": asdict(me), "token": token, "job": place.job}
    by_name, failed = addresses != [place.address], []
    for address in addresses:
        client = Client(address, place.port, secret=os.environ.get(SECRET, ""))
        try:
            answer = client.call("join", body, timeout_s=max(min(CERTAIN_S, limit_s), 1))
        except NotOurs as error:
            raise _NotYet(str(error), _other_program(place, "does not speak packtrain's language")) from error
        except Refused as error:
            if error.unknown:
                raise _NotYet("it has only begun to listen") from error
            raise _other_run(place, None) from error
        except NoAnswer as error:
            if _listens(address, place.port):
                text = f"what listens at {place.address}:{place.port} does not answer"
                raise _NotYet(text, _other_program(place, "does not answer")) from error
            why = "no answer" if "timed out" in str(error) else str(error).lower()
            failed.append(f"{why}{' by' if 'refused' in why else ' from'} {address}" if by_name else why)
        else:
            return _group_of(answer, client, address, place)
    raise _NotYet(", ".join(failed), _means_itself(place, addresses) if all(map(is_own, addresses)) else None)


def _group_of(answer: Mapping[str, Any], client: Client, address: str, place: Place) -> Group | str:
    if "stop" in answer:
        raise _from_json(answer["stop"])
    if "left" in answer:
        raise _left(place, str(answer["left"]))
    if "go" not in answer:
        return str(answer.get("wait", ""))
    go = answer["go"]
    client.secret = go["secret"]
    names = {int(node): str(name) for node, name in go["names"]}
    return Group(names, address, place.port, go["secret"], int(go["store_port"]), client=client)


def _check_address(me: Member, place: Place) -> None:
    """Whether machine 0 is where the others will look for it. Raises CheckFailed where it is not."""
    try:
        found = resolve(place.address, place.port)
    except OSError as error:
        what = f"{place.address!r} is not known on {me.host}: {error.strerror}"
        raise CheckFailed(what, where="topology.main_address", fix="Name an address of machine 0.") from error
    if any(is_own(address) for address in found):
        return
    end, token = time.monotonic() + _CALL_OUT_S, new_secret()
    while time.monotonic() < end:  # where the real machine 0 listens, both are told
        with suppress(_NotYet):
            _asked(me, place, token, end - time.monotonic())
        time.sleep(_POLL_S)
    means = f" ({', '.join(found)})" if found != [place.address] else ""
    raise CheckFailed(
        f"this machine ({me.host}) has topology.node_rank=0, but topology.main_address={place.address}{means} "
        f"is not one of its addresses ({', '.join(own_addresses()) or 'none'})",
        where="topology.node_rank, topology.main_address",
        fix="Number the machines from 0, each once; topology.main_address is that of number 0.",
    )


def _serving(place: Place) -> Server:
    """The channel on the run's port. Raises CheckFailed where it is taken, and says by whom."""
    try:
        return Server(place.port, secret=os.environ.get(SECRET) or new_secret())
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        taken = error.errno == errno.EADDRINUSE
        what = f"port {place.port} is taken{holder_of(place.port)}" if taken else f"port {place.port} is not allowed"
        fix = f"Set another one on every machine, e.g. topology.main_port={place.port + 1 if taken else 29500}."
        raise CheckFailed(what, where="topology.main_port", fix=fix) from error


def holder_of(port: int) -> str:
    """ " by process 4711 (python serve.py)", as far as the system says."""
    try:
        import psutil

        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr[1] == port and one.pid:
                # an option, or what follows one, may be secret
                program, script, *_ = [*psutil.Process(one.pid).cmdline(), "?", "-"]
                command = program if script.startswith("-") or script == "?" else f"{program} {script}"
                return f" by process {one.pid} ({command[:100]})"
    except (ImportError, OSError, RuntimeError, psutil.Error):
        pass
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


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def _free_port(preferred: int) -> int:
    """`preferred` where nobody has it, else any free one, on all addresses of this machine."""
    for port in (preferred, 0):
        try:
            with socket.create_server(("", port)) as probe:
                return probe.getsockname()[1]
        except OSError:
            continue
    return preferred


def _to_json(error: PacktrainError) -> dict[str, Any]:
    return {"code": error.exit_code, "problems": [asdict(one) for one in error.problems]}


def _from_json(values: Mapping[str, Any]) -> PacktrainError:
    kind = {one.exit_code: one for one in (UserError, CheckFailed, PeerFailed)}.get(values["code"], PeerFailed)
    return kind([Problem(**one) for one in values["problems"]])


def _other_version(me: Member) -> CheckFailed:
    what = f"{me.host} runs another version of packtrain ({me.versions.get('packtrain', '?')})"
    return CheckFailed(what, where="versions", fix="Install the same version on every machine.")


def _other_run(place: Place, me: Member | None) -> CheckFailed:
    host = f" ({me.host})" if me and me.host != place.address else ""
    what = f"at {place.address}:{place.port}{host} the machines of another run meet: its folder is another one"
    fix = "Give all machines of a run the same trainer.output_dir, and two runs on one machine two ports."
    return CheckFailed(what, where="trainer.output_dir, topology.main_port", fix=fix)


def _goes_on(place: Place, me: Member) -> CheckFailed:
    what = f"at {place.address}:{place.port} ({me.host}) a run goes on already, with all its machines"
    fix = f"Wait for its end, or set another port on every machine, e.g. topology.main_port={place.port + 1}."
    return CheckFailed(what, where="topology.main_port", fix=fix)


def _other_program(place: Place, what: str) -> CheckFailed:
    return CheckFailed(
        f"what listens at {place.address}:{place.port} {what}: it is not a packtrain that waits for this machine",
        where="topology.main_address, topology.main_port",
        fix=f"The port is taken there. Set another one on every machine, e.g. topology.main_port={place.port + 1}.",
    )


def _means_itself(place: Place, addresses: list[str]) -> CheckFailed:
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
