"""A machine's network, and settings of NCCL and gloo: one interface towards the first machine.

By default gloo takes the address of the machine's own name, often 127.0.0.1, which no other machine can reach. NCCL takes an interface
called ib*, else the first in the system's list, even if it does not lead to the other machines. The user's own settings are checked
and left unchanged.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from packtrain.errors import CheckFailed, Problem
from packtrain.system import start

SOCKETS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
LOOPBACK = "127.0.0.1"
RESOLVE_S = 1.0
"""Seconds until a name server counts as silent."""
FIX = "mend the servers in /etc/resolv.conf, or give the addresses names in /etc/hosts as torch asks for them: ::ffff:10.0.0.1 n1"
_RATE = re.compile(r"([\d.]+)\s*Gb/sec")
_FAR_AWAY = "203.0.113.1", "2001:db8::1"  # reserved addresses: only the default route leads to them


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface."""

    name: str
    addresses: tuple[str, ...] = ()
    up: bool = True
    default_route: bool = False

    @property
    def usable(self) -> bool:
        """Whether the interface is up and has an address that others could reach."""
        loopback = self.name == "lo" or all(map(is_loopback, self.addresses))
        return self.up and not loopback and any(not item.startswith("fe80:") for item in self.addresses)


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an RDMA device. `layer`: InfiniBand, or Ethernet (RoCE); `rate` in Gbit/s."""

    device: str
    number: int = 1
    active: bool = True
    rate: float | None = None
    layer: str = "InfiniBand"


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """Interfaces and RDMA ports of this machine. `own_address` faces the first machine (None: no known route)."""

    interfaces: tuple[Interface, ...] = ()
    ports: tuple[Port, ...] = ()
    own_address: str | None = None


@dataclass(frozen=True, slots=True)
class NetworkSetting:
    """An environment variable, its `value` (None: left unchanged) and the reason."""

    name: str
    value: str | None
    reason: str


def read_network(main_address: str | None, *, root: Path = Path("/")) -> HostNetwork:
    """Read the network of this machine, and its own address towards `main_address`.

    Takes a few milliseconds and a name look-up. `root` contains the kernel's files (sys/).
    """
    up = dict[str, bool]()
    with suppress(OSError, RuntimeError, psutil.Error):
        up = {name: stats.isup for name, stats in psutil.net_if_stats().items()}
    outward = {own_address_towards(item) for item in _FAR_AWAY} - {None}
    return HostNetwork(
        interfaces=tuple(
            Interface(name, addresses, up.get(name, True), not outward.isdisjoint(addresses))
            for name, addresses in addresses_by_interface().items()
        ),
        ports=tuple(_port(port) for port in sorted((root / "sys/class/infiniband").glob("*/ports/*"))),
        own_address=own_address_towards(main_address) if main_address else None,
    )


def own_address_towards(main_address: str) -> str | None:
    """Return the source address of packets to `main_address`; send nothing. None if the name or the route is unknown."""
    with suppress(OSError, UnicodeError):
        for family, kind, protocol, _, place in socket.getaddrinfo(main_address, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0]).partition("%")[0]
    return None


def addresses_by_interface() -> dict[str, tuple[str, ...]]:
    """Return this machine's IP addresses by interface; {} if a sandbox hides them."""
    families = (socket.AF_INET, socket.AF_INET6)
    with suppress(OSError, RuntimeError, psutil.Error):
        return {
            name: tuple(item.address.partition("%")[0] for item in listed if item.family in families)
            for name, listed in psutil.net_if_addrs().items()
        }
    return {}


def is_loopback(address: str) -> bool:
    """Return whether the address or name leads only to this machine itself."""
    return address.startswith("127.") or address in ("::1", "localhost")


def is_ip(name: str) -> bool:
    """Return whether `name` is an IP address."""
    with suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def _port(folder: Path) -> Port:
    rate = _RATE.match(kernel_text(folder / "rate"))  # "400 Gb/sec (4X NDR)"
    return Port(
        device=folder.parts[-3],
        number=int(folder.name),
        active=kernel_text(folder / "state").endswith("ACTIVE"),  # "4: ACTIVE"
        rate=float(rate[1]) if rate else None,
        layer=kernel_text(folder / "link_layer") or "InfiniBand",
    )


def kernel_text(path: Path) -> str:
    """Return the text of a small kernel file, "" if it cannot be read."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def choose_network(
    network: HostNetwork,
    env: Mapping[str, str],
    main_address: str | None,
    *,
    asked: Mapping[str, str] | None = None,
    gpus: bool = True,
) -> list[NetworkSetting]:
    """Choose the network settings for the processes of this machine, one of several.

    `asked` (topology.environment) overrides `env`, the user's environment. Without `gpus` NCCL gets no settings.
    Raises CheckFailed if a setting of the user names an interface that this machine does not have.
    """
    asked = asked or {}
    given = {**env, **asked}
    sources = {name: f"{'topology.environment.' if name in asked else 'environment variable '}{name}" for name in given}
    up = {item.name: item.addresses[0] for item in network.interfaces if item.up and item.addresses}
    interface, reason = _choose_interface(network, main_address)
    settings, problems = list[NetworkSetting](), list[Problem]()
    for name in SOCKETS if gpus else SOCKETS[1:]:
        nccl, value = name.startswith("NCCL"), given.get(name)
        if value and network.interfaces and not matching(value, list(up), exact=not nccl):
            there = ", ".join(f"{item} ({address})" for item, address in up.items()) or "none"
            what = f"{value} is not there, or down: this machine has {there}"
            fix = "remove it, and packtrain chooses; or name one of these"
            problems.append(Problem(what, sources[name], fix, code="no-such-interface"))
        elif value or interface is None:
            settings.append(NetworkSetting(name, None, f"{value}, by {sources[name]}" if value else reason))
        else:  # in NCCL's syntax, = asks for exactly this name
            settings.append(NetworkSetting(name, f"={interface}" if nccl else interface, reason))
    if problems:
        raise CheckFailed(problems)
    return settings


def _choose_interface(network: HostNetwork, main_address: str | None) -> tuple[str | None, str]:
    """Return the interface towards the first machine and the reason, or None and the reason."""
    own = network.own_address
    if main_address is None or own is None:
        return None, "no route to the first machine is known here"
    if is_loopback(main_address):
        return None, f"{main_address} is every machine's own address: all processes are taken to be on this one"
    leading = [item for item in network.interfaces if own in item.addresses]
    reason = f"leads to {main_address}, with the address {own}"
    if is_loopback(own):  # the name leads each machine to itself
        leading = [item for item in network.interfaces if item.usable and item.default_route]
        reason = f"has the default route ({main_address} is {own} here, which no other machine reaches)"
    return (leading[0].name, reason) if leading else (None, f"no interface leads from {own} to {main_address}")


def matching(wanted: str, names: Sequence[str], *, exact: bool = False) -> list[str]:
    """Return the `names` that match a list in NCCL's syntax.

    Plain entries are prefixes; after = they are exact names; after ^ all other names match. `exact`: the list is gloo's, plain names.
    """
    parts = [part.strip() for part in (wanted if exact else wanted.lstrip("^=")).split(",")]
    exact = exact or wanted.removeprefix("^").startswith("=")
    fits = [name for name in names if any(name == part if exact else name.startswith(part) for part in parts if part)]
    return [name for name in names if name not in fits] if wanted.startswith("^") else fits


def silence_for(address: str) -> str:
    """Return a message if no name server answers for `address` within RESOLVE_S, else "".

    torch's store, gloo and torchrun look up the name of each address that they connect to. They need it only for their logs, but they
    wait for it: with the usual settings of glibc a start silently takes 20 s longer.
    """

    def resolve() -> None:
        resolved = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
        mapped = resolved if ":" in resolved else f"::ffff:{resolved}"  # torch's sockets speak IPv6
        socket.gethostbyaddr(mapped)  # getnameinfo would block all threads in Python 3.11.2

    try:
        start(resolve).result(RESOLVE_S)
    except TimeoutError:
        return f"the name server does not answer for {address}"
    except OSError:  # an unknown name is an answer; other code reports it
        pass
    return ""
