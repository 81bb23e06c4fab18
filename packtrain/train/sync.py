"""Meeting of the ranks, and checks that they agree on config, data and model.

Ranks that differ would hang, or train something else than configured. Collective operations hang if ranks differ (another
backend, one more call), so they cannot check for differences. Instead every rank writes a statement into the store of the
rendezvous, rank 0 reads them all and writes its verdict, and the others wait for it (`Peers.settle`). Every wait has a limit and
names the missing ranks. The first collective operation is a sum with a known result, so that a backend that hangs or adds
wrongly is found at the start. From then on collectives have time limits, which change with the phase of the run.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list, gather_object
from torch.distributed import DistError, PrefixStore, Store, TCPStore, distributed_c10d

from packtrain.data.prepare import PreparedData
from packtrain.errors import CheckFailed, Disagreement, PeerFailed, Problem, UserError
from packtrain.launch.worker import LOG_DIR
from packtrain.model.load import base_model
from packtrain.model.weights import weights_hash
from packtrain.monitor.heartbeat import TimeLimits, waiting
from packtrain.plan.network_settings import SOCKETS
from packtrain.plan.origin import SAME_CONFIG, SAME_VERSIONS, digest_of, list_differences, shared_versions
from packtrain.run_folder import environment
from packtrain.system import leave, start
from packtrain.train.library_errors import shortly
from packtrain.wording import counted, listed, ranks_in_words

T = TypeVar("T")
BACKGROUND = "checkpoints in the background"
"""Description of the group whose collectives belong to no step (train/checkpoint/writer.py)."""
_FIRST_STAGE = "start"
_GRACE_S = 10  # the others wait this much longer than rank 0: it knows which ranks are missing
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.5
_READ_S = 4 * _LONGEST_PAUSE_S
_MAY_DIFFER = ("_name_or_path", "transformers_version")  # in a model's config
_NUMBERS = 2**17  # 1 MiB fills the packets of a link: with a wrong MTU large packets are lost and small ones pass
_DISK_S = 5  # some network disks take a while to show a new file
_NETWORK_FIX = "packtrain env CONFIG --cluster measures the links; NCCL_DEBUG=INFO tells which one is used, GLOO_SOCKET_IFNAME sets it"


@dataclass(frozen=True, slots=True)
class Peers:
    """All ranks of a run, seen by one of them: `rank` on `host`."""

    store: Store
    world_size: int
    rank: int
    host: str

    def settle(self, stage: str, facts: Mapping[str, str], fixes: Mapping[str, str], *, timeout_s: float) -> None:
        """Wait until all ranks come to `stage` with the same `facts` (name → text).

        Raises Disagreement with the same problems on all ranks if they differ, PeerFailed if a rank does not come in time.
        """
        store = PrefixStore(stage, self.store)
        try:
            with waiting(f"the other ranks at the stage {stage!r}"):
                store.set(str(self.rank), json.dumps([self.host, facts]))
                if self.rank == 0:
                    store.set("verdict", json.dumps(self._judge(store, fixes, timeout_s)))
                came = self.rank == 0 or _wait_for_keys(store, ["verdict"], timeout_s + _GRACE_S)
                verdict = json.loads(store.get("verdict")) if came else {"problems": [], "missing": "rank 0"}
                if verdict["problems"] or verdict["missing"]:
                    # rank 0 may serve the store, so it ends after the others have read the verdict. But only rank 0 prints, and torchrun
                    # ends all ranks once one has ended, so the others wait longer
                    time.sleep(_READ_S if self.rank == 0 else _READ_S + 2 * _LONGEST_PAUSE_S)
        except DistError as error:
            what = f"rank {self.rank} lost rank 0 at the stage {stage!r}: {shortly(error)}"
            raise PeerFailed(what, fix="its terminal or log says why it ended", code="rank-0-lost") from error
        if verdict["missing"]:
            what = f"at the stage {stage!r} {verdict['missing']} did not come within {timeout_s:g} s"
            fix = "their logs say why, if they were started at all; topology.join_timeout and topology.step_timeout are the limits"
            raise PeerFailed(what, fix=fix, code="ranks-missing")
        if verdict["problems"]:
            shown = self.rank == 0 or LOG_DIR in os.environ  # other ranks report in their logs only
            raise Disagreement([Problem(**problem) for problem in verdict["problems"]], shown=shown)

    def share(self, name: str, value: str = "") -> str:
        """Return rank 0's `value` on all ranks. Raises PeerFailed if it does not come within the store's limit."""
        try:
            if self.rank == 0:
                self.store.set(name, value)
            with waiting("rank 0"):
                return self.store.get(name).decode()
        except DistError as error:
            what = f"rank {self.rank} lost rank 0: {shortly(error)}"
            raise PeerFailed(what, fix="its log says why", code="rank-0-lost") from error

    def _statements(self, store: Store) -> dict[int, tuple[str, dict[str, str]]]:
        """Return host and facts of the ranks that have come to the stage of `store`."""
        came = [rank for rank in range(self.world_size) if store.check([str(rank)])]
        texts = cast(list, store.multi_get([str(rank) for rank in came]))
        return {rank: tuple(json.loads(text)) for rank, text in zip(came, texts, strict=True)}

    def _judge(self, store: Store, fixes: Mapping[str, str], timeout_s: float) -> dict[str, object]:
        """Return rank 0's verdict on a stage: the problems, or the missing ranks in words."""
        in_time = _wait_for_keys(store, [str(rank) for rank in range(self.world_size)], timeout_s)
        statements = self._statements(store)
        hosts = {rank: host for rank, (host, _) in self._statements(PrefixStore(_FIRST_STAGE, self.store)).items()}
        if not in_time:
            missing = [rank for rank in range(self.world_size) if rank not in statements]
            return {"problems": [], "missing": _name_ranks(missing, hosts)}
        several = hosts if len(set(hosts.values())) > 1 else {}
        facts = {rank: facts for rank, (_, facts) in statements.items()}
        problems = list_differences(facts, fixes, lambda ranks: _name_ranks(ranks, several))
        return {"problems": [asdict(problem) for problem in problems], "missing": ""}


def join(*, timeout_s: float) -> Peers | None:
    """Join the other ranks by the launch's environment variables. One process has no others: None.

    Raises PeerFailed if rank 0 cannot be reached within `timeout_s`, CheckFailed if its port is taken.
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world_size == 1:
        return None
    host, address, port = socket.gethostname(), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun serves the store

    def connect() -> Store:
        limit, kinds = timedelta(seconds=timeout_s), {"wait_for_workers": False, "multi_tenant": True}
        return TCPStore(address, port, world_size, serves, limit, **kinds)

    with waiting("rank 0"):
        if not serves:
            _wait_for_listener(address, port, rank, timeout_s)
        try:  # torch waits for ever for a listener that does not answer
            store = start(connect, "store").result(timeout_s + _READ_S)
        except (DistError, TimeoutError) as error:
            fix = "set topology.main_port (MASTER_PORT) to a free one, on all machines"
            if "EADDRINUSE" in str(error):
                what = f"port {port} of this machine is taken"
                raise CheckFailed(what, where="topology.main_port", fix=fix, code="port-taken") from error
            why = shortly(error) if isinstance(error, DistError) else "what listens there does not answer"
            what = f"no connection to rank 0 at {address}:{port}: {why}"
            raise PeerFailed(what, fix=fix, code="rank-0-unreachable") from error
    return Peers(PrefixStore("packtrain", store), world_size, rank, host)


def preparing_s(step_timeout: float) -> float:
    """Return the time limit for preparing data, loading a model, or reading and writing files. These may take hours: there is no limit if
    packtrain's launcher watches the ranks, else a checkpoint's limit."""
    return math.inf if LOG_DIR in os.environ else TimeLimits(step_timeout).collective_s("checkpoint")


def agree_on_start(peers: Peers | None, config: Mapping[str, str], device: str, *, timeout_s: float) -> None:
    """Check that all ranks have the same `config`, packages and `device` (cpu, cuda).

    `config` is from plan.origin.shared_values. Our launchers have compared all but the device already. Raises Disagreement, PeerFailed.
    """
    facts, fixes = {"device": device}, {"device": "look at nvidia-smi and CUDA_VISIBLE_DEVICES there"}
    if LOG_DIR not in os.environ:
        versions, processes = shared_versions(environment()), "processes on the machine"
        facts |= {**config, **versions, processes: os.environ.get("LOCAL_WORLD_SIZE", "?")}
        fixes |= {**dict.fromkeys(config, SAME_CONFIG), **dict.fromkeys(versions, SAME_VERSIONS)}
        fixes[processes] = "start the same number of processes on every machine"
    if peers is not None:
        peers.settle(_FIRST_STAGE, facts, fixes, timeout_s=timeout_s)


def agree_on_data(peers: Peers | None, data: PreparedData, *, timeout_s: float) -> None:
    """Check that all ranks have prepared the same documents. Raises Disagreement, PeerFailed."""
    parts = {"data.train": data.train, "data.eval": data.eval}
    facts = {
        key: f"{counted(len(part), 'documents')} with fingerprint {part.fingerprint[:12]}" if part else "none"
        for key, part in parts.items()
    }
    fix = "the files or the tokenizer differ there: copy them, or train on a shared disk; a hub id can have a revision"
    if peers is not None:
        peers.settle("data", facts, dict.fromkeys(facts, fix), timeout_s=timeout_s)


def agree_on_model(peers: Peers | None, model: torch.nn.Module, *, timeout_s: float) -> None:
    """Check that all ranks have loaded the same weights and model settings. Raises Disagreement, PeerFailed."""
    if peers is None:
        return
    settings = {key: value for key, value in base_model(model).config.to_dict().items() if key not in _MAY_DIFFER}
    facts = {
        "model.config": f"one with digest {digest_of(json.dumps(settings, sort_keys=True, default=str))}",
        "model weights": f"those with hash {weights_hash(model)[:12]}",
    }
    if sampled := getattr(base_model(model), "hash_of_files", ""):  # each process reads only its own slices
        facts["model.path"] = f"files with hash {sampled[:12]}"
    fix = "its files differ there: compare them with sha256sum, copy them, or name a model.revision"
    peers.settle("model", facts, dict.fromkeys(facts, fix), timeout_s=timeout_s)


def on_all_or_none(peers: Peers | None, stage: str, read: Callable[[], T], *, timeout_s: float) -> T:
    """Return the result of `read`. A UserError of any rank is raised on all: only some ranks see a weight of the wrong shape."""
    if peers is None:
        return read()
    result, refusal = cast(T, None), None
    try:
        result = read()
    except UserError as error:
        refusal = error
    peers.settle(stage, {}, {}, timeout_s=timeout_s)
    with waiting("the errors of all ranks"):
        if first := next(filter(None, gather_object([refusal])), None):
            raise refusal or first
    return result


def check_run_folder(logs: Path, *, main: bool, needed: bool) -> str:
    """Return a warning if machines do not share the run folder's disk, else "".

    All ranks call it together. Each rank writes its part of a checkpoint and reads all parts on resume, so a checkpoint
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
            code="disk-not-shared",
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
    """Connect the process group by `open_group`, then add known numbers over all ranks.

    Both happen in a thread, since neither NCCL nor gloo keeps to a time limit while it connects. Raises CheckFailed on each rank
    that fails, adds wrongly or does not end in time; the launcher of the ranks then ends the others.
    """
    if peers is None:
        return open_group()

    def work() -> tuple[torch.device, list[int]]:
        device = open_group()
        return device, _wrong_ranks(peers.rank, peers.world_size, device, reduce)

    future = start(work, "first all-reduce")
    with waiting("the other ranks in the first all-reduce"):
        try:
            device, wrong = future.result(timeout_s)
            problem = f"has a wrong sum: of {ranks_in_words(wrong)}" if wrong else ""
        except Exception as error:  # backends raise exceptions of every type
            problem = f"failed: {shortly(error)}" if future.done() else f"did not end within {timeout_s:g} s"
    if not problem:
        return device
    if not future.done():
        # while its thread is in the collective, unloading the backend would abort the process with another code
        atexit.register(leave, CheckFailed.exit_code)
    names = [name for name in SOCKETS if name.partition("_")[0].lower() in backend and os.environ.get(name)]
    settings = "".join(f" ({name} is {os.environ[name].removeprefix('=')})" for name in names)
    where = f"rank {peers.rank} on {peers.host}"
    what = f"the first all-reduce over {backend} {problem}{settings}"
    raise CheckFailed(what, where=where, fix=_NETWORK_FIX, code="first-all-reduce")


def limit_collectives(seconds: float) -> None:
    """Set the time limit of this process's following collectives, in all its groups.

    torch sets a group's limit only when it is made, and DeepSpeed's groups get the default. Every rank changes its own limit
    when it enters a phase with another one; nothing is sent.
    """
    if dist.is_available() and dist.is_initialized():
        for group in list(distributed_c10d._world.pg_map):
            if group.group_desc != BACKGROUND:  # its collectives belong to no phase
                distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def _wrong_ranks(rank: int, ranks: int, device: torch.device, reduce: Callable[[torch.Tensor], object]) -> list[int]:
    """Sum one column of numbers for each rank. Return the ranks whose column is wrong in the sum."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has its own
    numbers = torch.zeros(max(_NUMBERS // ranks, 1), ranks, dtype=torch.int64, device=device)
    numbers[:, rank] = rank + 1
    reduce(numbers)
    return (numbers.cpu() != torch.arange(1, ranks + 1)).any(dim=0).nonzero().flatten().tolist()


def _name_ranks(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Name ranks with their hosts, such as "ranks 0 and 1 on n1". Without hosts unless all are known."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        by_host[hosts.get(rank, "")].append(rank)
    if "" in by_host:
        return ranks_in_words(ranks)
    return listed([f"{ranks_in_words(on_host)} on {host}" for host, on_host in by_host.items()])


def _wait_for_keys(store: Store, keys: list[str], timeout_s: float) -> bool:
    """Return whether all `keys` came within `timeout_s`. Polls, since torch's own wait prints warnings."""
    limit, pause = time.monotonic() + timeout_s, _SHORTEST_PAUSE_S
    while not store.check(keys):
        if time.monotonic() > limit:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True


def _wait_for_listener(address: str, port: int, rank: int, timeout_s: float) -> None:
    """Wait until a program listens there: torch's own error is a long traceback."""
    limit = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=max(limit - time.monotonic(), 1)).close()
            return
        except OSError as error:
            if time.monotonic() > limit:
                place = f"{address}:{port} within {timeout_s:g} s: {error.strerror or error}"
                what = f"rank {rank} on {socket.gethostname()} did not reach rank 0 at {place}"
                fix = "look whether it was started, whether the name leads to it from here, and for a firewall"
                raise PeerFailed(what, fix=fix, code="rank-0-unreachable") from error
        time.sleep(_LONGEST_PAUSE_S)
