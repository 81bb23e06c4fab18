"""Checks of the network: what stops runs on several machines, and what makes them slow. Pure.

What only matters between machines fails where the run is on several, and warns where no run was named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from packtrain.diagnose.checks.check import Check, Status, first_or, passed, size
from packtrain.diagnose.checks.needs import Needs
from packtrain.diagnose.facts.facts import Facts
from packtrain.plan.interfaces import FIX, SOCKETS, Port, hcas, is_loopback, matching


def check_host_name(facts: Facts, needs: Needs) -> Iterator[Check]:
    """Whether others would be told an address of this machine that they can reach."""
    host = facts.network.host
    own = {address for one in facts.network.interfaces for address in one.addresses}
    way_round = f"topology.environment.GLOO_SOCKET_IFNAME={_outward(facts)}"
    if host.lack:
        found, fix = (
            f"{host.name} does not resolve: {host.lack}",
            f"a line 'ADDRESS {host.name}' in /etc/hosts, or {way_round}",
        )
    elif host.addresses and all(map(is_loopback, host.addresses)):
        found = f"{host.name} resolves to {', '.join(host.addresses)}, where other machines find themselves"
        fix = f"this machine's own address for {host.name} in /etc/hosts, or {way_round}"
    elif own and host.addresses and not own.intersection(host.addresses):
        found = f"{host.name} resolves to {', '.join(host.addresses)}, which is no address of this machine"
        fix = f"this machine's own address for {host.name} in /etc/hosts or the name server, or {way_round}"
    else:
        yield passed("host-name", f"{host.name} is {', '.join(host.addresses) or 'not known'}")
        return
    told = [one.value for one in needs.network if one.name == "GLOO_SOCKET_IFNAME" and one.value]
    told += [value for name, value in _variables(facts, needs).items() if name == "GLOO_SOCKET_IFNAME"]
    told = [value for value in told if not own or _leads_out(facts, value)]
    if needs.configured and needs.nodes == 1:
        yield passed("host-name", f"{found} (one machine does not need it)")
    elif needs.configured and told:
        yield passed("host-name", f"{found}; GLOO_SOCKET_IFNAME={told[0]} leads them here all the same")
    else:
        yield Check("host-name", _between(needs), found, fix)


def check_name_server(facts: Facts, needs: Needs) -> Iterator[Check]:
    """Whether each connection of torch would wait for a name server."""
    if facts.network.silence:
        what = f"{facts.network.silence}, and torch asks it at each connection, for 10 s"
        yield Check("name-server", "warn", what, FIX)
    else:
        yield passed("name-server", "names are looked up at once")


def _leads_out(facts: Facts, wanted: str) -> bool:
    """Whether gloo would take an interface that others can reach."""
    chosen = matching(wanted, [one.name for one in facts.network.interfaces], exact=True)
    return any(one.usable and one.name in chosen for one in facts.network.interfaces)


def check_main_address(facts: Facts, needs: Needs) -> Iterator[Check]:
    """Whether machine 0 can be found from here."""
    main = facts.network.main
    if main is None or needs.nodes == 1:
        return
    if main.lack:
        fix = "topology.main_address with a name or address that every machine knows"
        yield Check("main-address", "fail", f"{main.name} does not resolve here: {main.lack}", fix)
    elif all(map(is_loopback, main.addresses)):
        of_name = f"{main.name} is {', '.join(main.addresses)}" if main.addresses != (main.name,) else main.name
        what = f"{of_name}: every machine would look for machine 0 in itself"
        meant = is_loopback(main.name)  # who writes 127.0.0.1 may have all "machines" on this one, to try things
        fix = "topology.main_address with machine 0's own address"
        yield Check("main-address", "warn" if meant else "fail", what, fix)
    else:
        yield passed("main-address", f"{main.name} is {', '.join(main.addresses)}")


def check_interfaces(facts: Facts, needs: Needs) -> Iterator[Check]:
    """The interfaces that NCCL and gloo are told to use."""
    ways = [one.name for one in facts.network.interfaces if one.default_route]
    told = [f"{one.name}={one.value} {one.reason}" for one in needs.network if one.value and one.name in SOCKETS]
    fine = "; ".join(told) or f"the default route is {', '.join(ways) or 'not known'}"
    yield from first_or("network-interface", _interfaces(facts, needs), fine)


def _interfaces(facts: Facts, needs: Needs) -> Iterator[Check]:
    status: Status = "fail" if needs.processes > 1 else "warn"
    there = [one for one in facts.network.interfaces if one.addresses]
    for name in SOCKETS:
        wanted = _variables(facts, needs).get(name)
        if not wanted or not there:
            continue
        chosen = [
            one for one in there if one.name in matching(wanted, [i.name for i in there], exact=name.startswith("GLOO"))
        ]
        fix = f"topology.environment.{name}={_outward(facts)}, or unset {name}"
        if not chosen:
            has = ", ".join(one.name for one in there)
            yield Check("network-interface", status, f"{name}={wanted}, and this machine has {has}", fix)
        elif not any(one.up for one in chosen):
            yield Check("network-interface", status, f"{name}={wanted}, which is down", fix)
        elif needs.nodes > 1 and all(map(is_loopback, (a for one in chosen for a in one.addresses))):
            what = f"{name}={wanted}, which reaches no other machine"
            yield Check("network-interface", "fail", what, fix)
    if needs.nodes > 1 and there and not any(one.default_route for one in there):
        if any(_variables(facts, needs).get(name) for name in SOCKETS) or any(one.value for one in needs.network):
            return
        fix = f"topology.environment.NCCL_SOCKET_IFNAME={_outward(facts)}, and the same for GLOO_SOCKET_IFNAME"
        yield Check(
            "network-interface",
            "warn",
            "there is no default route: NCCL takes ib*, or the first that the system lists",
            fix,
        )


def check_infiniband(facts: Facts, needs: Needs) -> Iterator[Check]:
    """RDMA devices: whether NCCL can use those that are there."""
    ports = facts.network.ports
    if not ports:
        way = _outward(facts)
        yield passed("infiniband", f"no RDMA device: machines would talk by TCP over {way}")
        return
    yield from first_or("infiniband", _rdma(facts, needs), "; ".join(_named(facts, one) for one in ports))


def _rdma(facts: Facts, needs: Needs) -> Iterator[Check]:
    network, status = facts.network, _between(needs)
    variables = _variables(facts, needs)
    active = [one for one in network.ports if one.active]
    wanted = variables.get("NCCL_IB_HCA")
    if variables.get("NCCL_IB_DISABLE") == "1":
        if active:
            what = f"NCCL_IB_DISABLE=1 leaves {_devices(active)} unused: machines talk by TCP"
            yield Check("infiniband", "warn", what, "unset NCCL_IB_DISABLE")
        return
    chosen = hcas(wanted, network.ports) if wanted else network.ports
    down = [one for one in chosen if not one.active]
    tcp = "topology.environment.NCCL_IB_DISABLE=1 to go by TCP meanwhile"
    if not chosen:
        what = f"NCCL_IB_HCA={wanted} matches no device of this machine ({_devices(network.ports)})"
        yield Check(
            "infiniband", status, what, f"topology.environment.NCCL_IB_HCA={(active or network.ports)[0].device}"
        )
    elif len(down) == len(chosen):
        yield Check(
            "infiniband", status, f"no port is up: {_all_named(facts, down)}", f"{_repair(facts, down)}; or {tcp}"
        )
    elif down and wanted:
        what = f"NCCL_IB_HCA={wanted} names ports that are not up: {_all_named(facts, down)}"
        yield Check(
            "infiniband",
            status,
            what,
            f"{_repair(facts, down)}; or topology.environment.NCCL_IB_HCA={_devices(active)}",
        )
    elif fabric := [one for one in down if one.layer == "InfiniBand" and any(up.layer == one.layer for up in active)]:
        what = f"not up: {_all_named(facts, fabric)}; NCCL goes on without a word over {_devices(active)}"
        yield Check(
            "infiniband",
            "warn",
            what,
            f"{_repair(facts, fabric)}; or topology.environment.NCCL_IB_HCA={_devices(active)}",
        )
    rates = {one.rate for one in chosen if one.active and one.layer == "InfiniBand" and one.rate}
    if len(rates) > 1:
        what = f"ports of different rates: {_all_named(facts, [one for one in chosen if one.active])}"
        yield Check("infiniband", "warn", what, f"topology.environment.NCCL_IB_HCA={_devices(_fastest(chosen))}")
    if active and not network.verbs:
        what = f"{_devices(active)} cannot be opened: there is no /dev/infiniband/uverbs* (a container without its devices?)"
        yield Check(
            "infiniband", status, what, "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1"
        )


def check_memlock(facts: Facts, needs: Needs) -> Iterator[Check]:
    """RDMA pins memory: it needs leave to."""
    limit = facts.host.limits.memlock
    words = "no limit" if limit == -1 else size(limit)
    rdma = any(one.active for one in facts.network.ports) and _variables(facts, needs).get("NCCL_IB_DISABLE") != "1"
    if limit in (None, -1) or not rdma:
        yield passed("locked-memory", words if rdma or limit == -1 else f"{words}; matters with RDMA devices only")
        return
    what = f"{words}, and NCCL locks gigabytes for {_devices([one for one in facts.network.ports if one.active])}"
    fix = "ulimit -l unlimited (for good: '* - memlock unlimited' in /etc/security/limits.conf; docker run --ulimit memlock=-1; "
    yield Check("locked-memory", _between(needs), what, fix + "Slurm: PropagateResourceLimitsExcept=MEMLOCK)")


def _between(needs: Needs) -> Status:
    return "fail" if needs.nodes > 1 else "warn"


def _variables(facts: Facts, needs: Needs) -> Mapping[str, str]:
    """As the run's processes will have them."""
    return {**facts.network.environment, **needs.environment}


def _outward(facts: Facts) -> str:
    """The interface that other machines are most likely reached by."""
    there = facts.network.interfaces
    ways = [one for one in there if one.default_route] or [one for one in there if one.usable and not one.virtual]
    return ways[0].name if ways else "INTERFACE"


def _named(facts: Facts, port: Port) -> str:
    layer = "RoCE" if port.layer == "Ethernet" else port.layer
    where = f" = {', '.join(port.interfaces)}" if port.interfaces else ""
    rate = "" if port.rate is None or not port.active else f", {port.rate:g} Gb/s"
    return f"{port.device}:{port.number}{where} ({layer}, {_state(facts, port)}{rate})"


def _all_named(facts: Facts, ports: Sequence[Port]) -> str:
    return "; ".join(_named(facts, one) for one in ports)


def _state(facts: Facts, port: Port) -> str:
    known = facts.network.states.get(f"{port.device}:{port.number}", "ACTIVE" if port.active else "DOWN")
    return "ACTIVE" if port.active else known


def _devices(ports: Sequence[Port]) -> str:
    return ",".join(dict.fromkeys(one.device for one in ports))


def _fastest(ports: Sequence[Port]) -> list[Port]:
    most = max(one.rate or 0 for one in ports)
    return [one for one in ports if one.active and (one.rate or 0) == most]


def _repair(facts: Facts, down: Sequence[Port]) -> str:
    states = [_state(facts, one) for one in down]
    if any(state.startswith(("INIT", "ARMED")) for state in states):
        return "the fabric's subnet manager has not set the port up (sminfo)"
    if any("Disabled" in state for state in states):
        return f"ibportstate -C {down[0].device} {down[0].number} enable, or ip link set up"
    return f"look at the cable and switch of {down[0].device} (ibstat {down[0].device})"
