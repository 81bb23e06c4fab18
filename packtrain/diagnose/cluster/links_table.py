"""Which pairs of machines are tried in which round, and what their figures say of links and machines. Pure.

No machine is in two pairs of a round, so that no figure is of two streams at once. Up to MOST_FOR_ALL machines play every
pair, as in a round-robin tournament; of more the neighbours in a ring, and machine 0 with a sample of the others, which
touches every machine twice in a few rounds. A link is slow by comparison with the median, or of few with the better quarter:
one slow machine of three or four spoils half of all pairs. Where there are too few to compare, only what would slow down any
training is slow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from packtrain.diagnose.cluster.compare import Folded

MOST_FOR_ALL = 16
_HUB_SAMPLE = 16
_LEAST_TO_COMPARE = 3
_ENOUGH = 10  # links of which one machine spoils less than half: every pair of five machines
_FAR = 4.0  # times slower than usual
_LATENCY_MS = 1.0  # less than this above it is the scheduler's, not the link's
_SLOW_MS, _SLOW_MIB_PER_S = 10.0, 20.0
_FIX_DEAD = "Let machines of the run reach each other on every port (firewall, security group, VLAN, routes)."
_FIX_SLOW = "Look at its cable, port, MTU and interface (ethtool, ibstat), and at what else runs there."

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Kind:
    """What is measured between two machines, in words: `name` as a check, `several` of one machine, `dead` between two.

    `far` is how many times less than the usual rate is slow, `later_ms` how much more than the usual latency, at least.
    """

    name: str
    several: str
    dead: str
    fix_dead: str
    far: float
    later_ms: float


LINKS = Kind("link", "links to other machines", "{} cannot reach {}", _FIX_DEAD, _FAR, _LATENCY_MS)


@dataclass(frozen=True, slots=True)
class Link:
    """What machine `start` measured to machine `end`: half of a round trip is not meant, `latency_ms` is the whole."""

    start: int
    end: int
    latency_ms: float | None = None
    mib_per_s: float | None = None
    status: Literal["ok", "slow", "dead", "not tried"] = "ok"
    found: str = ""

    def to_json(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Plain containers."""
        head = {"from": names[self.start], "to": names[self.end], "status": self.status, "found": self.found}
        return {**head, "latency_ms": self.latency_ms, "mib_per_s": self.mib_per_s}


def rounds_of(nodes: Sequence[int]) -> list[list[Pair]]:
    """Rounds of pairs (who measures, to whom) over these machines; none is in two pairs of a round."""
    if len(nodes) < 2:
        return []
    if len(nodes) <= MOST_FOR_ALL:
        return _tournament(list(nodes))
    step = (len(nodes) - 1) // _HUB_SAMPLE or 1
    ring = [(one, nodes[(at + 1) % len(nodes)]) for at, one in enumerate(nodes)]
    return _coloured([*ring, *((nodes[0], other) for other in nodes[2:-1:step][:_HUB_SAMPLE])])


def _tournament(nodes: Sequence[int | None]) -> list[list[Pair]]:
    """The circle method: the first stays, the others go round; whoever is paired with nobody rests."""
    circle = [*nodes, *([None] if len(nodes) % 2 else [])]
    rounds = []
    for number in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        met = [(one, other) for one, other in pairs if one is not None and other is not None]
        rounds.append([(other, one) for one, other in met] if number % 2 else met)
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def _coloured(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Each pair in the first round where both are free."""
    rounds: list[list[Pair]] = []
    for pair in pairs:
        free = (one for one in rounds if not any(set(pair) & set(other) for other in one))
        place = next(free, None)
        if place is None:
            rounds.append([pair])
        else:
            place.append(pair)
    return rounds


def judged(links: Sequence[Link], kind: Kind = LINKS) -> list[Link]:
    """The links with those marked slow that are far from the usual, or slow for any training where few are known."""
    alive = [one for one in links if one.latency_ms is not None and one.mib_per_s is not None]
    usual_ms, usual_rate = usual(links)
    few = len(alive) < _LEAST_TO_COMPARE
    most_ms = _SLOW_MS if few else max(_FAR * usual_ms, usual_ms + kind.later_ms)
    least = _SLOW_MIB_PER_S if few else usual_rate / kind.far
    result = []
    for one in links:
        ms, rate = one.latency_ms, one.mib_per_s
        slow = ms is not None and rate is not None and (ms > most_ms or rate < least)
        result.append(Link(one.start, one.end, ms, rate, "slow", one.found) if slow else one)
    return result


def figures(links: Sequence[Link]) -> tuple[float, float]:
    """Medians of latency (ms) and rate (MiB/s) over the links that answered; 0 where none did."""
    latencies = [one.latency_ms for one in links if one.latency_ms is not None]
    rates = [one.mib_per_s for one in links if one.mib_per_s is not None]
    return (median(latencies) if latencies else 0.0, median(rates) if rates else 0.0)


def usual(links: Sequence[Link]) -> tuple[float, float]:
    """Latency (ms) and rate (MiB/s) of a link that is well: the medians, of few links what a quarter of them reach."""
    if len(links) >= _ENOUGH:
        return figures(links)
    latencies = sorted(one.latency_ms for one in links if one.latency_ms is not None)
    rates = sorted((one.mib_per_s for one in links if one.mib_per_s is not None), reverse=True)
    return (latencies[len(latencies) // 4] if latencies else 0.0, rates[len(rates) // 4] if rates else 0.0)


def remarks(links: Sequence[Link], names: Mapping[int, str], kind: Kind = LINKS) -> list[Folded]:
    """Machines all of whose links are dead or slow, where others' are not; then the links that this does not explain."""
    links = [one for one in links if one.status != "not tried"]
    text = "usual here are {:.2g} ms and {:.0f} MiB/s".format(*usual(links))
    of: dict[int, list[Link]] = defaultdict(list)
    for one in links:
        of[one.start].append(one)
        of[one.end].append(one)
    found, blamed = [], set()
    for status in ("dead", "slow"):
        bad = [node for node, own in of.items() if len(own) > 1 and all(one.status == status for one in own)]
        if len(bad) == len(of):  # then it is nobody's in particular
            continue
        for node in sorted(bad):
            blamed.add((node, status))
            if status == "dead":
                what = f"none of its {len(of[node])} {kind.several} works ({of[node][0].found})"
                found.append(Folded("machine", "fail", what, kind.fix_dead, (names[node],)))
            else:
                ms, rate = figures(of[node])
                what = f"all of its {len(of[node])} {kind.several} are slow ({ms:.2g} ms, {rate:.0f} MiB/s; {text})"
                found.append(Folded("machine", "warn", what, _FIX_SLOW, (names[node],)))
    for one in links:
        if one.status == "ok" or {(one.start, one.status), (one.end, one.status)} & blamed:
            continue
        ends = (names[one.start], names[one.end])
        if one.status == "dead":
            found.append(Folded(kind.name, "fail", f"{kind.dead.format(*ends)}: {one.found}", kind.fix_dead, ends))
        else:
            what = f"{ends[0]} to {ends[1]} is slow: {one.latency_ms:.2g} ms, {one.mib_per_s:.0f} MiB/s"
            found.append(Folded(kind.name, "warn", f"{what} ({text})" if len(links) > 1 else what, _FIX_SLOW, ends))
    return found
