"""packtrain's command in processes of its own that need not import torch again: they are forked from one that has.

Importing torch, transformers and TRL takes longer than training a tiny model does. Each process still is the command from
its first line on: it has its own arguments, environment, folder, output and exit code, and shares nothing with others.
What is claimed of the start itself, of the launcher and of signals is tested with processes made from nothing.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # as many threads everywhere: sums are then made in one order
_CONTEXT = multiprocessing.get_context("forkserver")
WARM = (
    "packtrain.train.run",
    "packtrain.train.verify.measure",  # and with it both objectives
    "packtrain.cli",
    "packtrain.launch.execute",
    "packtrain.config.compose",
    "packtrain.plan.screen",
    "packtrain.launch.jobs",
    "packtrain.report.page",
    "packtrain.diagnose.doctor",
    "deepspeed",  # which accelerate imports in every run, where it is installed
    "transformers.models.llama.modeling_llama",
    "typer._adapters",
    "typer._click.decorators",
    "numpy.ctypeslib",
    "pydantic.dataclasses",
    "rich._emoji_codes",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.checkpoint.state_dict",
    "torch.profiler._cupti_monitor",
    "transformers.models.auto.processing_auto",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "transformers.video_processing_utils",
)
"""Modules that take most of the time of a tiny run. Strategies are not among them: tests replace what they import."""
PRIMED = "tests.train.primed"
"""Module that imports all of WARM."""
_CONTEXT.set_forkserver_preload([PRIMED])
SHARED = "PACKTRAIN_TESTS_SERVER"
"""Variable with the address of the server that all workers of pytest share."""
if SHARED in os.environ:
    _server = forkserver._forkserver
    _alive = os.open(os.devnull, os.O_WRONLY)  # the server ends with the process that started it
    _server.ensure_running = lambda: None


def use_shared_server() -> None:
    """Tokenising in the process of a test starts a server of its own, whose processes block signals."""
    if SHARED in os.environ:
        _server._forkserver_address, _server._forkserver_alive_fd = os.environ[SHARED], _alive
        _server._forkserver_pid = None  # the next one that tokenises starts another


def tokenise_in_forks(patch: pytest.MonkeyPatch) -> None:
    """Fork the processes that tokenise from the shared server too. Tests that send them signals must not do this."""
    if SHARED in os.environ:
        use_shared_server()
        patch.setattr(forkserver, "ensure_running", lambda: None)


def serve() -> None:
    """Start a server for all workers of pytest, and wait for its imports."""
    begun(int).join()
    if sys.version_info < (3, 14):  # later versions want a key: there each worker starts its own
        os.environ[SHARED] = forkserver._forkserver._forkserver_address


def command(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
    begin: Callable[..., None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`packtrain ARGUMENTS`, with variables of its own in `env`; `begin` as in `start`."""
    return results_of(arguments, [{**(env or {})}], cwd, timeout, begin)[0]


def joined(
    processes: int, *arguments: str, timeout: float = 600, begin: Callable[..., None] | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """`packtrain ARGUMENTS` in as many processes, as torchrun would have started them; what became of them by rank."""
    return results_of(arguments, told_by_torchrun(processes), None, timeout, begin)


def told_by_torchrun(processes: int) -> list[dict[str, str]]:
    """The variables of each rank of a launch on this machine."""
    common = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, **common} for rank in range(processes)]
    return [{name: str(value) for name, value in own.items()} for own in ranks]


def enter(environment: Mapping[str, str], cwd: Path, outputs: list[Path]) -> None:
    """Gives this process its own environment, folder, stdout and stderr."""
    multiprocessing.set_start_method(
        multiprocessing.get_all_start_methods()[0], force=True
    )  # the server's is not the usual one
    gc.freeze()  # what the server has imported is never garbage: looking through it takes longer than a tiny run
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, file in enumerate(outputs, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)


def results_of(
    arguments: tuple[str, ...],
    variables: list[dict[str, str]],
    cwd: Path | None,
    timeout: float,
    begin: Callable[..., None] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """What became of one process for each entry of `variables`; kills them all and raises TimeoutError if one does not end."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [[Path(folder, f"{number}.{name}") for name in ("out", "err")] for number in range(len(variables))]
        processes = [
            start(arguments, {**ENVIRONMENT, **own}, cwd or Path.cwd(), output, begin)
            for own, output in zip(variables, outputs, strict=True)
        ]
        for process in processes:
            process.join(timeout)
            if process.exitcode is None:
                for one in processes:
                    one.kill()
                raise TimeoutError(f"packtrain {' '.join(arguments)} did not end: {outputs[0][1].read_text()[-3000:]}")
        return [
            subprocess.CompletedProcess(arguments, process.exitcode or 0, *(file.read_text() for file in output))
            for process, output in zip(processes, outputs, strict=True)
        ]


def start(
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    cwd: Path,
    outputs: list[Path],
    begin: Callable[..., None] | None = None,
) -> BaseProcess:
    """`packtrain ARGUMENTS`, at work; what it prints goes to the two files `outputs`. `begin` is what calls `run` in it."""
    return begun(begin or run, arguments, environment, cwd, outputs)


def begun(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A process that does `work`, forked from the one that has imported everything."""
    use_shared_server()
    process = _CONTEXT.Process(target=work, args=arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # which the server reads once, while it imports torch
        process.start()
    return process


def run(arguments: tuple[str, ...], environment: Mapping[str, str], cwd: Path, outputs: list[Path]) -> None:
    """The command itself, in a process of its own."""
    enter(environment, cwd, outputs)
    sys.argv = ["packtrain", *arguments]
    from packtrain.cli import main

    main()


def piped(text: str, *given: Any) -> None:
    """Run the command with this text on its stdin."""
    read, write = os.pipe()
    os.write(write, text.encode())
    os.close(write)
    sys.stdin = open(read, encoding="utf-8")  # noqa: SIM115
    run(*given)
