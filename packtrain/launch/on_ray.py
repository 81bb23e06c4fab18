"""A run on the machines of a Ray cluster (topology=ray): Ray Train places a worker for each device, and each starts packtrain, which
joins the others as under torchrun.

packtrain is a process of its own below the worker, since a worker's code is not in the main thread, which signals go to. A `Board`, an
actor of this launch, carries what rank 0 prints to the terminal, a signal to all, and the exit codes back. Where processes have failed or a
worker is lost, Ray Train starts all of them again, trainer.restarts times (its FailureConfig), from the newest checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from packtrain.errors import PeerFailed, UserError
from packtrain.exit_code import ENDING, leave, listening, report_error
from packtrain.launch.attempt import is_locked
from packtrain.launch.exit_status import MOST_TELLING
from packtrain.launch.rendezvous import PROGRESS_S
from packtrain.plan.launch_plan import LaunchPlan
from packtrain.plan.surroundings import free_port
from packtrain.run_folder import RunFolder
from packtrain.wording import first_line

ON_RAY = "PACKTRAIN_ON_RAY"
"""The variable by which a process knows that a worker of Ray has started it, with which it ends."""
_POLL_S = 0.3
_SILENT_S = 60
"""After which the cluster is lost."""
_LEAVE_S = 60
"""For the processes of a launch to end after the first of them has failed, and for those of an earlier one."""
_AGAIN = (1, *MOST_TELLING[3:])
"""The exit codes after which a new launch may help: a crash, a lost peer."""


@dataclass(frozen=True, slots=True)
class Given:
    """What each worker gets: the `board`, the run as a YAML, its `verb`, run folder and the folder that its paths start from."""

    board: Any
    config: str
    verb: str
    root: Path
    folder: str
    processes: int


class Board:
    """What workers and launcher tell each other; an actor of Ray."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.signal, self.launches = 0, 0
        self.begun: set[int] = set()
        self.codes: dict[int, int] = {}

    def begin(self, rank: int) -> int:
        """Notes a worker; the number of the launch, from 1."""
        if rank in self.begun or not self.begun:
            self.begun, self.codes, self.launches = set(), {}, self.launches + 1
        self.begun.add(rank)
        return self.launches

    def say(self, lines: list[str]) -> None:
        self.lines += lines

    def read(self) -> tuple[list[str], int]:
        """The lines since the last call, and how many workers have begun."""
        lines, self.lines = self.lines, []
        return lines, len(self.begun)

    def stop(self, number: int) -> None:
        self.signal = number

    def asked(self) -> int:
        """The signal for all processes; 0: none."""
        return self.signal

    def end(self, rank: int, code: int) -> None:
        self.codes[rank] = code

    def ended(self) -> dict[int, int]:
        """The exit codes by rank."""
        return self.codes


def run_on_ray(config: str, verb: str, folder: RunFolder, plan: LaunchPlan, join_timeout_s: float) -> int:
    """Runs `config`, the YAML of a joined process, on the cluster that `ray status` shows from here; returns the exit code.

    Raises UserError where Ray is not installed or no cluster is found, PeerFailed where workers are not placed within `join_timeout_s`.
    """
    try:
        ray, train = _ray(), import_module("ray.train")
        make_trainer: Any = import_module("ray.train.v2.api.data_parallel_trainer").DataParallelTrainer
    except ImportError as error:
        raise UserError(
            f"Ray Train is not there: {error}", where="topology.kind", fix="pip install 'packtrain[ray]'"
        ) from error
    address = os.environ.get("RAY_ADDRESS", "auto")
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal():  # ray.init waits for minutes where nothing listens
            socket.create_connection((host.rpartition("/")[2], int(port)), timeout=10).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except OSError as error:
        fix = "Start one with ray start --head, or give the command to one: ray job submit -- packtrain …"
        raise UserError(f"no Ray cluster is found from here ({address})", where="topology.kind", fix=fix) from error
    gpus, processes = ray.cluster_resources().get("GPU", 0) > 0, plan.num_processes
    board = ray.remote(num_cpus=0)(Board).remote()
    given = Given(board, config, verb, folder.root.absolute(), os.getcwd(), processes)
    trainer = make_trainer(
        work,
        train_loop_config={"given": given},
        backend_config=_seeing_all_gpus(),
        scaling_config=train.ScalingConfig(num_workers=processes, use_gpu=gpus, placement_strategy="PACK"),
        run_config=train.RunConfig(
            failure_config=train.FailureConfig(max_failures=plan.restarts),
            storage_path=tempfile.mkdtemp(prefix="packtrain-ray-"),
        ),
    )
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=fit, name="ray train", daemon=True)
    try:
        with listening(lambda number: board.stop.remote(number)):
            thread.start()
            _follow(ray, board, thread, processes, join_timeout_s)
        codes = ray.get(board.ended.remote())
    finally:
        ray.shutdown()
    if len(codes) == processes and not any(codes.values()):
        return 0
    code = next((code for code in MOST_TELLING if code in codes.values()), max(codes.values(), default=4))
    if code in _AGAIN and failure:
        print(
            f"the workers on Ray failed: {str(failure[0]).strip().splitlines()[-1][:500]}", file=sys.stderr, flush=True
        )
    return code


def _follow(ray: Any, board: Any, thread: threading.Thread, processes: int, limit_s: float) -> None:
    """Prints what rank 0 prints until the run has ended. Raises PeerFailed where some workers are not placed after `limit_s`."""
    complete_at = said_at = time.monotonic()
    while True:
        alive = thread.is_alive()
        try:
            lines, begun = ray.get(board.read.remote(), timeout=_SILENT_S)
        except ray.exceptions.RayError as error:  # it may hang when it is shut down, too
            fix = "ray status says what there is; the same command goes on from the newest checkpoint."
            lost = PeerFailed(f"the Ray cluster no longer answers: {first_line(error)}", where="Ray", fix=fix)
            leave(report_error(lost))
        for line in lines:
            print(line, end="", flush=True)
        now = time.monotonic()
        complete_at = now if begun == processes else complete_at
        if not alive:
            return
        if now - max(complete_at, said_at) > PROGRESS_S:
            said_at = now
            print(
                f"waiting for {processes - begun} of {processes} workers of Ray (ray status)",
                file=sys.stderr,
                flush=True,
            )
        if now - complete_at > limit_s:
            what = f"Ray has placed {begun} of {processes} workers after {limit_s} s"
            raise PeerFailed(
                what, where="topology.join_timeout", fix="ray status says what there is, and what is asked for."
            )
        thread.join(_POLL_S)


def _ray() -> Any:
    return import_module("ray")


def _seeing_all_gpus() -> Any:
    """Ray's settings of workers that each see all GPUs of their machine that are theirs, as torchrun's do."""
    backend: Any = import_module("ray.train.backend")

    class Shared(backend.Backend):
        share_cuda_visible_devices = True

    class SharedConfig(backend.BackendConfig):
        @property
        def backend_cls(self) -> type:
            return Shared

    return SharedConfig()


def work(config: dict[str, Any]) -> None:
    """In a worker of Ray: one process of the run. Raises RuntimeError where all are to be started again."""
    ray, train, collective = _ray(), import_module("ray.train"), import_module("ray.train.collective")
    given: Given = config["given"]
    context = train.get_context()
    rank, board = context.get_world_rank(), given.board
    launch = ray.get(board.begin.remote(rank))
    here = {"MASTER_ADDR": ray.util.get_node_ip_address(), "MASTER_PORT": str(free_port())}
    until = time.monotonic() + _LEAVE_S
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
        command = [
            sys.executable,
            "-m",
            "packtrain",
            given.verb,
            str(file),
            *(["trainer.resume=auto"] if launch > 1 else []),
        ]
        code = _run(command, {**os.environ, **{key: str(value) for key, value in numbers.items()}, **first}, given)
    ray.get(board.end.remote(rank, code))
    until = time.monotonic() + _LEAVE_S
    while (codes := ray.get(board.ended.remote())) and len(codes) < given.processes and time.monotonic() < until:
        time.sleep(_POLL_S)
    telling = next((one for one in MOST_TELLING if one in codes.values()), code)
    if telling in _AGAIN:
        raise RuntimeError(f"rank {rank} ended with exit code {code}")


def _run(command: list[str], env: dict[str, str], given: Given) -> int:
    """Runs the process, with its lines to the board (other ranks than 0 have none but errors), and signals from there; its exit code."""
    ray, folder = _ray(), given.folder if os.path.isdir(given.folder) else None
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    blocked = signal.pthread_sigmask(
        signal.SIG_UNBLOCK, ENDING
    )  # Ray's workers block SIGINT, and a process inherits that
    process = subprocess.Popen(command, env=env, cwd=folder, **streams)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def pass_on() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            given.board.say.remote([line.decode(errors="replace")])

    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()
    sent = 0
    while process.poll() is None:
        if (number := ray.get(given.board.asked.remote())) != sent:
            process.send_signal(sent := number)
        time.sleep(_POLL_S)
    reader.join(10)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode
