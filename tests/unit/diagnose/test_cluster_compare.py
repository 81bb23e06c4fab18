"""What is compared of several machines, in tables, without any machine."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from packtrain.diagnose.cluster import Traits, exit_code_for, find_differences, group_checks, traits_of
from packtrain.diagnose.machine import Driver, Facts, Gpu, Host, Torch

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


@pytest.mark.parametrize(
    "other",
    [traits(), traits(torch=Torch()), traits(variables={"NCCL_IB_HCA": "m"})],
    ids=["alike", "a torch that was too slow to answer", "its own interface"],
)
def test_machines_that_are_alike_differ_in_nothing(other: Traits) -> None:
    assert find_differences(machines(4, other)) == []


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
