"""What all processes of a run must have in common: asserted after start, after data, and after loading the model.

Processes that differ would train something that nobody asked for, or wait for each other for ever. The comparison is
that of plan/agreement.py; peers.py carries the statements. Weights are compared by a hash over
their bytes: xxh3 takes 0.1 s for 135 million float32 ones, where a cryptographic hash takes 1 s.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from packtrain.config.schema import RunConfig
from packtrain.errors import Disagreement, Problem
from packtrain.model.load import base_model
from packtrain.plan.agreement import SAME_CONFIG, SAME_VERSIONS, differences, shared_values, shared_versions
from packtrain.run_folder import environment
from packtrain.train.sync.peers import FIRST_STAGE, Peers, Statement, places_in_words, preparing_s
from packtrain.wording import counted

_MOST_SHOWN = 8
_LONGEST = 120
_NO_MATTER = ("_name_or_path", "transformers_version")  # of a model's config


@dataclass(frozen=True, slots=True)
class Claim:
    """Facts (name → value in words) that must be the same on all processes, and what to do where they are not."""

    facts: Mapping[str, str]
    fix: str


def agree_on_start(
    peers: Peers | None, config: RunConfig, device: str, planned: tuple[int, int] | None, own: Sequence[str] = ()
) -> None:
    """All processes have one config, the same packages and the same `device` (cpu, cuda), and are where they were planned.

    `planned`: machines, and processes on each, where that is known; `own`: config keys that may differ.
    Raises Disagreement, PeerFailed.
    """
    number = peers.world_size if peers else 1
    if planned and (problem := wrong_number(number, planned)):
        raise Disagreement(problem, shown=peers is None or peers.speaks)
    shared = {key: value for key, value in shared_values(config).items() if key not in own}
    own_machine = os.environ.get("LOCAL_WORLD_SIZE", "?")
    claims = (
        Claim(shared, SAME_CONFIG),
        Claim(shared_versions(environment()), SAME_VERSIONS),
        Claim({"device": device}, "look at nvidia-smi and CUDA_VISIBLE_DEVICES there"),
        Claim({"processes on the machine": own_machine}, "start the same number of processes on every machine"),
    )
    _agree(peers, FIRST_STAGE, claims, config.topology.join_timeout, planned)


def agree_on_data(peers: Peers | None, config: RunConfig, data: Any) -> None:
    """All processes have prepared the same documents (a PreparedData). Raises Disagreement, PeerFailed."""
    parts = {"data.train": data.train, "data.eval": data.eval}
    facts = {
        key: f"{counted(len(part), 'documents')} with fingerprint {part.fingerprint[:12]}" if part else "none"
        for key, part in parts.items()
    }
    fix = "the files or the tokenizer differ there: copy them, or train on a shared disk; a hub id can have a revision"
    _agree(peers, "data", (Claim(facts, fix),), preparing_s(config.topology.step_timeout))


def agree_on_model(peers: Peers | None, config: RunConfig, model: torch.nn.Module) -> None:
    """All processes have loaded the same weights and settings of the model. Raises Disagreement, PeerFailed."""
    if peers is None:
        return
    settings = base_model(model).config.to_dict()
    facts = {f"model.config.{key}": _text(value) for key, value in settings.items() if key not in _NO_MATTER}
    facts["model weights"] = f"those with hash {weights_hash(model)[:12]}"
    fix = "its files differ there: compare them with sha256sum, copy them, or name a model.revision"
    _agree(peers, "model", (Claim(facts, fix),), preparing_s(config.topology.step_timeout))


def weights_hash(model: torch.nn.Module) -> str:
    """Hash of names, types, shapes and bytes of all weights and saved buffers, adapters among them; tied ones count once."""
    digest, seen = xxhash.xxh3_128(), set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.device.type != "meta":
            bytes_of: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            digest.update(bytes_of)
    return digest.hexdigest()


def unlike(statements: Sequence[Statement], fixes: Mapping[str, str]) -> list[Problem]:
    """One problem for each fact that is not the same in all statements; `fixes`: fact → what to do about it."""
    several = len({one.host for one in statements}) > 1
    by_rank = {one.rank: one for one in statements}

    def in_words(ranks: Sequence[int]) -> str:
        return places_in_words([by_rank[rank] for rank in ranks], several_hosts=several)

    return differences({rank: one.facts for rank, one in by_rank.items()}, fixes, in_words)


def misplaced(statements: Sequence[Statement], planned: tuple[int, int]) -> list[Problem]:
    """Whether the processes are on other machines, or on more or fewer of them, than the plan has them on."""
    nodes, per_node = planned
    machines: dict[str, list[Statement]] = defaultdict(list)
    for one in statements:
        machines[one.machine].append(one)
    wrong = [ours for ours in machines.values() if len(ours) != per_node]
    if len(machines) == nodes and not wrong:
        return []
    found = ", ".join(f"{len(ours)} on {ours[0].host}" for ours in (wrong or list(machines.values()))[:_MOST_SHOWN])
    what = f"planned are {_times(nodes, per_node)}; started are {len(statements)} on {len(machines)} ({found})"
    fix = "look at how they were started: accelerate wants the total of all machines, torchrun those of each machine"
    return [Problem(what, "topology", fix)]


def wrong_number(world_size: int, planned: tuple[int, int]) -> Problem | None:
    """Whether other than the planned machines × processes have found each other."""
    nodes, per_node = planned
    if world_size == nodes * per_node:
        return None
    return Problem(
        f"planned are {_times(nodes, per_node)} = {nodes * per_node} in all, but {world_size} have found each other",
        "topology",
        "every machine must start packtrain with the same topology.nodes, main_address and main_port, and its own node_rank",
    )


def _agree(
    peers: Peers | None,
    stage: str,
    claims: Iterable[Claim],
    timeout_s: float,
    planned: tuple[int, int] | None = None,
) -> None:
    if peers is None:
        return
    claims = tuple(claims)
    fixes = {name: claim.fix for claim in claims for name in claim.facts}

    def judge(statements: Sequence[Statement]) -> list[Problem]:
        return [*(misplaced(statements, planned) if planned else []), *unlike(statements, fixes)]

    facts = {name: value for claim in claims for name, value in claim.facts.items()}
    peers.settle(stage, facts, judge, timeout_s=timeout_s)


def _times(nodes: int, per_node: int) -> str:
    machines = f"{nodes} machine{'s' if nodes > 1 else ''}"
    return f"{machines} × {per_node} process{'es' if per_node > 1 else ''}"


def _text(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({xxhash.xxh3_64_hexdigest(text.encode())[:6]})"
