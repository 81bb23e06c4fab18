"""Where the launchers of a run meet, and whose addresses are whose."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from packtrain.launch.members import ranks_of
from packtrain.plan.interfaces import addresses_by_interface, is_loopback

_OF_ONE_LINK = ("169.254.", "fe80:")


@dataclass(frozen=True, slots=True)
class Place:
    """Machine 0 listens on `port`, the others reach it at `address` within `timeout_s` seconds of their own start.

    `job` is the run's name (members.job_of), `names` are host names by number as far as they are known beforehand, and
    `silence_s` is how long a launcher may be silent before it counts as lost, `training_silence_s` while the ranks train, if
    that is longer.
    """

    address: str
    port: int
    timeout_s: float
    job: str
    names: tuple[str, ...] = ()
    silence_s: float = 30
    training_silence_s: float = 0

    def machine(self, node: int, per_node: int) -> str:
        """A machine in words: "n2 (machine 1, ranks 4 to 7)"."""
        ranks = ranks_of(node, per_node)
        return (
            f"{self.names[node]} (machine {node}, {ranks})" if node < len(self.names) else f"machine {node} ({ranks})"
        )


def resolve(address: str, port: int) -> list[str]:
    """The addresses of a host name, in the system's order. Raises OSError (socket.gaierror)."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def is_own(address: str) -> bool:
    """Whether `address` is one of this machine's: only such an address can be bound to."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def own_addresses() -> tuple[str, ...]:
    """This machine's addresses that others may know it by; () where they cannot be found out."""
    found = [one for listed in (addresses_by_interface() or {}).values() for one in listed]
    return tuple(dict.fromkeys(one for one in found if not is_loopback(one) and not one.startswith(_OF_ONE_LINK)))
