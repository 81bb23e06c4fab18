"""What NCCL and gloo are told of the network, only where they would choose otherwise than they must; each with its reason.

gloo takes the address that the machine's own name resolves to, often 127.0.0.1, and then nobody reaches it. NCCL takes an
interface called ib*, else the first that the system lists (docker* and lo only where there is no other), wherever it leads,
and all RDMA ports that are active, those of storage among them. Both are told the interface on the way to the first machine,
which is known to lead there. What a user has set is read as NCCL reads it, checked and left alone. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from packtrain.errors import CheckFailed, Problem
from packtrain.plan.network.interfaces import Interface, Network, Port, is_loopback

SOCKETS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_MUCH_FASTER = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """An environment variable and why it is set to `value`, or, where that is None, is left as it is."""

    name: str
    value: str | None
    reason: str


def choose_network(
    network: Network,
    env: Mapping[str, str],
    *,
    main_address: str | None,
    nodes: int,
    asked: Mapping[str, str] | None = None,
    gpus: bool = True,
) -> list[Setting]:
    """The network settings of this machine's processes, one of `nodes`; none where it is the only one.

    `env` is what the user has exported, `asked` (topology.environment) wins over it; without `gpus` NCCL is not told
    anything. Raises CheckFailed where one of theirs names what this machine does not have.
    """
    if nodes == 1:
        return []
    given = {**env, **(asked or {})}
    if problems := list(_impossible(network, given, asked or {}, gpus=gpus)):
        raise CheckFailed(problems)
    wanted = [name for name in SOCKETS if gpus or name.startswith("GLOO")]
    settings = [_given(name, given[name], asked or {}) for name in wanted if given.get(name)]
    free = [name for name in wanted if not given.get(name)]
    interface, reason = _way(network, main_address)
    if interface is None:
        settings += [Setting(name, None, reason) for name in free]
    else:
        for name in free:
            nccl = name.startswith("NCCL")
            value = f"={interface.name}" if nccl else interface.name  # = is NCCL's word for exactly this one
            settings.append(Setting(name, value, reason + (_faster(network, interface) if nccl else "")))
    return settings + (_rdma(network.ports, given, asked or {}) if gpus else [])


def _way(network: Network, main_address: str | None) -> tuple[Interface | None, str]:
    """The interface on the way to the first machine, and the reason in words; or None, and why none is chosen."""
    if main_address is None:
        return None, "the first machine is not known"
    own = network.own_address
    if is_loopback(main_address):
        return None, f"{main_address} is every machine's own address: all processes are taken to be on this one"
    if own is None:
        return None, f"no way to {main_address} is known here"
    if not is_loopback(own):
        for one in network.interfaces:
            if own in one.addresses:
                return one, f"leads to {main_address}, with the address {own}"
        return None, f"the way to {main_address} leaves from {own}, which no interface has"
    here = f"{main_address} is 127.0.0.1 on this machine, which no other reaches"
    if not own.startswith("127."):
        here = here.replace("127.0.0.1", own)
    for one in network.interfaces:
        if one.default_route and one.usable:
            return one, f"has the default route ({here})"
    usable = [one for one in network.interfaces if one.usable and not one.virtual]
    if len(usable) == 1:
        return usable[0], f"is the only one that leads anywhere ({here})"
    return None, f"{here}, and which of {_names(usable) or 'no interfaces'} leads to the others is not known"


def _faster(network: Network, chosen: Interface) -> str:
    """A remark on interfaces that are much faster: whether they lead to the other machines cannot be seen from here."""
    if any(port.active for port in network.ports) or not chosen.speed:
        return ""
    faster = [
        one
        for one in network.interfaces
        if one.usable and not one.virtual and (one.speed or 0) >= _MUCH_FASTER * chosen.speed
    ]
    if not faster:
        return ""
    best = max(faster, key=lambda one: one.speed or 0)
    return (
        f"; {best.name} is faster ({best.speed} Mbit/s in place of {chosen.speed}): if all machines are on its network, "
        "use that address as topology.main_address"
    )


def _rdma(ports: Sequence[Port], given: Mapping[str, str], asked: Mapping[str, str]) -> list[Setting]:
    """NCCL_IB_HCA, where not all ports that there are should carry the training."""
    name = "NCCL_IB_HCA"
    ports = [one for one in ports if one.layer in ("InfiniBand", "Ethernet")]  # others have plugins of their own
    active = [one for one in ports if one.active]
    if not ports or given.get("NCCL_IB_DISABLE") == "1":
        return []
    if given.get(name):
        return [_given(name, given[name], asked)]
    if not active:
        return [Setting(name, None, f"no port of {_listed(ports)} is active: NCCL talks by TCP")]
    fabric = [one for one in active if one.layer == "InfiniBand"]
    rate = max((one.rate or 0 for one in fabric), default=0)
    best = [one for one in fabric if (one.rate or 0) == rate]
    if not best:
        rates = {one.rate for one in active}
        alike = "all alike" if len(rates) == 1 else "of several speeds"
        return [
            Setting(name, None, f"{_count(active, 'Ethernet (RoCE)')}, {alike}: NCCL chooses by what is near a GPU")
        ]
    speed = f" of {rate:g} Gbit/s" if rate else ""
    if len(best) == len(ports):
        return [Setting(name, None, f"{_count(best, 'InfiniBand')}{speed}, all alike: NCCL uses all of them")]
    others = "; ".join(f"{one.device} {_why_not(one, rate)}" for one in ports if one not in best)
    value = "=" + ",".join(f"{one.device}:{one.number}" for one in best)
    return [Setting(name, value, f"{_count(best, 'InfiniBand')}{speed}, without {others}")]


def _why_not(port: Port, rate: float) -> str:
    if not port.active:
        return "(down)"
    if port.layer != "InfiniBand":
        return f"(Ethernet{', ' + ', '.join(port.interfaces) if port.interfaces else ''})"
    return f"({port.rate or 0:g} Gbit/s)" if rate else "(another speed)"


def _impossible(
    network: Network, given: Mapping[str, str], asked: Mapping[str, str], *, gpus: bool
) -> Iterator[Problem]:
    """What the user's own values name that is not there."""
    usable = [one.name for one in network.interfaces if one.up and one.addresses]
    there = ", ".join(f"{one.name} ({one.addresses[0]})" for one in network.interfaces if one.name in usable)
    for name in SOCKETS if network.interfaces else ():
        value = given.get(name, "")
        gloo = name.startswith("GLOO")
        if not value or (not gloo and (not gpus or matching(value, usable))):
            continue
        if value.startswith("^") and not gloo:
            what = f"{value} leaves out all that this machine has: {there or 'none'}"
            yield Problem(what, _where(name, asked), "take it away, and packtrain chooses")
            continue
        parts = value.split(",") if gloo else _parts(value)  # gloo knows names only
        if lacking := [one for one in parts if not gloo or one not in usable]:
            down = [one.name for one in network.interfaces if one.name in lacking]
            what = f"is {'down or has no address' if down else 'not there'}: this machine has {there or 'none'}"
            fix = "take it away, and packtrain chooses; or name one of these"
            yield Problem(f"{', '.join(lacking)} {what}", _where(name, asked), fix)
    value, ports = given.get("NCCL_IB_HCA", ""), network.ports
    if not value or not gpus or given.get("NCCL_IB_DISABLE") == "1" or hcas(value, ports):
        return
    if ports or not value.startswith("^"):  # where there is no port, none is left out
        there = ", ".join(f"{one.device}:{one.number}" for one in ports)
        what = f"{value} means none of this machine's RDMA ports ({there or 'there is none'})"
        yield Problem(what, _where("NCCL_IB_HCA", asked), "take it away, and NCCL or packtrain chooses")


def matching(wanted: str, names: Sequence[str], *, exact: bool = False) -> list[str]:
    """Of `names` those that NCCL's form of a list means: prefixes (unless `exact`), exact names after =, all others after ^."""
    exact = exact or wanted.removeprefix("^").startswith("=")
    fits = [name for name in names if any(name == part if exact else name.startswith(part) for part in _parts(wanted))]
    return [name for name in names if name not in fits] if wanted.startswith("^") else fits


def _parts(wanted: str) -> list[str]:
    return [part.strip() for part in wanted.removeprefix("^").removeprefix("=").split(",") if part.strip()]


def hcas(wanted: str, ports: Sequence[Port]) -> list[Port]:
    """The ports that NCCL_IB_HCA means: a list as in `matching`, of devices each with or without `:port`."""
    exact, chosen = "=" in wanted[:2], []
    for part in _parts(wanted):
        device, _, number = part.partition(":")
        names = matching(device, [one.device for one in ports], exact=exact)
        chosen += [one for one in ports if one.device in names and number in ("", str(one.number))]
    return [one for one in ports if (one in chosen) != wanted.startswith("^")]


def _given(name: str, value: str, asked: Mapping[str, str]) -> Setting:
    return Setting(name, None, f"{value}, by {_where(name, asked)}")


def _where(name: str, asked: Mapping[str, str]) -> str:
    return f"topology.environment.{name}" if name in asked else f"environment variable {name}"


def _count(ports: Sequence[Port], layer: str) -> str:
    return f"{len(ports)} active {layer} port{'s' if len(ports) > 1 else ''}"


def _listed(ports: Sequence[Port]) -> str:
    return ", ".join(one.device for one in ports)


def _names(interfaces: Sequence[Interface]) -> str:
    return ", ".join(one.name for one in interfaces)
