"""The comparison of several machines as a person reads it: only what differs, what is wrong, and where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape

from packtrain.diagnose.checks.check import Status
from packtrain.diagnose.cluster.all_reduce import Reduced, of_each
from packtrain.diagnose.cluster.compare import Difference, Folded, named, said
from packtrain.diagnose.cluster.doors import Door, ports_text
from packtrain.diagnose.cluster.links_table import MOST_FOR_ALL, Link, figures

_COLOURS: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}
_MOST_LINKS = 6


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that machine 0 found out: `names` are those of all machines by number, `reports` of those that answered."""

    names: Mapping[int, str]
    reports: Mapping[str, Mapping[str, Any]]
    differences: Sequence[Difference]
    links: Sequence[Link]
    checks: Sequence[Folded]
    missing: Mapping[str, str]
    reduced: Reduced = field(default_factory=Reduced)
    pairs: Sequence[Link] = ()  # by all-reduces
    doors: Sequence[Door] = ()

    @property
    def exit_code(self) -> int:
        """4 where a machine is missing, 3 where something failed or must not differ, else 0."""
        if self.missing:
            return 4
        return 3 if any(one.status == "fail" for one in (*self.differences, *self.checks)) else 0

    def to_json(self) -> dict[str, Any]:
        """Plain containers; the keys are a promise to users."""
        return {
            "nodes": dict(self.reports),
            "differences": [one.to_json() for one in self.differences],
            "links": [one.to_json(self.names) for one in self.links],
            "ports": [one.to_json(self.names) for one in self.doors if one.of_run],
            "all_reduce": {**self.reduced.to_json(), "pairs": [one.to_json(self.names) for one in self.pairs]},
            "missing": list(self.missing),
            "reasons": dict(self.missing),
            "checks": [one.to_json() for one in self.checks],
        }


def print_comparison(found: Comparison) -> None:
    """Everything on stdout, in colour on a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(escape(f"\n{len(found.reports)} of {len(found.names)} machines: {named(tuple(found.reports), 16)}"))
    for name, why in found.missing.items():
        _line(console, "fail", "missing", f"{name}: {why}", "")
    console.print("\nWhat differs:\n")
    for one in found.differences:
        _line(console, one.status, one.what, said(one.values), one.fix)
    if not found.differences:
        console.print("nothing")
    console.print("\nChecks that failed or warned:\n")
    for one in found.checks:
        _line(console, one.status, one.name, f"{named(one.nodes)}: {one.found}", one.fix)
    if not found.checks:
        console.print("none")
    console.print(f"\nThe run's port:\n\n{escape(ports_text(found.doors, found.names))}")
    console.print(f"\nLinks:\n\n{escape(_links(found.links, found.names))}")
    if found.pairs:
        console.print(f"\nAll-reduce over each pair:\n\n{escape(_links(found.pairs, found.names))}")
    why = f" ({found.reduced.found})" if found.reduced.found else ""
    console.print(escape(f"\nAll-reduce over all of them: {found.reduced.status}{why}"))
    if found.reduced.status == "ok" and len(found.reduced.nodes or {}) <= MOST_FOR_ALL:
        console.print(escape(f"\n{of_each(found.reduced)}"))
    everything = (*found.differences, *found.checks)
    failed, warned = (sum(one.status == status for one in everything) for status in ("fail", "warn"))
    console.print(f"\n{len(found.missing)} missing, {failed} failed, {warned} to look at")


def _line(console: Console, status: Status, name: str, text: str, fix: str) -> None:
    console.print(f"[{_COLOURS[status]}]{status:<4}[/]  {escape(f'{name}  {text}')}", emoji=False)
    if status != "ok" and fix:
        console.print(f"      → {escape(fix)}", emoji=False)


def _links(links: Sequence[Link], names: Mapping[int, str]) -> str:
    """Each where they are few; else how many are well, and the medians of each machine, of many machines of all."""
    tried = [one for one in links if one.status != "not tried"]
    left = len(links) - len(tried)
    lines = [f"{left} not tried for lack of time"] if left else []
    if len(tried) <= _MOST_LINKS:
        return (
            "\n".join([*(_link(one, names) for one in tried), *lines]) or "none tried: fewer than two machines answered"
        )
    of: dict[int, list[Link]] = defaultdict(list)
    for one in tried:
        of[one.start].append(one)
        of[one.end].append(one)
    well = sum(one.status == "ok" for one in tried)
    lines = [f"{well} of {len(tried)} pairs well; medians {_figures(tried)}", *lines]
    each = [f"{names[node]}: {_figures(own)}" for node, own in sorted(of.items())] if len(of) <= MOST_FOR_ALL else []
    return "\n".join([*lines, *each])


def _figures(links: Sequence[Link]) -> str:
    return "{:.2g} ms, {:.0f} MiB/s".format(*figures(links))


def _link(link: Link, names: Mapping[int, str]) -> str:
    ends = f"{names[link.start]} to {names[link.end]}"
    if link.latency_ms is None or link.mib_per_s is None:
        return f"{ends}: {link.status}"
    return f"{ends}: {link.latency_ms:.2g} ms, {link.mib_per_s:.0f} MiB/s, {link.status}"
