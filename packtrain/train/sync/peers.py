"""How the processes of a run talk before they share a process group, and beside it: one key-value store, one verdict a stage.

Collective operations hang where processes differ (another backend, another world size, one more call), so what finds out
that they differ must not be one. Each process writes a statement into the store of the rendezvous; the first one reads
them all and writes its verdict, which the others wait for. Nothing is waited for without a limit, and who is missing is
named. That is N small messages to one process: nothing for a thousand of them.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, cast

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from packtrain.errors import CheckFailed, Disagreement, PeerFailed, Problem
from packtrain.launch.rollcall import holder_of
from packtrain.launch.worker import LOG_DIR
from packtrain.train.library_errors import shortly
from packtrain.wording import ranks_in_words

FIRST_STAGE = "start"
GRACE_S = 10
"""Others wait so much longer than the first process, whose words on who is missing are better than theirs."""
_ACKNOWLEDGED_S = 5
_TOLD_S = 30
"""Seconds after which it is said, again and again, for whom the first process waits."""
_MOST_MACHINES = 4
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2
_LONG_S, _LONGER_PAUSE_S = 10, 0.5

Judge = Callable[[Sequence["Statement"]], Sequence[Problem]]


def preparing_s(limit_s: float) -> float:
    """How long processes wait for others that prepare data, load a model, look through a checkpoint or write the results: some
    have it in a cache of their machine, others need hours. For ever, where our launchers end who does nothing, and name lost
    machines; elsewhere `limit_s`."""
    return math.inf if LOG_DIR in os.environ else limit_s


@dataclass(frozen=True, slots=True)
class Statement:
    """What one process says of itself: name → value in words. `machine` tells apart machines that have one host name."""

    rank: int
    host: str
    machine: str
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Peers:
    """The processes of a run as one of them sees them; `whole` is all that this one says of itself but for the facts."""

    store: Store
    world_size: int
    whole: Statement

    @property
    def speaks(self) -> bool:
        """Whether words that all processes have are to be shown by this one: by the others, in their logs at most."""
        return self.whole.rank == 0 or LOG_DIR in os.environ

    def settle(self, stage: str, facts: Mapping[str, str], judge: Judge, *, timeout_s: float) -> None:
        """Returns when all processes have come to `stage` and `judge` has nothing to say of their statements.

        Raises Disagreement with the same problems on all of them where it has, PeerFailed where one does not come in time.
        """
        store = PrefixStore(stage, self.store)
        try:
            verdict = self._verdict(store, replace(self.whole, facts=facts), judge, timeout_s, stage)
            if verdict["problems"] or verdict["missing"]:
                self._see_it_read(store, verdict["came"])
        except DistError as error:
            said = shortly(error)
            what = f"rank {self.whole.rank} lost the first process at the stage {stage!r}: {said}"
            raise PeerFailed(what, fix="its terminal or log says why it ended") from error
        if verdict["missing"]:
            raise PeerFailed(
                f"at the stage {stage!r} {verdict['missing']} did not come within {timeout_s:g} s",
                fix="their logs say why, if they were started at all; topology.join_timeout and topology.step_timeout are "
                "how long is waited",
            )
        if verdict["problems"]:
            raise Disagreement([Problem(**one) for one in verdict["problems"]], shown=self.speaks)

    def machines(self) -> list[tuple[str, tuple[int, ...]]]:
        """Host name and ranks of each machine, once all processes have come to the first stage."""
        first = PrefixStore(FIRST_STAGE, self.store)
        said = cast(list, first.multi_get([f"said/{rank}" for rank in range(self.world_size)]))
        machines: dict[str, list[Statement]] = defaultdict(list)
        for one in (Statement(**json.loads(text)) for text in said):
            machines[one.machine].append(one)
        return [(ours[0].host, tuple(one.rank for one in ours)) for ours in machines.values()]

    def _verdict(
        self, store: Store, statement: Statement, judge: Judge, timeout_s: float, stage: str
    ) -> dict[str, Any]:
        rank = statement.rank
        if store.add(f"taken/{rank}", 1) > 1:
            return self._twice(store, statement)
        store.set(f"said/{rank}", json.dumps(asdict(statement)))
        if rank:
            if not _wait_for(store, ["verdict"], timeout_s + GRACE_S):
                return {"problems": [], "missing": "rank 0", "came": 0}
            return json.loads(store.get("verdict"))
        said = [f"said/{one}" for one in range(self.world_size)]

        def tell(waited_s: float) -> None:
            if missing := self._missing(store):
                words = f"waiting {waited_s:.0f} s for {_absent(missing)} at the stage {stage!r}"
                print(words, file=sys.stderr, flush=True)

        came = _wait_for(store, said, timeout_s, or_for="verdict", tell=tell)
        if not came and store.check(["verdict"]):
            return json.loads(store.get("verdict"))
        if missing := [] if came else self._missing(store):
            verdict = {"problems": [], "missing": _absent(missing), "came": self.world_size - len(missing)}
        else:
            statements = [Statement(**json.loads(one)) for one in cast(list, store.multi_get(said))]
            problems = [asdict(one) for one in judge(statements)]
            verdict = {"problems": problems, "missing": "", "came": self.world_size}
        store.set("verdict", json.dumps(verdict))
        return verdict

    def _missing(self, store: Store) -> list[Statement]:
        """Those that have said nothing at this stage yet."""
        return [self._known(one) for one in range(self.world_size) if not store.check([f"said/{one}"])]

    def _known(self, rank: int) -> Statement:
        """What a process said first, or no more than its rank where it never came."""
        first, said = PrefixStore(FIRST_STAGE, self.store), f"said/{rank}"
        return Statement(**json.loads(first.get(said))) if first.check([said]) else Statement(rank, "", "", {})

    def _twice(self, store: Store, statement: Statement) -> dict[str, Any]:
        """The verdict of a process whose rank another one has already."""
        said = f"said/{statement.rank}"
        other = json.loads(store.get(said))["host"] if _wait_for(store, [said], GRACE_S) else "?"
        problem = Problem(
            f"two processes say that they are rank {statement.rank}: on {other} and on {statement.host}",
            where="environment variable RANK",
            fix="give each machine its own number (topology.node_rank, --machine_rank), and each launch its own main_port",
        )
        verdict = {"problems": [asdict(problem)], "missing": "", "came": self.world_size}
        store.set("verdict", json.dumps(verdict))
        return verdict

    def _see_it_read(self, store: Store, readers: int) -> None:
        """The first process, with which the store may end, and which speaks for all, goes on when all have read it."""
        read = store.add("read", 1)
        limit = time.monotonic() + _ACKNOWLEDGED_S
        while self.whole.rank == 0 and read < readers and time.monotonic() < limit:
            time.sleep(_SHORTEST_PAUSE_S)
            read = store.add("read", 0)


def meet(*, timeout_s: float) -> Peers | None:
    """The peers of this process, by the environment variables of its launch; None where it is alone.

    Raises PeerFailed where the first process cannot be reached within `timeout_s`, CheckFailed where its port is taken.
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world_size == 1:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun does
    if not serves:
        _reach(address, port, timeout_s)
    limit, kinds = timedelta(seconds=timeout_s), {"wait_for_workers": False, "multi_tenant": True}
    try:
        store = _in_time(lambda: TCPStore(address, port, world_size, serves, limit, **kinds), timeout_s)
    except (DistError, TimeoutError) as error:
        said = shortly(error)
        if "EADDRINUSE" in said:
            fix = "set topology.main_port (MASTER_PORT) to a free one, on all machines"
            what = f"port {port} of this machine is taken{holder_of(port)}"
            raise CheckFailed(what, where="topology.main_port", fix=fix) from error
        fix = "another program may have that port there: set topology.main_port (MASTER_PORT) to a free one, on all machines"
        raise PeerFailed(f"no connection to the first process at {address}:{port}: {said}", fix=fix) from error
    host = socket.gethostname()
    statement = Statement(rank, host, f"{host} {os.environ.get('GROUP_RANK', '')}", {})
    return Peers(PrefixStore("packtrain", store), world_size, statement)


def places_in_words(ours: Sequence[Statement], *, several_hosts: bool) -> str:
    """ "ranks 0 and 1 on n1, rank 2 on n2"; without the machines where there is only one."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for one in ours:
        by_host[one.host].append(one.rank)
    if not several_hosts or "" in by_host:
        return ranks_in_words([one.rank for one in ours])
    if len(by_host) > _MOST_MACHINES:
        hosts = ", ".join(list(by_host)[: _MOST_MACHINES - 1])
        return f"{ranks_in_words([one.rank for one in ours])} on {len(by_host)} machines ({hosts}, …)"
    return ", ".join(f"{ranks_in_words(ranks)} on {host}" for host, ranks in by_host.items())


def _absent(missing: Sequence[Statement]) -> str:
    return places_in_words(missing, several_hosts=True)


def _reach(address: str, port: int, timeout_s: float) -> None:
    """Waits until somebody listens there: torch's own words on who does not are many, and end in a stack."""
    limit = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=max(limit - time.monotonic(), 1)).close()
            return
        except OSError as error:
            if time.monotonic() > limit:
                raise PeerFailed(
                    f"rank {os.environ['RANK']} on {socket.gethostname()} did not reach the first process at "
                    f"{address}:{port} within {timeout_s:g} s: {error.strerror or error}",
                    fix="look whether it was started, whether the name leads to it from here, and for a firewall",
                ) from error
        time.sleep(_LONGEST_PAUSE_S)


def _in_time(connect: Callable[[], Store], timeout_s: float) -> Store:
    """What `connect` returns or raises; TimeoutError where it does not: torch waits for ever for a listener that is silent."""
    came: list[Store | DistError] = []

    def run() -> None:
        try:
            came.append(connect())
        except DistError as error:
            came.append(error)

    thread = threading.Thread(target=run, name="store", daemon=True)
    thread.start()
    thread.join(timeout_s + _ACKNOWLEDGED_S)  # longer, for its own words are better
    if not came:
        raise TimeoutError("what listens there does not answer")
    if isinstance(came[0], DistError):
        raise came[0]
    return came[0]


def _wait_for(
    store: Store,
    keys: list[str],
    timeout_s: float,
    or_for: str | None = None,
    tell: Callable[[float], None] = lambda waited_s: None,
) -> bool:
    """Whether all `keys` came within `timeout_s`, and before the key `or_for`; `tell` is called every _TOLD_S seconds.

    Asks again and again: where torch waits itself and nothing comes, it prints warnings.
    """
    begun, pause = time.monotonic(), _SHORTEST_PAUSE_S
    told = begun
    while not store.check(keys):
        now = time.monotonic()
        if now - begun > timeout_s or (or_for and store.check([or_for])):
            return False
        if now - told >= _TOLD_S:
            told = now
            tell(now - begun)
        time.sleep(pause)
        # a thousand ask one store, for hours where data is prepared
        pause = min(2 * pause, _LONGEST_PAUSE_S if now - begun < _LONG_S else _LONGER_PAUSE_S)
    return True
