"""What NCCL and gloo are told of the network, as tables: machines of many kinds, and what their users had set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packtrain.config.schema import Batch, RunConfig, Topology
from packtrain.errors import CheckFailed
from packtrain.plan import network_settings as interfaces
from packtrain.plan.launch_plan import LaunchPlan, plan_launch
from packtrain.plan.network_settings import HostNetwork, Interface, Port, choose_network, read_network
from packtrain.plan.surroundings import Surroundings

LO = Interface("lo", ("127.0.0.1", "::1"))
ETH0 = Interface("eth0", ("10.0.0.5", "fe80::5"), default_route=True)
ETH1 = Interface("eth1", ("192.168.7.5",))
DOCKER = Interface("docker0", ("172.17.0.1",))
IB0 = Interface("ib0", ("10.9.0.5",))
DOWN = Interface("eth9", ("10.3.0.5",), up=False)
NO_ADDRESS = Interface("eth8", ())
V6 = Interface("ens3", ("2001:db8::5", "fe80::1"), default_route=True)


def chosen(
    interfaces: tuple[Interface, ...], own: str | None, main: str | None = "n1", **more: Any
) -> dict[str, str | None]:
    network = HostNetwork((LO, *interfaces), (), own)
    settings = choose_network(network, more.pop("env", {}), main_address=main, **more)
    assert all(one.reason for one in settings)
    return {one.name: one.value for one in settings}


def sockets(name: str | None) -> dict[str, str | None]:
    return {"NCCL_SOCKET_IFNAME": name and f"={name}", "GLOO_SOCKET_IFNAME": name}


@pytest.mark.parametrize(
    ("interfaces", "own", "main", "expected"),
    [
        ((DOCKER, ETH0), "10.0.0.5", "10.0.0.1", "eth0"),
        ((ETH0, ETH1), "192.168.7.5", "192.168.7.1", "eth1"),
        ((ETH0, IB0), "10.9.0.5", "10.9.0.1", "ib0"),
        ((V6,), "2001:db8::5", "2001:db8::1", "ens3"),
        ((DOCKER, ETH0, ETH1), "127.0.1.1", "n1", "eth0"),
        ((V6,), "::1", "n1", "ens3"),
        ((ETH1, IB0), "127.0.0.1", "n1", None),
        ((), "127.0.0.1", "n1", None),
        ((ETH0,), "10.0.0.99", "n1", None),
        ((ETH0,), None, "n1", None),
        ((ETH0,), None, None, None),
        ((ETH0,), "127.0.0.1", "127.0.0.1", None),
        ((ETH0,), "::1", "localhost", None),
    ],
)
def test_processes_talk_over_the_interface_that_leads_to_the_first_machine(interfaces, own, main, expected):
    assert chosen(interfaces, own, main) == sockets(expected)


def test_what_the_user_has_set_wins_and_is_shown_with_where_it_comes_from() -> None:
    network = HostNetwork((LO, ETH0, ETH1), (), "10.0.0.5")
    asked = {"GLOO_SOCKET_IFNAME": "eth1"}
    settings = choose_network(network, {"NCCL_SOCKET_IFNAME": "eth"}, main_address="n1", asked=asked)
    assert {item.name: (item.value, item.reason) for item in settings} == {
        "NCCL_SOCKET_IFNAME": (None, "eth, by environment variable NCCL_SOCKET_IFNAME"),
        "GLOO_SOCKET_IFNAME": (None, "eth1, by topology.environment.GLOO_SOCKET_IFNAME"),
    }
    assert chosen((ETH0,), "10.0.0.5", env={"GLOO_SOCKET_IFNAME": ""}) == sockets("eth0")
    assert chosen((ETH0,), "10.0.0.5", gpus=False) == {"GLOO_SOCKET_IFNAME": "eth0"}


def test_a_value_that_names_what_is_not_there_is_refused_before_anything_starts() -> None:
    network = HostNetwork((LO, ETH0, DOWN, NO_ADDRESS), (), "10.0.0.5")
    # gloo takes whole names; eth9 is down and eth8 has no address
    for library, values in {"GLOO": ("ib0", "eth", "eth9", "eth8"), "NCCL": ("=eth", "^eth,lo")}.items():
        for variable, value in ((f"{library}_SOCKET_IFNAME", value) for value in values):
            with pytest.raises(CheckFailed) as refused:
                choose_network(network, {variable: value}, main_address="n1")
            (problem,) = refused.value.problems
            assert variable in problem.where and value in problem.what and "eth0 (10.0.0.5)" in problem.what


def test_rdma_ports_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    ports = {
        "mlx5_10": {"state": "1: DOWN", "rate": "10 Gb/sec (4X SDR)", "link_layer": "Ethernet"},
        "mlx5_2": {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"},
    }
    for device, files in ports.items():
        (folder := tmp_path / f"sys/class/infiniband/{device}/ports/1").mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")
    down, up = Port("mlx5_10", active=False, rate=10, layer="Ethernet"), Port("mlx5_2", rate=400)
    assert read_network(None, root=tmp_path).ports == (down, up)


def test_the_interface_that_leads_far_away_has_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "own_address_towards", {"203.0.113.1": "10.0.0.5"}.get)
    monkeypatch.setattr(interfaces, "addresses_by_interface", lambda: {"lo": ("127.0.0.1",), "eth0": ("10.0.0.5",)})
    found = read_network(None).interfaces
    assert {one.name: one.default_route for one in found} == {"lo": False, "eth0": True}


def planned(topology: Topology, env: dict[str, str] | None = None, gpus: int = 0) -> LaunchPlan:
    network = HostNetwork((LO, ETH0), (), "10.0.0.5")
    return plan_launch(
        RunConfig(topology=topology, batch=Batch(examples_per_step=8)),
        Surroundings(env=env or {}, gpus=gpus, network=lambda main: network),
    )


def by_hand(**keys: Any) -> Topology:
    return Topology(kind="manual", nodes=2, gpus_per_node=2, main_address="n1", **keys)


def test_the_plan_tells_this_machines_processes_the_reason_and_a_process_of_another_launch_too() -> None:
    plan = planned(by_hand(node_rank=1))
    assert "GLOO_SOCKET_IFNAME" not in plan.commands[0].env  # it looks at its own network
    assert plan.command.env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert [(one.name, one.reason) for one in plan.network] == [
        ("GLOO_SOCKET_IFNAME", "leads to n1, with the address 10.0.0.5")
    ]
    with_gpus = planned(by_hand(node_rank=0), gpus=2)
    assert with_gpus.command.env["NCCL_SOCKET_IFNAME"] == "=eth0"
    env = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    plan = planned(Topology(), {**env, "MASTER_ADDR": "n1"})
    assert plan.in_process and plan.command.env["GLOO_SOCKET_IFNAME"] == "eth0"


def test_the_plan_leaves_the_network_alone_where_the_user_has_set_it_or_nothing_starts_here() -> None:
    plan = planned(by_hand(node_rank=0, environment={"GLOO_SOCKET_IFNAME": "eth0"}))
    assert plan.command.env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert [one.value for one in plan.network] == [None]
    assert "GLOO_SOCKET_IFNAME" not in planned(by_hand(node_rank=0), {"GLOO_SOCKET_IFNAME": "eth0"}).command.env
    assert planned(by_hand()).network == ()  # it is not known which machine this is
    assert planned(Topology(gpus_per_node=2)).network == ()
    with pytest.raises(CheckFailed, match="ib0 is not there"):
        planned(by_hand(node_rank=0), {"GLOO_SOCKET_IFNAME": "ib0"})
