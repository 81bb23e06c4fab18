"""The network of a machine: host names, interfaces and RDMA devices, what stops runs on several machines or slows them.

What only matters between machines fails where the run is on several, and warns where no run was named.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from packtrain.diagnose.facts import Check, Facts, HostName, NetworkFacts, RunNeeds, size
from packtrain.diagnose.probe import Inquiry
from packtrain.errors import CheckFailed
from packtrain.plan.interfaces import (
    FIX,
    LOOPBACK,
    SOCKETS,
    HostNetwork,
    Port,
    choose_network,
    is_loopback,
    matching,
    read_network,
    silence_for,
)

NAME_S = 3.0
"""For a name server."""
_PREFIXES = ("NCCL_", "GLOO_", "UCX_", "FI_")
_CONTAINER = "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1"


def ask_network(inquiry: Inquiry) -> None:
    """Asks for interfaces, RDMA devices and this machine's name."""
    name = socket.gethostname()
    inquiry.ask("network", lambda: read_network(None))
    inquiry.ask("/dev/infiniband", read_verbs)
    inquiry.ask("host name", lambda: resolved(name), NAME_S)
    inquiry.ask("name server", lambda: silence_for(LOOPBACK) or silence_for(name), NAME_S)


def network_of(inquiry: Inquiry, needs: RunNeeds) -> NetworkFacts:
    """What was found, and where machine 0 of the run is."""
    lack, main = "the name server does not answer", needs.main_address
    if main:
        inquiry.ask("topology.main_address", lambda: resolved(main), NAME_S)
    found = inquiry.answer("network", HostNetwork())
    return NetworkFacts(
        host=inquiry.answer("host name", HostName(socket.gethostname(), lack=lack)),
        main=inquiry.answer("topology.main_address", HostName(main, lack=lack)) if main else None,
        interfaces=found.interfaces,
        ports=found.ports,
        verbs=inquiry.answer("/dev/infiniband", ()),
        environment={name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)},
        silence=inquiry.answer("name server", ""),
        taken=taken(needs.port),
    )


def read_verbs(root: Path = Path("/")) -> tuple[str, ...]:
    """The device files that programs reach RDMA devices by."""
    return tuple(sorted(one.name for one in (root / "dev/infiniband").glob("uverbs*")))


def resolved(name: str) -> HostName:
    """What a host name resolves to here; may take as long as the name server does."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return HostName(name, lack=getattr(error, "strerror", None) or str(error))
    return HostName(name, tuple(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in found)))


def taken(port: int | None) -> str:
    """Why nobody can listen at a port, "" where one can."""
    try:
        if port:
            socket.create_server(("", port)).close()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return ""


def check_host_name(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether others would be told an address of this machine that they can reach, and names are looked up at once."""
    if facts.network.silence:
        what = f"{facts.network.silence}, and torch asks it at each connection, for 10 s"
        yield Check("name-server", "warn", what, FIX)
    host = facts.network.host
    own = {address for one in facts.network.interfaces for address in one.addresses}
    found, fix = "", f"this machine's own address for {host.name} in /etc/hosts"
    if host.lack:
        found, fix = f"{host.name} does not resolve: {host.lack}", f"a line 'ADDRESS {host.name}' in /etc/hosts"
    elif host.addresses and all(map(is_loopback, host.addresses)):
        found = f"{host.name} resolves to {', '.join(host.addresses)}, where other machines find themselves"
    elif own and host.addresses and not own.intersection(host.addresses):
        found = f"{host.name} resolves to {', '.join(host.addresses)}, which is no address of this machine"
    wanted = next((one.value for one in needs.network if one.name == "GLOO_SOCKET_IFNAME" and one.value), None)
    wanted = _variables(facts, needs).get("GLOO_SOCKET_IFNAME", wanted)
    led = wanted and any(one.usable and one.name in wanted.split(",") for one in facts.network.interfaces)
    if not found:
        yield Check("host-name", "ok", f"{host.name} is {', '.join(host.addresses) or 'not known'}")
    elif needs.configured and needs.nodes == 1:
        yield Check("host-name", "ok", f"{found} (one machine does not need it)")
    elif needs.configured and led:
        yield Check("host-name", "ok", f"{found}; GLOO_SOCKET_IFNAME={wanted} leads them here all the same")
    else:
        around = f"or topology.environment.GLOO_SOCKET_IFNAME={_outward(facts)}"
        yield Check("host-name", needs.between, found, f"{fix}, {around}")


def check_main_address(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """Whether machine 0 can be found from here, and its port is free where this is machine 0."""
    main, name = facts.network.main, "main-address"
    if facts.network.taken:
        what = f"nobody can listen at port {needs.port} here: {facts.network.taken.lower()}"
        yield Check(name, "warn", what, "is a run going on? else set another topology.main_port")
    if main is None or needs.nodes == 1:
        return
    if main.lack:
        fix = "topology.main_address with a name or address that every machine knows"
        yield Check(name, "fail", f"{main.name} does not resolve here: {main.lack}", fix)
    elif all(map(is_loopback, main.addresses)):
        of_name = f"{main.name} is {', '.join(main.addresses)}" if main.addresses != (main.name,) else main.name
        what = f"{of_name}: every machine would look for machine 0 in itself"
        meant = is_loopback(main.name)  # who writes 127.0.0.1 may have all "machines" on this one, to try things
        yield Check(name, "warn" if meant else "fail", what, "topology.main_address with machine 0's own address")
    elif not facts.network.taken:
        yield Check(name, "ok", f"{main.name} is {', '.join(main.addresses)}")


def check_interfaces(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """The interfaces and RDMA ports that NCCL and gloo are told to use, as the plan of a run judges them."""
    network, variables = facts.network, _variables(facts, needs)
    there = HostNetwork(tuple(one for one in network.interfaces if one.addresses), network.ports)
    told = [f"{one.name}={one.value} {one.reason}" for one in needs.network if one.value and one.name in SOCKETS]
    ways = [one.name for one in network.interfaces if one.default_route]
    found: list[Check] = []
    try:
        choose_network(there, variables, main_address=None, nodes=2, gpus=True)
    except CheckFailed as error:
        for one in error.problems:
            name = "infiniband" if "HCA" in one.where else "network-interface"
            found.append(Check(name, needs.between, f"{one.where.rpartition(' ')[2]}: {one.what}", one.fix))
    for variable in SOCKETS:
        wanted = variables.get(variable, "")
        names = matching(wanted, [one.name for one in there.interfaces], exact=variable.startswith("GLOO"))
        chosen = [one for one in there.interfaces if wanted and one.name in names]
        if chosen and needs.nodes > 1 and all(one.loopback for one in chosen):
            fix = f"topology.environment.{variable}={_outward(facts)}, or unset {variable}"
            what = f"{variable}={wanted}, which reaches no other machine"
            found.append(Check("network-interface", "fail", what, fix))
    if needs.nodes > 1 and there.interfaces and not (ways or told or any(variables.get(name) for name in SOCKETS)):
        what = "there is no default route: NCCL takes ib*, or the first that the system lists"
        fix = f"topology.environment.NCCL_SOCKET_IFNAME={_outward(facts)}, and the same for GLOO_SOCKET_IFNAME"
        found.append(Check("network-interface", "warn", what, fix))
    if not any(one.name == "network-interface" for one in found):
        words = "; ".join(told) or f"the default route is {', '.join(ways) or 'not known'}"
        yield Check("network-interface", "ok", words)
    yield from found


def check_infiniband(facts: Facts, needs: RunNeeds) -> Iterator[Check]:
    """RDMA devices: whether NCCL can use those that are there, and pin memory for them."""
    ports, limit = facts.network.ports, facts.host.memlock
    active = [one for one in ports if one.active]
    down = [one for one in ports if not one.active and one.layer == "InfiniBand"]
    off = _variables(facts, needs).get("NCCL_IB_DISABLE") == "1"
    look = f"look at cable, switch and subnet manager (ibstat {down[0].device})" if down else "ip link, ibstat"
    if not ports:
        yield Check("infiniband", "ok", f"no RDMA device: machines would talk by TCP over {_outward(facts)}")
    elif off and active:
        what = f"NCCL_IB_DISABLE=1 leaves {_devices(active)} unused: machines talk by TCP"
        yield Check("infiniband", "warn", what, "unset NCCL_IB_DISABLE")
    elif not active and not off:
        fix = f"{look}; or topology.environment.NCCL_IB_DISABLE=1 to go by TCP meanwhile"
        yield Check("infiniband", needs.between, f"no port is up: {_named(ports)}", fix)
    elif active and not facts.network.verbs:
        what = f"{_devices(active)} cannot be opened: there is no /dev/infiniband/uverbs* (a container without its devices?)"
        yield Check("infiniband", needs.between, what, _CONTAINER)
    elif down and any(one.layer == "InfiniBand" for one in active):
        what = f"not up: {_named(down)}; NCCL goes on without a word over {_devices(active)}"
        yield Check("infiniband", "warn", what, f"{look}; or topology.environment.NCCL_IB_HCA={_devices(active)}")
    else:
        yield Check("infiniband", "ok", _named(ports))
    words = "no limit" if limit == -1 else size(limit)
    if limit in (None, -1) or off or not active:
        yield Check("locked-memory", "ok", words if limit == -1 else f"{words}; matters with RDMA devices only")
        return
    fix = "ulimit -l unlimited (for good: '* - memlock unlimited' in /etc/security/limits.conf; docker run --ulimit memlock=-1; "
    what = f"{words}, and NCCL locks gigabytes for {_devices(active)}"
    yield Check("locked-memory", needs.between, what, f"{fix}Slurm: PropagateResourceLimitsExcept=MEMLOCK)")


def _variables(facts: Facts, needs: RunNeeds) -> Mapping[str, str]:
    """As the run's processes will have them."""
    return {**facts.network.environment, **needs.environment}


def _outward(facts: Facts) -> str:
    """The interface that other machines are most likely reached by."""
    there = facts.network.interfaces
    ways = [one for one in there if one.default_route] or [one for one in there if one.usable and not one.virtual]
    return ways[0].name if ways else "INTERFACE"


def _named(ports: Sequence[Port]) -> str:
    words = []
    for one in ports:
        rate = "" if one.rate is None else f", {one.rate:g} Gb/s"
        interfaces = f" = {', '.join(one.interfaces)}" if one.interfaces else ""
        state = f"{'RoCE' if one.layer == 'Ethernet' else one.layer}, {'ACTIVE' if one.active else 'DOWN'}"
        words.append(f"{one.device}:{one.number}{interfaces} ({state}{rate})")
    return "; ".join(words)


def _devices(ports: Sequence[Port]) -> str:
    return ",".join(dict.fromkeys(one.device for one in ports))


CHECKS = (check_infiniband, check_interfaces, check_host_name, check_main_address)
