"""`packtrain env --cluster`: what is compared, what all-reduces mean, and machines that are threads here, on real sockets."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, replace
from typing import Any

import pytest

from packtrain.config.schema import RunConfig, Topology
from packtrain.diagnose import cluster as gather
from packtrain.diagnose.all_reduce import check_all_reduce, pairs_of, summarize, take_part, untried
from packtrain.diagnose.cluster import Traits, exit_code_for, find_differences, group_checks, show_cluster, traits_of
from packtrain.diagnose.machine import Driver, Facts, Gpu, Host, Torch
from packtrain.errors import PacktrainError, PeerFailed, UserError
from packtrain.launch import rendezvous
from tests.ports import free_port

H100 = Gpu(0, "H100", memory=80 * 2**30)
FACTS = Facts(
    torch=Torch(version="2.13.0"),
    driver=Driver(gpus=(H100, H100), version="570.1"),
    host=Host(shm=64 * 2**30, memory=512 * 2**30),
)


def values_of(difference: dict[str, Any]) -> str:
    return " / ".join(f"{', '.join(value['nodes'])}: {value['value']}" for value in difference["values"])


def traits(same: dict[str, str] | None = None, variables: dict[str, str] | None = None, **facts: Any) -> Traits:
    return traits_of(replace(FACTS, **facts), {"torch": "2.13.0", "trainer.seed": "0"} | (same or {}), variables or {})


def report(**same: str) -> dict[str, Any]:
    """A machine's report, as it is sent to machine 0."""
    own = {"network": {}, "traits": traits(same)}
    return json.loads(json.dumps({"facts": asdict(FACTS), "checks": [], "own": own}))


def machines(number: int, odd: Traits) -> dict[str, Traits]:
    """Machines n1, n2 … that are all alike but n3."""
    return {f"n{at}": odd if at == 3 else traits() for at in range(1, number + 1)}


@pytest.mark.parametrize(
    ("odd", "what", "status", "values"),
    [
        (traits({"torch": "2.12.0"}), "torch", "fail", "n1, n2, n4: 2.13.0 / n3: 2.12.0"),
        (traits({"trainer.seed": "1"}), "trainer.seed", "fail", "n1, n2, n4: 0 / n3: 1"),
        (traits(variables={"NCCL_ALGO": "Ring"}), "NCCL_ALGO", "warn", "n1, n2, n4: nothing / n3: Ring"),
        (traits(host=replace(FACTS.host, shm=2**26)), "/dev/shm", "warn", "n1, n2, n4: 64 GiB / n3: 64 MiB"),
        (traits(torch=Torch(version="2.13.0", nccl="2.21")), "nccl of torch", "fail", "n1, n2, n4: nothing / n3: 2.21"),
    ],
)
def test_what_differs_is_said_with_who_has_which(odd: Traits, what: str, status: str, values: str) -> None:
    (found,) = find_differences(machines(4, odd))
    assert (found["what"], found["status"], values_of(found)) == (what, status, values)
    # alike, a torch that was too slow to answer, its own interface
    for same in (traits(), traits(torch=Torch()), traits(variables={"NCCL_IB_HCA": "m"})):
        assert find_differences(machines(4, same)) == []


def test_a_check_is_said_once_for_all_machines_that_say_the_same() -> None:
    reports = {f"n{at}": report() for at in range(128)}
    for at in range(100):
        reports[f"n{at}"]["checks"] = [{"name": "open-files", "status": "warn", "found": "1024", "fix": "ulimit -n"}]
    reports["n7"]["checks"].append({"name": "gpus", "status": "fail", "found": "1 of 8", "fix": "look"})
    reports["n8"]["checks"].append({"name": "clock", "status": "ok", "found": "kept", "fix": ""})
    first, second = group_checks(reports)
    assert (first["name"], first["nodes"]) == ("gpus", ["n7"])
    assert (second["name"], len(second["nodes"])) == ("open-files", 100)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"differences": find_differences(machines(3, traits({"trainer.seed": "1"})))}, 3),
        ({"checks": [{"name": "all-reduce", "status": "warn"}]}, 0),
        ({"checks": [{"name": "all-reduce", "status": "fail"}]}, 3),
        ({"missing": ["n2"]}, 4),
    ],
    ids=["well", "must-agree", "slow", "dead", "missing"],
)
def test_the_exit_code_says_the_worst(changes: dict[str, Any], code: int) -> None:
    assert exit_code_for({"missing": [], "differences": [], "checks": [], **changes}) == code


WELL = {"backend": "gloo", "kib_ms": 0.1, "mib_64_ms": 64.0}


def results(number: int, rates: dict[tuple[int, int], float], dead: dict[tuple[int, int], str]) -> dict[str, Any]:
    """Of so many machines, whose pairs have these rates or are dead; the others are not tried."""
    pairs = untried([f"n{rank}" for rank in range(number)])
    for ranks, pair in zip(pairs_of(number), pairs, strict=True):
        if ranks in rates:
            pair.update(status="ok", latency_ms=0.2, mib_per_s=rates[ranks])
        if ranks in dead:
            pair.update(status="dead", found=dead[ranks])
    return {f"n{rank}": {**WELL, "pairs": pairs} if rank == 0 else WELL for rank in range(number)}


def test_who_failed_is_named_and_who_could_not_take_part_is_the_reason_that_there_was_none() -> None:
    all_well = results(2, {(0, 1): 1000.0}, {})
    well = summarize(all_well)
    assert (well["status"], check_all_reduce(well)) == ("ok", []) and "64 MiB in 64 ms (1000 MiB/s)" in well["found"]
    assert well["nodes"] == {"n0": {"kib_ms": 0.1, "mib_64_ms": 64.0}, "n1": {"kib_ms": 0.1, "mib_64_ms": 64.0}}
    (check,) = check_all_reduce(summarize({**all_well, "n1": {"backend": "gloo", "error": "no interface ib0"}}))
    assert (check["nodes"], check["status"]) == (["n1"], "fail") and "no interface ib0" in check["found"]
    none = summarize({**all_well, "n1": {"skipped": "no torch on n1"}})
    assert (none["status"], none["found"], check_all_reduce(none)) == ("skipped", "no torch on n1", [])


def test_pairs_that_are_slow_or_dead_or_not_tried_are_named_with_the_slowest_of_them() -> None:
    reduced = summarize(results(4, {(0, 1): 400.0, (1, 2): 900.0}, {(2, 3): "n3: no result in time"}))
    assert [pair["status"] for pair in reduced["pairs"]] == ["slow", "ok", "dead", "not tried"]
    assert reduced["status"] == "failed" and "n2 and n3: n3: no result in time" in reduced["found"]
    told = [(check["status"], check["nodes"]) for check in check_all_reduce(reduced)]
    assert told == [("fail", ["n2", "n3"]), ("warn", ["n0", "n1"])]
    rates = {pair: 90.0 if 2 in pair else 200.0 for pair in pairs_of(64)}
    (check,) = check_all_reduce(summarize(results(64, rates, {})))
    assert (check["name"], check["status"]) == ("all-reduce", "warn")
    assert "n2" in check["nodes"] and "90 MiB/s" in check["found"]


def test_a_process_that_cannot_reduce_says_why_and_the_others_still_do() -> None:  # tests/cluster has all together
    port, found = free_port(), {}

    def run(rank: int) -> None:
        order = {"backend": "gloo", "rank": rank, "names": ["n0", "n1", "n2"], "address": "127.0.0.1", "port": port}
        found[f"n{rank}"] = take_part(order, {"GLOO_SOCKET_IFNAME": "absent0" if rank == 1 else "lo"})

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reduced = summarize(dict(sorted(found.items())))
    first, second, others = reduced["pairs"]
    assert (first["status"], second["status"]) == ("dead", "dead"), reduced
    assert others["status"] in ("ok", "slow") and others["latency_ms"] and others["mib_per_s"], reduced
    assert reduced["status"] == "failed" and "absent0" in first["found"]


LONG_S = 60  # for what comes in no time, unless the machine has other things to do
SHORT_S = 1
CONFIG = RunConfig(topology=Topology(kind="manual", nodes=3, gpus_per_node=1, main_address="127.0.0.1"))


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Of three machines with a `report` each; machine 2's config is other."""

    def own_report(node: int, values: dict[str, Any]) -> dict[str, Any]:
        made = report(**{"data.train": "other" if node == 2 else "same"})
        made["facts"]["torch"].update(version=None, error="torch cannot be imported: No module named 'torch'")
        return made

    monkeypatch.setattr(gather, "gather", lambda load: (load().topology.node_rank, None))
    monkeypatch.setattr(gather, "own_report", lambda node, needs, values: own_report(node, values))
    monkeypatch.setattr(gather, "GATHER_S", LONG_S)
    return replace(CONFIG, topology=replace(CONFIG.topology, main_port=free_port()))


def together(config: RunConfig, *nodes: int, as_json: bool = True) -> list[int | PacktrainError]:
    """How `packtrain env --cluster` ends on each of these machines."""
    ends: dict[int, int | PacktrainError] = {}

    def run(number: int, node: int) -> None:
        mine = replace(config, topology=replace(config.topology, node_rank=node))
        try:
            ends[number] = show_cluster(lambda: mine, [], as_json=as_json)
        except PacktrainError as error:
            ends[number] = error

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in enumerate(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * LONG_S)
        assert not thread.is_alive()
    return [ends[number] for number in range(len(nodes))]


def test_all_machines_end_with_one_code_and_machine_0_says_what_differs(config, capsys):
    assert together(config, 2, 0, 1) == [3, 3, 3]
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"nodes", "differences", "all_reduce", "missing", "reasons", "checks"}
    assert len(found["nodes"]) == 3 and found["missing"] == []
    (difference,) = [one for one in found["differences"] if one["status"] == "fail"]
    assert difference["what"] == "data.train"
    assert [(one["value"], len(one["nodes"])) for one in difference["values"]] == [("same", 2), ("other", 1)]
    assert set(found["all_reduce"]) == {"status", "found", "backend", "nodes", "pairs"}
    assert found["all_reduce"]["status"] == "skipped" and "No module named 'torch'" in found["all_reduce"]["found"]


def test_a_missing_machine_is_listed_by_machine_0_and_machine_0_by_the_others(config, monkeypatch, capsys):
    monkeypatch.setattr(gather, "GATHER_S", 5)
    assert together(config, 0, 1, as_json=False) == [4, 4]
    said = capsys.readouterr()
    assert "machine 2: did not connect to" in said.out and "2 of 3 machines" in said.out
    monkeypatch.setattr(gather, "GATHER_S", SHORT_S)
    monkeypatch.setattr(rendezvous, "is_own", lambda address: False)  # 127.0.0.1 is not
    for end in together(config, 1, 2):
        assert isinstance(end, PeerFailed) and "machine 0 could not be reached" in str(end), end


def test_a_machine_of_a_run_that_is_its_own_is_refused_with_the_reason(config: RunConfig) -> None:
    with pytest.raises(UserError, match=r"\[nothing-to-compare\]"):
        show_cluster(lambda: RunConfig(topology=Topology(kind="single")), [], as_json=True)
    with pytest.raises(UserError, match=r"\[no-node-rank\]"):
        show_cluster(lambda: config, [], as_json=True)
    with pytest.raises(UserError, match=r"\[no-config\]"):
        show_cluster(lambda: None, [], as_json=True)
