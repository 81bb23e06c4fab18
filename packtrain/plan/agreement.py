"""Comparison of facts across machines (launch/rendezvous.py) and ranks (train/sync.py). Pure.

Values are compared as text. Values that may be secret are compared as short digests, enough to see that two differ.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from packtrain.config import is_mapping
from packtrain.errors import CheckFailed, Problem
from packtrain.wording import is_certain, listed, speaks_of_secrets

SAME_CONFIG = "start every process with the same config file and the same KEY=VALUE arguments"
SAME_VERSIONS = "install the same versions everywhere, e.g. from one lock file or container image"
GPUS_PER_NODE = "topology.gpus_per_node"
_CHECK_GPUS = "look at nvidia-smi and CUDA_VISIBLE_DEVICES"
# Keys that may differ between machines: node number, main address, cache folder, network interfaces and visible devices.
_OWN = re.compile(
    r"topology\.(node_rank|main_address)|data\.cache_dir|topology\.environment\..*(_IFNAME|_HCA|VISIBLE_DEVICES)"
)
_VARIABLES = "topology.environment."  # a user's own variables, which may hold secrets
_Peer = TypeVar("_Peer")


def shared_values(config: Mapping[str, object]) -> dict[str, str]:
    """Return key → text of all config values that machines must share; secrets as digests. `config`: plain containers."""
    flat: dict[str, object] = {}
    _flatten(config, "", flat)
    return {key: _shown(key, value) for key, value in flat.items() if not _OWN.fullmatch(key)}


def shared_versions(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return package → version from `run_folder.environment()`, and Python's version without its patch level."""
    packages = {name: version or "not installed" for name, version in environment["versions"].items()}
    return {"python": ".".join(str(environment["python"]).split(".")[:2]), **packages}


def digest_of(text: str) -> str:
    """Return a short digest that shows whether two secrets differ."""
    return hashlib.blake2b(text.encode(), digest_size=3).hexdigest()


def list_differences(
    facts_of: Mapping[_Peer, Mapping[str, str]], fixes: Mapping[str, str], in_words: Callable[[Sequence[_Peer]], str]
) -> list[Problem]:
    """Return one problem for each fact that is not the same for all.

    Example: "rank 2 has 4; ranks 0 and 1 have 3"; the smaller group comes first. `facts_of`: machine or rank → fact → value in words.
    `in_words` names several machines or ranks. `fixes`: fact → what to do about it.
    """
    everyone, problems = list(facts_of), list[Problem]()
    for name in dict.fromkeys(name for facts in facts_of.values() for name in facts):
        groups: dict[str, list[_Peer]] = defaultdict(list)
        for member, facts in facts_of.items():
            groups[facts.get(name, "no such thing")].append(member)
        # small groups first; among equal groups, the one with the first machine or rank last
        ordered = sorted(groups.items(), key=lambda item: (len(item[1]), -everyone.index(item[1][0])))
        has = [f"{in_words(ours)} {'have' if len(ours) > 1 else 'has'} {value}" for value, ours in ordered]
        if len(has) > 1:
            problems.append(Problem("; ".join(has), name, fixes.get(name, ""), code="peers-differ"))
    following = [*(item.fix for item in problems[1:]), ""]
    return [  # state a fix once, below all neighbouring problems that it mends
        replace(item, fix="" if item.fix == then else item.fix) for item, then in zip(problems, following, strict=False)
    ]


@dataclass(frozen=True, slots=True)
class Member:
    """One machine as its launcher describes it: machine `node` of `nodes`, with `per_node` processes.

    `versions` has packages and Python. `config` has the text of every value that all machines must share.
    """

    node: int
    nodes: int
    per_node: int
    gpus: int
    host: str
    addresses: tuple[str, ...]
    versions: Mapping[str, str]
    config: Mapping[str, str]


def names_of(members: Sequence[Member]) -> dict[int, str]:
    """Return node → host name. Machines with equal host names also get their number."""
    hosts = [member.host for member in members]
    return {
        member.node: member.host if hosts.count(member.host) == 1 else f"{member.host} (machine {member.node})"
        for member in members
    }


def same_number_error(item: Member, other: Member) -> CheckFailed:
    """Return the error that two machines have the same number."""
    places = " and ".join(f"{member.host} ({', '.join(member.addresses) or '?'})" for member in (item, other))
    what = f"two machines are number {item.node}: {places}"
    fix = f"Give each machine its own, from 0 (topology.main_address) to {max(item.nodes - 1, 1)}."
    return CheckFailed(what, where="topology.node_rank", fix=fix, code="same-number")


def compare_counts(members: Sequence[Member]) -> CheckFailed | None:
    """Return the error if machines differ in process counts or lack GPUs; else None."""
    if short := [item for item in members if 0 < item.gpus < item.per_node]:
        here = ", ".join(f"{names_of(members)[item.node]}: {item.gpus}" for item in short)
        what = f"{short[0].per_node} GPUs on each machine are needed, but some have fewer ({here})"
        fix = f"Set {GPUS_PER_NODE}={min(item.gpus for item in short)} on every machine, and {_CHECK_GPUS}."
        return CheckFailed(what, where=GPUS_PER_NODE, fix=fix, code="machines-lack-gpus")
    gpus = {item.node: "some" if item.gpus else "none" for item in members}
    facts_of = {
        item.node: {"topology.nodes": str(item.nodes), GPUS_PER_NODE: str(item.per_node), "GPUs": gpus[item.node]}
        for item in members
    }
    fixes = {
        "topology.nodes": "Start every machine with the same topology.nodes.",
        GPUS_PER_NODE: f"Set it to the smallest of them on every machine, and {_CHECK_GPUS}.",
        "GPUs": f"{_CHECK_GPUS} there",
    }
    return _compare(members, facts_of, fixes)


def compare_members(members: Sequence[Member]) -> CheckFailed | None:
    """Return one error about all facts that machines must share but do not; else None."""
    facts_of = {item.node: {**item.config, **item.versions} for item in members}
    fixes = {key: SAME_CONFIG for item in members for key in item.config}
    fixes |= {key: SAME_VERSIONS for item in members for key in item.versions}
    return compare_counts(members) or _compare(members, facts_of, fixes)


def _compare(
    members: Sequence[Member], facts_of: Mapping[int, Mapping[str, str]], fixes: Mapping[str, str]
) -> CheckFailed | None:
    names = names_of(members)
    problems = list_differences(facts_of, fixes, lambda nodes: listed([names[node] for node in nodes]))
    return CheckFailed(problems) if problems else None


def _flatten(value: object, path: str, into: dict[str, object]) -> None:
    if is_mapping(value) and value:
        for name, inner in value.items():
            _flatten(inner, f"{path}.{name}" if path else str(name), into)
    else:
        into[path] = value


def _shown(key: str, value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    if value is not None and (key.startswith(_VARIABLES) or speaks_of_secrets(key) or is_certain(text)):
        return f"a value not shown ({digest_of(text)})"
    return text if len(text) <= 200 else f"{text[:160]}… ({digest_of(text)})"
