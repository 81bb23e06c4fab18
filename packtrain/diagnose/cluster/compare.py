"""The report of each machine, what differs between those of several, and whether it may; a report is a plain document.

Three kinds of difference: what must be the same (`fail`: the run would stop, or train something else), what had better be
(`warn`), and what is a machine's own business (`ok`: its interfaces, its devices), shown because it explains the rest.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from packtrain.config.compose import to_dict
from packtrain.config.rules.secrets import speaks_of_secrets
from packtrain.config.schema import RunConfig
from packtrain.diagnose.env import check_all, gather, print_check, report_json
from packtrain.diagnose.facts import GIB, Status, size
from packtrain.diagnose.host import told
from packtrain.diagnose.redact import Redactor
from packtrain.plan.agreement import digest_of, shared_values, shared_versions
from packtrain.run_folder import environment
from packtrain.wording import grouped

CLOCK_S = 2.0
"""Clocks that are closer are alike: what is measured over a network on busy machines is no better."""
NOTHING = "nothing"
_OWN = re.compile(r"_IFNAME$|_HCA$|VISIBLE_DEVICES$|^TMPDIR$|^MASTER_ADDR$")
_VERSIONS = "Install the same versions everywhere, e.g. from one lock file or container image."
_CONFIG = "Start every machine with the same config file and the same KEY=VALUE arguments."
_GPUS = "Look at nvidia-smi and CUDA_VISIBLE_DEVICES there; leave a machine out that has lost a GPU."
_CARDS = (
    "Take machines with the same GPUs, set alike (nvidia-smi -q): the slowest sets the pace, the smallest the batch."
)
_SYSTEM = "Start every machine from one image with the same limits (ulimit, --shm-size, Slurm: topology.memory, cpus_per_node)."
_PORTS = "Look at ibstat and ip link there: a port that is down or slow holds up all machines."
_VARIABLE = "Set it on every machine, e.g. by topology.environment."
_SECRET = "Set it on every machine where it is kept from others (a file that only you can read), not in the config."
_CLOCK = "Start NTP there (timedatectl set-ntp true), so that times in logs match."

Trait = tuple[str, str, Status, str]
"""A thing to compare: its name, its value in words ("" where not known), what a difference means, what to do about it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Who has which value of `what`, the value that most have first."""

    what: str
    status: Status
    values: tuple[tuple[str, tuple[str, ...]], ...]
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain containers."""
        values = [{"value": value, "nodes": list(nodes)} for value, nodes in self.values]
        return {"what": self.what, "status": self.status, "values": values, "fix": self.fix}


@dataclass(frozen=True, slots=True)
class Folded:
    """A check that says the same on all of `nodes`."""

    name: str
    status: Status
    found: str
    fix: str
    nodes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain containers."""
        return {**asdict(self), "nodes": list(self.nodes)}


def differences(reports: Mapping[str, Mapping[str, Any]], offsets: Mapping[str, float]) -> list[Difference]:
    """Everything that is not the same on all machines, what must be first; `offsets` are their clocks' in seconds."""
    traits: dict[str, dict[str, Trait]] = {}
    cut = set()
    for name, report in reports.items():
        traits[name] = {}
        try:
            for one in _traits(report):
                traits[name][one[0]] = one
        except (
            KeyError,
            TypeError,
            AttributeError,
            ValueError,
        ):  # of another version of packtrain, which is compared first
            cut.add(name)
    found = []
    for what in dict.fromkeys(what for one in traits.values() for what in one):
        _, _, status, fix = next(one[what] for one in traits.values() if what in one)
        known = {
            name: one[what][1] if what in one else NOTHING
            for name, one in traits.items()
            if what in one or name not in cut
        }
        groups = grouped({name: value for name, value in known.items() if value})
        if len(groups) > 1:
            found.append(Difference(what, status, groups, fix))
    if max((abs(offset) for offset in offsets.values()), default=0) > CLOCK_S:
        found.append(
            Difference("clock", "warn", grouped({name: _clock(offset) for name, offset in offsets.items()}), _CLOCK)
        )
    return sorted(found, key=lambda one: ("fail", "warn", "ok").index(one.status))


def folded(reports: Mapping[str, Mapping[str, Any]]) -> list[Folded]:
    """The checks that failed or warned, each once with all machines that say the same, in the order of a report."""
    who: dict[tuple[str, Status, str, str], list[str]] = defaultdict(list)
    for name, report in reports.items():
        for check in report["checks"]:
            if check["status"] != "ok":
                who[(check["name"], check["status"], check["found"], check["fix"])].append(name)
    found = [Folded(*key, nodes=tuple(names)) for key, names in who.items()]
    return sorted(found, key=lambda one: ("fail", "warn").index(one.status))


def _traits(report: Mapping[str, Any]) -> Iterator[Trait]:
    """What is compared of a report: first what a run compares, too."""
    own, facts = report["own"], report["facts"]
    for group, fix in (("versions", _VERSIONS), ("config", _CONFIG)):
        for name, value in own[group].items():
            yield name, value, "fail", fix
    yield "packtrain's commit", facts["software"]["commits"].get("packtrain", ""), "fail", _VERSIONS
    torch, cards, host = facts["torch"], facts["gpus"]["gpus"], facts["host"]
    yield (
        "torch, as imported",
        torch["version"] or "",
        "fail",
        _VERSIONS,
    )  # one that does not answer is a check of its own
    for name in ("cuda", "nccl", "cudnn"):
        yield f"{name} of torch", (torch[name] or NOTHING) if torch["version"] else "", "fail", _VERSIONS
    yield "number of GPUs", str(len(cards)), "fail", _GPUS
    yield "NVIDIA driver", facts["gpus"]["driver"] or NOTHING, "warn", "Install the same driver on every machine."
    for what, words in (_CARD if cards else {}).items():  # a machine without any differs in their number
        yield what, _counted(words(one) for one in cards), "warn", _CARDS
    for name, version in {**facts["software"]["packages"], **facts["software"]["tools"]}.items():
        if name not in own["versions"]:
            yield name, version or "not installed", "warn", _VERSIONS
    for name, value in own["environment"].items():
        if _OWN.search(name):
            yield name, value, "ok", ""
        else:
            yield name, value, "warn", _SECRET if speaks_of_secrets(name) else _VARIABLE
    ports = (
        f"{one['layer']} {one['rate']} Gb/s {'up' if one['active'] else 'down'}" for one in facts["network"]["ports"]
    )
    yield "RDMA ports", _counted(ports), "warn", _PORTS
    mtus = (f"MTU {one['mtu']}" for one in facts["network"]["interfaces"] if one["default_route"] and one["mtu"])
    yield "MTU of the default route", _counted(mtus), "warn", _PORTS
    yield "platform", facts["software"]["platform"], "warn", _SYSTEM
    yield "cores", f"{host['cpus']:g}", "warn", _SYSTEM
    for what, key in (("memory", "memory"), ("/dev/shm", "shm")):
        yield what, _rounded(host[key]), "warn", _SYSTEM
    for letter, key in (("l", "memlock"), ("n", "nofile")):  # -1: no limit
        value = "unlimited" if host[key] == -1 else "" if host[key] is None else str(host[key])
        yield f"ulimit -{letter}", value, "warn", _SYSTEM
    for folder in host["folders"]:
        words = f"{folder['kind'] or 'file system not known'}{'' if folder['writable'] else ', not writable'}"
        yield (
            f"{folder['setting']} on",
            words,
            "warn",
            f"Name a folder by {folder['setting']} that is the same everywhere.",
        )


_CARD = {
    "GPUs": lambda one: f"{one['name']}, {size(one['memory'])}",
    "ECC of the GPUs": lambda one: str(one["ecc"]),
    "MIG of the GPUs": lambda one: str(one["mig"]),
    "NVLinks of the GPUs": lambda one: str(one["nvlinks"]),
    "power limit of the GPUs": lambda one: f"{one['power']} W",
}


def _clock(offset_s: float) -> str:
    return "right" if abs(offset_s) <= CLOCK_S else f"{abs(offset_s):.0f} s {'ahead' if offset_s > 0 else 'behind'}"


def _counted(texts: Iterable[str]) -> str:
    """ "8 × H100, 1 × A100"."""
    return ", ".join(f"{number} × {text}" for text, number in sorted(Counter(texts).items())) or NOTHING


def _rounded(number: int | None) -> str:
    """Bytes in GiB without a fraction: two machines of one kind differ by some MiB."""
    return NOTHING if number is None else size(number) if number < GIB else f"{number / GIB:.0f} GiB"


def named(nodes: Sequence[str], most: int = 8) -> str:
    """ "n1, n2, n3"; of many only the first."""
    return ", ".join(nodes[:most]) + (f" and {len(nodes) - most} more" if len(nodes) > most else "")


def show(document: Mapping[str, Any], machines: int) -> None:
    """The comparison of so many machines on stdout, in colour on a terminal."""
    console, reduced = Console(highlight=False, soft_wrap=True), document["all_reduce"]
    console.print(escape(f"\n{len(document['nodes'])} of {machines} machines: {named(list(document['nodes']), 16)}"))
    for name, why in document["reasons"].items():
        print_check(console, "fail", "missing", f"{name}: {why}", "")
    console.print("\nWhat differs:\n")
    for one in document["differences"]:
        values = [f"{named(value['nodes'])}: {value['value']}" for value in one["values"]]
        more = [f"{len(values) - 8} more values"] if len(values) > 8 else []
        print_check(console, one["status"], one["what"], " / ".join([*values[:8], *more]), one["fix"])
    console.print("" if document["differences"] else "nothing\n", end="\nChecks that failed or warned:\n\n")
    for one in document["checks"]:
        print_check(console, one["status"], one["name"], f"{named(one['nodes'])}: {one['found']}", one["fix"])
    console.print(
        "" if document["checks"] else "none\n", end=escape(f"\nAll-reduce: {reduced['status']} ({reduced['found']})\n")
    )
    for link in reduced["pairs"][:16]:
        rate = f"{link['latency_ms']:.2g} ms, {link['mib_per_s']:.0f} MiB/s, " if link["mib_per_s"] else ""
        console.print(escape(f"{link['from']} and {link['to']}: {rate}{link['status']}"))
    statuses = [one["status"] for one in (*document["differences"], *document["checks"])]
    bad = f"{statuses.count('fail')} failed, {statuses.count('warn')} to look at"
    console.print(f"\n{len(document['missing'])} missing, {bad}")


def own_report(config: RunConfig) -> dict[str, Any]:
    """This machine's report as `env --json` has it, with what else is compared under `own`; nothing secret is in it."""
    facts, needs = gather(lambda: config)
    redactor = Redactor(os.environ, needs.environment)
    own = {
        "versions": shared_versions(environment()),
        "config": {key: shown(key, value, redactor) for key, value in shared_values(to_dict(config)).items()},
        "network": {one.name: one.value for one in needs.network if one.value is not None},
        "environment": {name: shown(name, value, redactor) for name, value in told(os.environ).items()},
    }
    return {**report_json(facts, needs, check_all(facts, needs), redactor), "own": own}


def shown(name: str, value: str, redactor: Redactor) -> str:
    """The value of a variable or a key; of one with a secret in it a digest, too, by which two can be told apart."""
    plain = redactor.plain({name: value})[name]
    return plain if plain == value else f"{plain} ({digest_of(value)})"
