"""The network as this machine has it: interfaces, the default route, RDMA ports, and the way to the first machine.

Everything is read where the kernel keeps it (/sys/class/net, /sys/class/infiniband, /proc/net), which needs no rights and
no other program, and is what NCCL looks at, too. What follows from it is in network_choice.py.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
class Network:
    """What this machine has. `own_address` is the one that it has towards the first machine, None where no way is known."""

    interfaces: tuple[Interface, ...] = ()
    ports: tuple[Port, ...] = ()
    own_address: str | None = None


def read_network(
    main_address: str | None, *, root: Path = Path("/"), addresses: Mapping[str, tuple[str, ...]] | None = None
) -> Network:
    """The network of this machine, and its own address towards `main_address`.

    Takes a few milliseconds, and the name server's time. `root` and `addresses` (by interface) stand in for the system.
    """
    addresses = addresses_by_interface() if addresses is None else addresses
    default = default_interface(kernel_text(root / "proc/net/route"), kernel_text(root / "proc/net/ipv6_route"))
    folders = root / "sys/class/net"
    names = dict.fromkeys([*(one.name for one in _listed(folders) if one.is_dir()), *(addresses or ())])
    return Network(
        interfaces=tuple(
            _interface(folders / name, tuple(addresses.get(name, ())), default=name == default) for name in names
        )
        if addresses is not None
        else (),
        ports=tuple(
            _port(device, port)
            for device in _listed(root / "sys/class/infiniband")
            for port in _listed(device / "ports")
        ),
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
        return sorted(folder.iterdir(), key=_natural)
    return []


def _natural(path: Path) -> list[tuple[int, str]]:
    """mlx5_2 before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def kernel_text(path: Path) -> str:
    """A short file of the kernel's, "" where it cannot be read."""
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def whole(text: str) -> int | None:
    """The whole number that a text is, None where it is something else."""
    return int(text) if re.fullmatch(r"-?\d+", text) else None
