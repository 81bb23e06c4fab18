"""The network of a machine, and the settings of NCCL and gloo that it needs: only where they would choose a wrong interface.

Interfaces, the default route and RDMA ports are read where the kernel keeps them (/sys/class/net, /sys/class/infiniband,
/proc/net), which needs no rights and is what NCCL looks at, too. gloo takes the address that the machine's own name resolves to,
often 127.0.0.1, which no other machine can reach. NCCL takes an interface called ib*, else the first that the system lists, wherever it
leads, and all RDMA ports that are active, those of storage among them. Both are set to the interface that leads to the
first machine. What a user has set is read as NCCL reads it, checked and left alone.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packtrain.errors import CheckFailed, Problem

SOCKETS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
LOOPBACK = "127.0.0.1"
LIMIT_S = 1.0
"""Seconds within which any name server of use has answered."""
FIX = "mend the servers in /etc/resolv.conf, or give the addresses names in /etc/hosts as torch asks for them: ::ffff:10.0.0.1 n1"
_SHORT = "timeout:1 attempts:1"
_RATE = re.compile(r"([\d.]+)\s*Gb/sec")
_VIRTUAL = re.compile(
    r"(docker|podman|veth|virbr|br-|cni|flannel|cali|cilium|kube|nodelocaldns|lxc|lxd|vmnet|vboxnet|tunl|dummy|ifb)"
)


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface. `speed` is in Mbit/s, None where it has none; `virtual` where it leads to containers only."""

    name: str
    addresses: tuple[str, ...] = ()
    up: bool = True
    speed: int | None = None
    mtu: int | None = None
    default_route: bool = False

    @property
    def loopback(self) -> bool:
        """Whether it leads to this machine only."""
        return self.name == "lo" or (bool(self.addresses) and all(is_loopback(one) for one in self.addresses))

    @property
    def virtual(self) -> bool:
        """Whether it is made for containers and virtual machines, by its name."""
        return _VIRTUAL.match(self.name) is not None

    @property
    def usable(self) -> bool:
        """Whether it is up and has an address that others could reach."""
        return self.up and not self.loopback and any(not one.startswith("fe80:") for one in self.addresses)


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an RDMA device. `layer`: InfiniBand, or Ethernet (RoCE); `rate` in Gbit/s; `interfaces` of the same card."""

    device: str
    number: int = 1
    active: bool = True
    rate: float | None = None
    layer: str = "InfiniBand"
    interfaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """What this machine has. `own_address` is the one that it has towards the first machine, None where no way is known."""

    interfaces: tuple[Interface, ...] = ()
    ports: tuple[Port, ...] = ()
    own_address: str | None = None


@dataclass(frozen=True, slots=True)
class NetworkSetting:
    """An environment variable and why it is set to `value`, or, where that is None, is left as it is."""

    name: str
    value: str | None
    reason: str


def read_network(
    main_address: str | None, *, root: Path = Path("/"), addresses: Mapping[str, tuple[str, ...]] | None = None
) -> HostNetwork:
    """The network of this machine, and its own address towards `main_address`.

    Takes a few milliseconds, and the name server's time. `root` and `addresses` (by interface) stand in for the system.
    """
    found = addresses_by_interface() if addresses is None else addresses
    default = default_interface(kernel_text(root / "proc/net/route"), kernel_text(root / "proc/net/ipv6_route"))
    folders = root / "sys/class/net"
    names = {} if found is None else dict.fromkeys([*(one.name for one in _listed(folders) if one.is_dir()), *found])
    interfaces = (_interface(folders / name, (found or {}).get(name, ()), default=name == default) for name in names)
    devices = _listed(root / "sys/class/infiniband")
    return HostNetwork(
        interfaces=tuple(interfaces),
        ports=tuple(_port(device, port) for device in devices for port in _listed(device / "ports")),
        own_address=own_address_towards(main_address) if main_address else None,
    )


def own_address_towards(main_address: str) -> str | None:
    """The address that packets to `main_address` leave from; nothing is sent. None where the name or the way is unknown."""
    with suppress(OSError, UnicodeError):
        for family, kind, protocol, _, place in socket.getaddrinfo(main_address, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0]).partition("%")[0]
    return None


def default_interface(route: str, ipv6_route: str) -> str | None:
    """The interface of the preferred default route, by the texts of /proc/net/route and /proc/net/ipv6_route."""
    found: list[tuple[int, str]] = []
    for line in route.splitlines()[1:]:
        parts = line.split()  # Iface Destination Gateway Flags RefCnt Use Metric Mask …
        if len(parts) >= 8 and parts[1] == parts[7] == "00000000" and int(parts[3], 16) & 1:
            found.append((int(parts[6]), parts[0]))
    if not found:
        for line in ipv6_route.splitlines():
            parts = line.split()
            if len(parts) == 10 and set(parts[0]) == {"0"} and parts[1] == "00" and parts[9] != "lo":
                found.append((int(parts[5], 16), parts[9]))
    return min(found)[1] if found else None


def addresses_by_interface() -> dict[str, tuple[str, ...]] | None:
    """This machine's IP addresses; None where the system does not tell, as in some sandboxes."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    try:
        listed_by_name = psutil.net_if_addrs()
    except (OSError, RuntimeError, psutil.Error):
        return None
    return {
        name: tuple(one.address.partition("%")[0] for one in listed if one.family in families)
        for name, listed in listed_by_name.items()
    }


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address, or the name stands for such a one."""
    return address.startswith("127.") or address in ("::1", "localhost")


def _interface(folder: Path, addresses: tuple[str, ...], *, default: bool) -> Interface:
    speed, mtu = whole(kernel_text(folder / "speed")), whole(kernel_text(folder / "mtu"))
    up = kernel_text(folder / "operstate") != "down"  # "unknown" is what loopback and tunnels say
    return Interface(folder.name, addresses, up, speed if speed and speed > 0 else None, mtu, default)


def _port(device: Path, port: Path) -> Port:
    rate = _RATE.match(kernel_text(port / "rate"))
    return Port(
        device=device.name,
        number=int(port.name) if port.name.isdigit() else 1,
        active=kernel_text(port / "state").endswith("ACTIVE"),  # "4: ACTIVE"
        rate=float(rate[1]) if rate else None,
        layer=kernel_text(port / "link_layer") or "InfiniBand",
        interfaces=tuple(one.name for one in _listed(device / "device/net")),
    )


def _listed(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.iterdir())
    return []


def kernel_text(path: Path) -> str:
    """A short file of the kernel's, "" where it cannot be read."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def whole(text: str) -> int | None:
    """The whole number that a text is, None where it is something else."""
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def choose_network(
    network: HostNetwork,
    env: Mapping[str, str],
    main_address: str | None,
    *,
    nodes: int,
    asked: Mapping[str, str] | None = None,
    gpus: bool = True,
) -> list[NetworkSetting]:
    """The network settings of this machine's processes, one of `nodes`; none where it is the only one.

    `env` is what the user has exported, `asked` (topology.environment) wins over it; without `gpus` NCCL is not told
    anything. Raises CheckFailed where one of theirs names what this machine does not have.
    """
    if nodes == 1:
        return []
    asked = asked or {}
    given = {**env, **asked}
    if problems := list(_impossible(network, given, asked, gpus=gpus)):
        raise CheckFailed(problems)
    settings = []
    interface, reason = _way(network, main_address)
    for name in SOCKETS if gpus else SOCKETS[1:]:
        if given.get(name):
            settings.append(_given(name, given[name], asked))
        elif interface is None:
            settings.append(NetworkSetting(name, None, reason))
        else:  # = is NCCL's word for exactly this one
            value = f"={interface.name}" if name.startswith("NCCL") else interface.name
            settings.append(NetworkSetting(name, value, reason))
    return settings + (_rdma(network.ports, given, asked) if gpus else [])


def _way(network: HostNetwork, main_address: str | None) -> tuple[Interface | None, str]:
    """The interface on the way to the first machine, and the reason in words; or None, and why none is chosen."""
    if main_address is None:
        return None, "the first machine is not known"
    own = network.own_address
    if is_loopback(main_address):
        return None, f"{main_address} is every machine's own address: all processes are taken to be on this one"
    if own is None:
        return None, f"no way to {main_address} is known here"
    if not is_loopback(own):
        leading = [one for one in network.interfaces if own in one.addresses]
        if leading:
            return leading[0], f"leads to {main_address}, with the address {own}"
        return None, f"the way to {main_address} leaves from {own}, which no interface has"
    here = f"{main_address} is {own} on this machine, which no other reaches"
    usable = [one for one in network.interfaces if one.usable]
    if default := [one for one in usable if one.default_route]:
        return default[0], f"has the default route ({here})"
    real = [one for one in usable if not one.virtual]
    if len(real) == 1:
        return real[0], f"is the only one that leads anywhere ({here})"
    names = ", ".join(one.name for one in real) or "no interfaces"
    return None, f"{here}, and which of {names} leads to the others is not known"


def _rdma(ports: Sequence[Port], given: Mapping[str, str], asked: Mapping[str, str]) -> list[NetworkSetting]:
    """NCCL_IB_HCA, where not all ports that there are should carry the training."""
    name = "NCCL_IB_HCA"
    ports = [one for one in ports if one.layer in ("InfiniBand", "Ethernet")]  # others have plugins of their own
    if not ports or given.get("NCCL_IB_DISABLE") == "1":
        return []
    if given.get(name):
        return [_given(name, given[name], asked)]
    active = [one for one in ports if one.active]
    fabric = [one for one in active if one.layer == "InfiniBand"]
    rate = max((one.rate or 0 for one in fabric), default=0)
    best = [one for one in fabric if (one.rate or 0) == rate]
    found = f"{len(best)} active InfiniBand port{'s' if len(best) > 1 else ''} of {rate:g} Gbit/s"
    value = None
    if not active:
        reason = f"no port of {', '.join(one.device for one in ports)} is active: NCCL talks by TCP"
    elif not best:
        reason = f"{len(active)} active RoCE ports: NCCL chooses by what is near a GPU"
    elif len(best) == len(ports):
        reason = f"{found}, all alike: NCCL uses all of them"
    else:
        value = "=" + ",".join(f"{one.device}:{one.number}" for one in best)
        reason = f"{found}, without {', '.join(one.device for one in ports if one not in best)}"
    return [NetworkSetting(name, value, reason)]


def _impossible(
    network: HostNetwork, given: Mapping[str, str], asked: Mapping[str, str], *, gpus: bool
) -> Iterator[Problem]:
    """What the user's own values name that is not there."""
    usable = {one.name: one.addresses[0] for one in network.interfaces if one.up and one.addresses}
    there = ", ".join(f"{name} ({address})" for name, address in usable.items()) or "none"
    gloo, nccl = given.get("GLOO_SOCKET_IFNAME", ""), given.get("NCCL_SOCKET_IFNAME", "")
    lacking = {
        "NCCL_SOCKET_IFNAME": nccl if gpus and not matching(nccl, list(usable)) else "",
        "GLOO_SOCKET_IFNAME": ", ".join(one for one in gloo.split(",") if one not in usable),  # gloo knows names only
    }
    for name, value in lacking.items() if network.interfaces else ():
        if value:
            what = f"{value} is not there, or down: this machine has {there}"
            fix = "take it away, and packtrain chooses; or name one of these"
            yield Problem(what, _where(name, asked), fix)
    value, ports = given.get("NCCL_IB_HCA", ""), network.ports
    if not value or not gpus or given.get("NCCL_IB_DISABLE") == "1" or hcas(value, ports):
        return
    if ports or not value.startswith("^"):  # where there is no port, none is left out
        there = ", ".join(f"{one.device}:{one.number}" for one in ports) or "there is none"
        what = f"{value} means none of this machine's RDMA ports ({there})"
        yield Problem(what, _where("NCCL_IB_HCA", asked), "take it away, and NCCL or packtrain chooses")


def matching(wanted: str, names: Sequence[str], *, exact: bool = False) -> list[str]:
    """Of `names` those that NCCL's form of a list means: prefixes (unless `exact`), exact names after =, all others after ^."""
    exact = exact or wanted.removeprefix("^").startswith("=")
    fits = [name for name in names if any(name == part if exact else name.startswith(part) for part in _parts(wanted))]
    return [name for name in names if name not in fits] if wanted.startswith("^") else fits


def hcas(wanted: str, ports: Sequence[Port]) -> list[Port]:
    """The ports that NCCL_IB_HCA means: a list as in `matching`, of devices each with or without `:port`."""
    exact, chosen = "=" in wanted[:2], []
    for part in _parts(wanted):
        device, _, number = part.partition(":")
        names = matching(device, [one.device for one in ports], exact=exact)
        chosen += [one for one in ports if one.device in names and number in ("", str(one.number))]
    return [one for one in ports if (one in chosen) != wanted.startswith("^")]


def _parts(wanted: str) -> list[str]:
    return [part.strip() for part in wanted.removeprefix("^").removeprefix("=").split(",") if part.strip()]


def _given(name: str, value: str, asked: Mapping[str, str]) -> NetworkSetting:
    return NetworkSetting(name, None, f"{value}, by {_where(name, asked)}")


def _where(name: str, asked: Mapping[str, str]) -> str:
    return f"topology.environment.{name}" if name in asked else f"environment variable {name}"


def silence_for(address: str) -> str:
    """That no name server answers for `address` (or a name of it), in words; "" where it is looked up in no time.

    torch's store, gloo and torchrun look up the name of each address that they connect to, only to show it in their logs, but
    they wait for it: with the usual settings of glibc a start takes 20 s longer, in silence.
    """
    thread = threading.Thread(target=_look_up, args=(address,), name="look-up", daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return f"the name server does not answer for {address}" if thread.is_alive() else ""


def short_waits(address: str) -> dict[str, str]:
    """Variables with which processes that connect to `address` wait for a silent name server 1 s instead of 10; {} where none
    is silent. Prints that one is; the user's own RES_OPTIONS stay."""
    silent = silence_for(address)
    if not silent:
        return {}
    own = os.environ.get("RES_OPTIONS")
    waits = f"as long as RES_OPTIONS={own!r} says" if own else f"only 1 s from now on (RES_OPTIONS={_SHORT!r})"
    print(f"{silent}, and torch asks it at each connection: it waits {waits}\n    → {FIX}", file=sys.stderr, flush=True)
    return {} if own else {"RES_OPTIONS": _SHORT}


def _look_up(address: str) -> None:
    with suppress(OSError):  # no such name: that is known at once, and told elsewhere
        found = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
        mapped = found if ":" in found else f"::ffff:{found}"  # torch's sockets speak IPv6
        socket.gethostbyaddr(mapped)  # not getnameinfo, which holds all threads up in Python 3.11.2
