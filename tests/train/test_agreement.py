"""What all processes must have in common: the comparison as tables, the verdict among threads, and the hash of weights."""

from __future__ import annotations

import math
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from torch.distributed import HashStore

from packtrain.config.schema import Optim, RunConfig, Topology, Trainer
from packtrain.errors import Disagreement, PacktrainError, PeerFailed, Problem
from packtrain.launch.worker import LOG_DIR
from packtrain.train.sync.agreement import agree_on_start, misplaced, unlike, weights_hash, wrong_number
from packtrain.train.sync.peers import FIRST_STAGE, Judge, Peers, Statement, meet, preparing_s


def statements(nodes: int, per_node: int, facts: dict[int, dict[str, str]] | None = None) -> list[Statement]:
    """`nodes` × `per_node` processes that all have seed 0, but for the `facts` of some ranks."""
    return [
        Statement(rank, f"n{rank // per_node}", f"n{rank // per_node} 0", {"seed": "0", **(facts or {}).get(rank, {})})
        for rank in range(nodes * per_node)
    ]


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (2, 2), (3, 1), (16, 8), (128, 1)])
def test_processes_that_are_alike_agree(nodes: int, per_node: int) -> None:
    said = statements(nodes, per_node)
    assert unlike(said, {}) == []
    assert misplaced(said, (nodes, per_node)) == []
    assert wrong_number(len(said), (nodes, per_node)) is None


@pytest.mark.parametrize(
    ("nodes", "per_node", "facts", "told"),
    [
        (1, 2, {1: {"seed": "7"}}, "rank 1 has 7; rank 0 has 0"),
        (1, 3, {0: {"seed": "7"}}, "rank 0 has 7; ranks 1, 2 have 0"),
        (2, 2, {2: {"seed": "7"}}, "rank 2 on n1 has 7; ranks 0 and 1 on n0, rank 3 on n1 have 0"),
        (2, 1, {1: {"seed": "7"}}, "rank 1 on n1 has 7; rank 0 on n0 has 0"),
        (
            16,
            8,
            {5: {"seed": "7"}},
            "rank 5 on n0 has 7; ranks 0 to 4 and 6 to 127 on 16 machines (n0, n1, n2, …) have 0",
        ),
        (
            128,
            1,
            {rank: {"seed": str(rank)} for rank in range(100, 110)},
            "rank 109 on n109 has 109; rank 108 on n108 has 108; rank 107 on n107 has 107; 7 more values; "
            "ranks 0 to 99 and 110 to 127 on 118 machines (n0, n1, n2, …) have 0",
        ),
    ],
    ids=["two", "rank-0", "four-on-two", "tie", "one-of-128", "ten-of-128"],
)
def test_a_difference_names_who_has_what_the_few_first(
    nodes: int, per_node: int, facts: dict[int, dict[str, str]], told: str
) -> None:
    found = unlike(statements(nodes, per_node, facts), {"seed": "set it"})
    assert found == [Problem(told.replace("1, 2", "1 and 2"), "seed", "set it")]


def test_a_fact_that_only_some_state_is_a_difference() -> None:
    (found,) = unlike(statements(1, 3, {1: {"optim.new": "1"}}), {})
    assert found == Problem("rank 1 has 1; ranks 0 and 2 have no such thing", "optim.new")


def test_of_many_differences_the_first_are_told_in_full_and_their_fix_once() -> None:
    other = {f"k{number}": "x" for number in range(30)}
    found = unlike(statements(1, 2, {1: other}), dict.fromkeys(other, "same config"))
    assert [one.where for one in found] == [*(f"k{number}" for number in range(8)), ""]
    assert found[-1].what == "22 more differ: k8, k9, k10, k11, k12, k13, k14, k15, …"
    assert [one.fix for one in found[:-1]] == [""] * 7 + ["same config"]


@pytest.mark.parametrize(
    ("on", "planned", "told"),
    [
        ((3, 1), (2, 2), "planned are 2 machines × 2 processes; started are 4 on 2 (3 on n0, 1 on n1)"),
        (
            (1, 1, 1, 1),
            (2, 2),
            "planned are 2 machines × 2 processes; started are 4 on 4 (1 on n0, 1 on n1, 1 on n2, 1 on n3)",
        ),
        ((4,), (2, 2), "planned are 2 machines × 2 processes; started are 4 on 1 (4 on n0)"),
        ((2,), (2, 1), "planned are 2 machines × 1 process; started are 2 on 1 (2 on n0)"),
    ],
)
def test_processes_on_other_machines_than_planned_are_counted(
    on: tuple[int, ...], planned: tuple[int, int], told: str
) -> None:
    hosts = [f"n{node}" for node, number in enumerate(on) for _ in range(number)]
    said = [Statement(rank, host, host, {}) for rank, host in enumerate(hosts)]
    assert [one.what for one in misplaced(said, planned)] == [told]


def test_machines_with_one_name_are_told_apart_by_their_number() -> None:
    said = [Statement(rank, "localhost", f"localhost {rank // 2}", {}) for rank in range(4)]
    assert misplaced(said, (2, 2)) == []


def test_a_world_of_another_size_than_planned_names_both_numbers() -> None:
    problem = wrong_number(2, (2, 2))
    assert problem is not None
    assert problem.what == "planned are 2 machines × 2 processes = 4 in all, but 2 have found each other"
    with pytest.raises(Disagreement, match="= 4 in all, but 1 have"):
        agree_on_start(None, RunConfig(), "cpu", (2, 2))


def peers(world_size: int) -> list[Peers]:
    store = HashStore()
    return [Peers(store, world_size, Statement(rank, f"n{rank}", f"n{rank}", {})) for rank in range(world_size)]


def together(
    all_peers: list[Peers], facts: list[dict[str, str]], timeout_s: float = 60, stage: str = "data"
) -> list[PacktrainError | None]:
    """What each of the processes (threads here) raises; where some are missing, the first comes after those that do."""
    judge: Judge = lambda said: unlike(said, {})  # noqa: E731

    said = [f"{stage}/said/{peer.whole.rank}" for peer in all_peers[1:]]
    some = len(all_peers) < all_peers[0].world_size

    def one(peer: Peers, own: dict[str, str]) -> PacktrainError | None:
        try:
            if some and peer is all_peers[0]:
                peer.store.wait(said)
            peer.settle(stage, own, judge, timeout_s=timeout_s)
        except PacktrainError as error:
            return error
        return None

    with ThreadPoolExecutor(len(all_peers)) as pool:
        return list(pool.map(one, all_peers, facts))


def test_the_first_process_knows_the_ranks_of_each_machine_afterwards_also_where_two_have_one_name() -> None:
    store, machines = HashStore(), ["n1 0", "n1 0", "n1 1", "n1 1"]
    all_peers = [Peers(store, 4, Statement(rank, "n1", machine, {})) for rank, machine in enumerate(machines)]
    assert together(all_peers, [{}] * 4, stage=FIRST_STAGE) == [None] * 4
    assert all_peers[0].machines() == [("n1", (0, 1)), ("n1", (2, 3))]


def test_all_processes_raise_the_same_words_and_the_first_one_shows_them() -> None:
    assert together(peers(5), [{"seed": "0"}] * 5) == [None] * 5
    raised = together(peers(5), [*[{"seed": "0"}] * 4, {"seed": "1"}])
    assert {type(error) for error in raised} == {Disagreement}
    assert {str(error) for error in raised} == {
        "seed: rank 4 on n4 has 1; rank 0 on n0, rank 1 on n1, rank 2 on n2, rank 3 on n3 have 0"
    }
    assert [error.shown for error in raised if isinstance(error, Disagreement)] == [True, False, False, False, False]


def test_who_does_not_come_is_named_to_all() -> None:
    raised = together(peers(4)[:2], [{}, {}], timeout_s=0.2)
    assert {type(error) for error in raised} == {PeerFailed}
    assert {str(error).split("\n")[0] for error in raised} == {
        "at the stage 'data' ranks 2 and 3 did not come within 0.2 s"
    }


def test_who_does_not_come_to_a_later_stage_is_named_with_its_machine() -> None:
    all_peers = peers(4)
    assert together(all_peers, [{}] * 4, stage="start") == [None] * 4
    raised = together(all_peers[:2], [{}, {}], timeout_s=0.2)
    assert {str(error).split("\n")[0] for error in raised} == {
        "at the stage 'data' rank 2 on n2, rank 3 on n3 did not come within 0.2 s"
    }


def test_a_rank_that_two_processes_have_is_refused_on_all() -> None:
    first, second, *_ = peers(3)
    other = replace(first, whole=replace(first.whole, host="n9"))
    raised = together([first, second, other], [{}, {}, {}])
    assert {type(error) for error in raised} == {Disagreement}
    assert len({str(error) for error in raised}) == 1
    assert "two processes say that they are rank 0: on " in str(raised[0])


def test_a_program_that_has_the_port_and_is_silent_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("packtrain.train.sync.peers._ACKNOWLEDGED_S", 0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(PeerFailed, match="what listens there does not answer") as caught:
            meet(timeout_s=0.3)
    assert "topology.main_port" in caught.value.problems[0].fix


def configured(**groups: object) -> RunConfig:
    return replace(RunConfig(), **groups)


@pytest.mark.parametrize(
    ("other", "device", "told"),
    [
        (
            configured(optim=Optim(learning_rate=1e-4)),
            "cpu",
            "optim.learning_rate: rank 1 on n1 has 0.0001; rank 0 on n0 has 2e-05",
        ),
        (configured(), "cuda", "device: rank 1 on n1 has cuda; rank 0 on n0 has cpu"),
        (configured(topology=Topology(node_rank=1)), "cpu", None),
        (configured(trainer=Trainer(output_dir="elsewhere")), "cpu", "trainer.output_dir: "),
    ],
    ids=["config", "device", "node-rank", "output-dir"],
)
def test_what_is_compared_at_the_start(other: RunConfig, device: str, told: str | None) -> None:
    def start(peer: Peers, config: RunConfig, on: str) -> str | None:
        try:
            agree_on_start(peer, config, on, None)
        except Disagreement as error:
            return str(error)
        return None

    with ThreadPoolExecutor(2) as pool:
        raised = list(pool.map(start, peers(2), [configured(), other], ["cpu", device]))
    assert raised[0] == raised[1]
    assert raised[0] is None if told is None else str(raised[0]).startswith(told)


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


def test_whom_the_first_process_waits_for_is_said_again_and_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("packtrain.train.sync.peers._TOLD_S", 0.05)
    first, second = peers(2)
    said, limit = "", time.monotonic() + 60
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(first.settle, "data", {}, lambda _: [], timeout_s=math.inf)
        while said.count(" s for rank 1 at the stage 'data'") < 2 and time.monotonic() < limit:
            time.sleep(0.01)
            said += capsys.readouterr().err
        second.settle("data", {}, lambda _: [], timeout_s=60)
        waits.result(60)
    assert re.match(r"waiting \d+ s for rank 1 at the stage 'data'\n", said), said
    assert said.count("waiting") >= 2


def test_others_that_prepare_for_hours_are_waited_for_where_a_launcher_of_ours_looks_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(LOG_DIR, raising=False)
    assert preparing_s(600) == 600
    monkeypatch.setenv(LOG_DIR, "logs")
    assert preparing_s(600) == math.inf
