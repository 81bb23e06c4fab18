"""The network of a machine: host names, interfaces and RDMA devices, what stops runs on several machines or slows them.

What only matters between machines fails where the run is on several, and warns where no run was named.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from packtrain.diagnose.facts import Check, Facts, HostName, NetworkFacts, RunNeeds
from packtrain.diagnose.probe import Inquiry
from packtrain.plan.interfaces import (
    FIX,
    LOOPBACK,
    SOCKETS,
    HostNetwork,
    Port,
    is_loopback,
    matching,
    read_network,
    silence_for,
)

NAME_S = 2.0
"""For a name server."""


def ask_network(inquiry: Inquiry) -> None:
    """Asks for interfaces, RDMA devices and the name server."""
    name = socket.gethostname()
    inquiry.ask("network", lambda: read_network(None))
    inquiry.ask("name server", lambda: silence_for(LOOPBACK) or silence_for(name), NAME_S)


def network_of(inquiry: Inquiry, needs: RunNeeds) -> NetworkFacts:
    """What was found, and where machine 0 of the run is."""
    lack, main = "the name server does not answer", needs.main_address
    if main:
        inquiry.ask("topology.main_address", lambda: resolved(main), NAME_S)
    found = inquiry.answer("network", HostNetwork())
    return NetworkFacts(
        main=inquiry.answer("topology.main_address", HostName(main, lack=lack)) if main else None,
        interfaces=found.interfaces,
        ports=found.ports,
        silence=inquiry.answer("name server", ""),
    )


def resolved(name: str) -> HostName:
    """What a host name resolves to here; may take as long as the name server does."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return HostName(name, lack=getattr(error, "strerror", None) or str(error))
    return HostName(name, tuple(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in found)))


def check_name_server(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether names are looked up at once."""
    if silence := facts.network.silence:
        yield Check("name-server", "warn", f"{silence}, and torch asks it at each connection, for 10 s", FIX)


def check_main_address(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether machine 0 can be found from here."""
    main, name = facts.network.main, "main-address"
    if main is None or needs.nodes == 1:
        return
    if main.lack:
        fix = "topology.main_address with a name or address that every machine knows"
        yield Check(name, "fail", f"{main.name} does not resolve here: {main.lack}", fix)
    elif all(map(is_loopback, main.addresses)):
        what = f"{main.name} is {', '.join(main.addresses)}: every machine would look for machine 0 in itself"
        meant = is_loopback(main.name)  # who writes 127.0.0.1 may have all "machines" on this one, to try things
        yield Check(name, "warn" if meant else "fail", what, "topology.main_address with machine 0's own address")
    else:
        yield Check(name, "ok", f"{main.name} is {', '.join(main.addresses)}")


def check_interfaces(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether the interfaces that NCCL and gloo are told to use lead to other machines."""
    there, well = facts.network.interfaces, True
    for variable in SOCKETS if there else ():
        wanted = needs.variables(facts).get(variable, "")
        names = matching(wanted, [one.name for one in there], exact=variable.startswith("GLOO"))
        if wanted and not any(one.usable for one in there if one.name in names):
            what = f"{variable}={wanted}, which reaches no other machine: it is missing, down or a loopback"
            fix = f"topology.environment.{variable}={_outward(facts)}, or unset {variable}"
            well = False
            yield Check("network-interface", needs.between, what, fix)
    if well:
        told = [f"{one.name}={one.value} {one.reason}" for one in needs.network if one.value and one.name in SOCKETS]
        yield Check("network-interface", "ok", "; ".join(told) or f"machines would talk over {_outward(facts)}")


def check_infiniband(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """RDMA devices: whether their ports are active and equally fast."""
    ports = facts.network.ports
    active = [one for one in ports if one.active]
    if not ports:
        yield Check("infiniband", "ok", f"no RDMA device: machines would talk by TCP over {_outward(facts)}")
    elif needs.variables(facts).get("NCCL_IB_DISABLE") == "1":
        yield Check("infiniband", "ok", f"{_named(ports)}; NCCL_IB_DISABLE=1: machines talk by TCP")
    elif not active:
        fix = (
            "look at cable, switch and subnet manager (ibstat); or topology.environment.NCCL_IB_DISABLE=1 to go by TCP"
        )
        yield Check("infiniband", needs.between, f"no port is up: {_named(ports)}", fix)
    elif any(not one.active and one.layer == "InfiniBand" for one in ports) or len({one.rate for one in active}) > 1:
        what = f"ports are down or of several speeds: {_named(ports)}"
        yield Check("infiniband", "warn", what, "look at it (ibstat), or topology.environment.NCCL_IB_HCA=DEVICES")
    else:
        yield Check("infiniband", "ok", _named(ports))


def _outward(facts: Facts) -> str:
    """The interface that other machines are most likely reached by."""
    there = facts.network.interfaces
    ways = [one for one in there if one.default_route] or [one for one in there if one.usable]
    return ways[0].name if ways else "INTERFACE"


def _named(ports: Sequence[Port]) -> str:
    return "; ".join(
        f"{one.device}:{one.number} ({one.layer}, {'ACTIVE' if one.active else 'DOWN'}, {one.rate or '?'} Gb/s)"
        for one in ports
    )


CHECKS = (check_infiniband, check_interfaces, check_name_server, check_main_address)
