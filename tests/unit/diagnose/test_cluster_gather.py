"""`packtrain env --cluster` by machines that are threads here, on real sockets: who meets, who is missing, what is compared."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from packtrain.config.schema import RunConfig, Topology
from packtrain.diagnose import cluster as gather
from packtrain.diagnose.cluster import show_cluster
from packtrain.errors import PacktrainError, PeerFailed, UserError
from packtrain.launch import rendezvous
from tests.ports import free_port
from tests.unit.diagnose.test_cluster_compare import report

LONG_S = 60  # for what comes in no time, unless the machine has other things to do
SHORT_S = 1
CONFIG = RunConfig(topology=Topology(kind="manual", nodes=3, gpus_per_node=1, main_address="127.0.0.1"))


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Of three machines, each of which makes the report of `test_cluster_compare`; machine 2's config is other."""

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


def test_all_machines_end_with_one_code_and_machine_0_says_what_differs(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert together(config, 2, 0, 1) == [3, 3, 3]
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"nodes", "differences", "all_reduce", "missing", "reasons", "checks"}
    assert len(found["nodes"]) == 3 and found["missing"] == []
    (difference,) = [one for one in found["differences"] if one["status"] == "fail"]
    assert difference["what"] == "data.train"
    assert [(one["value"], len(one["nodes"])) for one in difference["values"]] == [("same", 2), ("other", 1)]
    assert set(found["all_reduce"]) == {"status", "found", "backend", "nodes", "pairs"}
    assert found["all_reduce"]["status"] == "skipped" and "No module named 'torch'" in found["all_reduce"]["found"]


def test_a_missing_machine_is_listed_and_the_others_are_compared(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gather, "GATHER_S", 5)
    assert together(config, 0, 1, as_json=False) == [4, 4]
    said = capsys.readouterr()
    assert "machine 2: did not connect to" in said.out and "2 of 3 machines" in said.out


def test_each_machine_says_that_machine_0_is_missing(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "GATHER_S", SHORT_S)
    monkeypatch.setattr(rendezvous, "is_own", lambda address: False)  # 127.0.0.1 is not
    for end in together(config, 1, 2):
        assert isinstance(end, PeerFailed) and "machine 0 could not be reached" in str(end), end


def test_a_machine_of_a_run_that_is_its_own_is_refused_with_the_reason(config: RunConfig) -> None:
    with pytest.raises(UserError, match="one machine: there is nothing to compare"):
        show_cluster(lambda: RunConfig(topology=Topology(kind="single")), [], as_json=True)
    with pytest.raises(UserError, match="the number of this machine is not known"):
        show_cluster(lambda: config, [], as_json=True)
    with pytest.raises(UserError, match="no config"):
        show_cluster(lambda: None, [], as_json=True)
