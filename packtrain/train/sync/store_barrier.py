"""Barriers without a process group: every rank writes a statement into torch's store, and rank 0 writes one verdict.

Collective operations hang if ranks differ (another backend, another world size, one more call), so they cannot be used to
check for differences. At each stage every rank writes a statement into the store of the rendezvous; rank 0 reads them all and
writes its verdict, for which the others wait. Every wait has a limit and names the missing ranks.

A rank that is refused before training (its run folder, its data, its files) says why in the store: the others, which come to a
stage or wait there, end with the same words instead of waiting for it.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, cast

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from packtrain.errors import CheckFailed, Disagreement, PacktrainError, PeerFailed, Problem, of_json
from packtrain.launch.worker import LOG_DIR
from packtrain.monitor.heartbeat import TimeLimits, waiting
from packtrain.train.library_errors import shortly
from packtrain.wording import listed, ranks_in_words

FIRST_STAGE = "start"
GRACE_S = 10
"""The others wait this much longer than rank 0, which knows which ranks are missing."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.5
_READ_S = 4 * _LONGEST_PAUSE_S
_REFUSAL, _ENDING = "refusal", "ending"
"""What is wrong with the first rank that was refused, and how many ranks end for that."""
_PORT_FIX = "set topology.main_port (MASTER_PORT) to a free one, on all machines"

Judge = Callable[[Sequence["Statement"]], Sequence[Problem]]


def preparing_s(step_timeout: float) -> float:
    """The time limit for preparing data, loading a model, or reading and writing files, which may take hours: none if
    packtrain's launcher watches the ranks, else that of a checkpoint."""
    return math.inf if LOG_DIR in os.environ else TimeLimits(step_timeout).collective_s("checkpoint")


@dataclass(frozen=True, slots=True)
class Statement:
    """The facts of one rank: name → value as text. `machine` is unique even if two machines share a host name."""

    rank: int
    host: str
    machine: str
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks of a run as one of them sees them; `own` is this one's statement, without facts; it may hold the store."""

    store: Store
    world_size: int
    own: Statement
    holds_store: bool = False

    def settle(self, stage: str, facts: Mapping[str, str], judge: Judge, *, timeout_s: float) -> None:
        """Returns when all ranks have come to `stage` and `judge` has found no problem in their statements.

        Raises Disagreement with the same problems on all ranks if it has, PeerFailed if a rank does not come in time, and what
        another rank has been refused for.
        """
        store = PrefixStore(stage, self.store)
        try:
            with waiting(f"the other ranks at the stage {stage!r}"):
                verdict = self._verdict(store, replace(self.own, facts=facts), judge, timeout_s)
                if verdict["problems"] or verdict["missing"]:
                    # rank 0 may hold the store: the others must read the verdict before it ends. It alone prints: as torchrun ends
                    # all when one has ended, they come after it
                    time.sleep(_READ_S if self.own.rank == 0 else _READ_S + 2 * _LONGEST_PAUSE_S)
        except DistError as error:
            what = f"rank {self.own.rank} lost rank 0 at the stage {stage!r}: {shortly(error)}"
            raise PeerFailed(what, fix="its terminal or log says why it ended") from error
        if verdict["missing"]:
            raise PeerFailed(
                f"at the stage {stage!r} {verdict['missing']} did not come within {timeout_s:g} s",
                fix="their logs say why, if they were started at all; topology.join_timeout and topology.step_timeout are "
                "how long is waited",
            )
        if verdict["problems"]:
            shown = self.own.rank == 0 or LOG_DIR in os.environ  # other ranks report in their logs only
            raise Disagreement([Problem(**one) for one in verdict["problems"]], shown=shown)

    def share(self, name: str, value: str = "") -> str:
        """The `value` of rank 0, on all ranks. Raises PeerFailed if it does not come within the store's limit."""
        try:
            if self.own.rank == 0:
                self.store.set(name, value)
            with waiting("rank 0"):
                return self.store.get(name).decode()
        except DistError as error:
            raise PeerFailed(f"rank {self.own.rank} lost rank 0: {shortly(error)}", fix="its log says why") from error

    def machines(self) -> list[tuple[str, tuple[int, ...]]]:
        """Host name and ranks of each machine, once all ranks have come to the first stage."""
        machines: dict[tuple[str, str], list[int]] = defaultdict(list)
        for one in _statements(PrefixStore(FIRST_STAGE, self.store), range(self.world_size)):
            machines[one.host, one.machine].append(one.rank)
        return [(host, tuple(ranks)) for (host, _), ranks in machines.items()]

    def refuse(self, error: PacktrainError) -> None:
        """Tells the others what this rank ends for. Where it holds the store, stays until all know, for GRACE_S at most."""
        with suppress(DistError):
            if not self.store.check([_REFUSAL]):
                self.store.set(_REFUSAL, json.dumps({**asdict(self.own), "facts": error.to_json()}))
            limit = time.monotonic() + GRACE_S
            ending = self.store.add(_ENDING, 1)
            while self.holds_store and ending < self.world_size and time.monotonic() < limit:
                time.sleep(_LONGEST_PAUSE_S)
                ending = self.store.add(_ENDING, 0)

    def _refused(self) -> PacktrainError | None:
        """What another rank has been refused for, in words for this one."""
        if not self.store.check([_REFUSAL]):
            return None
        other = Statement(**json.loads(self.store.get(_REFUSAL)))
        error, place = of_json(other.facts), ranks_on_hosts([other])
        told = [replace(one, where=f"{place}, {one.where}" if one.where else place) for one in error.problems]
        refused = type(error)(told)
        refused.shown = self.own.rank == 0 or LOG_DIR in os.environ
        return refused

    def _verdict(self, store: Store, statement: Statement, judge: Judge, timeout_s: float) -> dict[str, Any]:
        """This rank's part of a stage: writes its statement; returns the verdict, which rank 0 or a duplicate rank writes."""
        own_key = f"said/{statement.rank}"
        if store.add(f"taken/{statement.rank}", 1) > 1:
            other = _statements(store, [statement.rank])[0].host if self._came(store, [own_key], GRACE_S) else "?"
            what = f"two processes say that they are rank {statement.rank}: on {other} and on {statement.host}"
            fix = "give each machine its own number (topology.node_rank, --machine_rank), and each launch its own main_port"
            return _publish(store, [Problem(what, "environment variable RANK", fix)], missing="")
        store.set(own_key, json.dumps(asdict(statement)))
        if statement.rank:
            came = self._came(store, ["verdict"], timeout_s + GRACE_S)
            return json.loads(store.get("verdict")) if came else {"problems": [], "missing": "rank 0"}
        return self._verdict_of_rank_0(store, judge, timeout_s)

    def _verdict_of_rank_0(self, store: Store, judge: Judge, timeout_s: float) -> dict[str, Any]:
        keys = [f"said/{rank}" for rank in range(self.world_size)]
        complete = self._came(store, keys, timeout_s, or_key="verdict")
        if store.check(["verdict"]):  # already written by a duplicate rank
            return json.loads(store.get("verdict"))
        missing = [] if complete else [rank for rank, key in enumerate(keys) if not store.check([key])]
        if missing:
            return _publish(store, [], missing=ranks_on_hosts(self._known(missing)))
        return _publish(store, judge(_statements(store, range(self.world_size))), missing="")

    def _came(self, store: Store, keys: list[str], timeout_s: float, *, or_key: str | None = None) -> bool:
        """Whether all `keys` came within `timeout_s` and before `or_key`. Polls, since torch's own wait prints warnings.

        Raises what another rank has been refused for.
        """
        limit, pause = time.monotonic() + timeout_s, _SHORTEST_PAUSE_S
        while not store.check(keys):
            if refused := self._refused():
                raise refused
            if time.monotonic() > limit or (or_key and store.check([or_key])):
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return True

    def _known(self, ranks: Sequence[int]) -> list[Statement]:
        """The statements of `ranks` at the first stage; an empty one for a rank that never came."""
        first = PrefixStore(FIRST_STAGE, self.store)
        came = {rank: first.check([f"said/{rank}"]) for rank in ranks}
        return [_statements(first, [rank])[0] if came[rank] else Statement(rank, "", "", {}) for rank in ranks]


def join(*, timeout_s: float) -> Peers | None:
    """The other ranks, by the environment variables of the launch; None in a run of one process.

    Raises PeerFailed if rank 0 cannot be reached within `timeout_s`, CheckFailed if its port is taken.
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world_size == 1:
        return None
    host, address, port = socket.gethostname(), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun serves the store
    made: list[Store | Exception] = []

    def connect() -> None:
        limit, kinds = timedelta(seconds=timeout_s), {"wait_for_workers": False, "multi_tenant": True}
        try:
            made.append(TCPStore(address, port, world_size, serves, limit, **kinds))
        except DistError as error:
            made.append(error)

    # in a thread, since torch waits for ever for a listener that does not answer
    thread = threading.Thread(target=connect, name="store", daemon=True)
    with waiting("rank 0"):
        if not serves:
            _wait_for_listener(address, port, rank, timeout_s)
        thread.start()
        thread.join(timeout_s + _READ_S)
    store = made[0] if made else TimeoutError("what listens there does not answer")
    if isinstance(store, Exception):
        said = shortly(store)
        if "EADDRINUSE" in said:
            what = f"port {port} of this machine is taken"
            raise CheckFailed(what, where="topology.main_port", fix=_PORT_FIX) from store
        fix = f"another program may have that port there: {_PORT_FIX}"
        raise PeerFailed(f"no connection to rank 0 at {address}:{port}: {said}", fix=fix) from store
    own = Statement(rank, host, f"{host} {os.environ.get('GROUP_RANK', '')}", {})
    return Peers(PrefixStore("packtrain", store), world_size, own, holds_store=serves)


@contextmanager
def telling(peers: Peers | None) -> Iterator[None]:
    """Inside the block, what this rank is refused for is told to the others, which wait at a stage or will."""
    try:
        yield
    except (Disagreement, PeerFailed):  # known to all
        raise
    except PacktrainError as error:
        if peers is not None:
            peers.refuse(error)
        raise


def ranks_on_hosts(statements: Sequence[Statement], *, hosts: bool = True) -> str:
    """ "ranks 0 and 1 on n1 and rank 2 on n2"; without hosts unless `hosts` is set and all are known."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for one in statements:
        by_host[one.host].append(one.rank)
    if not hosts or "" in by_host:
        return ranks_in_words([one.rank for one in statements])
    return listed([f"{ranks_in_words(ranks)} on {host}" for host, ranks in by_host.items()])


def _statements(store: Store, ranks: Sequence[int]) -> list[Statement]:
    texts = cast(list, store.multi_get([f"said/{rank}" for rank in ranks]))
    return [Statement(**json.loads(text)) for text in texts]


def _publish(store: Store, problems: Sequence[Problem], *, missing: str) -> dict[str, Any]:
    """Writes the verdict, and returns it."""
    verdict = {"problems": [asdict(one) for one in problems], "missing": missing}
    store.set("verdict", json.dumps(verdict))
    return verdict


def _wait_for_listener(address: str, port: int, rank: int, timeout_s: float) -> None:
    """Waits until a program listens there: torch's own error is a long traceback."""
    limit = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=max(limit - time.monotonic(), 1)).close()
            return
        except OSError as error:
            if time.monotonic() > limit:
                raise PeerFailed(
                    f"rank {rank} on {socket.gethostname()} did not reach rank 0 at {address}:{port} within "
                    f"{timeout_s:g} s: {error.strerror or error}",
                    fix="look whether it was started, whether the name leads to it from here, and for a firewall",
                ) from error
        time.sleep(_LONGEST_PAUSE_S)
