"""The report of each machine, what differs between those of several, and whether it may; a report is a plain document.

Three kinds of difference: what must be the same (`fail`: the run would stop, or train something else), what had better be
(`warn`), and what is a machine's own business (`ok`: its interfaces, its devices), shown because it explains the rest.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from packtrain.diagnose.cluster.all_reduce import in_words
from packtrain.diagnose.env import check_all, print_check, report_json
from packtrain.diagnose.facts import GIB, Facts, RunNeeds, Status, size
from packtrain.diagnose.host import reported_variables
from packtrain.errors import CheckFailed, PeerFailed
from packtrain.plan.agreement import digest_of, shared_values, shared_versions
from packtrain.redact import Redactor
from packtrain.run_folder import environment
from packtrain.wording import grouped, listed

CLOCK_S = 2.0
"""Seconds by which clocks may differ: measured over a network on busy machines, less is not significant."""
NOTHING = "nothing"
_OWN = re.compile(r"_IFNAME$|_HCA$|VISIBLE_DEVICES$|^TMPDIR$|^MASTER_ADDR$")
_FIXES: dict[Status, str] = {
    "fail": "Start every machine with the same config and arguments, from one image or lock file; look at nvidia-smi there.",
    "warn": "Take machines that are alike, from one image, with the same limits and variables (topology.environment).",
    "ok": "",
}

Traits = Mapping[Status, Mapping[str, str]]
"""The compared facts of a machine, by what a difference means: name → value in words, "" if it is not known."""


def own_report(facts: Facts, needs: RunNeeds, config: Mapping[str, Any]) -> dict[str, Any]:
    """This machine's report as `env --json` has it, with what is compared, and what NCCL and gloo are told, under `own`;
    `config` as plain containers."""
    redactor = Redactor(os.environ, needs.environment)

    def hidden(values: Mapping[str, str]) -> dict[str, str]:
        return {name: shown(name, value, redactor) for name, value in values.items()}

    same, variables = (
        hidden({**shared_versions(environment()), **shared_values(config)}),
        hidden(reported_variables(os.environ)),
    )
    network = {one.name: one.value for one in needs.network if one.value is not None}
    own = {"network": network, "traits": traits_of(facts, same, variables)}
    return {**report_json(facts, needs, check_all(facts, needs), redactor), "own": own}


def traits_of(facts: Facts, same: Mapping[str, str], variables: Mapping[str, str]) -> Traits:
    """The compared facts of a machine; `same` are versions and config values, which a run compares, too."""
    torch, cards, host, net = facts.torch, facts.gpus.gpus, facts.host, facts.network
    # a torch that does not answer has a check of its own
    build = {name: (getattr(torch, name) or NOTHING) if torch.version else "" for name in ("cuda", "nccl")}
    must = {**same, **{f"{name} of torch": value for name, value in build.items()}, "number of GPUs": str(len(cards))}
    links = (f"{one.layer} {one.rate} Gb/s {'up' if one.active else 'down'}" for one in net.ports)
    alike = {
        "NVIDIA driver": facts.gpus.driver or NOTHING,
        # a machine without any differs in their number
        "GPUs": _counted(f"{one.name}, {size(one.memory)}" for one in cards) if cards else "",
        "RDMA ports": _counted(links),
        "platform": facts.software.platform,
        "cores": str(host.cpus),
        "memory": _rounded(host.memory),
        "/dev/shm": _rounded(host.shm),
        "ulimit -n": "unlimited" if host.nofile == -1 else f"{host.nofile}",
        **{f"{one.setting} on": one.kind for one in host.folders},
        **{name: version or "not installed" for name, version in facts.software.packages.items() if name not in same},
        **{name: value for name, value in variables.items() if not _OWN.search(name)},
    }
    return {"fail": must, "warn": alike, "ok": {name: value for name, value in variables.items() if _OWN.search(name)}}


def differences(traits: Mapping[str, Traits], offsets: Mapping[str, float]) -> list[dict[str, Any]]:
    """The facts that differ between machines, those that must not first, with the machines of each value, the most common first;
    `offsets` are their clocks' in seconds."""
    found = []

    def compare(what: str, status: Status, values: Mapping[str, str]) -> None:
        groups = grouped(values)
        if len(groups) > 1:
            values_of = [{"value": value, "nodes": list(nodes)} for value, nodes in groups]
            found.append({"what": what, "status": status, "values": values_of, "fix": _FIXES[status]})

    for status in _FIXES:
        of = {name: one.get(status, {}) for name, one in traits.items()}
        for what in dict.fromkeys(what for one in of.values() for what in one):
            values = {name: one.get(what, NOTHING) for name, one in of.items()}
            compare(what, status, {name: value for name, value in values.items() if value})
    compare("clock", "warn", {name: _clock(offset) for name, offset in offsets.items()})
    return found


def _clock(offset: float) -> str:
    return "right" if abs(offset) <= CLOCK_S else f"{abs(offset):.0f} s {'ahead' if offset > 0 else 'behind'}"


def folded(reports: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The checks that failed or warned, each once with all machines (`nodes`) that say the same, failed ones first."""
    found: dict[str, dict[str, Any]] = {}
    for name, report in reports.items():
        for one in report["checks"]:
            if one["status"] != "ok":
                found.setdefault(repr(one), {**one, "nodes": []})["nodes"].append(name)
    return sorted(found.values(), key=lambda one: one["status"])


def exit_code_of(document: Mapping[str, Any]) -> int:
    """4 if a machine is missing, 3 if a check failed or facts differ that must not, else 0."""
    failed = any(one["status"] == "fail" for one in (*document["differences"], *document["checks"]))
    return PeerFailed.exit_code if document["missing"] else CheckFailed.exit_code if failed else 0


def _counted(texts: Iterable[str]) -> str:
    """ "8 × H100, 1 × A100"."""
    return ", ".join(f"{number} × {text}" for text, number in sorted(Counter(texts).items())) or NOTHING


def _rounded(number: int | None) -> str:
    """Bytes in GiB without a fraction: two machines of one kind differ by some MiB."""
    return NOTHING if number is None else size(number) if number < GIB else f"{number / GIB:.0f} GiB"


def shown(name: str, value: str, redactor: Redactor) -> str:
    """The value of a variable or a key; a secret is hidden behind a digest, which shows whether two differ."""
    plain = redactor.plain({name: value})[name]
    return plain if plain == value else f"{plain} ({digest_of(value)})"


def show(document: Mapping[str, Any], machines: int) -> None:
    """The comparison of so many machines on stdout, in colour on a terminal."""
    console, reduced = Console(highlight=False, soft_wrap=True), document["all_reduce"]
    console.print(escape(f"\n{len(document['nodes'])} of {machines} machines: {listed(list(document['nodes']))}"))
    for name, why in document["reasons"].items():
        print_check(console, "fail", "missing", f"{name}: {why}", "")
    console.print("\nWhat differs:\n")
    for one in document["differences"]:
        values = [f"{listed(value['nodes'])}: {value['value']}" for value in one["values"]]
        print_check(console, one["status"], one["what"], " / ".join(values), one["fix"])
    console.print("" if document["differences"] else "nothing\n", end="\nChecks that failed or warned:\n\n")
    for one in document["checks"]:
        print_check(console, one["status"], one["name"], f"{listed(one['nodes'])}: {one['found']}", one["fix"])
    console.print(
        "" if document["checks"] else "none\n", end=escape(f"\nAll-reduce: {reduced['status']} ({reduced['found']})\n")
    )
    for pair in reduced["pairs"]:
        console.print(escape(in_words(pair)))
    statuses = [one["status"] for one in (*document["differences"], *document["checks"])]
    bad = f"{statuses.count('fail')} failed, {statuses.count('warn')} to look at"
    console.print(f"\n{len(document['missing'])} missing, {bad}")
