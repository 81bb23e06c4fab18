"""Reports of several machines compared, and the links between them judged: tables, without any machine."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packtrain.config.schema import Data, RunConfig
from packtrain.diagnose.checks.all import check_all
from packtrain.diagnose.checks.needs import Needs
from packtrain.diagnose.cluster import command as cluster
from packtrain.diagnose.cluster.command import fitting, shown
from packtrain.diagnose.cluster.compare import differences, folded, said
from packtrain.diagnose.cluster.links_table import Link, judged, remarks, rounds_of
from packtrain.diagnose.cluster.view import Comparison
from packtrain.diagnose.facts.facts import Facts, Folder, Gpu, Gpus, Host, Limits, Torch
from packtrain.diagnose.facts.fingerprints import NOT_HERE, code_fingerprint, fingerprint_of
from packtrain.diagnose.facts.output_folder import Output, without_guess
from packtrain.diagnose.redact import Redactor
from packtrain.launch.wire import LINE_LIMIT

NO_CLOCKS: dict[str, float] = {}
H100 = Gpu(0, "H100", memory=80 * 2**30, clock=1980, power=700)
FACTS = Facts(
    torch=Torch(version="2.13.0"),
    gpus=Gpus(gpus=(H100, H100), driver="570.1"),
    host=Host(
        limits=Limits(memlock=-1, shm=64 * 2**30),
        folders=(Folder("trainer.output_dir", "/runs", True, kind="nfs4"),),
    ),
)


def report(**own: Any) -> dict[str, Any]:
    same = {
        "versions": {"torch": "2.13.0"},
        "config": {"trainer.seed": "0"},
        "code": "ab",
        "data": {},
        "environment": {},
    }
    return {"facts": json.loads(json.dumps(FACTS.to_json())), "checks": [], "own": {**same, **own}}


def machines(number: int, odd: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Machines n1, n2 … that are all alike but n3."""
    return {f"n{at}": odd if at == 3 else report() for at in range(1, number + 1)}


def without_a_gpu() -> dict[str, Any]:
    found = report()
    del found["facts"]["gpus"]["gpus"][1]
    return found


def with_fact(group: str, key: str, value: Any) -> dict[str, Any]:
    found = report()
    found["facts"][group][key] = value
    return found


def with_gpu(**changes: Any) -> dict[str, Any]:
    found = report()
    found["facts"]["gpus"]["gpus"][0] |= changes
    return found


def with_limit(**changes: Any) -> dict[str, Any]:
    found = report()
    found["facts"]["host"]["limits"] |= changes
    return found


PORT = {"layer": "InfiniBand", "rate": 400, "active": True}


@pytest.mark.parametrize("number", [4, 128])
def test_machines_that_are_alike_differ_in_nothing(number: int) -> None:
    assert differences({f"n{at}": report() for at in range(number)}, {"n0": 0.0, "n1": 0.5}) == []


@pytest.mark.parametrize(
    ("odd", "what", "status", "values"),
    [
        (report(versions={"torch": "2.12.0"}), "torch", "fail", "n1, n2, n4: 2.13.0 / n3: 2.12.0"),
        (report(config={"trainer.seed": "1"}), "trainer.seed", "fail", "n1, n2, n4: 0 / n3: 1"),
        (report(code="cd"), "packtrain's code", "fail", "n1, n2, n4: ab / n3: cd"),
        (report(data={"data.train a": "x"}), "data.train a", "fail", "n1, n2, n4: nothing / n3: x"),
        (report(environment={"NCCL_ALGO": "Ring"}), "NCCL_ALGO", "warn", "n1, n2, n4: nothing / n3: Ring"),
        (report(environment={"NCCL_IB_HCA": "m"}), "NCCL_IB_HCA", "ok", "n1, n2, n4: nothing / n3: m"),
        (without_a_gpu(), "number of GPUs", "fail", "n1, n2, n4: 2 / n3: 1"),
        (with_fact("gpus", "driver", "550.9"), "NVIDIA driver", "warn", "n1, n2, n4: 570.1 / n3: 550.9"),
        (
            with_gpu(clock=1410),
            "clock of the GPUs",
            "warn",
            "n1, n2, n4: 2 × 1980 MHz / n3: 1 × 1410 MHz, 1 × 1980 MHz",
        ),
        (with_gpu(power=500), "power limit of the GPUs", "warn", "n1, n2, n4: 2 × 700 W / n3: 1 × 500 W, 1 × 700 W"),
        (
            with_fact("network", "ports", [PORT]),
            "RDMA ports",
            "warn",
            "n1, n2, n4: nothing / n3: 1 × InfiniBand 400 Gb/s up",
        ),
        (with_limit(memlock=65536), "ulimit -l", "warn", "n1, n2, n4: unlimited / n3: 65536"),
        (with_limit(shm=2**26), "/dev/shm", "warn", "n1, n2, n4: 64 GiB / n3: 64 MiB"),
        (with_fact("torch", "nccl", "2.21"), "nccl of torch", "fail", "n1, n2, n4: nothing / n3: 2.21"),
    ],
    ids=[
        "version",
        "config",
        "code",
        "data",
        "variable",
        "own-variable",
        "gpus",
        "driver",
        "clock",
        "power",
        "rdma",
        "memlock",
        "shm",
        "nccl",
    ],
)
def test_what_differs_is_said_with_who_has_which(odd: dict[str, Any], what: str, status: str, values: str) -> None:
    found = {one.what: one for one in differences(machines(4, odd), NO_CLOCKS)}
    assert (found[what].status, said(found[what].values)) == (status, values)
    assert found[what].fix or status == "ok"
    if what == "number of GPUs":
        assert all(name.endswith("GPUs") for name in found)
    else:
        assert list(found) == [what]


def test_clocks_are_compared_with_machine_0s() -> None:
    (clock,) = differences(machines(3, report()), {"n1": 0.0, "n2": 0.4, "n3": -75.2})
    assert said(clock.values) == "n1, n2: right / n3: 75 s behind"


def test_a_torch_that_was_too_slow_to_answer_is_no_difference() -> None:
    assert differences(machines(3, with_fact("torch", "version", None)), NO_CLOCKS) == []


def test_a_report_of_another_version_is_compared_as_far_as_it_goes() -> None:
    odd = report(versions={"torch": "2.13.0", "packtrain": "9"})
    del odd["facts"]["torch"]["nccl"]
    (found,) = differences(machines(3, odd), NO_CLOCKS)
    assert (found.what, said(found.values)) == ("packtrain", "n1, n2: nothing / n3: 9")


def test_a_check_is_said_once_for_all_machines_that_say_the_same() -> None:
    reports = {f"n{at}": report() for at in range(128)}
    for at in range(100):
        reports[f"n{at}"]["checks"] = [{"name": "open-files", "status": "warn", "found": "1024", "fix": "ulimit -n"}]
    reports["n7"]["checks"].append({"name": "gpus", "status": "fail", "found": "1 of 8", "fix": "look"})
    reports["n8"]["checks"].append({"name": "clock", "status": "ok", "found": "kept", "fix": ""})
    first, second = folded(reports)
    assert (first.name, first.nodes) == ("gpus", ("n7",))
    assert (second.name, len(second.nodes)) == ("open-files", 100)


@pytest.mark.parametrize("number", [2, 3, 4, 7, 16])
def test_few_machines_play_every_pair_once(number: int) -> None:
    rounds = rounds_of(list(range(number)))
    pairs = [frozenset(pair) for one in rounds for pair in one]
    assert len(pairs) == len(set(pairs)) == number * (number - 1) // 2
    assert len(rounds) == number - 1 + number % 2


@pytest.mark.parametrize("number", [1, 2, 5, 16, 17, 64, 128])
def test_no_machine_is_in_two_pairs_of_a_round(number: int) -> None:
    rounds = rounds_of(list(range(number)))
    for one in rounds:
        ends = [node for pair in one for node in pair]
        assert len(ends) == len(set(ends))
    met = [node for one in rounds for pair in one for node in pair]
    assert number == 1 or all(met.count(node) >= min(number - 1, 2) for node in range(number))
    assert len(rounds) <= 24


def links(number: int, slow: int | None = None, dead: int | None = None) -> list[Link]:
    """Of every pair, well but those of one machine each."""
    found = []
    for start, end in [pair for one in rounds_of(list(range(number))) for pair in one]:
        if dead in (start, end):
            found.append(Link(start, end, status="dead", found="refused"))
        else:
            found.append(Link(start, end, 0.1, 100.0 if slow in (start, end) else 1000.0))
    return judged(found)


@pytest.mark.parametrize("number", [3, 4, 5, 16, 128])
def test_the_slow_and_the_dead_machine_are_named_and_not_each_of_their_links(number: int) -> None:
    names = {node: f"n{node}" for node in range(number)}
    assert remarks(links(number), names) == []
    slow, dead = remarks(links(number, slow=1), names), remarks(links(number, dead=2), names)
    assert [(one.name, one.status, one.nodes) for one in slow] == [("machine", "warn", ("n1",))]
    assert "all of its" in slow[0].found and "usual here are 0.1 ms and 1000 MiB/s" in slow[0].found
    assert [(one.name, one.status, one.nodes) for one in dead] == [("machine", "fail", ("n2",))]


def test_a_single_dead_or_slow_link_is_named_by_its_ends() -> None:
    names = {node: f"n{node}" for node in range(4)}
    well = links(4)
    dead = [Link(one.start, one.end, status="dead", found="refused") if one is well[0] else one for one in well]
    (found,) = remarks(judged(dead), names)
    assert found.name == "link" and found.nodes == (f"n{well[0].start}", f"n{well[0].end}")
    slow = [Link(one.start, one.end, 30.0, 900.0) if one is well[0] else one for one in well]
    (found,) = remarks(judged(slow), names)
    assert found.name == "link" and "30 ms" in found.found


def test_a_link_alone_is_slow_only_where_it_would_slow_down_any_training() -> None:
    assert [one.status for one in judged([Link(0, 1, 5.0, 100.0)])] == ["ok"]
    assert [one.status for one in judged([Link(0, 1, 40.0, 100.0)])] == ["slow"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"links": [Link(0, 1, 50.0, 1.0, "slow")]}, 0),
        ({"differences": differences(machines(3, report(code="cd")), NO_CLOCKS)}, 3),
        ({"differences": differences(machines(3, report()), {"n1": 0.0, "n3": 9.0})}, 0),
        ({"checks": remarks(links(4, dead=2), {node: f"n{node}" for node in range(4)})}, 3),
        ({"missing": {"n2": "did not connect"}}, 4),
    ],
    ids=["well", "slow", "must-agree", "clock", "dead", "missing"],
)
def test_the_exit_code_says_the_worst(changes: dict[str, Any], code: int) -> None:
    empty = {"names": {}, "reports": {}, "differences": (), "links": (), "checks": (), "missing": {}}
    assert Comparison(**{**empty, **changes}).exit_code == code


def test_secret_variables_travel_as_digests_that_differ() -> None:
    one, other = (
        shown("HF_TOKEN", value, Redactor({"HF_TOKEN": value})) for value in ("hf_aaaaaaaaaa", "hf_bbbbbbbbbb")
    )
    assert one != other
    assert one.startswith("*** (") and "aaaa" not in one
    assert shown("NCCL_ALGO", "Ring", Redactor({})) == "Ring"


def test_a_report_fits_in_a_line() -> None:
    found = report()
    found["facts"]["gpus"]["events"] = [{"text": "x" * 1000}] * 2000
    assert len(str(fitting(found))) < LINE_LIMIT


def test_files_that_a_disk_does_not_give_are_not_compared_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(data=Data(train="rows.jsonl"))
    monkeypatch.setattr(cluster, "gather", lambda load: (FACTS, Needs()))
    monkeypatch.setattr(cluster, "_FILES_S", 0.2)
    monkeypatch.setattr(cluster, "code_fingerprint", lambda: time.sleep(1))
    silent = cluster.own_report(config)
    monkeypatch.setattr(cluster, "code_fingerprint", lambda: "ab")
    well = cluster.own_report(config)
    assert well["own"]["data"] == {"data.train rows.jsonl": NOT_HERE}
    assert differences({"n1": well, "n2": silent}, NO_CLOCKS) == []
    assert [one.nodes for one in folded({"n1": well, "n2": silent}) if one.name == "files"] == [("n2",)]


def test_an_output_folder_that_is_not_there_yet_is_the_one_above_it_and_needed_only_for_checkpoints(
    tmp_path: Path,
) -> None:
    shared, own = (Output(str(tmp_path / name), needed=False) for name in ("a/run", "b/run"))
    (tmp_path / "b").mkdir()
    mark = shared.leave_mark()
    assert mark.parent == tmp_path and shared.sees(mark.name) and not own.sees(mark.name)
    assert not shared.sees("run.yaml") and not shared.sees("../" + mark.name)
    names = {0: "n1", 1: "n2", 2: "n3"}
    assert shared.remark({1: True, 2: True}, names) == []
    (found,) = shared.remark({1: True, 2: False}, names)
    assert (found.status, found.nodes) == ("warn", ("n3",))
    (found,) = replace(shared, needed=True).remark({1: False, 2: False}, names)
    assert (found.status, found.nodes) == ("fail", ("n2", "n3")) and "checkpoints" in found.found


def test_what_a_machine_only_guesses_of_its_output_folder_is_left_to_the_comparison() -> None:
    needs = Needs(configured=True, nodes=2)
    facts = Facts(host=Host(folders=(Folder("trainer.output_dir", "/runs", True, kind="ext4"),)))
    guessed = [one for one in check_all(facts, needs) if one.name == "output-folder"]
    assert [one.status for one in guessed] == ["warn"] and without_guess(guessed) == []


def test_fingerprints_change_with_the_bytes_and_not_with_the_place(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.jsonl").write_text("other" if name == "c" else "same")
    of_files = [fingerprint_of(str(tmp_path / name / "data.jsonl")) for name in ("a", "b", "c")]
    of_folders = [fingerprint_of(str(tmp_path / name)) for name in ("a", "b", "c")]
    for first, second, third in (of_files, of_folders):
        assert first == second != third
    assert fingerprint_of(str(tmp_path / "*/data.jsonl")).startswith("3 files, ")
    assert fingerprint_of("owner/data") == NOT_HERE
    assert "files" in code_fingerprint()
