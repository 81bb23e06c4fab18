"""What machines must have in common, and what they say of themselves."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from packtrain.config.schema import Optim, RunConfig, Topology
from packtrain.launch.rendezvous import Member, compare_members
from packtrain.plan.origin import shared_values


def member(node: int, nodes: int = 2, **changes: Any) -> Member:
    values = {"per_node": 2, "gpus": 0, "host": f"n{node + 1}", "addresses": (f"10.0.0.{node + 1}",)}
    values = {**values, "versions": {"torch": "2.13.0"}, "config": {"optim.learning_rate": "0.001"}, **changes}
    return Member(node=node, nodes=nodes, **values)


def test_counts_that_do_not_fit_and_of_many_machines_those_that_differ_are_named() -> None:
    for where, said, change in (
        ("topology.gpus_per_node", "(n2: 1)", {"gpus": 1}),
        ("GPUs", "n2 has some; n1 has none", {"gpus": 8}),
        ("topology.gpus_per_node", "n2 has 3; n1 has 2", {"per_node": 3}),
        ("topology.nodes", "n2 has 3; n1 has 2", {"nodes": 3}),
    ):
        error = compare_members([member(0), replace(member(1), **change)])
        assert error is not None and [problem.where for problem in error.problems] == [where]
        assert said in str(error)
    assert compare_members([member(0), member(1)]) is None
    members = [member(node, 64, host=f"n{node}") for node in range(64)]
    members[17] = replace(members[17], versions={"torch": "2.12.0"})
    assert "n17 has 2.12.0; n0, n1, n2, n3, n4, n5 and 57 more have 2.13.0" in str(compare_members(members))


def test_what_is_compared_holds_no_secret_and_nothing_of_one_machine() -> None:
    secret = {"WANDB_API_KEY": "s3cret", "NCCL_SOCKET_IFNAME": "eth0"}
    config = RunConfig(topology=Topology(node_rank=1, main_address="n1", environment=secret))
    values = shared_values(asdict(config))
    assert "s3cret" not in str(values)
    assert "topology.node_rank" not in values
    assert not any("IFNAME" in key for key in values)
    other = replace(config, topology=replace(config.topology, environment={**secret, "WANDB_API_KEY": "other"}))
    assert shared_values(asdict(other)) != values
    assert shared_values(asdict(replace(config, optim=Optim(learning_rate=0.5))))["optim.learning_rate"] == "0.5"
