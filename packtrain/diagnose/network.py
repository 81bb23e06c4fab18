"""Checks of the network of a machine: what stops runs on several machines or slows them.

What only matters between machines fails where the run is on several, and warns where no run was named.
"""

from __future__ import annotations

from collections.abc import Iterator

from packtrain.diagnose.facts import Check, Facts, RunNeeds, judged
from packtrain.plan.network_settings import FIX, SOCKETS, matching


def check_name_server(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether the name server answers quickly."""
    if facts.silence:
        yield Check("name-server", "warn", f"{facts.silence}, and torch asks it at each connection, for 10 s", FIX)


def check_interfaces(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether the interfaces that NCCL and gloo are told to use lead to other machines."""
    name, there, well = "network-interface", facts.network.interfaces, True
    outward = _outward(facts)
    for variable in SOCKETS if there else ():
        wanted = needs.variables(facts).get(variable, "")
        names = matching(wanted, [one.name for one in there], exact=variable.startswith("GLOO"))
        if wanted and not any(one.usable for one in there if one.name in names):
            what = f"{variable}={wanted}, which reaches no other machine: it is missing, down or a loopback"
            yield Check(name, needs.between, what, f"topology.environment.{variable}={outward}, or unset {variable}")
            well = False
    if well:
        told = [f"{one.name}={one.value} {one.reason}" for one in needs.network if one.value and one.name in SOCKETS]
        yield Check(name, "ok", "; ".join(told) or f"machines would talk over {outward}")


def check_infiniband(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """RDMA devices: whether their ports are active."""
    ports = facts.network.ports
    words = "; ".join(
        f"{one.device}:{one.number} ({one.layer}, {'ACTIVE' if one.active else 'DOWN'}, {one.rate or '?'} Gb/s)"
        for one in ports
    )
    down = any(not one.active and one.layer == "InfiniBand" for one in ports)
    if not ports or needs.variables(facts).get("NCCL_IB_DISABLE") == "1":
        yield Check(
            "infiniband", "ok", f"{words or 'no RDMA device'}: machines would talk by TCP over {_outward(facts)}"
        )
    elif not any(one.active for one in ports):
        fix = (
            "look at cable, switch and subnet manager (ibstat); or topology.environment.NCCL_IB_DISABLE=1 to go by TCP"
        )
        yield Check("infiniband", needs.between, f"no port is up: {words}", fix)
    else:
        yield judged("infiniband", "warn" if down else "ok", words, "look at those that are DOWN (ibstat)")


def _outward(facts: Facts) -> str:
    """The interface that most likely leads to other machines."""
    there = facts.network.interfaces
    ways = [one for one in there if one.default_route] or [one for one in there if one.usable]
    return ways[0].name if ways else "INTERFACE"


CHECKS = (check_infiniband, check_interfaces, check_name_server)
