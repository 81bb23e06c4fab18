"""What each launcher says of its machine at the roll call, and what must be the same on all of them. Pure.

Values are compared as text. Those that may be secret (environment variables, tokens, addresses with a password) travel as
a short digest, enough to see that two differ.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from packtrain.config.schema import RunConfig
from packtrain.config.secret_names import speaks_of_secrets
from packtrain.errors import CheckFailed, PacktrainError, Problem

CLOCK_SKEW_S = 60
_MOST_SHOWN = 12
_MOST_NAMES = 6
# A machine's own business: its number, the name it has for the main one, its folder for caches, its devices.
_OWN = re.compile(
    r"topology\.(node_rank|main_address)|data\.cache_dir|topology\.environment\..*(_IFNAME|_HCA|VISIBLE_DEVICES)"
)
_FEWER_GPUS = "Set topology.gpus_per_node={} on every machine, and look at nvidia-smi and CUDA_VISIBLE_DEVICES."
_VARIABLES = "topology.environment."  # anything may be in them
_URL_WITH_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@]*@")


@dataclass(frozen=True, slots=True)
class Member:
    """One machine as its launcher describes it: machine `node` of `nodes`, with `per_node` processes of `total`.

    `versions` has packages and Python, `config` the text of every value that all machines must share; `clock` is seconds
    since 1970.
    """

    node: int
    nodes: int
    per_node: int
    total: int
    gpus: int
    host: str
    addresses: tuple[str, ...]
    versions: Mapping[str, str]
    config: Mapping[str, str]
    clock: float

    def to_json(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Member:
        """The member that `to_json` described. Raises ValueError for anything else."""
        if not isinstance(values, dict) or set(values) != {one.name for one in fields(cls)}:
            raise ValueError("not a member")
        whole = all(type(values[name]) is int and 0 <= values[name] < 2**20 for name in _WHOLE)
        texts = all(_is_text_map(values[name]) for name in ("versions", "config"))
        addresses = values["addresses"]
        listed = isinstance(addresses, (list, tuple)) and all(isinstance(one, str) for one in addresses)
        timed = isinstance(values["clock"], (int, float)) and abs(values["clock"]) < 1e12
        if not (whole and texts and listed and timed and isinstance(values["host"], str)):
            raise ValueError("not a member")
        host = "".join(letter for letter in values["host"] if letter.isprintable())[:255]
        return cls(**{**values, "host": host or "?", "addresses": tuple(addresses)})


_WHOLE = ("node", "nodes", "per_node", "total", "gpus")


def shared_values(config: RunConfig) -> dict[str, str]:
    """Key → text of every config value that must be the same on all machines; secrets as digests."""
    flat: dict[str, Any] = {}
    _flatten(asdict(config), "", flat)
    return {key: _shown(key, value) for key, value in flat.items() if not _OWN.fullmatch(key)}


def shared_versions(environment: Mapping[str, Any]) -> dict[str, str]:
    """Package → version of `run_folder.environment()`, and Python's without its patch level."""
    packages = {name: version or "not installed" for name, version in environment["versions"].items()}
    return {"python": ".".join(str(environment["python"]).split(".")[:2]), **packages}


def job_of(config: RunConfig) -> str:
    """A name of the run by which its launchers know each other; machines of another run are sent away."""
    return hashlib.blake2b(config.trainer.output_dir.encode(), digest_size=8).hexdigest()


def names_of(members: Sequence[Member]) -> dict[int, str]:
    """Node → host name, with the machine's number where two have the same one."""
    hosts = [member.host for member in members]
    return {
        member.node: member.host if hosts.count(member.host) == 1 else f"{member.host} (machine {member.node})"
        for member in members
    }


def ranks_of(node: int, per_node: int) -> str:
    """Which ranks a machine has, in words."""
    first, last = node * per_node, (node + 1) * per_node - 1
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def twice(one: Member, other: Member) -> CheckFailed:
    """Two machines with the same number."""
    places = " and ".join(f"{member.host} ({', '.join(member.addresses) or '?'})" for member in (one, other))
    return CheckFailed(
        f"two machines say that they are number {one.node}: {places}",
        where="topology.node_rank",
        fix=f"Give each machine its own, from 0 (topology.main_address) to {max(one.nodes - 1, 1)}.",
    )


def wrong_counts(members: Sequence[Member]) -> CheckFailed | None:
    """Whether the machines mean to start different numbers of processes, or cannot have as many as they mean to."""
    names = names_of(members)
    nodes = {names[one.node]: str(one.nodes) for one in members}
    if len(set(nodes.values())) > 1:
        what = f"the machines do not agree on how many they are: {_by_value(nodes)}"
        return CheckFailed(what, where="topology.nodes", fix="Start every machine with the same topology.nodes.")
    per_node = {names[one.node]: str(one.per_node) for one in members}
    gpus = {names[one.node]: str(one.gpus) for one in members}
    if len(set(per_node.values())) > 1:
        of_gpus = per_node == gpus
        found = ", ".join(f"{name}: {number}" for name, number in list(per_node.items())[:_MOST_SHOWN])
        what = f"the machines do not have the same number of {'GPUs' if of_gpus else 'processes'} ({found})"
        fewest = min(one.per_node for one in members)
        return CheckFailed(what, where="topology.gpus_per_node", fix=_FEWER_GPUS.format(fewest))
    if short := [one for one in members if 0 < one.gpus < one.per_node]:
        found = ", ".join(f"{names[one.node]}: {one.gpus}" for one in short[:_MOST_SHOWN])
        what = f"{members[0].per_node} GPUs on each machine are wanted, and some have fewer ({found})"
        fewest = min(one.gpus for one in short)
        return CheckFailed(what, where="topology.gpus_per_node", fix=_FEWER_GPUS.format(fewest))
    totals = {names[one.node]: str(one.total) for one in members}
    expected = members[0].nodes * members[0].per_node
    if set(totals.values()) != {str(expected)}:
        what = f"{expected} processes in total are wanted, but planned are {_by_value(totals)}"
        return CheckFailed(what, where="topology", fix="Start every machine with the same config.")
    if len({one.gpus > 0 for one in members}) > 1:
        what = f"some machines have GPUs and others none ({_by_value(gpus)})"
        return CheckFailed(what, where="topology", fix="Look at nvidia-smi and CUDA_VISIBLE_DEVICES there.")
    return None


def differences(members: Sequence[Member]) -> PacktrainError | None:
    """Everything that is not the same on all machines and must be: one error with each key and who has which value."""
    if counts := wrong_counts(members):
        return counts
    names = names_of(members)
    problems = []
    for group, fix in (
        ("config", "Start every machine with the same config file and the same KEY=VALUE arguments."),
        ("versions", "Install the same versions everywhere, e.g. from one lock file or container image."),
    ):
        found = _unlike({names[one.node]: cast(Mapping[str, str], getattr(one, group)) for one in members})
        last = len(found) - 1
        for number, (key, text) in enumerate(found.items()):
            problems.append(Problem(text, key, fix if number == last else ""))
    return CheckFailed(problems) if problems else None


def clock_remarks(members: Sequence[Member], offsets: Mapping[int, float]) -> list[str]:
    """Clocks that are far from machine 0's; `offsets` are seconds by node, measured when a member said its clock."""
    names = names_of(members)
    return [
        f"the clock of {names[node]} is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} that of {names[0]}: "
        "times in logs will not match (is NTP running?)"
        for node, offset in sorted(offsets.items())
        if abs(offset) > CLOCK_SKEW_S
    ]


def _flatten(value: Any, path: str, into: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _flatten(inner, f"{path}.{name}" if path else str(name), into)
    else:
        into[path] = value


def _shown(key: str, value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    if value is not None and (key.startswith(_VARIABLES) or speaks_of_secrets(key) or _URL_WITH_PASSWORD.search(text)):
        return f"a value not shown ({digest_of(text)})"
    return text if len(text) <= 200 else f"{text[:160]}… ({digest_of(text)})"


def digest_of(text: str) -> str:
    """A few letters by which two secrets can be told apart."""
    return hashlib.blake2b(text.encode(), digest_size=3).hexdigest()


def _unlike(values: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Key → who has which value, of the keys whose values (by machine) differ."""
    keys = dict.fromkeys(key for mapping in values.values() for key in mapping)
    found = {}
    for key in keys:
        by_machine = {name: mapping.get(key, "nothing") for name, mapping in values.items()}
        if len(set(by_machine.values())) > 1:
            found[key] = _by_value(by_machine)
    if len(found) > _MOST_SHOWN:
        more = len(found) - _MOST_SHOWN
        found = dict(list(found.items())[:_MOST_SHOWN])
        found["and"] = f"{more} more that differ"
    return found


def _by_value(by_machine: Mapping[str, str]) -> str:
    """ "4 on n1 and n3, 3 on n2", the value that most have first."""
    return ", ".join(f"{value} on {listed(names)}" for value, names in grouped(by_machine))


def grouped(by_machine: Mapping[str, str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Each value and who has it, the value that most have first."""
    who: dict[str, list[str]] = defaultdict(list)
    for name, value in by_machine.items():
        who[value].append(name)
    groups = sorted(who.items(), key=lambda item: -len(item[1]))
    return tuple((value, tuple(names)) for value, names in groups)


def listed(names: Sequence[str]) -> str:
    """ "n1, n2 and n3"; of many only the first."""
    names = list(names)
    if len(names) > _MOST_NAMES:
        return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for pair in value.items() for one in pair)
