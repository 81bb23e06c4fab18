"""Rendezvous of all launchers before any worker starts: they compare configs, versions and counts.

Machine 0 serves the control channel on the run's port. The others call `join` repeatedly, each with a description of its machine,
and all get the same answer: wait, go, or stop with the reason. Some faults would make torchrun hang silently or train wrongly; here
they become errors that name the machine. The channel stays open for the whole run (coordinator.py); torch's own store gets another
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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass

from packtrain.errors import CheckFailed, Json, PacktrainError, PeerFailed, error_from_json
from packtrain.monitor.channel import SECRET, Client, NoAnswer, Server, free_port, new_secret
from packtrain.plan.network_settings import addresses_by_interface, is_loopback
from packtrain.plan.origin import SAME_CONFIG, SAME_VERSIONS, list_differences
from packtrain.plan.topology import GPUS_PER_NODE
from packtrain.run_folder import as_type
from packtrain.wording import listed, ranks_in_words

PROGRESS_S = 10
GONE_S = 15  # seconds of silence until machine 0 counts as gone from the rendezvous
POLL_S = 0.3
ABSENT_S = 5  # a machine that is silent this long counts as not joined
_FAREWELL_S = 3  # machine 0 keeps answering this long after a failure, so that the others get the reason
_LINK_LOCAL = ("169.254.", "fe80:")
_CHECK_GPUS = "look at nvidia-smi and CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Member:
    """One machine as its launcher describes it: machine `node` of `nodes`, with `per_node` processes.

    `versions` has packages and Python. `config` has the text of every value that all machines must share.
    """

    node: int
    nodes: int
    per_node: int
    gpus: int
    host: str
    addresses: tuple[str, ...]
    versions: Mapping[str, str]
    config: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """The place where machines connect: machine 0 listens on `port`, the others call `address`.

    Port 0 means a free one. The others call for up to `timeout_s` seconds. `job` is the run's folder; launchers recognise each other by
    it. `names` are the host names by number that are known beforehand. The rendezvous waits for all machines in `expected` (None:
    every machine). After `timeout_s` it goes on with at least `least` of them (None: it needs all).
    """

    address: str
    port: int
    timeout_s: float
    job: str
    names: tuple[str, ...] = ()
    expected: frozenset[int] | None = None
    least: int | None = None

    @property
    def password(self) -> str:
        """Password to join: the run's folder, and the secret that batch scripts pass to machines."""
        return f"{os.environ.get(SECRET, '')} {self.job}"

    def describe_machine(self, node: int, per_node: int = 0) -> str:
        """Describe a machine in words: "n2 (machine 1, ranks 4 to 7)"."""
        ranks = [ranks_in_words(range(node * per_node, (node + 1) * per_node))] if per_node else []
        known = node < len(self.names)
        about = ", ".join([f"machine {node}", *ranks] if known else ranks)
        return f"{self.names[node] if known else f'machine {node}'}{f' ({about})' if about else ''}"

    def departure_error(self, why: str) -> PeerFailed:
        """Return the error that machine 0 ended before the run began."""
        what = f"{self.describe_machine(0)} left before the run began: {why}"
        fix = "Its terminal or log says why; start all machines again."
        return PeerFailed(what, where="rendezvous", fix=fix, code="machine-0-left")


@dataclass(frozen=True, slots=True)
class Group:
    """The machines of a run after the rendezvous.

    Names are by number. Machine 0 serves the `channel`, and the others call it. torch's store uses `store_port`. `prepared` is machine 0's preparation for all.
    """

    names: Mapping[int, str]
    channel: Server | Client
    store_port: int
    prepared: str


Prepare = Callable[[Mapping[int, str]], str]


@contextmanager
def meet(me: Member, place: MeetingPoint, prepare: Prepare = lambda names: "") -> Iterator[Group]:
    """Let all machines join and agree; inside the block machine 0 serves the channel.

    Machine 0 calls `prepare` with the names of the joined machines before they go on. All get its result, and its errors end all
    machines. Raises CheckFailed, the same on every machine, if they disagree, or if machine 0 does not have the address or the
    port; PeerFailed if a machine is missing after `place.timeout_s` seconds, or joins after the run has started.
    Prints the missing machines on stderr every PROGRESS_S seconds.
    """
    if me.node:
        yield _join_machine_0(me, place)
        return
    _check_address(me, place)
    try:
        server = Server(place.port, secret=new_secret())
    except OSError as error:
        why = "taken" if error.errno == errno.EADDRINUSE else f"not usable: {error.strerror}"
        fix = f"Set another one on every machine, e.g. topology.main_port={place.port + 10}."
        what = f"port {place.port} is {why}"
        raise CheckFailed(what, where="topology.main_port", fix=fix, code="port-unusable") from error
    with closing(server):
        yield _gather(me, place, server, prepare)


def _gather(me: Member, place: MeetingPoint, server: Server, prepare: Prepare) -> Group:
    """Hold the rendezvous on machine 0: wait for the others and answer all of them."""
    joining = _JoinServer(me, place)
    server.serve("join", joining.join, open=True)
    store_port = free_port()
    if place.port:
        with suppress(OSError), socket.create_server(("", place.port + 1)):
            store_port = place.port + 1
    try:
        names = names_of(joining.wait())
        prepared = prepare(names)
    except BaseException as error:  # a signal, too
        why = error if isinstance(error, PacktrainError) else place.departure_error("its launcher was stopped")
        joining.final = {"stop": why.to_json()}
        time.sleep(_FAREWELL_S)
        raise
    go = {"names": list(names.items()), "secret": server.secret, "store_port": store_port, "prepared": prepared}
    joining.final = {"go": go}
    return Group(names, server, store_port, prepared)


class _JoinServer:
    """Machine 0's record of joined launchers, and its `final` answer to all of them."""

    def __init__(self, me: Member, place: MeetingPoint) -> None:
        self._me, self._place = me, place
        self._least = place.least or me.nodes
        # with the time of the last call (time.monotonic()), by token: two launchers may have the same number
        self._joined: dict[str, tuple[Member, float]] = {}
        self._waiting = ""
        self._error: PacktrainError | None = None
        self._lock = threading.Lock()
        self.final: Json | None = None

    def join(self, body: Json) -> Json:
        """Answer a launcher: {"wait": text}, {"go": …}, or {"stop": problems}. The channel's threads call this."""
        place = self._place
        if not hmac.compare_digest(str(body.get("password", "")).encode(), place.password.encode()):
            return _reject(place, "another run, with another trainer.output_dir, uses this port")
        try:
            member, token = as_type(body.get("member"), Member), str(body["token"])
        except (ValueError, KeyError, TypeError):
            return _reject(place, "machine 0 has another version of packtrain")
        with self._lock:
            if token not in self._joined:
                if self.final is not None and "go" in self.final:
                    return _too_late(place)
                self._error = self._error or compare_counts([*self._members(), member])
            self._joined[token] = member, time.monotonic()
            return self.final or {"wait": self._waiting}

    def wait(self) -> list[Member]:
        """Return the machines once all have joined and agree. Raises PacktrainError if they disagree or one is missing."""
        begun, printed, nodes, place = time.monotonic(), 0, self._me.nodes, self._place
        while True:
            with self._lock:
                since = time.monotonic() - ABSENT_S
                self._joined = {token: known for token, known in self._joined.items() if known[1] > since}
                members, error = self._members(), self._error
            waited_s = time.monotonic() - begun
            absent = sorted(set(range(nodes)) - {member.node for member in members})
            expected = absent if place.expected is None else [node for node in absent if node in place.expected]
            enough = nodes - len(absent) >= self._least
            missing = expected or ([] if enough else absent)
            if error or not missing or (enough and waited_s >= place.timeout_s):
                break
            connected = listed(list(names_of(members).values()))
            missing_names = listed([place.describe_machine(node, self._me.per_node) for node in missing])
            if waited_s >= place.timeout_s:
                raise PeerFailed(
                    f"{missing_names} did not connect to {self._me.host} within {place.timeout_s:.0f} s (connected: {connected})",
                    where="rendezvous",
                    fix=f"Is packtrain started there, with topology.node_rank={missing[0]}? If so, does {place.address}:"
                    f"{place.port} answer there (name, firewall)? topology.join_timeout sets how long machines wait.",
                    code="machine-missing",
                )
            if waited_s // PROGRESS_S > printed:
                printed = waited_s // PROGRESS_S
                self._waiting = f"waited {waited_s:.0f} s so far for {missing_names} to connect; connected: {connected}"
                print(self._waiting, file=sys.stderr, flush=True)
            time.sleep(POLL_S)
        if error := error or compare_members(members):
            raise error
        return members

    def _members(self) -> list[Member]:
        """Return the machines that have joined: this one, and the others by number."""
        others = [member for member, _ in self._joined.values()]
        return [self._me, *sorted(others, key=lambda member: member.node)]


def _join_machine_0(me: Member, place: MeetingPoint) -> Group:
    """Join the rendezvous from another machine: find machine 0 and wait for its answer.

    Raises machine 0's error, or PeerFailed if machine 0 could not be reached for `place.timeout_s` seconds, or left.
    """
    body = {"member": asdict(me), "token": new_secret(), "password": place.password}
    joined = False
    begun = heard = printed = time.monotonic()
    while True:
        waited_s = time.monotonic() - begun
        try:
            limit_s = max(min(GONE_S, place.timeout_s - waited_s), 1)
            with socket.create_connection((place.address, place.port), timeout=limit_s) as connection:
                # later calls skip the name server, which may be slow
                client = Client(str(connection.getpeername()[0]), place.port)
            answer = client.call("join", body, timeout_s=limit_s)
            joined, words, heard = True, str(answer.get("wait", "")), time.monotonic()
            if "stop" in answer:
                raise error_from_json(answer["stop"])
            if go := answer.get("go"):
                client.secret = go["secret"]
                names = {int(node): str(name) for node, name in go["names"]}
                return Group(names, client, go["store_port"], go["prepared"])
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            if isinstance(error, NoAnswer):
                reason = "something other than packtrain is listening there"
            words = f"waited {waited_s:.0f} s so far for {place.describe_machine(0)} at {place.address}:{place.port}: {reason}"
            if joined and time.monotonic() - heard >= GONE_S:
                raise place.departure_error(reason) from error
            if not joined and time.monotonic() - begun >= place.timeout_s:
                what = f"{place.describe_machine(0)} could not be reached at {place.address}:{place.port} for {waited_s:.0f} s"
                raise PeerFailed(
                    f"{what}: {reason}",
                    where="rendezvous",
                    fix="Is packtrain started there, with topology.node_rank=0? Does the name resolve to that machine "
                    "from here (/etc/hosts), and does a firewall let the port through? topology.join_timeout sets how long machines wait.",
                    code="machine-0-unreachable",
                ) from error
        if words and time.monotonic() - printed >= PROGRESS_S:
            printed = time.monotonic()
            print(words, file=sys.stderr, flush=True)
        time.sleep(POLL_S)


def _check_address(me: Member, place: MeetingPoint) -> None:
    """Raise CheckFailed if topology.main_address is not an address of this machine 0. The others call it there."""
    try:
        addresses = resolve(place.address, place.port)
    except OSError as error:
        what = f"the name {place.address!r} is not known here ({error.strerror})"
        fix = "Use an address, or make the name known on this machine (DNS, /etc/hosts)."
        raise CheckFailed(what, where="topology.main_address", fix=fix, code="main-address-unknown") from error
    if any(map(is_own, addresses)):
        return
    means = f" ({', '.join(addresses)})" if addresses != [place.address] else ""
    claim = f"this machine ({me.host}) has topology.node_rank=0, but topology.main_address={place.address}{means}"
    what = f"{claim} is not one of its addresses ({', '.join(own_addresses()) or 'none'})"
    fix = "Number the machines from 0, each once; topology.main_address belongs to number 0."
    raise CheckFailed(what, where="topology.node_rank, topology.main_address", fix=fix, code="not-machine-0")


def resolve(address: str, port: int) -> list[str]:
    """Return the addresses of a host name, in the system's order. Raises OSError (socket.gaierror)."""
    answers = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in answers))


def is_own(address: str) -> bool:
    """Return whether `address` belongs to this machine: only then can a socket bind to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def own_addresses() -> tuple[str, ...]:
    """Return this machine's addresses that others may use; () if unknown."""
    addresses = [address for interface in (addresses_by_interface() or {}).values() for address in interface]
    usable = (address for address in addresses if not is_loopback(address) and not address.startswith(_LINK_LOCAL))
    return tuple(dict.fromkeys(usable))


def _reject(place: MeetingPoint, what: str) -> Json:
    error = CheckFailed(
        f"at {place.address}:{place.port} {what}",
        where="trainer.output_dir, topology.main_address, topology.main_port",
        fix="Give all machines of a run the same packtrain and trainer.output_dir, and use another port for another run or program, "
        f"e.g. topology.main_port={place.port + 10}.",
        code="not-this-run",
    )
    return {"stop": error.to_json()}


def _too_late(place: MeetingPoint) -> Json:
    error = PeerFailed(
        f"at {place.address}:{place.port} the run has started, and goes on without this machine",
        where="rendezvous",
        fix="A run that has started cannot be joined. If machine 0 says that it waits for this machine (trainer.restarts without "
        "topology.min_nodes), start the same command here again; otherwise wait until the run ends.",
        code="run-has-started",
    )
    return {"stop": error.to_json()}


def names_of(members: Sequence[Member]) -> dict[int, str]:
    """Return node → host name. Machines with equal host names also get their number."""
    hosts = [member.host for member in members]
    return {
        member.node: member.host if hosts.count(member.host) == 1 else f"{member.host} (machine {member.node})"
        for member in members
    }


def compare_counts(members: Sequence[Member]) -> CheckFailed | None:
    """Return the error if machines cannot make one run; else None.

    They may have the same number, differ in process counts, or lack GPUs.
    """
    numbers = Counter(member.node for member in members)
    if same := [member for member in members if numbers[member.node] > 1]:
        places = " and ".join(f"{member.host} ({', '.join(member.addresses) or '?'})" for member in same)
        what = f"two machines are number {same[0].node}: {places}"
        fix = f"Give each machine its own, from 0 (topology.main_address) to {max(same[0].nodes - 1, 1)}."
        return CheckFailed(what, where="topology.node_rank", fix=fix, code="same-number")
    if short := [item for item in members if 0 < item.gpus < item.per_node]:
        here = ", ".join(f"{names_of(members)[item.node]}: {item.gpus}" for item in short)
        what = f"{short[0].per_node} GPUs on each machine are needed, but some have fewer ({here})"
        fix = f"Set {GPUS_PER_NODE}={min(item.gpus for item in short)} on every machine, and {_CHECK_GPUS}."
        return CheckFailed(what, where=GPUS_PER_NODE, fix=fix, code="machines-lack-gpus")
    gpus = {item.node: "some" if item.gpus else "none" for item in members}
    facts_of = {
        item.node: {"topology.nodes": str(item.nodes), GPUS_PER_NODE: str(item.per_node), "GPUs": gpus[item.node]}
        for item in members
    }
    fixes = {
        "topology.nodes": "Start every machine with the same topology.nodes.",
        GPUS_PER_NODE: f"Set it to the smallest of them on every machine, and {_CHECK_GPUS}.",
        "GPUs": f"{_CHECK_GPUS} there",
    }
    return _compare(members, facts_of, fixes)


def compare_members(members: Sequence[Member]) -> CheckFailed | None:
    """Return one error about all facts that machines must share but do not; else None."""
    facts_of = {item.node: {**item.config, **item.versions} for item in members}
    fixes = {key: SAME_CONFIG for item in members for key in item.config}
    fixes |= {key: SAME_VERSIONS for item in members for key in item.versions}
    return compare_counts(members) or _compare(members, facts_of, fixes)


def _compare(
    members: Sequence[Member], facts_of: Mapping[int, Mapping[str, str]], fixes: Mapping[str, str]
) -> CheckFailed | None:
    names = names_of(members)
    problems = list_differences(facts_of, fixes, lambda nodes: listed([names[node] for node in nodes]))
    return CheckFailed(problems) if problems else None
