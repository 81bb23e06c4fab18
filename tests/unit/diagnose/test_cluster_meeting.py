"""`packtrain env --cluster` by machines that are threads here, on real sockets: who meets, who is missing, which links work."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from packtrain.config.schema import RunConfig, Topology
from packtrain.diagnose.cluster import command as cluster
from packtrain.diagnose.cluster import hub as cluster_hub
from packtrain.diagnose.cluster.hub import Hub
from packtrain.diagnose.cluster.station import Station, knocked, measured, reached
from packtrain.errors import PacktrainError, PeerFailed, UserError
from tests.ports import free_port
from tests.unit.diagnose.test_cluster_compare import report
from tests.unit.launchers import member

LONG_S = 60  # for what comes in no time, unless the machine has other things to do
SHORT_S = 3
CONFIG = RunConfig(topology=Topology(kind="manual", nodes=3, gpus_per_node=1, main_address="127.0.0.1"))
WORD = "w" * 32


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Of three machines, each of which makes the report of `test_cluster_compare`; machine 2's data is other."""

    def own_report(config: RunConfig) -> dict[str, Any]:
        made = report(data={"data.train a.jsonl": "other" if config.topology.node_rank == 2 else "same"})
        made["facts"]["torch"].update(version=None, error="No module named 'torch'")
        return made

    monkeypatch.setattr(cluster, "own_report", own_report)
    monkeypatch.setattr(cluster, "age_s", lambda: 0.0)
    monkeypatch.setattr(cluster, "LIMIT_S", LONG_S)
    for name in ("CONNECT_S", "ANSWER_S"):
        monkeypatch.setattr(f"packtrain.diagnose.cluster.station.{name}", LONG_S)
    monkeypatch.setattr(cluster_hub, "KNOCK_S", LONG_S)
    monkeypatch.setattr(cluster_hub, "_LOOK_S", LONG_S)
    (tmp_path / "run").mkdir()
    trainer = replace(CONFIG.trainer, output_dir=str(tmp_path / "run"), checkpoint_every=10)
    return replace(CONFIG, topology=replace(CONFIG.topology, main_port=free_port()), trainer=trainer)


def waiting_for(config: RunConfig, monkeypatch: pytest.MonkeyPatch, *nodes: int, refused: bool = False) -> RunConfig:
    """Machine 0 waits for these however busy all are, and SHORT_S for the others; with `refused` also for one that it refuses."""
    monkeypatch.setattr(
        cluster, "_SHARES", (LONG_S / SHORT_S, LONG_S / SHORT_S)
    )  # those that come need not hurry either
    poll, reports = Hub._poll, Hub._await_reports

    def members(hub: Hub, limit_s: float, goes_on: Callable[[], bool]) -> None:
        poll(hub, LONG_S, lambda: not set(nodes) <= set(hub._members) or (refused and not hub._checks))
        poll(hub, limit_s, goes_on)

    def awaited(hub: Hub) -> None:
        poll(hub, LONG_S, lambda: 1 not in hub._reports)
        hub._report_s = 0
        reports(hub)

    monkeypatch.setattr(Hub, "_poll", members)
    monkeypatch.setattr(Hub, "_await_reports", awaited)
    return replace(config, topology=replace(config.topology, join_timeout=SHORT_S))


def together(
    config: RunConfig, *nodes: int, as_json: bool = True, folders: Mapping[int, Path] | None = None
) -> list[int | PacktrainError]:
    """How `packtrain env --cluster` ends on each of these machines; `folders` are output folders of their own."""
    ends: dict[int, int | PacktrainError] = {}

    def run(number: int, node: int) -> None:
        mine = replace(config, topology=replace(config.topology, node_rank=node))
        if folders and node in folders:
            mine = replace(mine, trainer=replace(mine.trainer, output_dir=str(folders[node])))
        try:
            ends[number] = cluster.show_cluster(lambda: mine, [], as_json=as_json)
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
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    assert together(config, 2, 0, 1, folders={2: tmp_path / "other"}) == [3, 3, 3]
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"nodes", "differences", "links", "ports", "all_reduce", "missing", "reasons", "checks"}
    assert len(found["nodes"]) == 3 and found["missing"] == []
    (difference,) = [one for one in found["differences"] if one["status"] == "fail"]
    assert difference["what"] == "data.train a.jsonl"
    assert [(one["value"], len(one["nodes"])) for one in difference["values"]] == [("same", 2), ("other", 1)]
    (blind,) = [one for one in found["checks"] if one["name"] == "output-folder"]
    assert blind["status"] == "fail" and "(machine 2) cannot see what" in blind["found"] and len(blind["nodes"]) == 1
    assert "trainer.output_dir on a file system that all machines share" in blind["fix"]
    assert not any((tmp_path / "run").iterdir())
    assert set(found["all_reduce"]) == {"status", "found", "backend", "nodes", "pairs"}
    assert found["all_reduce"]["status"] == "skipped" and "No module named 'torch'" in found["all_reduce"]["found"]
    assert len(found["ports"]) == 6 and "closed" not in {one["status"] for one in found["ports"]}  # one holds it here
    assert len(found["links"]) == 3
    for link in found["links"]:
        assert link["status"] in ("ok", "slow") and link["latency_ms"] > 0 and link["mib_per_s"] > 0


def test_the_runs_port_is_free_for_the_all_reduce_and_its_figures_are_shown_of_each_machine(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def take_part(order: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
        end = time.monotonic() + LONG_S
        while order["rank"] == 0 and time.monotonic() < end:  # as torch's store does
            try:
                socket.create_server(("", order["port"])).close()
                break
            except OSError:
                time.sleep(0.05)
        else:
            if order["rank"] == 0:
                return {"error": "taken"}
        figures = {"latency_ms": 1.0, "mib_per_s": 100.0, "found": ""}
        pairs = [{"other": other, **figures} for other in range(3) if other != order["rank"]]
        return {"pairs": pairs, "kib_ms": 1.5 + order["rank"], "mib_64_ms": 64.0}

    monkeypatch.setattr("packtrain.diagnose.cluster.station.take_part", take_part)
    monkeypatch.setattr(cluster, "own_report", lambda config: report())
    assert together(config, 0, 1, 2, as_json=False) == [0, 0, 0]
    said = capsys.readouterr().out
    assert "All-reduce over all of them: ok" in said and "(machine 2): 3.5 ms, 1000 MiB/s" in said


def test_a_missing_machine_is_waited_for_no_longer_than_promised() -> None:
    assert cluster.LIMIT_S <= 20  # without a join_timeout of the config


def test_a_missing_machine_is_listed_while_the_others_report(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, begun = waiting_for(config, monkeypatch, 1), time.monotonic()
    assert together(config, 0, 1, as_json=False) == [4, 4]
    assert time.monotonic() - begun < LONG_S
    said = capsys.readouterr()
    assert "machine 2: did not connect to" in said.out and "2 of 3 machines" in said.out
    assert "MiB/s" in said.out
    assert "machine 2 did not connect" in said.err and "the others go on" in said.err


def test_a_machine_that_falls_silent_is_named_while_the_others_go_on(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = waiting_for(config, monkeypatch, 1, 2)
    held: list[socket.socket] = []

    def stopped() -> None:  # after it has connected
        end = time.monotonic() + LONG_S
        while not held and time.monotonic() < end:
            with suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", config.topology.main_port)))
                hello = {"kind": "hello", "job": cluster._JOB, "member": asdict(member(2, nodes=3))}
                held[0].sendall(json.dumps(hello).encode() + b"\n")
            time.sleep(0.05)

    silent = threading.Thread(target=stopped)
    silent.start()
    assert together(config, 0, 1, as_json=False) == [4, 4]
    silent.join()
    held[0].close()
    said = capsys.readouterr()
    assert "n3: connected, but made no report; the others go on" in said.err
    assert "missing  n3: connected, but made no report" in said.out and "2 of 3 machines" in said.out


def test_each_machine_says_that_machine_0_is_missing(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LIMIT_S", SHORT_S)
    begun = time.monotonic()
    for end in together(config, 1, 2):
        assert isinstance(end, PeerFailed) and "machine 0 could not be reached" in str(end)
    assert time.monotonic() - begun < LONG_S


def test_two_machines_of_one_number_are_named_and_do_not_hold_up_the_rest(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = together(waiting_for(config, monkeypatch, 1, refused=True), 0, 1, 1)
    assert ends[0] == 4 and sorted(str(type(one).__name__) for one in ends[1:]) == ["CheckFailed", "int"]
    found = json.loads(capsys.readouterr().out)
    assert "two machines say that they are number 1" in found["checks"][0]["found"]
    assert len(found["nodes"]) == 2 and found["missing"] == ["machine 2"]
    assert "did not connect to" in found["reasons"]["machine 2"]


def test_a_machine_of_a_run_that_is_its_own_is_refused_with_the_reason(config: RunConfig) -> None:
    with pytest.raises(UserError, match="one machine: there is nothing to compare"):
        cluster.show_cluster(lambda: RunConfig(topology=Topology(kind="single")), [], as_json=True)
    with pytest.raises(UserError, match="the number of this machine is not known"):
        cluster.show_cluster(lambda: config, [], as_json=True)
    with pytest.raises(UserError, match="no config"):
        cluster.show_cluster(lambda: None, [], as_json=True)


def test_a_station_answers_only_who_knows_the_word() -> None:
    station = Station()
    try:
        well, strange = (measured("127.0.0.1", station.port, word) for word in (station.word, WORD))
    finally:
        station.close()
    assert well["found"] == "" and well["mib_per_s"] is not None
    assert strange["mib_per_s"] is None and str(strange["found"])
    assert "refused" in str(measured("127.0.0.1", free_port(), WORD)["found"])


def test_a_station_answers_at_the_runs_port_until_it_leaves_it_and_sends_launchers_away() -> None:
    station, other, port = Station(), Station(), free_port()
    try:
        assert station.open(port) == "" and knocked("127.0.0.1", port, station.word) == ""
        assert f"port {port} is taken" in other.open(port)
        assert knocked("127.0.0.1", port, WORD) and reached("127.0.0.1", port) == ""
        with socket.create_connection(("127.0.0.1", port), timeout=5) as launcher:
            launcher.sendall(json.dumps({"kind": "hello", "member": "x" * 2**16}).encode() + b"\n")
            sent_away = json.loads(launcher.makefile().readline())
        assert sent_away["kind"] == "stop" and "takes no more machines" in sent_away["problems"][0]["what"]
        station.leave()
        assert "refused" in knocked("127.0.0.1", port, station.word)
        assert station.open(port) == "" and knocked("127.0.0.1", station.port, station.word) == ""
    finally:
        station.close()
        other.close()
    assert "refused" in reached("127.0.0.1", port)


def test_who_accepts_and_says_nothing_is_a_dead_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.diagnose.cluster.station.ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = measured("127.0.0.1", silent.getsockname()[1], WORD)
    assert found["latency_ms"] is None and "no answer" in str(found["found"])
