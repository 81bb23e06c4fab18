"""Runs on a Ray cluster (topology=ray). Ray Train places a worker for each device.

Each worker starts packtrain, which joins the others as under torchrun. packtrain is a separate process below the worker: a worker's code
is not in the main thread, and signals go to the main thread. A `Board`, an actor beside the launcher, carries rank 0's output to the
terminal, signals to all, and the exit codes back. After a failed process or a lost worker, Ray Train starts all of them again from the
newest checkpoint, trainer.restarts times (its FailureConfig)."""

from __future__ import annotations

import math
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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from packtrain.errors import PeerFailed, UserError, report_error
from packtrain.launch.coordinator import MOST_TELLING, TAIL_LINES, is_failure
from packtrain.launch.execute import ON_RAY, is_locked
from packtrain.launch.rendezvous import PROGRESS_S
from packtrain.monitor.channel import free_port
from packtrain.plan.launch_plan import LaunchPlan
from packtrain.run_folder import RunFolder
from packtrain.system import ENDING, leave, listening
from packtrain.wording import first_line

_POLL_S = 0.3
_SILENT_S = 60
"""Seconds of silence that make the cluster lost, or all workers of a launch."""
_LEAVE_S = 30
"""Seconds that a launch may go on after its first failure, as with torchrun. Then its processes are killed."""
_GOES_ALONG = re.compile("(HF|WANDB|AWS)_(?!.*(HOME|DIR|CACHE|FILE))")
"""Variables of the launcher that workers get too. Workers may run elsewhere, so paths are left out."""
_OF_JOBS = "working_dir_files"
"""The folder of Ray's copies of job folders."""
_AGAIN = (1, *MOST_TELLING[3:])
"""Exit codes that a new launch may mend: a crash, a lost peer."""


@dataclass(frozen=True, slots=True)
class Given:
    """Input of each worker: the `board`, `config` as YAML, its `verb`, the run folder.

    `root` is the run folder. Relative paths start from `folder`. `variables` are those that a machine may lack."""

    board: Any
    config: str
    verb: str
    root: Path
    folder: str
    processes: int
    variables: Mapping[str, str] = field(repr=False)


class Board:
    """Messages between workers and launcher; an actor of Ray."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.signals: list[int] = []
        self.launches, self.heard_at, self.failed_at = 0, 0.0, math.inf
        self.begun: set[int] = set()
        self.codes: dict[int, int] = {}

    def begin(self, rank: int) -> int:
        """Note a worker; return the number of the launch, from 1."""
        if rank in self.begun or not self.begun:
            self.begun, self.codes, self.launches, self.failed_at = set(), {}, self.launches + 1, math.inf
        self.begun.add(rank)
        self.heard_at = time.monotonic()
        return self.launches

    def say(self, stream: int, line: str) -> None:
        """Add a line for the terminal's stdout (1) or stderr (2)."""
        self.lines.append((stream, line))

    def read(self) -> tuple[list[tuple[int, str]], int]:
        """Return the lines since the last call, and the number of workers."""
        lines, self.lines = self.lines, []
        return lines, len(self.begun) if time.monotonic() - self.heard_at < _SILENT_S else 0

    def send(self, number: int) -> None:
        self.signals.append(number)

    def sent(self, known: int) -> list[int]:
        """Return the signals for all processes after the first `known` ones."""
        self.heard_at = time.monotonic()
        return [signal.SIGKILL] if self.heard_at - self.failed_at > _LEAVE_S else self.signals[known:]

    def end(self, rank: int, code: int) -> None:
        self.codes[rank] = code
        if is_failure(code):
            self.failed_at = min(self.failed_at, time.monotonic())

    def ended(self) -> dict[int, int]:
        """Return the exit codes by rank."""
        return self.codes


def run_on_ray(config: str, verb: str, folder: RunFolder, plan: LaunchPlan, join_timeout_s: float) -> int:
    """Run `config` on the cluster that `ray status` shows; return the exit code.

    `config` is the YAML of a joined process. Raises UserError if Ray is not installed or no cluster is found, PeerFailed if workers are
    not placed within `join_timeout_s`."""
    try:
        ray, trainer_class = _ray(), _trainer_class()
    except ImportError as error:
        what, fix = f"Ray Train is not there: {error}", "pip install 'packtrain[ray]'"
        raise UserError(what, where="topology.kind", fix=fix) from error
    root, current, processes = folder.root.absolute(), os.getcwd(), plan.num_processes
    if _OF_JOBS in root.parts:
        what = f"{folder.root} would be in a copy that each machine has of the job's folder, which Ray deletes"
        fix = "Name a folder that all machines see by its whole path; relative paths of data and config may stay."
        raise UserError(what, where="trainer.output_dir", fix=fix)
    variables = {name: value for name, value in os.environ.items() if _GOES_ALONG.match(name)}
    _connect(ray)
    beside = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    here = beside(ray.get_runtime_context().get_node_id(), soft=False)  # other machines may be lost
    board = ray.remote(num_cpus=0, scheduling_strategy=here)(Board).remote()
    trainer = _make_trainer(trainer_class, Given(board, config, verb, root, current, processes, variables), plan)
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            failure.append(error)

    received: list[int] = []

    def pass_on(number: int) -> None:
        received.append(number)
        board.send.remote(number)

    thread = threading.Thread(target=fit, name="ray train", daemon=True)
    try:
        with listening(pass_on):
            thread.start()
            placed = _follow(ray, board, thread, received, processes, join_timeout_s)
        if not placed:
            signal.raise_signal(received[0])  # ends the command, now that nobody listens here
        codes = ray.get(board.ended.remote()).values()
    finally:
        ray.shutdown()
    return _exit_code(codes, processes, failure[0] if failure and not received else None)


def _trainer_class() -> Any:
    return import_module("ray.train.v2.api.data_parallel_trainer").DataParallelTrainer


def _make_trainer(kind: Any, given: Given, plan: LaunchPlan) -> Any:
    """Return a trainer with one worker for each process. Each gets a GPU if the cluster has any."""
    train = import_module("ray.train")
    placement = {"use_gpu": _ray().cluster_resources().get("GPU", 0) > 0, "num_workers": given.processes}
    placement |= {"placement_strategy": "PACK" if plan.nodes > 1 else "STRICT_PACK"}
    return kind(
        lambda: work(given),  # Ray's dashboard would show a train_loop_config
        backend_config=_seeing_all_gpus(),
        scaling_config=train.ScalingConfig(**placement),
        run_config=train.RunConfig(
            failure_config=train.FailureConfig(max_failures=plan.restarts),
            storage_path=tempfile.mkdtemp(prefix="packtrain-ray-"),
        ),
    )


def _exit_code(codes: Collection[int], processes: int, lost: BaseException | None) -> int:
    """Return the run's exit code from the `codes` of processes that have one. `lost` says why Ray gave up unasked."""
    if len(codes) == processes and not any(codes):
        return 0
    # when a worker is lost, Ray stops the others by SIGTERM
    code = next((code for code in MOST_TELLING if code in codes), 4 if lost else max(codes, default=4))
    if lost and code not in codes:
        said = str(lost).strip().splitlines()[-1][:300]
        print(f"a worker of Ray was lost: {said}", file=sys.stderr, flush=True)
    return code


def _connect(ray: Any) -> None:
    """Connect to the cluster. Raises UserError if none is found."""
    address = os.environ.get("RAY_ADDRESS") or "auto"
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal() and "//" not in host:  # ray.init waits for minutes if nothing listens
            socket.create_connection((host, int(port)), timeout=10).close()
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        signal.signal(signal.SIGTERM, handler)  # Ray's own handler ends the process with code 15
    except Exception as error:  # also an address of another kind, a cluster of another version, a missing token
        what = f"no Ray cluster is found from here ({address}): {first_line(error)}"
        fix = "Start one with ray start --head, name it (RAY_ADDRESS=HOST:6379), or give it the command: ray job submit -- packtrain …"
        raise UserError(what, where="topology.kind", fix=fix) from error


def _follow(
    ray: Any, board: Any, thread: threading.Thread, received: list[int], processes: int, limit_s: float
) -> bool:
    """Print rank 0's output until the run has ended. Return False if a signal was `received` while no worker is there.

    Raises PeerFailed if some workers are not placed after `limit_s`.
    """
    complete_at = said_at = time.monotonic()
    while True:
        alive = thread.is_alive()
        try:
            lines, begun = ray.get(board.read.remote(), timeout=_SILENT_S)
        except ray.exceptions.RayError as error:  # a cluster that shuts down may also hang
            fix = "ray status says what there is; the same command goes on from the newest checkpoint."
            lost = PeerFailed(f"the Ray cluster no longer answers: {first_line(error)}", where="Ray", fix=fix)
            leave(report_error(lost))
        for stream, line in lines:
            print(line, end="", file=sys.stderr if stream == 2 else sys.stdout, flush=True)
        now = time.monotonic()
        complete_at = now if begun == processes else complete_at
        if not alive or (received and not begun):
            return not alive
        if now - max(complete_at, said_at) > PROGRESS_S:
            said_at = now
            has = ray.cluster_resources()
            there = f"{has['GPU']:g} GPUs" if has.get("GPU") else f"{has.get('CPU', 0):g} CPUs"
            what = f"waiting for {processes - begun} of {processes} workers of Ray, which has {there} (ray status)"
            print(what, file=sys.stderr, flush=True)
        if now - complete_at > limit_s:
            what = f"Ray has placed {begun} of {processes} workers after {limit_s} s"
            fix = "ray status says what there is, and what is asked for."
            raise PeerFailed(what, where="topology.join_timeout", fix=fix)
        thread.join(_POLL_S)


def _ray() -> Any:
    return import_module("ray")


def _seeing_all_gpus() -> Any:
    """Return Ray settings for workers. Each sees all GPUs of its machine that the run owns, as torchrun's workers do."""
    backend: Any = import_module("ray.train.backend")

    class Shared(backend.Backend):
        share_cuda_visible_devices = True

    class SharedConfig(backend.BackendConfig):
        @property
        def backend_cls(self) -> type:
            return Shared

    return SharedConfig()


def work(given: Given) -> None:
    """Run one process of the run in a worker of Ray. Raises RuntimeError if all processes must start again."""
    ray, train, collective = _ray(), import_module("ray.train"), import_module("ray.train.collective")
    context = train.get_context()
    rank, board = context.get_world_rank(), given.board
    launch = ray.get(board.begin.remote(rank))
    here = {"MASTER_ADDR": ray.util.get_node_ip_address(), "MASTER_PORT": str(free_port())}
    until = time.monotonic() + 2 * _LEAVE_S
    while rank == 0 and launch > 1 and is_locked(given.root) and time.monotonic() < until:
        time.sleep(_POLL_S)
    first = collective.broadcast_from_rank_zero(here)
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        ON_RAY: 1,
    }
    with tempfile.TemporaryDirectory(prefix="packtrain-ray-") as made:
        file = Path(made, "run.yaml")
        file.write_text(given.config, encoding="utf-8")
        resume = ["trainer.resume=auto"] if launch > 1 else []
        command = [sys.executable, "-m", "packtrain", given.verb, str(file), *resume]
        variables = {**given.variables, **os.environ, **{key: str(value) for key, value in numbers.items()}, **first}
        code, last = _run(command, variables, given, rank)
    ray.get(board.end.remote(rank, code))
    until = time.monotonic() + 2 * _LEAVE_S
    while (codes := ray.get(board.ended.remote())) and len(codes) < given.processes and time.monotonic() < until:
        time.sleep(_POLL_S)
    telling = next((one for one in MOST_TELLING if one in codes.values()), code)
    if rank and rank == min(one for one, its in codes.items() if its == telling):
        ray.get([board.say.remote(2, line) for line in last])
    if telling in _AGAIN:
        raise RuntimeError(f"rank {rank} ended with exit code {code}")


def _run(command: list[str], env: dict[str, str], given: Given, rank: int) -> tuple[int, list[str]]:
    """Run the process, with signals from the board; return its exit code and last lines.

    Ray's log gets all that it prints, and the board gets rank 0's output.
    """
    ray, folder = _ray(), given.folder if os.path.isdir(given.folder) else None
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Ray's workers block SIGINT, and child processes inherit that
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    process = subprocess.Popen(command, env=env, cwd=folder, **streams)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    last: deque[str] = deque(maxlen=TAIL_LINES)

    def pass_on(number: int, stream: Any) -> None:
        for said in stream:
            last.append(line := said.decode(errors="replace"))
            print(line, end="", flush=True)
            if rank == 0:
                given.board.say.remote(number, line)

    readers = [threading.Thread(target=pass_on, args=one) for one in ((1, process.stdout), (2, process.stderr))]
    for reader in readers:
        reader.daemon = True
        reader.start()
    known = 0
    while process.poll() is None:
        for number in ray.get(given.board.sent.remote(known)):
            process.send_signal(number)
            known += 1
        time.sleep(_POLL_S)
    for reader in readers:
        reader.join(10)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode, list(last)
