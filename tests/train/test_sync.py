"""How ranks meet, among threads: one verdict for all, who is missing, and the first all-reduce; and the hash of weights."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from torch.distributed import HashStore

from packtrain.config.schema import Optim, RunConfig, Topology, Trainer
from packtrain.errors import CheckFailed, Disagreement, PacktrainError, PeerFailed
from packtrain.model.weights import weights_hash
from packtrain.plan.origin import shared_values
from packtrain.train.sync import Peers, agree_on_data, agree_on_start, connect

RANKS = 3
CPU = torch.device("cpu")
REFUSED = "Gloo connectFullMesh failed with SO_ERROR: Connection refused, remote=[127.0.0.1]:17332$0"


def peers(world_size: int) -> list[Peers]:
    store = HashStore()
    return [Peers(store, world_size, rank, f"n{rank}") for rank in range(world_size)]


def raised(processes: int, call: Callable[[int], object]) -> list[PacktrainError | None]:
    """What each of the processes (threads here) raises."""

    def one(rank: int) -> PacktrainError | None:
        try:
            call(rank)
        except PacktrainError as error:
            return error
        return None

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(one, range(processes)))


def together(some: list[Peers], seeds: Sequence[int] = (0,) * 9, timeout_s: float = 60, *, later: bool = False) -> Any:
    """What is raised at the first stage, or at a later one."""
    data: Any = SimpleNamespace(train=None, eval=None)

    def call(rank: int) -> None:
        if later:
            agree_on_data(some[rank], data, timeout_s=timeout_s)
        else:
            agree_on_start(some[rank], {"seed": str(seeds[rank])}, "cpu", timeout_s=timeout_s)

    return raised(len(some), call)


def test_all_processes_raise_the_same_words_and_the_first_one_shows_them() -> None:
    assert together(peers(5)) == [None] * 5
    errors = together(peers(5), [0, 0, 0, 0, 1])
    (words,) = {str(error) for error in errors}
    others = "rank 0 on n0, rank 1 on n1, rank 2 on n2 and rank 3 on n3 have 0"
    assert {type(error) for error in errors} == {Disagreement} and words.startswith(
        f"seed: rank 4 on n4 has 1; {others}"
    )
    assert [error.shown for error in errors] == [True, False, False, False, False]


def test_who_does_not_come_is_named_to_all_later_with_its_machine() -> None:
    errors = together(peers(4)[:2], timeout_s=0.2)
    (words,) = {str(error).split("\n")[0] for error in errors}
    assert {type(error) for error in errors} == {PeerFailed}
    assert "ranks 2 and 3 did not come within 0.2 s" in words
    all_peers = peers(4)
    assert together(all_peers) == [None] * 4
    (words,) = {str(error).split("\n")[0] for error in together(all_peers[:2], timeout_s=0.2, later=True)}
    assert "rank 2 on n2 and rank 3 on n3 did not come within 0.2 s" in words


def configured(**groups: object) -> RunConfig:
    return replace(RunConfig(), **groups)


@pytest.mark.parametrize(
    ("other", "device", "told"),
    [
        (configured(optim=Optim(learning_rate=1e-4)), "cpu", "optim.learning_rate: rank 1 on n1 has 0.0001"),
        (configured(), "cuda", "device: rank 1 on n1 has cuda; rank 0 on n0 has cpu"),
        (configured(topology=Topology(node_rank=1)), "cpu", None),
        (configured(trainer=Trainer(output_dir="elsewhere")), "cpu", "trainer.output_dir: "),
    ],
    ids=["config", "device", "node-rank", "output-dir"],
)
def test_what_is_compared_at_the_start(other: RunConfig, device: str, told: str | None) -> None:
    both, given = peers(2), ((configured(), "cpu"), (other, device))

    def start(rank: int) -> None:
        config, on = given[rank]
        agree_on_start(both[rank], shared_values(asdict(config)), on, timeout_s=60)

    first, second = (error and str(error) for error in raised(2, start))
    assert first == second and (first is None if told is None else str(first).startswith(told))


def test_the_hash_of_weights_sees_every_weight_its_type_and_adapters() -> None:
    model = tiny_model("llama")
    hashes = [weights_hash(model)]
    assert weights_hash(model) == hashes[0]
    with torch.no_grad():
        next(iter(model.parameters()))[0, 0] += 1e-6
    hashes.append(weights_hash(model))
    hashes.append(weights_hash(model.to(torch.bfloat16)))
    for seed in (0, 0, 1):
        frozen = tiny_model("llama")
        torch.manual_seed(seed)
        hashes.append(weights_hash(get_peft_model(frozen, LoraConfig(target_modules="all-linear"))))
    assert hashes.pop(3) == hashes[3]
    assert len(set(hashes)) == 5


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


def summed(sum_of: Sum, late: Mapping[int, float] = MappingProxyType({})) -> list[PacktrainError | None]:
    """What is raised on two machines; `late` are limits (s) of ranks that are not done in time."""
    store = HashStore()

    def call(rank: int) -> None:
        peers = Peers(store, RANKS, rank, f"n{1 + rank // 2}")
        connect(peers, lambda: CPU, "nccl", timeout_s=late.get(rank, 60), reduce=sum_of.of(rank))

    return raised(RANKS, call)


def test_a_right_sum_is_no_event_and_one_process_has_none_to_make(capfd: pytest.CaptureFixture[str]) -> None:
    assert summed(Sum()) == [None] * RANKS
    assert connect(None, lambda: CPU, "nccl", timeout_s=1) == CPU
    assert capfd.readouterr().err == ""


def loses(rank: int, numbers: torch.Tensor) -> None:
    if rank == 2:
        numbers[-1, 0] += 1  # a single number of a mebibyte
        numbers[0, 1] = 0


OVER = threading.Event()


def stuck(rank: int, numbers: torch.Tensor) -> None:
    if rank == 2:
        OVER.wait(300)


def refused(rank: int, numbers: torch.Tensor) -> None:
    if rank == 0:
        raise RuntimeError(f"{REFUSED}\nException raised from …")


@pytest.mark.parametrize(
    ("fault", "rank", "said"),
    [
        (loses, 2, "has a wrong sum: of ranks 0 and 1"),
        (stuck, 2, "did not end within 0.3 s"),
        (refused, 0, f"failed: {REFUSED}"),
    ],
)
def test_a_rank_with_a_wrong_sum_or_none_in_time_fails_with_its_network_settings(
    fault: Callable[[int, torch.Tensor], None], rank: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth0")
    ends: list[int] = []  # of processes that are still in the collective
    monkeypatch.setattr(atexit, "register", lambda end, code: ends.append(code))
    OVER.clear()
    errors = summed(Sum(fault), {2: 0.3} if fault is stuck else {})
    OVER.set()
    assert [number for number, error in enumerate(errors) if error] == [rank]
    error = errors[rank]
    assert isinstance(error, CheckFailed) and ends == ([3] if fault is stuck else [])
    first = str(error).partition("\n")[0]
    assert first.startswith(f"rank {rank} on n{1 + rank // 2}: ") and said in first
    assert first.endswith("(NCCL_SOCKET_IFNAME is eth0) [first-all-reduce]")
