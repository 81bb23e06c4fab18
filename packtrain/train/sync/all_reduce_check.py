"""The first collective operation of a run: a sum whose result is known, before data is prepared or a model loaded.

A backend that hangs or adds wrongly is thereby named at the start, and not by a loss hours later. Each rank adds a column of
its own, so a wrong one tells whose numbers did not come. A message of 1 MiB fills its packets: a link with a wrong MTU swallows
those, and lets small ones pass. It is made by a thread, since NCCL connects inside the call, where no time limit of torch
holds; so is gloo's connection before it, which takes five times its limit on one side and seconds on the other. What became of
it the ranks tell each other over the store, which needs no collective; when one has failed the others do not wait for their limit.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from packtrain.errors import PacktrainError, PeerFailed, Problem
from packtrain.launch.arrival import PROGRESS_S
from packtrain.monitor.old.diagnosis import CAUSES
from packtrain.plan.network.choice import SOCKETS
from packtrain.train.library_errors import shortly
from packtrain.train.sync.peers import GRACE_S, Peers, Statement, places_in_words
from packtrain.wording import ranks_in_words

_NUMBERS = 2**17
_MOST_SHOWN = 8
_OTHERS_S = 5
_LOOK_S = 1.0
_FAILED = "first all-reduce failed"
_FIX = CAUSES["network"][1]

State = TypeVar("State")


def connected(peers: Peers | None, connect: Callable[[], State], backend: str, *, timeout_s: float) -> State:
    """What `connect` returns, called in a thread. Raises as `check_first_sum` does where it fails or takes too long."""
    if peers is None:
        return connect()
    states: list[State] = []

    def work() -> str:
        states.append(connect())
        return ""

    _done_in_time(peers, work, backend, timeout_s)
    return states[0]


def check_first_sum(
    peers: Peers | None,
    device: torch.device,
    backend: str,
    *,
    timeout_s: float,
    reduce: Callable[[torch.Tensor], object] = dist.all_reduce,
) -> None:
    """All ranks add known numbers on `device`, and see that the sum is right.

    Raises Disagreement, the same on all, with the ranks on which it is wrong or does not come within `timeout_s`; PeerFailed
    where one of them does not say anything.
    """
    if peers is None:
        return
    rank, ranks = peers.whole.rank, peers.world_size
    _done_in_time(peers, lambda: _add(rank, ranks, device, reduce), backend, timeout_s, by_all=True)


def _done_in_time(
    peers: Peers, work: Callable[[], str], backend: str, timeout_s: float, *, by_all: bool = False
) -> None:
    """Does `work`, which returns what is wrong, in a thread. Raises where something is: here, or (`by_all`) on any rank."""
    seen: list[str] = []

    def run() -> None:
        try:
            seen.append(work())
        except Exception as error:  # of whatever kind a backend's are
            seen.append(_failed(error))

    thread = threading.Thread(target=run, name="first sum", daemon=True)
    begun = told = time.monotonic()
    end = begun + timeout_s
    thread.start()
    while thread.is_alive() and (now := time.monotonic()) < end:
        thread.join(min(end - now, _LOOK_S))
        if thread.is_alive() and _another_failed(peers):
            end = min(end, now + _OTHERS_S)
        if thread.is_alive() and peers.whole.rank == 0 and now - told >= PROGRESS_S:
            told, waits = now, f"waiting {now - begun:.0f} s for the first all-reduce"
            print(f"{waits} of {peers.world_size} ranks", file=sys.stderr, flush=True)
    waited = timeout_s if end == begun + timeout_s else round(end - begun)
    said = seen[0] if seen else f"did not end within {waited:g} s"
    if not said and not by_all:
        return
    try:
        _tell(peers, f"{said}{_interface(backend)}" if said else "", backend, timeout_s)
    except PacktrainError as error:
        if thread.is_alive():
            atexit.register(_end, error.exit_code)
        raise


def _another_failed(peers: Peers) -> bool:
    with suppress(dist.DistError):
        return peers.store.check([_FAILED])
    return True  # the first process is gone, with the store


def _tell(peers: Peers, said: str, backend: str, timeout_s: float) -> None:
    """Tells the others what became of it here, in words, "" where all is well. Raises as `check_first_sum` does."""

    def judge(statements: Sequence[Statement]) -> list[Problem]:
        return problems(statements, backend)

    facts = {"sum": said}
    if said:
        with suppress(dist.DistError):
            peers.store.set(_FAILED, "")
    try:
        peers.settle("first all-reduce", facts, judge, timeout_s=_OTHERS_S if said else timeout_s + GRACE_S)
    except PeerFailed as error:  # who says nothing may only wait for this one
        raise PeerFailed([*problems([replace(peers.whole, facts=facts)], backend), *error.problems]) from error


def _interface(backend: str) -> str:
    """Over which interface the ranks of this machine were told to talk, in words."""
    names = [name for name in SOCKETS if name.partition("_")[0].lower() in backend and os.environ.get(name)]
    return "".join(f" ({name} is {os.environ[name].removeprefix('=')})" for name in names)


def _failed(error: Exception) -> str:
    """What became of it where the backend raised this."""
    return f"failed: {shortly(error)}"


def problems(statements: Sequence[Statement], backend: str) -> list[Problem]:
    """What is wrong, by the ranks that say so."""
    groups: dict[str, list[Statement]] = defaultdict(list)
    for one in statements:
        groups[one.facts["sum"]].append(one)
    found = [
        Problem(f"the first all-reduce over {backend} {said}", places_in_words(ours, several_hosts=True))
        for said, ours in list(groups.items())
        if said
    ]
    last = found[:_MOST_SHOWN][-1:]
    return [*found[:_MOST_SHOWN][:-1], *(Problem(one.what, one.where, _FIX) for one in last)]


def _end(code: int) -> None:
    """Ends the process while its thread is in the collective: what unloads the backend would abort it, with another code."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _add(rank: int, ranks: int, device: torch.device, reduce: Callable[[torch.Tensor], object]) -> str:
    """Whose numbers are wrong in the sum, in words; "" where none are."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has its own
    numbers = torch.zeros(max(_NUMBERS // ranks, 1), ranks, dtype=torch.int64, device=device)
    numbers[:, rank] = rank + 1
    reduce(numbers)
    right = torch.arange(1, ranks + 1)
    wrong = (numbers.cpu() != right).any(dim=0).nonzero().flatten().tolist()
    return f"has a wrong sum: of {ranks_in_words(wrong)}" if wrong else ""
