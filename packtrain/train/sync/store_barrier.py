"""Barriers without a process group: every rank writes a statement into torch's store, and rank 0 writes one verdict.

Collective operations hang if ranks differ (another backend, another world size, one more call), so they cannot be used to
check for differences. At each stage every rank writes a statement into the store of the rendezvous; rank 0 reads them all and
writes its verdict, for which the others wait. Every wait has a limit and names the missing ranks.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, cast

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from packtrain.errors import CheckFailed, Disagreement, PeerFailed, Problem
from packtrain.launch.worker import LOG_DIR
from packtrain.monitor.heartbeat import TimeLimits, waiting
from packtrain.train.library_errors import shortly
from packtrain.wording import listed, ranks_in_words

FIRST_STAGE = "start"
GRACE_S = 10
"""The others wait this much longer than rank 0, which knows which ranks are missing."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.5
_READ_S = 4 * _LONGEST_PAUSE_S
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
    """The ranks of a run as one of them sees them; `own` is this one's statement, without facts."""

    store: Store
    world_size: int
    own: Statement

    def settle(self, stage: str, facts: Mapping[str, str], judge: Judge, *, timeout_s: float) -> None:
        """Returns when all ranks have come to `stage` and `judge` has found no problem in their statements.

        Raises Disagreement with the same problems on all ranks if it has, PeerFailed if a rank does not come in time.
        """
        store, rank = PrefixStore(stage, self.store), self.own.rank
        try:
            with waiting(f"the other ranks at the stage {stage!r}"):
                store.set(f"said/{rank}", json.dumps(asdict(replace(self.own, facts=facts))))
                if rank == 0:
                    store.set("verdict", json.dumps(self._judge(store, judge, timeout_s)))
                came = rank == 0 or _wait_for_keys(store, ["verdict"], timeout_s + GRACE_S)
                verdict = json.loads(store.get("verdict")) if came else {"problems": [], "missing": "rank 0"}
                if verdict["problems"] or verdict["missing"]:
                    # rank 0 may hold the store: the others must read the verdict before it ends. It alone prints: as torchrun ends
                    # all when one has ended, they come after it
                    time.sleep(_READ_S if rank == 0 else _READ_S + 2 * _LONGEST_PAUSE_S)
        except DistError as error:
            what = f"rank {rank} lost rank 0 at the stage {stage!r}: {shortly(error)}"
            raise PeerFailed(what, fix="its terminal or log says why it ended") from error
        if verdict["missing"]:
            raise PeerFailed(
                f"at the stage {stage!r} {verdict['missing']} did not come within {timeout_s:g} s",
                fix="their logs say why, if they were started at all; topology.join_timeout and topology.step_timeout are "
                "how long is waited",
            )
        if verdict["problems"]:
            shown = rank == 0 or LOG_DIR in os.environ  # other ranks report in their logs only
            raise Disagreement([Problem(**problem) for problem in verdict["problems"]], shown=shown)

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
        for statement in _read(
            PrefixStore(FIRST_STAGE, self.store), [f"said/{rank}" for rank in range(self.world_size)]
        ):
            machines[statement.host, statement.machine].append(statement.rank)
        return [(host, tuple(ranks)) for (host, _), ranks in machines.items()]

    def _judge(self, store: Store, judge: Judge, timeout_s: float) -> dict[str, Any]:
        """Rank 0's verdict on a stage: the problems, or the missing ranks in words."""
        keys = [f"said/{rank}" for rank in range(self.world_size)]
        if _wait_for_keys(store, keys, timeout_s):
            return {"problems": [asdict(problem) for problem in judge(_read(store, keys))], "missing": ""}
        first = PrefixStore(FIRST_STAGE, self.store)  # where the missing ranks may have named their machines
        missing = [
            _read(first, [key])[0] if first.check([key]) else Statement(rank, "", "", {})
            for rank, key in enumerate(keys)
            if not store.check([key])
        ]
        return {"problems": [], "missing": ranks_on_hosts(missing)}


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
    return Peers(PrefixStore("packtrain", store), world_size, own)


def ranks_on_hosts(statements: Sequence[Statement], *, hosts: bool = True) -> str:
    """ "ranks 0 and 1 on n1 and rank 2 on n2"; without hosts unless `hosts` is set and all are known."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for statement in statements:
        by_host[statement.host].append(statement.rank)
    if not hosts or "" in by_host:
        return ranks_in_words([statement.rank for statement in statements])
    return listed([f"{ranks_in_words(ranks)} on {host}" for host, ranks in by_host.items()])


def _read(store: Store, keys: list[str]) -> list[Statement]:
    return [Statement(**json.loads(text)) for text in cast(list, store.multi_get(keys))]


def _wait_for_keys(store: Store, keys: list[str], timeout_s: float) -> bool:
    """Whether all `keys` came within `timeout_s`. Polls, since torch's own wait prints warnings."""
    limit, pause = time.monotonic() + timeout_s, _SHORTEST_PAUSE_S
    while not store.check(keys):
        if time.monotonic() > limit:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True


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
