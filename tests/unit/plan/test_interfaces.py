"""What NCCL and gloo are told of the network, as tables: machines of many kinds, and what their users had set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from packtrain.config.schema import Batch, RunConfig, Topology
from packtrain.errors import CheckFailed
from packtrain.launch.rendezvous import own_addresses
from packtrain.plan.interfaces import (
    HostNetwork,
    Interface,
    Port,
    choose_network,
    default_interface,
    own_address_towards,
    read_network,
)
from packtrain.plan.launch_plan import LaunchPlan, plan_launch
from packtrain.plan.surroundings import Surroundings

LO = Interface("lo", ("127.0.0.1", "::1"))
ETH0 = Interface("eth0", ("10.0.0.5", "fe80::5"), speed=25_000, default_route=True)
ETH1 = Interface("eth1", ("192.168.7.5",), speed=100_000)
DOCKER = Interface("docker0", ("172.17.0.1",), speed=10_000)
IB0 = Interface("ib0", ("10.9.0.5",), speed=400_000)
DOWN = Interface("eth9", ("10.3.0.5",), up=False)
NO_ADDRESS = Interface("eth8", ())
V6 = Interface("ens3", ("2001:db8::5", "fe80::1"), default_route=True)
BOND = Interface("br-ex", ("10.0.0.7",))

COMPUTE = tuple(Port(f"mlx5_{number}", rate=400) for number in range(8))
STORAGE = tuple(Port(f"mlx5_{number}", rate=200, layer="Ethernet", interfaces=(f"eth{number}",)) for number in (8, 9))
ROCE = tuple(Port(f"mlx5_{number}", rate=400, layer="Ethernet") for number in range(8))


def chosen(
    interfaces: tuple[Interface, ...], own: str | None, main: str | None = "n1", **more
) -> dict[str, str | None]:
    ports = more.pop("ports", ())
    network = HostNetwork((LO, *interfaces), ports, own)
    settings = choose_network(network, more.pop("env", {}), main_address=main, nodes=more.pop("nodes", 2), **more)
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
        ((ETH0, IB0), "10.0.0.5", "10.0.0.1", "eth0"),
        ((V6,), "2001:db8::5", "2001:db8::1", "ens3"),
        ((BOND, ETH1), "10.0.0.7", "10.0.0.1", "br-ex"),
        ((DOCKER, ETH0, ETH1), "127.0.1.1", "n1", "eth0"),
        ((DOCKER, ETH1), "127.0.0.1", "n1", "eth1"),
        ((V6,), "::1", "n1", "ens3"),
        ((ETH1, IB0), "127.0.0.1", "n1", None),
        ((), "127.0.0.1", "n1", None),
        ((ETH0,), "10.0.0.99", "n1", None),
        ((ETH0,), None, "n1", None),
        ((ETH0,), None, None, None),
        ((ETH0,), "127.0.0.1", "127.0.0.1", None),
        ((ETH0,), "::1", "localhost", None),
    ],
    ids=[
        "laptop-with-docker",
        "two-networks",
        "main-on-ipoib",
        "ipoib-beside",
        "ipv6-only",
        "bridge-that-leads-there",
        "own-name-is-loopback",
        "own-name-is-loopback-no-default-route",
        "own-name-is-loopback-v6",
        "own-name-is-loopback-and-two-ways",
        "nothing-but-loopback",
        "address-of-no-interface",
        "name-unknown",
        "main-unknown",
        "all-on-this-machine",
        "all-on-localhost",
    ],
)
def test_processes_talk_over_the_interface_that_leads_to_the_first_machine(
    interfaces: tuple[Interface, ...], own: str | None, main: str | None, expected: str | None
) -> None:
    assert chosen(interfaces, own, main) == sockets(expected)


def test_one_machine_needs_nothing_and_one_without_gpus_only_gloo() -> None:
    assert chosen((ETH0,), "10.0.0.5", nodes=1, ports=COMPUTE) == {}
    assert chosen((ETH0,), "10.0.0.5", gpus=False, ports=(*COMPUTE, *STORAGE)) == {"GLOO_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize(
    ("ports", "value", "words"),
    [
        (COMPUTE, None, "8 active InfiniBand ports of 400 Gbit/s, all alike: NCCL uses all of them"),
        (
            (*COMPUTE, *STORAGE),
            "=" + ",".join(f"mlx5_{number}:1" for number in range(8)),
            "8 active InfiniBand ports of 400 Gbit/s, without mlx5_8, mlx5_9",
        ),
        (
            (*COMPUTE[:2], Port("mlx5_2", active=False, rate=10), Port("mlx5_3", rate=200)),
            "=mlx5_0:1,mlx5_1:1",
            "2 active InfiniBand ports of 400 Gbit/s, without mlx5_2, mlx5_3",
        ),
        ((Port("mlx4_0", 1, active=False), Port("mlx4_0", 2, rate=56)), "=mlx4_0:2", "1 active InfiniBand port of 56"),
        (ROCE, None, "8 active RoCE ports: NCCL chooses"),
        ((Port("mlx5_0", active=False),), None, "no port of mlx5_0 is active: NCCL talks by TCP"),
    ],
    ids=["dgx", "dgx-with-storage", "port-down", "second-port", "roce", "all-down"],
)
def test_nccl_is_told_its_rdma_devices_only_where_some_should_not_carry_the_training(
    ports: tuple[Port, ...], value: str | None, words: str
) -> None:
    network = HostNetwork((LO, ETH0), ports, "10.0.0.5")
    (setting,) = [one for one in choose_network(network, {}, main_address="n1", nodes=2) if one.name == "NCCL_IB_HCA"]
    assert setting.value == value
    assert setting.reason.startswith(words) or words in setting.reason


def test_devices_with_a_plugin_of_their_own_are_left_to_it() -> None:
    assert "NCCL_IB_HCA" not in chosen((ETH0,), "10.0.0.5", ports=(Port("rdmap0", rate=100, layer="Unspecified"),))


def test_what_the_user_has_set_wins_and_is_shown_with_where_it_comes_from() -> None:
    network = HostNetwork((LO, ETH0, ETH1), (*COMPUTE, *STORAGE), "10.0.0.5")
    env = {"NCCL_SOCKET_IFNAME": "eth", "NCCL_IB_HCA": "^mlx5_8:1,mlx5_9"}
    asked = {"GLOO_SOCKET_IFNAME": "eth1"}
    settings = choose_network(network, env, main_address="n1", nodes=2, asked=asked)
    assert [(one.name, one.value, one.reason) for one in settings] == [
        ("NCCL_SOCKET_IFNAME", None, "eth, by environment variable NCCL_SOCKET_IFNAME"),
        ("GLOO_SOCKET_IFNAME", None, "eth1, by topology.environment.GLOO_SOCKET_IFNAME"),
        ("NCCL_IB_HCA", None, "^mlx5_8:1,mlx5_9, by environment variable NCCL_IB_HCA"),
    ]
    assert chosen((ETH0,), "10.0.0.5", ports=(*COMPUTE, *STORAGE), env={"NCCL_IB_DISABLE": "1"}) == sockets("eth0")
    assert chosen((ETH0,), "10.0.0.5", env={"GLOO_SOCKET_IFNAME": ""}) == sockets("eth0")


@pytest.mark.parametrize(
    ("env", "where", "what"),
    [
        (
            {"GLOO_SOCKET_IFNAME": "ib0"},
            "environment variable GLOO_SOCKET_IFNAME",
            "ib0 is not there, or down: this machine has ",
        ),
        ({"GLOO_SOCKET_IFNAME": "eth0,ib0"}, "environment variable GLOO_SOCKET_IFNAME", "ib0 is not there"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "environment variable GLOO_SOCKET_IFNAME", "eth is not there"),
        ({"GLOO_SOCKET_IFNAME": "eth9"}, "environment variable GLOO_SOCKET_IFNAME", "eth9 is not there, or down"),
        ({"GLOO_SOCKET_IFNAME": "eth8"}, "environment variable GLOO_SOCKET_IFNAME", "eth8 is not there, or down"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "environment variable NCCL_SOCKET_IFNAME", "ib is not there"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "environment variable NCCL_SOCKET_IFNAME", "=eth is not there"),
        ({"GLOO_SOCKET_IFNAME": "=eth0"}, "environment variable GLOO_SOCKET_IFNAME", "=eth0 is not there"),
        ({"NCCL_SOCKET_IFNAME": "^eth,lo"}, "environment variable NCCL_SOCKET_IFNAME", "^eth,lo is not there"),
        ({"NCCL_IB_HCA": "mlx4"}, "environment variable NCCL_IB_HCA", "mlx4 means none of this machine's RDMA ports"),
        ({"NCCL_IB_HCA": "=mlx5:1"}, "environment variable NCCL_IB_HCA", "=mlx5:1 means none of"),
        ({"NCCL_IB_HCA": "mlx5_0:3"}, "environment variable NCCL_IB_HCA", "mlx5_0:3 means none of"),
        ({"NCCL_IB_HCA": "^mlx5"}, "environment variable NCCL_IB_HCA", "^mlx5 means none of"),
    ],
)
def test_a_value_that_names_what_is_not_there_is_refused_before_anything_starts(
    env: dict[str, str], where: str, what: str
) -> None:
    network = HostNetwork((LO, ETH0, DOWN, NO_ADDRESS), COMPUTE, "10.0.0.5")
    with pytest.raises(CheckFailed) as refused:
        choose_network(network, env, main_address="n1", nodes=2)
    (problem,) = refused.value.problems
    assert problem.where == where
    assert problem.what.startswith(what)
    if "SOCKET" in where:
        assert "eth0 (10.0.0.5)" in problem.what


def test_a_value_of_the_config_is_blamed_by_its_key_and_all_problems_are_told_at_once() -> None:
    with pytest.raises(CheckFailed) as refused:
        chosen((ETH0,), "10.0.0.5", env={"NCCL_SOCKET_IFNAME": "ib"}, asked={"GLOO_SOCKET_IFNAME": "ib0"})
    assert [one.where for one in refused.value.problems] == [
        "environment variable NCCL_SOCKET_IFNAME",
        "topology.environment.GLOO_SOCKET_IFNAME",
    ]


@pytest.mark.parametrize("value", ["^mlx5_0:1", "^=mlx5_0", "mlx5_0:1,mlx5_0:7", "=mlx5_1", "mlx5", "^mlx4"])
def test_a_list_that_leaves_some_rdma_ports_is_left_alone(value: str) -> None:
    assert chosen((ETH0,), "10.0.0.5", ports=COMPUTE[:2], env={"NCCL_IB_HCA": value})["NCCL_IB_HCA"] is None


def test_a_machine_without_rdma_ports_may_leave_some_out_but_name_none() -> None:
    assert "NCCL_IB_HCA" not in chosen((ETH0,), "10.0.0.5", env={"NCCL_IB_HCA": "^mlx5_8"})
    with pytest.raises(CheckFailed, match="there is none"):
        chosen((ETH0,), "10.0.0.5", env={"NCCL_IB_HCA": "mlx5_8"})


@pytest.mark.parametrize("value", ["eth", "=eth0", "^docker,lo", "ib,eth", "eth0"])
def test_the_forms_of_nccls_lists_are_understood(value: str) -> None:
    assert chosen((DOCKER, ETH0), "10.0.0.5", env={"NCCL_SOCKET_IFNAME": value})["NCCL_SOCKET_IFNAME"] is None


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


ROUTE = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
wlan0 00000000 0100000A 0003 0 0 600 00000000 0 0 0
eth0 00000000 0100000A 0003 0 0 100 00000000 0 0 0
ib0 00000000 0100000A 0002 0 0 0 00000000 0 0 0
eth1 0000000A 00000000 0001 0 0 0 00FFFFFF 0 0 0"""
ROUTE_V6 = f"""{"0" * 32} 00 {"0" * 32} 00 {"0" * 32} 00000000 00000001 00000000 80200001 lo
fd{"0" * 30} 40 {"0" * 32} 00 {"0" * 32} 00000100 00000001 00000000 00000001 ens3
{"0" * 32} 00 {"0" * 32} 00 fd{"0" * 29}1 00000400 00000002 00000000 00000003 ens4"""


def test_the_network_is_read_from_the_kernels_files(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/net/route": ROUTE,
            "sys/class/net/eth0/speed": "25000",
            "sys/class/net/eth0/mtu": "9000",
            "sys/class/net/eth0/operstate": "up",
            "sys/class/net/wlan0/speed": "-1",
            "sys/class/net/wlan0/operstate": "down",
            "sys/class/net/lo/operstate": "unknown",
            "sys/class/net/bonding_masters": "",
            "sys/class/infiniband/mlx5_10/ports/1/state": "1: DOWN",
            "sys/class/infiniband/mlx5_10/ports/1/rate": "10 Gb/sec (4X SDR)",
            "sys/class/infiniband/mlx5_10/ports/1/link_layer": "Ethernet",
            "sys/class/infiniband/mlx5_10/device/net/eth5/mtu": "1500",
            "sys/class/infiniband/mlx5_2/ports/1/state": "4: ACTIVE",
            "sys/class/infiniband/mlx5_2/ports/1/rate": "400 Gb/sec (4X NDR)",
            "sys/class/infiniband/mlx5_2/ports/1/link_layer": "InfiniBand",
        },
    )
    network = read_network("127.0.0.1", root=tmp_path, addresses={"lo": ("127.0.0.1",), "eth0": ("10.0.0.5",)})
    assert network.interfaces == (
        Interface("eth0", ("10.0.0.5",), True, 25_000, 9_000, True),
        Interface("lo", ("127.0.0.1",)),
        Interface("wlan0", (), False),
    )
    assert network.ports == (
        Port("mlx5_10", active=False, rate=10, layer="Ethernet", interfaces=("eth5",)),
        Port("mlx5_2", rate=400),
    )
    assert network.own_address == "127.0.0.1"


def test_the_default_route_is_the_preferred_one_of_ipv4_else_of_ipv6() -> None:
    assert default_interface(ROUTE, ROUTE_V6) == "eth0"
    assert default_interface("", ROUTE_V6) == "ens4"
    assert default_interface("", "") is None


def test_a_machine_that_tells_nothing_has_no_network(tmp_path: Path) -> None:
    assert read_network(None, root=tmp_path, addresses={}) == HostNetwork()
    assert own_address_towards("no-such-host.invalid") is None


@pytest.mark.parametrize("error", [OSError(1, "no"), RuntimeError("no"), psutil.AccessDenied()])
def test_a_machine_that_hides_its_addresses_can_still_be_planned_for(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise error

    monkeypatch.setattr(psutil, "net_if_addrs", refuse)
    seen = read_network("127.0.0.1")
    assert (seen.interfaces, seen.own_address) == ((), "127.0.0.1")
    assert own_addresses() == ()
    chosen = choose_network(seen, {"GLOO_SOCKET_IFNAME": "eth7"}, main_address="10.0.0.1", nodes=2, gpus=False)
    assert [one.value for one in chosen] == [None]


def test_this_machine_can_be_read() -> None:
    network = read_network("localhost")
    assert any(one.loopback for one in network.interfaces)
    assert network.own_address in ("127.0.0.1", "::1")


def planned(topology: Topology, env: dict[str, str] | None = None, gpus: int = 0) -> LaunchPlan:
    network = HostNetwork((LO, ETH0), (), "10.0.0.5")
    return plan_launch(
        RunConfig(topology=topology, batch=Batch(examples_per_step=8)),
        Surroundings(env=env or {}, gpus=gpus, network=lambda main: network),
    )


def by_hand(**keys: Any) -> Topology:
    return Topology(kind="manual", nodes=2, gpus_per_node=2, main_address="n1", **keys)


def test_the_plan_tells_this_machines_processes_and_shows_the_reason() -> None:
    plan = planned(by_hand(node_rank=1))
    assert "GLOO_SOCKET_IFNAME" not in plan.commands[0].env  # it looks at its own network
    assert plan.command.env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert [(one.name, one.reason) for one in plan.network] == [
        ("GLOO_SOCKET_IFNAME", "leads to n1, with the address 10.0.0.5")
    ]
    with_gpus = planned(by_hand(node_rank=0), gpus=2)
    assert with_gpus.command.env["NCCL_SOCKET_IFNAME"] == "=eth0"


def test_the_plan_leaves_the_network_alone_where_the_user_has_set_it_or_nothing_starts_here() -> None:
    plan = planned(by_hand(node_rank=0, environment={"GLOO_SOCKET_IFNAME": "eth0"}))
    assert plan.command.env["GLOO_SOCKET_IFNAME"] == "eth0"
    assert [one.value for one in plan.network] == [None]
    assert "GLOO_SOCKET_IFNAME" not in planned(by_hand(node_rank=0), {"GLOO_SOCKET_IFNAME": "eth0"}).command.env
    assert planned(by_hand()).network == ()  # it is not known which machine this is
    assert planned(Topology(gpus_per_node=2)).network == ()
    with pytest.raises(CheckFailed, match="ib0 is not there"):
        planned(by_hand(node_rank=0), {"GLOO_SOCKET_IFNAME": "ib0"})


def test_a_process_of_another_launch_over_several_machines_is_told_too() -> None:
    env = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    plan = planned(Topology(), {**env, "MASTER_ADDR": "n1"})
    assert plan.in_process
    assert plan.command.env["GLOO_SOCKET_IFNAME"] == "eth0"
