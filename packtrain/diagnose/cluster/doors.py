"""The run's port and a free one of each machine, as the others find them: what a firewall lets through. Pure.

A firewall that was opened for a run is often open at its port alone, which is where launchers and torch's store meet at
machine 0; what NCCL and gloo send goes by ports that the system gives them. So both are tried, each way between two
machines, and where one of them answers and the other does not, it is neither the machine nor its cable.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packtrain.diagnose.cluster.compare import Folded, named
from packtrain.diagnose.cluster.links_table import Link, Pair
from packtrain.launch.place import Place

_LAST_PORT = 2**16 - 1
_MOST_LINES = 6
_NEEDED = "the run needs it at {} alone, or where another machine is the first"


@dataclass(frozen=True, slots=True)
class Door:
    """A port of machine `end` as machine `start` found it: `found` is why it gives no answer, "" where it answers.

    `of_run` says whether it is the run's port, else it is a free one. `found` is None where it was not tried, `why` why not.
    """

    start: int
    end: int
    port: int
    of_run: bool
    found: str | None = None
    why: str = ""

    def to_json(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Plain containers."""
        status = "not tried" if self.found is None else "closed" if self.found else "open"
        ends = {"from": names[self.start], "to": names[self.end]}
        return {**ends, "port": self.port, "status": status, "found": self.found or self.why}


def next_door(place: Place) -> Place:
    """The port beside the run's, where machine 0 listens, too: for machines that a firewall keeps from the run's."""
    return replace(place, port=place.port + 1 if place.port < _LAST_PORT else place.port - 1)


def ways_of(rounds: Iterable[Iterable[Pair]]) -> list[Pair]:
    """Both ways of each pair of these rounds."""
    return [way for pairs in rounds for one, other in pairs for way in ((one, other), (other, one))]


def shut_links(doors: Sequence[Door]) -> dict[Pair, Link]:
    """The ways on which the free port gives no answer, as dead links."""
    run = {(one.start, one.end): one for one in doors if one.of_run}
    found = {}
    for one in doors:
        if one.of_run or not one.found:
            continue
        other = run.get((one.start, one.end))
        if other is None or other.found is None:
            more = ""
        elif other.found:
            more = f", nor at the run's port {other.port}"
        else:
            more = f", while the run's port {other.port} answers: only that one is let through"
        found[one.start, one.end] = Link(one.start, one.end, status="dead", found=f"{one.found}{more}")
    return found


def closed_to(doors: Sequence[Door], end: int) -> list[int]:
    """The machines that the run's port of machine `end` does not answer."""
    return sorted(one.start for one in doors if one.of_run and one.end == end and one.found)


def opened(port: int, machine: str) -> str:
    """What to do about a firewall."""
    how = f"firewall-cmd --add-port={port}/tcp, ufw allow {port}/tcp, security group"
    return (
        f"Open TCP port {port} on {machine} ({how}), or set topology.main_port to one that is open. NCCL and gloo take "
        f"other ports between all machines, too: sysctl net.ipv4.ip_local_port_range says which."
    )


def port_remarks(doors: Sequence[Door], names: Mapping[int, str]) -> list[Folded]:
    """Machines whose run's port is closed to others that another port of theirs answers; of machine 0 the run cannot do without."""
    free = {(one.start, one.end): one for one in doors if not one.of_run}
    shut: dict[int, list[Door]] = defaultdict(list)
    for one in sorted(doors, key=lambda door: door.start):
        other = free.get((one.start, one.end))
        if one.of_run and one.found and other is not None and other.found == "":
            shut[one.end].append(one)
    others = {end: closed for end, closed in sorted(shut.items()) if end}
    if len(others) < 2:
        return [_of_one(closed, free, names) for _, closed in sorted(shut.items())]
    at_main = [_of_one(shut[0], free, names)] if 0 in shut else []
    return [*at_main, _of_several(others, names)]


def _of_one(closed: Sequence[Door], free: Mapping[Pair, Door], names: Mapping[int, str]) -> Folded:
    first = closed[0]
    there, who = names[first.end], [names[one.start] for one in closed]
    what = f"{named(who)} cannot reach {there} at the run's port {first.port} ({first.found}), "
    what += f"while port {free[first.start, first.end].port} there answers"
    if first.end:
        what += f"; {_NEEDED.format(names[0])}"
    return Folded("port", "warn" if first.end else "fail", what, opened(first.port, there), (there, *who))


def _of_several(shut: Mapping[int, Sequence[Door]], names: Mapping[int, str]) -> Folded:
    """Of machines other than 0: a firewall that is the same everywhere is one remark."""
    (first, *_), *_ = shut.values()
    there = [names[end] for end in shut]
    what = f"the run's port {first.port} of {named(there)} is closed to others (from {names[first.start]}: {first.found}), "
    what += f"while another port there answers; {_NEEDED.format(names[0])}"
    return Folded("port", "warn", what, opened(first.port, "them"), tuple(there))


def ports_text(doors: Sequence[Door], names: Mapping[int, str]) -> str:
    """What became of the run's port, in lines: how often it answers, and each way on which it does not or was not tried."""
    mine = [one for one in doors if one.of_run]
    tried = [one for one in mine if one.found is not None]
    if not mine:
        return "none tried: fewer than two machines answered"
    lines = [f"port {mine[0].port}: {sum(not one.found for one in tried)} of {len(tried)} ways open"]
    closed = [f"{names[one.start]} to {names[one.end]}: closed ({one.found})" for one in tried if one.found]
    untried = dict.fromkeys(
        f"not tried at {names[one.end]}: {one.why}" for one in mine if one.found is None and one.why
    )
    for more in (closed, list(untried)):
        left = len(more) - _MOST_LINES
        lines += [*more[:_MOST_LINES], *([f"and {left} more"] if left > 0 else [])]
    return "\n".join(lines)
