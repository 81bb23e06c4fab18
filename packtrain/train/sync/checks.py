"""Checks that all ranks agree: at the start, after preparing the data and after loading the model.

Ranks that differ would hang, or train something else than configured. The first collective operation is a sum with a known
result, so that a backend that hangs or adds wrongly is found at the start, not by a loss hours later. From then on
collectives have time limits, which change with the phase of the run.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed import distributed_c10d

from packtrain.errors import CheckFailed, PacktrainError, PeerFailed, Problem
from packtrain.launch.worker import LOG_DIR
from packtrain.model.load import base_model, weights_hash
from packtrain.monitor.heartbeat import waiting
from packtrain.plan.agreement import SAME_CONFIG, SAME_VERSIONS, differences, digest_of, shared_versions
from packtrain.plan.network_settings import SOCKETS
from packtrain.run_folder import environment
from packtrain.train.library_errors import shortly
from packtrain.train.sync.store_barrier import FIRST_STAGE, GRACE_S, Peers, Statement, ranks_on_hosts
from packtrain.wording import counted, listed, ranks_in_words

BACKGROUND = "checkpoints in the background"
"""The description of the group whose collectives are not those of a step (train/checkpoint/writer.py)."""
_MOST_SHOWN = 8
_MAY_DIFFER = ("_name_or_path", "transformers_version")  # in a model's config
_NUMBERS = 2**17  # 1 MiB fills the packets of a link: with a wrong MTU large packets are lost and small ones pass
_OTHERS_S = 5  # to wait for the others' outcome once one rank has failed
_LOOK_S = 1.0
_FAILED = "first all-reduce failed"
_DISK_S = 5  # some network disks take a while to show a new file
_NETWORK_FIX = "packtrain env CONFIG --cluster measures the links; NCCL_DEBUG=INFO tells which one is used, GLOO_SOCKET_IFNAME sets it"


def agree_on_start(peers: Peers | None, config: Mapping[str, str], device: str, *, timeout_s: float) -> None:
    """All ranks have one `config` (see plan.agreement.shared_values), the same packages and the same `device` (cpu, cuda).

    Launchers of ours have compared all but the device already. Raises Disagreement, PeerFailed.
    """
    facts, fixes = {"device": device}, {"device": "look at nvidia-smi and CUDA_VISIBLE_DEVICES there"}
    if LOG_DIR not in os.environ:
        versions, processes = shared_versions(environment()), "processes on the machine"
        facts |= {**config, **versions, processes: os.environ.get("LOCAL_WORLD_SIZE", "?")}
        fixes |= {**dict.fromkeys(config, SAME_CONFIG), **dict.fromkeys(versions, SAME_VERSIONS)}
        fixes[processes] = "start the same number of processes on every machine"
    _agree(peers, FIRST_STAGE, facts, fixes, timeout_s)


def agree_on_data(peers: Peers | None, data: Any, *, timeout_s: float) -> None:
    """All ranks have prepared the same documents (a PreparedData). Raises Disagreement, PeerFailed."""
    parts = {"data.train": data.train, "data.eval": data.eval}
    facts = {
        key: f"{counted(len(part), 'documents')} with fingerprint {part.fingerprint[:12]}" if part else "none"
        for key, part in parts.items()
    }
    fix = "the files or the tokenizer differ there: copy them, or train on a shared disk; a hub id can have a revision"
    _agree(peers, "data", facts, dict.fromkeys(facts, fix), timeout_s)


def agree_on_model(peers: Peers | None, model: torch.nn.Module, *, timeout_s: float) -> None:
    """All ranks have loaded the same weights and settings of the model. Raises Disagreement, PeerFailed."""
    if peers is None:
        return
    settings = {key: value for key, value in base_model(model).config.to_dict().items() if key not in _MAY_DIFFER}
    facts = {
        "model.config": f"one with digest {digest_of(json.dumps(settings, sort_keys=True, default=str))}",
        "model weights": f"those with hash {weights_hash(model)[:12]}",
    }
    fix = "its files differ there: compare them with sha256sum, copy them, or name a model.revision"
    _agree(peers, "model", facts, dict.fromkeys(facts, fix), timeout_s)


def check_run_folder(logs: Path, *, main: bool, needed: bool) -> str:
    """A warning if the machines do not share the disk of the run folder; "" if they do.

    Called on all ranks together. Each rank writes its part of a checkpoint and reads all parts on resume, so a checkpoint
    spread over several disks is useless. Raises CheckFailed if checkpoints are `needed`.
    """
    probe = logs / f".seen-by-all-{uuid.uuid4().hex}"
    if main:
        probe.touch()
    with waiting("the first rank's file in the run folder"):
        probe = logs / cast(list, broadcast_object_list([probe.name]))[0]
    limit = time.monotonic() + _DISK_S
    while not (seen := probe.exists()) and time.monotonic() < limit:
        time.sleep(0.1)
    with waiting("the other ranks to look for a file"):
        sights = gather_object([(socket.gethostname(), seen)])
    if main:
        probe.unlink(missing_ok=True)
    if not (blind := sorted({host for host, sees in sights if not sees})):
        return ""
    what = f"{listed(blind)} and the first machine do not share the disk of this folder"
    if needed:
        raise CheckFailed(
            f"{what}, and each process has a part of a checkpoint",
            where=f"trainer.output_dir ({logs.parent})",
            fix="Name a folder on a disk that all machines share; without one, trainer.checkpoint_every=null with "
            "trainer.resume=never trains without checkpoints.",
        )
    return f"{what}: the run cannot go on from where it is stopped"


def connect(
    peers: Peers | None,
    open_group: Callable[[], torch.device],
    backend: str,
    *,
    timeout_s: float,
    reduce: Callable[[torch.Tensor], object] = dist.all_reduce,
) -> torch.device:
    """Has `open_group` connect the process group, and all ranks add known numbers on the device that it returns.

    Both happen in a thread, since neither NCCL nor gloo keeps to a time limit while it connects. The ranks exchange the
    outcome over the store; once one has failed the others do not wait for the whole `timeout_s`. Raises Disagreement, the
    same on all ranks, naming those on which it fails, adds wrongly or does not end; PeerFailed if a rank is silent.
    """
    if peers is None:
        return open_group()
    devices: list[torch.device] = []
    outcome: list[str] = []

    def work() -> None:
        try:
            devices.append(open_group())
            outcome.append(_wrong_sum(peers.own.rank, peers.world_size, devices[0], reduce))
        except Exception as error:  # backends raise exceptions of every type
            outcome.append(f"failed: {shortly(error)}")

    thread = threading.Thread(target=work, name="first all-reduce", daemon=True)
    begun = time.monotonic()
    limit = begun + timeout_s
    thread.start()
    with waiting("the other ranks in the first all-reduce"):
        while thread.is_alive() and (now := time.monotonic()) < limit:
            thread.join(min(limit - now, _LOOK_S))
            if thread.is_alive() and _another_failed(peers):
                limit = min(limit, now + _OTHERS_S)
    problem = outcome[0] if outcome else f"did not end within {round(limit - begun, 1):g} s"
    if problem:
        with suppress(dist.DistError):
            peers.store.set(_FAILED, "")
        names = [name for name in SOCKETS if name.partition("_")[0].lower() in backend and os.environ.get(name)]
        problem += "".join(f" ({name} is {os.environ[name].removeprefix('=')})" for name in names)

    def judge(statements: Sequence[Statement]) -> list[Problem]:
        groups: dict[str, list[Statement]] = defaultdict(list)
        for statement in statements:
            if statement.facts["problem"]:
                groups[statement.facts["problem"]].append(statement)
        problems = [
            Problem(f"the first all-reduce over {backend} {problem}", ranks_on_hosts(affected))
            for problem, affected in list(groups.items())[:_MOST_SHOWN]
        ]
        return [*problems[:-1], replace(problems[-1], fix=_NETWORK_FIX)] if problems else []

    facts = {"problem": problem}
    try:
        peers.settle("first all-reduce", facts, judge, timeout_s=_OTHERS_S if problem else timeout_s + GRACE_S)
    except PacktrainError as error:
        if thread.is_alive():
            atexit.register(_end, error.exit_code)
        if isinstance(error, PeerFailed):  # the silent rank may be waiting for this one
            raise PeerFailed([*judge([replace(peers.own, facts=facts)]), *error.problems]) from error
        raise
    return devices[0]


def limit_collectives(seconds: float) -> None:
    """Sets the time limit of all following collectives of this process, in all its process groups.

    torch sets a group's limit only when it is made, and DeepSpeed's groups get the default. Every rank changes its own limit
    as it enters a phase with another one; nothing is sent.
    """
    if dist.is_available() and dist.is_initialized():
        for group in list(distributed_c10d._world.pg_map):
            if group.group_desc == BACKGROUND:  # its collectives belong to no phase
                continue
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def _agree(
    peers: Peers | None, stage: str, facts: Mapping[str, str], fixes: Mapping[str, str], timeout_s: float
) -> None:
    def judge(statements: Sequence[Statement]) -> list[Problem]:
        hosts = len({statement.host for statement in statements}) > 1
        facts_by_rank = {statement.rank: statement.facts for statement in statements}
        return differences(
            facts_by_rank, fixes, lambda ranks: ranks_on_hosts([statements[rank] for rank in ranks], hosts=hosts)
        )

    if peers is not None:
        peers.settle(stage, facts, judge, timeout_s=timeout_s)


def _wrong_sum(rank: int, ranks: int, device: torch.device, reduce: Callable[[torch.Tensor], object]) -> str:
    """Sums one column of numbers for each rank; names the ranks whose column is wrong in the sum, "" if none is."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has its own
    numbers = torch.zeros(max(_NUMBERS // ranks, 1), ranks, dtype=torch.int64, device=device)
    numbers[:, rank] = rank + 1
    reduce(numbers)
    wrong = (numbers.cpu() != torch.arange(1, ranks + 1)).any(dim=0).nonzero().flatten().tolist()
    return f"has a wrong sum: of {ranks_in_words(wrong)}" if wrong else ""


def _another_failed(peers: Peers) -> bool:
    with suppress(dist.DistError):
        return peers.store.check([_FAILED])
    return True  # rank 0 is gone, with the store


def _end(code: int) -> None:
    """Ends the process while its thread is in the collective: unloading the backend would abort it, with another code."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
