"""The first sum of a run, among threads: who has a wrong one, and who has none in time."""

from __future__ import annotations

import atexit
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import pytest
import torch
from torch.distributed import HashStore

from packtrain.config.schema import RunConfig
from packtrain.errors import Disagreement, PacktrainError, PeerFailed
from packtrain.train import run
from packtrain.train.sync import all_reduce_check as first_sum
from packtrain.train.sync.all_reduce_check import check_first_sum
from packtrain.train.sync.peers import Peers, Statement
from tests.unit.launch.test_docs_multi_node import ROWS, same

RANKS = 3
REFUSED = "Gloo connectFullMesh failed with SO_ERROR: Connection refused, remote=[127.0.0.1]:17332$0"
FIX = "packtrain env CONFIG --cluster measures the links"


class Sum:
    """What a backend does, right but for the ranks that `spoiled` is called with the sum of."""

    def __init__(self, spoiled: Callable[[int, torch.Tensor], None] = lambda rank, numbers: None) -> None:
        self._given: dict[int, torch.Tensor] = {}
        self._all = threading.Barrier(RANKS)
        self._spoiled = spoiled

    def of(self, rank: int) -> Callable[[torch.Tensor], None]:
        def reduce(numbers: torch.Tensor) -> None:
            self._given[rank] = numbers.clone()
            self._all.wait(60)
            numbers.copy_(torch.stack(list(self._given.values())).sum(0))
            self._spoiled(rank, numbers)

        return reduce


def raised(sum_of: Sum, late: Mapping[int, float] = MappingProxyType({})) -> list[PacktrainError | None]:
    """What each of the ranks (threads here, on two machines) raises; `late` are limits (s) of those that are not done in time."""
    store = HashStore()

    def one(rank: int) -> PacktrainError | None:
        host = f"n{1 + rank // 2}"
        peers = Peers(store, RANKS, Statement(rank, host, host, {}))
        try:
            check_first_sum(peers, torch.device("cpu"), "nccl", timeout_s=late.get(rank, 60), reduce=sum_of.of(rank))
        except PacktrainError as error:
            return error
        return None

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


def test_a_right_sum_is_no_event_and_one_process_has_none_to_make(capfd: pytest.CaptureFixture[str]) -> None:
    assert raised(Sum()) == [None] * RANKS
    check_first_sum(None, torch.device("cpu"), "nccl", timeout_s=1)
    assert capfd.readouterr().err == ""


def loses(rank: int, numbers: torch.Tensor) -> None:
    if rank == 2:
        numbers[-1, 0] += 1  # a single number of a mebibyte
        numbers[0, 1] = 0


OVER = threading.Event()


def stuck(rank: int, numbers: torch.Tensor) -> None:
    if rank != 1:
        OVER.wait(300)


def fails(rank: int, numbers: torch.Tensor) -> None:
    if rank == 0:
        raise RuntimeError("gloo: Connection refused\nException raised from …")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (loses, "rank 2 on n2: the first all-reduce over nccl has a wrong sum: of ranks 0 and 1 ({})"),
        (stuck, "rank 0 on n1, rank 2 on n2: the first all-reduce over nccl did not end within 0.3 s ({})"),
        (fails, "rank 0 on n1: the first all-reduce over nccl failed: gloo: Connection refused ({})"),
    ],
)
def test_who_has_a_wrong_sum_or_none_in_time_is_named_on_all_ranks(
    fault: Callable[[int, torch.Tensor], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth0")
    ends: list[int] = []  # of processes that are still in the collective
    monkeypatch.setattr(atexit, "register", lambda end, code: ends.append(code))
    monkeypatch.setattr(first_sum, "_OTHERS_S", 60)
    OVER.clear()
    errors = raised(Sum(fault), {0: 0.3, 2: 0.3} if fault is stuck else {})
    OVER.set()
    assert {type(error) for error in errors} == {Disagreement}
    assert ends == ([3, 3] if fault is stuck else [])
    (text,) = {str(error) for error in errors}
    said = said.format("NCCL_SOCKET_IFNAME is eth0")
    assert text.startswith(f"{said}\n    → {FIX}")
    if fault is stuck:
        assert any(
            same(said.rpartition(", ")[2]) == what and same(text.partition("→ ")[2]) == fix for what, fix in ROWS
        )


def test_a_rank_that_still_waits_when_another_has_failed_does_not_wait_for_its_whole_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(first_sum, "_OTHERS_S", 1)
    monkeypatch.setattr(first_sum, "_LOOK_S", 0.1)
    monkeypatch.setattr(atexit, "register", lambda end, code: None)
    failed, over = threading.Event(), threading.Event()
    store = HashStore()

    def connect(rank: int) -> None:
        if rank == 1:
            failed.set()
            raise RuntimeError(REFUSED)
        failed.wait(60)
        over.wait(600)

    def one(rank: int) -> str:
        peers = Peers(store, 2, Statement(rank, f"n{rank + 1}", f"n{rank + 1}", {}))
        with pytest.raises(Disagreement) as caught:
            first_sum.connected(peers, lambda: connect(rank), "gloo", timeout_s=600)
        return str(caught.value)

    begun = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        (said,) = set(pool.map(one, range(2)))
    over.set()
    assert time.monotonic() - begun < 200
    assert f"rank 1 on n2: the first all-reduce over gloo failed: {REFUSED}" in said
    assert re.search(r"rank 0 on n1: the first all-reduce over gloo did not end within \d+ s", said)


def test_a_backend_that_cannot_connect_is_an_error_of_the_network_with_its_own_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connects(**_: object) -> None:
        raise RuntimeError(f"{REFUSED}\nException raised from …")

    monkeypatch.setattr(run, "PartialState", connects)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(first_sum, "_OTHERS_S", 0.1)
    peers = Peers(HashStore(), 2, Statement(0, "n1", "n1", {}))
    with pytest.raises(PeerFailed) as caught:
        run._open_group(RunConfig(), peers, on_cpu=True)
    one, other = caught.value.problems
    said = f"rank 0 on n1: the first all-reduce over gloo failed: {REFUSED} (GLOO_SOCKET_IFNAME is lo)"
    assert f"{one.where}: {one.what}" == said and (same(said), same(one.fix)) in ROWS
    assert "rank 1 did not come" in other.what
