"""A launch in small: `python -m tests.cluster.small_launch KEY=VALUE…` does what packtrain does with the run.yaml of its
folder, but the workers are forks of one process that runs worker.py there, in place of torchrun's.

All that the launchers have to do with them is as in a run: process ids, exit codes, heartbeats, stacks, sessions of their
own, and what torchrun leaves of those that a signal ended. It takes a tenth of torchrun's time, most of which is importing.
Modules in PRELOAD are imported once, for all ranks of a machine.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from packtrain.launch import supervisor
from packtrain.launch.worker import EXIT_DIR, PARENT, end_with_parent
from packtrain.monitor.heartbeat import write_exit

ROOT = Path(__file__).parents[2]
PRELOAD = "PRELOAD"
SMALL = ("-m", "tests.cluster.small_launch")
BY_TORCHRUN = (
    "-c",
    """
import sys
from dataclasses import replace
from packtrain.config.compose import load_config
from packtrain.errors import exit_code_of
from packtrain.launch.execute import execute
from packtrain.plan.launch_plan import plan_launch
from packtrain.plan.surroundings import detect_surroundings

config = load_config("run.yaml", sys.argv[1:])
plan = plan_launch(config, replace(detect_surroundings(), gpus=0))
def of_worker(argv): return [*argv[: argv.index("-m")], "worker.py", *argv[-2:]]
commands = tuple(replace(one, argv=of_worker(one.argv)) for one in plan.commands)
sys.exit(exit_code_of(lambda: execute(replace(plan, commands=commands), config, int)))
""",
)
_GRACE_S = 30
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 0.1  # as torchrun


def at_work(folder: Path, *python: str, **given: str | None) -> subprocess.Popen[str]:
    """Python with the arguments `python` (SMALL or BY_TORCHRUN, and more) in `folder`: no rank of another launch, no GPU, one thread.

    `given` are variables of its environment; None takes one away.
    """
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    usual = {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env = {name: value for name, value in {**clean, **usual, **given}.items() if value is not None}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *python], cwd=folder, env=env, **streams)


def instead_of_torchrun(begin: Callable[..., Any]) -> None:
    """Has launchers start the processes of a machine by `begin`, which takes what subprocess.Popen does."""
    supervisor.subprocess = SimpleNamespace(Popen=begin, TimeoutExpired=subprocess.TimeoutExpired)


def start_arguments(argv: Sequence[str]) -> list[str]:
    """The arguments of `start` that say what torchrun's command does."""
    names = ("num_machines", "machine_rank", "num_processes", "main_process_ip", "main_process_port")
    nodes, node, processes, *where = (argv[argv.index(f"--{name}") + 1] for name in names)
    log = argv[argv.index("packtrain.launch.worker") + 1]
    return [log, nodes, node, str(int(processes) // int(nodes)), *where, *argv[-2:]]


def begin_small(argv: Sequence[str], **given: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *SMALL, "--start", *start_arguments(argv)], **given)


def launch(overrides: list[str]) -> int:
    """The launcher of one machine."""
    from packtrain.config.compose import load_config
    from packtrain.launch.execute import execute
    from packtrain.plan.launch_plan import plan_launch
    from packtrain.plan.surroundings import detect_surroundings

    config = load_config("run.yaml", overrides)
    return execute(plan_launch(config, detect_surroundings()), config, lambda: 0)


def start(log: str, nodes: str, node: str, per_node: str, address: str, port: str, *arguments: str) -> int:
    """The processes of one machine, to their end; 1 where one of them failed, which ends the others."""
    end_with_parent(int(os.environ[PARENT]))
    number, first = int(per_node), int(node) * int(per_node)
    os.environ.update({PARENT: str(os.getpid()), "MASTER_ADDR": address, "MASTER_PORT": port})
    os.environ.update(WORLD_SIZE=str(int(nodes) * number), LOCAL_WORLD_SIZE=per_node, GROUP_RANK=node)
    for module in os.environ.get(PRELOAD, "").split():
        importlib.import_module(module)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until there is a handler that passes them on
    workers = {_fork(first + local, local, arguments): first + local for local in range(number)}
    signal.signal(signal.SIGTERM, lambda number, _: _signal(workers, number))
    signal.signal(signal.SIGINT, lambda number, _: _signal(workers, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    failed: float | None = None
    ends: dict[int, int] = {}
    while workers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            code, rank = os.waitstatus_to_exitcode(status), workers.pop(pid)
            with Path(log).open("a") as file:
                file.write(f"rank {rank}: exit code {code}\n")
            ends |= {rank: code} if code else {}
            if code and failed is None:  # the others have half a minute
                failed = time.monotonic()
                _signal(workers, signal.SIGTERM)
        elif failed and time.monotonic() - failed > _GRACE_S:
            _signal(workers, signal.SIGKILL)
        else:
            time.sleep(_LOOK_S)
    if EXIT_DIR in os.environ:  # a launcher of ours waits for them
        for rank, code in ends.items():
            write_exit(Path(os.environ[EXIT_DIR]), rank, ended=code)
    return 1 if failed else 0


def _fork(rank: int, local: int, arguments: Sequence[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local))
    sys.argv = ["worker.py", *arguments]
    runpy.run_path("worker.py", run_name="__main__")
    os._exit(0)


def _signal(workers: Iterable[int], number: int) -> None:
    for pid in list(workers):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    from packtrain.errors import exit_code_of

    if sys.argv[1:2] == ["--start"]:
        sys.exit(start(*sys.argv[2:]))
    instead_of_torchrun(begin_small)
    sys.exit(exit_code_of(lambda: launch(sys.argv[1:])))
