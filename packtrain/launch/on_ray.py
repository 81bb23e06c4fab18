"""Runs on a Ray cluster (topology=ray). Ray reserves the machines, and an actor on each starts packtrain there.

The actor starts `packtrain VERB` as machine i of n (topology=manual), so everything else works as on machines that are numbered by hand.
It returns output and exit code, and passes signals on. packtrain is a child process of the actor, because an actor may not handle signals;
the child dies with its actor. After a crash or a lost machine, Ray reserves machines again, and all continue from the newest checkpoint.
This happens up to trainer.restarts times."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from packtrain.config.compose import to_yaml
from packtrain.config.schema import RunConfig
from packtrain.errors import PeerFailed, UserError, report_error
from packtrain.launch.attempt import is_locked
from packtrain.launch.coordinator import MOST_TELLING, RESTARTED
from packtrain.launch.rendezvous import PROGRESS_S
from packtrain.launch.worker import end_with_parent
from packtrain.monitor.channel import free_port
from packtrain.plan.launch_plan import LaunchPlan
from packtrain.run_folder import RunFolder
from packtrain.system import ENDING, leave, listening, start
from packtrain.wording import first_line

_POLL_S = 0.3
_SILENT_S = 60
"""Most seconds without an answer. Then the cluster counts as lost."""
_ANSWER_S = 10
_LEAVE_S = 60
"""Seconds that machines may go on after one of them has failed, and that an earlier launch may take to leave the run folder."""
_PASSED_ON = re.compile("(HF|WANDB|AWS)_(?!.*(HOME|DIR|CACHE|FILE))")
"""Variables that machines get from the launcher. Variables with paths are left out: machines may have other paths."""
_JOB_COPIES = "working_dir_files"
"""Folder where Ray keeps its copies of job folders."""


@dataclass(frozen=True, slots=True)
class Given:
    """Input of each machine: `config` as YAML, its `verb`, the run folder `root`.

    Relative paths start from `folder`. A machine gets the `variables` that it does not have itself."""

    config: str
    verb: str
    root: Path
    folder: str
    variables: dict[str, str] = field(repr=False)


class Machine:
    """packtrain's launcher on a machine; an actor of Ray."""

    def __init__(self, given: Given) -> None:
        self._given, self._lines, self._signals_sent = given, deque[tuple[int, str]](), 0
        self._process: subprocess.Popen[bytes] | None = None
        self._readers: list[threading.Thread] = []

    def address(self) -> tuple[str, int]:
        """Return the machine's address and a free port, for the machines to meet there."""
        return import_module("ray.util").get_node_ip_address(), free_port()

    def begin(self, overrides: Sequence[str], again: bool) -> None:
        """Start packtrain with these overrides. `again`: first wait until the earlier launch has left the run folder."""
        until = time.monotonic() + _LEAVE_S
        while again and is_locked(self._given.root) and time.monotonic() < until:
            time.sleep(_POLL_S)
        file = Path(tempfile.mkdtemp(prefix="packtrain-ray-"), "run.yaml")
        file.write_text(self._given.config, encoding="utf-8")
        parent = os.getpid()
        # Ray's workers block SIGINT, and child processes inherit that
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "packtrain", self._given.verb, str(file), *overrides],
            env={**self._given.variables, **os.environ},
            cwd=self._given.folder if os.path.isdir(self._given.folder) else None,
            preexec_fn=lambda: end_with_parent(parent),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        streams = ((1, self._process.stdout), (2, self._process.stderr))
        self._readers = [threading.Thread(target=self._read, args=one, daemon=True) for one in streams]
        for reader in self._readers:
            reader.start()

    def look(self, signals: Sequence[int]) -> tuple[list[tuple[int, str]], int | None]:
        """Pass on the new ones of all `signals`. Return the new lines of stdout (1) and stderr (2), and the exit code."""
        assert self._process is not None
        for number in signals[self._signals_sent :]:
            self._process.send_signal(number)
        self._signals_sent, code = len(signals), self._process.poll()
        for reader in self._readers if code is not None else ():
            reader.join(10)
        lines = [self._lines.popleft() for _ in range(len(self._lines))]  # a reader may add one meanwhile
        return lines, code if code is None or code >= 0 else 128 - code

    def _read(self, number: int, stream: IO[bytes]) -> None:
        for raw in stream:
            print(line := raw.decode(errors="replace"), end="", flush=True)  # into Ray's log
            self._lines.append((number, line))


def run_on_ray(config: RunConfig, folder: RunFolder, plan: LaunchPlan) -> int:
    """Run `config` on the cluster that `ray status` shows; return the exit code.

    Raises UserError if Ray is not installed or no cluster is found, PeerFailed if Ray does not reserve the machines within
    topology.join_timeout.
    """
    try:
        ray = import_module("ray")
    except ImportError as error:
        what, fix = f"Ray cannot be imported: {error}", "pip install 'packtrain[ray]'"
        raise UserError(what, where="topology.kind", fix=fix, code="ray-missing") from error
    root = folder.root.absolute()
    if _JOB_COPIES in root.parts:
        what = f"{folder.root} is in each machine's own copy of the job's folder, which Ray deletes"
        fix = "Write the whole path of a folder that all machines share. Paths of data and config may stay relative."
        raise UserError(what, where="trainer.output_dir", fix=fix, code="folder-not-shared")
    topology = replace(config.topology, kind="manual", min_nodes=None)
    inside = to_yaml(replace(config, topology=topology, trainer=replace(config.trainer, restarts=0)))
    variables = {name: value for name, value in os.environ.items() if _PASSED_ON.match(name)}
    given = Given(inside, config.objective.kind, root, os.getcwd(), variables)
    _connect(ray)
    received: list[int] = []
    try:
        with listening(received.append):
            for restart in range(plan.restarts + 1):
                code = _launch(ray, given, plan, config.topology.join_timeout, received, again=restart > 0)
                if received or code not in RESTARTED:
                    break
        if code is None:
            signal.raise_signal(received[0])  # the handler is gone, so this ends the command
        return code or 0
    finally:
        ray.shutdown()


def _connect(ray: ModuleType) -> None:
    """Connect to the cluster. Raises UserError if none is found."""
    address = os.environ.get("RAY_ADDRESS") or "auto"
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal() and "//" not in host:  # ray.init waits for minutes if nothing listens
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        signal.signal(signal.SIGTERM, handler)  # Ray's own handler ends the process with code 15
    except Exception as error:  # also an address of another kind, a cluster of another version, a missing token
        what = f"no Ray cluster is found from here ({address}): {first_line(error)}"
        fix = "Start one with ray start --head, name it (RAY_ADDRESS=HOST:6379), or send it the command: ray job submit -- packtrain …"
        raise UserError(what, where="topology.kind", fix=fix, code="no-ray-cluster") from error


def _launch(
    ray: ModuleType, given: Given, plan: LaunchPlan, limit_s: float, received: list[int], *, again: bool
) -> int | None:
    """Run packtrain on all machines once; return the exit code. None if a signal was `received` before they were reserved."""
    groups, nodes, units = import_module("ray.util.placement_group"), plan.nodes, plan.gpus_per_node
    strategies = import_module("ray.util.scheduling_strategies")
    unit = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
    group = groups.placement_group([{unit: units}] * nodes, strategy="STRICT_SPREAD")
    try:
        if not _is_reserved(ray, group, f"{nodes} × {units} {unit}s", limit_s, received):
            return None
        cpus, gpus = (units if unit == one else 0 for one in ("CPU", "GPU"))
        places = [strategies.PlacementGroupSchedulingStrategy(group, node) for node in range(nodes)]
        actor = ray.remote(Machine)
        machines = [
            actor.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=place).remote(given) for place in places
        ]
        address, port = ray.get(machines[0].address.remote(), timeout=_SILENT_S)
        shared = [f"topology.nodes={nodes}", f"topology.main_address={address}", f"topology.main_port={port}"]
        shared += ["trainer.resume=auto"] if again else []
        begun = [
            machine.begin.remote([*shared, f"topology.node_rank={node}"], again and node == 0)
            for node, machine in enumerate(machines)
        ]
        ray.get(begun, timeout=2 * _LEAVE_S)
        return _follow(ray, machines, received)
    except ray.exceptions.RayError as error:
        if isinstance(error, ray.exceptions.RayActorError) and _answers(ray):
            print(f"a worker of Ray was lost: {first_line(error)}", file=sys.stderr, flush=True)
            return PeerFailed.exit_code
        what = f"the Ray cluster no longer answers: {first_line(error)}"
        fix = "See ray status; the same command goes on from the newest checkpoint."
        lost = PeerFailed(what, where="Ray", fix=fix, code="ray-lost")
        leave(report_error(lost))  # not raised: ray.shutdown may hang too
    finally:
        groups.remove_placement_group(group)  # ends the actors in it


def _answers(ray: ModuleType) -> bool:
    """Return whether the head of the cluster answers."""
    try:
        return bool(start(ray.nodes).result(_ANSWER_S))
    except Exception:
        return False


def _is_reserved(ray: ModuleType, group: Any, wanted: str, limit_s: float, received: list[int]) -> bool:
    """Wait until Ray has reserved the machines. Return False if a signal was `received` before. Raises PeerFailed after `limit_s`."""
    begun = reported = time.monotonic()
    while not group.wait(_POLL_S):
        now, resources = time.monotonic(), ray.cluster_resources()
        has = f"{resources['GPU']:g} GPUs" if resources.get("GPU") else f"{resources.get('CPU', 0):g} CPUs"
        if received:
            return False
        if now - begun > limit_s:
            fix = "ray status shows the free resources and the requested ones."
            what = f"Ray has not reserved machines of {wanted} after {limit_s} s (it has {has})"
            raise PeerFailed(what, where="topology.join_timeout", fix=fix, code="ray-not-reserved")
        if now - reported > PROGRESS_S:
            reported = now
            print(f"waiting for Ray to reserve machines of {wanted}; it has {has}", file=sys.stderr, flush=True)
    return True


def _follow(ray: ModuleType, machines: Sequence[Any], received: Sequence[int]) -> int:
    """Print machine 0's output and pass signals on until all machines have ended. Return the run's exit code.

    packtrain gives all machines one exit code. If another machine ends with its own code, print its last lines.
    """
    last: dict[int, list[tuple[int, str]]] = {}
    ended_at: float | None = None
    while True:
        found = ray.get([machine.look.remote(list(received)) for machine in machines], timeout=_SILENT_S)
        for node, (lines, _) in enumerate(found):
            last[node] = [*last.get(node, []), *lines][-20:]
            for stream, line in lines if node == 0 else ():
                print(line, end="", file=sys.stderr if stream == 2 else sys.stdout, flush=True)
        codes = [code for _, code in found]
        if any(codes):
            ended_at = ended_at or time.monotonic()
        if None not in codes or (ended_at and time.monotonic() - ended_at > _LEAVE_S):
            break
        time.sleep(_POLL_S)
    code = next((one for one in MOST_TELLING if one in codes), max(one or 0 for one in codes))
    if code != codes[0]:
        print("".join(line for _, line in last[codes.index(code)]), end="", file=sys.stderr, flush=True)
    return code
