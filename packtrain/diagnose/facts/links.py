"""What launch/network.py does not need to know of the network: why a port is down, and what names resolve to.

RDMA devices are read where the kernel keeps them (/sys/class/infiniband), which needs neither ibstat nor the right to use
them. `root` is the file system to read; tests hand in one of their own.
"""

from __future__ import annotations

import socket
from pathlib import Path

from packtrain.diagnose.facts.facts import Name
from packtrain.plan.interfaces import kernel_text


def read_states(root: Path = Path("/")) -> dict[str, str]:
    """Port ("mlx5_0:1") → its state and that of its cable ("DOWN, Polling")."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    return {
        f"{port.parents[1].name}:{port.name}": ", ".join(
            kernel_text(port / file).rpartition(":")[2].strip() or "?"
            for file in ("state", "phys_state")  # "4: ACTIVE", "5: LinkUp"
        )
        for port in ports
    }


def read_verbs(root: Path = Path("/")) -> tuple[str, ...]:
    """The device files that programs reach RDMA devices by."""
    return tuple(sorted(one.name for one in (root / "dev/infiniband").glob("uverbs*")))


def resolved(name: str) -> Name:
    """What a host name resolves to here; may take as long as the name server does."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Name(name, lack=getattr(error, "strerror", None) or str(error))
    return Name(name, tuple(dict.fromkeys(str(one[4][0]).partition("%")[0] for one in found)))
