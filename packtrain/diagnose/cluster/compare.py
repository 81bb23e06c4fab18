"""What differs between the reports of several machines, and whether it may. Pure: a report is the plain document it came as.

Three kinds of difference: what must be the same (`fail`: the run would stop, or train something else), what had better be
(`warn`), and what is a machine's own business (`ok`: its interfaces, its devices), shown because it explains the rest.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packtrain.config.rules.secrets import speaks_of_secrets
from packtrain.diagnose.checks.check import GIB, Status, size
from packtrain.wording import grouped

CLOCK_S = 2.0
"""Clocks that are closer are alike: what is measured over a network on busy machines is no better."""
NOTHING = "nothing"
_OWN = re.compile(r"_IFNAME$|_HCA$|VISIBLE_DEVICES$|^TMPDIR$|^MASTER_ADDR$|^CUDA_VISIBLE")
_SAME_VERSIONS = "Install the same versions everywhere, e.g. from one lock file or container image."
_SAME_CONFIG = "Start every machine with the same config file and the same KEY=VALUE arguments."
_SAME_FILES = "Copy the same files to every machine, or name a path that they share."
_SAME_CODE = "Install the same commit of packtrain everywhere."
_SAME_GPUS = "Look at nvidia-smi and CUDA_VISIBLE_DEVICES there; leave a machine out that has lost a GPU."
_SAME_CARDS = "Take machines with the same GPUs: the slowest sets the pace, the smallest the size of a batch."
_SAME_SYSTEM = "Start every machine from one image, so that what works on one works on all."
_SAME_VARIABLE = "Set it on every machine, e.g. by topology.environment."
_SAME_SECRET = (
    "Set it on every machine where it is kept from others (a file that only you can read), not in the config."
)
_SAME_CLOCK = "Start NTP there (timedatectl set-ntp true), so that times in logs match."

Values = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Trait:
    """A thing to compare: its value in words ("" where it is not known), what a difference means, and what to do about it."""

    value: str
    status: Status
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """Who has which value of `what`, the value that most have first."""

    what: str
    status: Status
    values: Values
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
        head = {"name": self.name, "status": self.status, "found": self.found, "fix": self.fix}
        return {**head, "nodes": list(self.nodes)}


def differences(reports: Mapping[str, Mapping[str, Any]], offsets: Mapping[str, float]) -> list[Difference]:
    """Everything that is not the same on all machines, what must be first; `offsets` are their clocks' in seconds."""
    traits, cut = {}, set()
    for name, report in reports.items():
        traits[name] = {}
        try:
            traits[name].update(traits_of(report))
        except (
            KeyError,
            TypeError,
            AttributeError,
            ValueError,
        ):  # of another version of packtrain, which is seen first
            cut.add(name)
    found = []
    for what in dict.fromkeys(what for one in traits.values() for what in one):
        trait = next(one[what] for one in traits.values() if what in one)
        known = {name: one.get(what) for name, one in traits.items() if what in one or name not in cut}
        by_machine = {name: NOTHING if one is None else one.value for name, one in known.items()}
        by_machine = {name: value for name, value in by_machine.items() if value}
        if len(set(by_machine.values())) > 1:
            found.append(Difference(what, trait.status, grouped(by_machine), trait.fix))
    if max((abs(offset) for offset in offsets.values()), default=0) > CLOCK_S:
        by_machine = {name: _offset(offset) for name, offset in offsets.items()}
        found.append(Difference("clock", "warn", grouped(by_machine), _SAME_CLOCK))
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


def traits_of(report: Mapping[str, Any]) -> Iterator[tuple[str, Trait]]:
    """What is compared of a report, by name: first what the run compares, too."""
    own, facts = report["own"], report["facts"]
    for name, version in own["versions"].items():
        yield name, Trait(version, "fail", _SAME_VERSIONS)
    yield "packtrain's code", Trait(own["code"], "fail", _SAME_CODE)
    for key, value in own["config"].items():
        yield key, Trait(value, "fail", _SAME_CONFIG)
    for key, value in own["data"].items():
        yield key, Trait(value, "fail", _SAME_FILES)
    yield from _torch(facts["torch"])
    yield from _gpus(facts["gpus"])
    for name, version in {**facts["software"]["packages"], **facts["software"]["tools"]}.items():
        if name not in own["versions"]:
            yield name, Trait(version or "not installed", "warn", _SAME_VERSIONS)
    yield "platform", Trait(facts["software"]["platform"], "warn", _SAME_SYSTEM)
    for name, value in own["environment"].items():
        mine = _OWN.search(name)
        same = _SAME_SECRET if speaks_of_secrets(name) else _SAME_VARIABLE
        yield name, Trait(value, "ok" if mine else "warn", "" if mine else same)
    yield from _network(facts["network"])
    yield from _machine(facts["host"])


def _torch(torch: Mapping[str, Any]) -> Iterator[tuple[str, Trait]]:
    known = torch["version"] is not None  # a torch that does not answer is a check of its own
    yield "torch, as imported", Trait(torch["version"] or "", "fail", _SAME_VERSIONS)
    for name in ("cuda", "nccl", "cudnn"):
        yield f"{name} of torch", Trait(torch[name] or NOTHING if known else "", "fail", _SAME_VERSIONS)


def _gpus(gpus: Mapping[str, Any]) -> Iterator[tuple[str, Trait]]:
    cards = gpus["gpus"]
    yield "number of GPUs", Trait(str(len(cards)), "fail", _SAME_GPUS)
    yield "NVIDIA driver", Trait(gpus["driver"] or NOTHING, "warn", "Install the same driver on every machine.")
    if not cards:  # a machine without any differs in their number
        return
    yield "GPUs", Trait(_counted(f"{one['name']}, {size(one['memory'])}" for one in cards), "warn", _SAME_CARDS)
    for what, key in (("ECC", "ecc"), ("MIG", "mig"), ("NVLinks", "nvlinks"), ("PCIe lanes", "width")):
        fix = f"Look at nvidia-smi -q there ({what}): the slowest GPU sets the pace."
        yield f"{what} of the GPUs", Trait(_counted(str(one[key]) for one in cards), "warn", fix)
    for what, key, unit, fix in (("clock", "clock", "MHz", "-ac, -lgc"), ("power limit", "power", "W", "-pl")):
        amounts = _counted(f"{one[key]} {unit}" for one in cards if one[key] is not None)
        yield f"{what} of the GPUs", Trait(amounts, "warn", f"nvidia-smi {fix} sets it: the slowest sets the pace.")


def _network(network: Mapping[str, Any]) -> Iterator[tuple[str, Trait]]:
    ports = _counted(
        f"{one['layer']} {one['rate']} Gb/s {'up' if one['active'] else 'down'}" for one in network["ports"]
    )
    yield "RDMA ports", Trait(ports, "warn", "Look at ibstat there: a port that is down or slow holds up all machines.")
    mtus = [str(one["mtu"]) for one in network["interfaces"] if one["default_route"] and one["mtu"]]
    if mtus:
        yield "MTU of the default route", Trait(", ".join(sorted(set(mtus))), "warn", "Set one MTU on every machine.")


def _machine(host: Mapping[str, Any]) -> Iterator[tuple[str, Trait]]:
    limits = host["limits"]
    yield (
        "cores",
        Trait(str(limits["cpus"]), "warn", "Give each machine the same number (Slurm: topology.cpus_per_node)."),
    )
    memory = "Give each machine the same amount (Slurm: topology.memory; docker run --memory)."
    yield "memory", Trait(_rounded(limits["memory"]), "warn", memory)
    yield "memory limit (cgroup)", Trait(_rounded(limits["memory_limit"]), "warn", memory)
    for letter, what in (("l", "memlock"), ("n", "nofile")):  # -1: no limit
        fix = f"Set one limit on every machine ('* - {what}' in /etc/security/limits.conf)."
        value = "unlimited" if limits[what] == -1 else "" if limits[what] is None else str(limits[what])
        yield f"ulimit -{letter}", Trait(value, "warn", fix)
    yield "/dev/shm", Trait(_rounded(limits["shm"]), "warn", "Start every container with the same --shm-size.")
    for folder in host["folders"]:
        kind = folder["kind"] or "file system not known"
        fix = f"Name a folder by {folder['setting']} that is the same on every machine."
        yield f"{folder['setting']} on", Trait(f"{kind}{'' if folder['writable'] else ', not writable'}", "warn", fix)


def _counted(texts: Iterator[str]) -> str:
    """ "8 × H100, 1 × A100"."""
    return ", ".join(f"{number} × {text}" for text, number in sorted(Counter(texts).items())) or NOTHING


def _rounded(number: int | None) -> str:
    """Bytes in GiB without a fraction: two machines of one kind differ by some MiB."""
    return NOTHING if number is None else size(number) if number < GIB else f"{number / GIB:.0f} GiB"


def _offset(seconds: float) -> str:
    if abs(seconds) <= CLOCK_S:
        return "right"
    return f"{abs(seconds):.0f} s {'ahead' if seconds > 0 else 'behind'}"


def said(values: Values, most: int = 8) -> str:
    """ "n1, n2: 2.13.0 / n3: 2.12.0"; of many names and values only the first."""
    parts = [f"{named(nodes)}: {value}" for value, nodes in values[:most]]
    return " / ".join([*parts, *([f"{len(values) - most} more values"] if len(values) > most else [])])


def named(nodes: Sequence[str], most: int = 8) -> str:
    """ "n1, n2, n3"; of many only the first."""
    return ", ".join(nodes[:most]) + (f" and {len(nodes) - most} more" if len(nodes) > most else "")
