"""Carrying out a LaunchPlan: files in the run folder, processes, signals, and one exit code for all of them.

torchrun ends with 1 whatever happened in its workers, so each worker leaves its exit code in a folder that only this
launch knows (worker.py), and the launcher ends with the most telling one. Workers are in sessions of their own, out
of reach of the terminal's Ctrl-C; the launcher passes SIGINT and SIGTERM on to torchrun, which signals them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from packtrain.config.compose import to_yaml
from packtrain.config.schema import RunConfig
from packtrain.errors import PeerFailed, UserError
from packtrain.launch.claim import claimed
from packtrain.launch.plan import LaunchPlan
from packtrain.launch.worker import EXIT_DIR, LOG_DIR
from packtrain.run_folder import RunFolder, environment, write_json

LAUNCHER_LOG = "launcher.log"
SHUTDOWN_TIMEOUT_S = 120
MOST_TELLING = (2, 3, 1, 4)  # a lost peer is mostly what the others see of the first three


def execute(plan: LaunchPlan, config: RunConfig, train: Callable[[], int]) -> int:
    """Carries out the plan to its end and returns the exit code: 0, or the most telling one of the workers.

    A run of one process is `train()` in this one; the others start the plan's commands. Raises UserError where the run
    folder cannot be written or another run is going on in it, PeerFailed where a worker was killed without a word.
    """
    folder = RunFolder.of(config)
    if not _is_first():
        return _carry_out(plan, config, folder, train)
    with claimed(folder.root):
        _open_attempt(plan, config, folder)
        return _carry_out(plan, config, folder, train)


def _carry_out(plan: LaunchPlan, config: RunConfig, folder: RunFolder, train: Callable[[], int]) -> int:
    if "OMP_WAIT_POLICY" in plan.commands[0].env:
        print("other work keeps this machine busy: threads sleep while they wait (OMP_WAIT_POLICY=passive)", flush=True)
    if plan.in_process:
        os.environ.update(plan.commands[0].env)
        return train()
    with tempfile.TemporaryDirectory(prefix="packtrain-") as exits:
        environment = {
            **os.environ,
            **plan.commands[0].env,
            # torchrun kills workers 30 s after a signal to it, but a step and a checkpoint may take longer; for the others
            # of a worker that failed it keeps to 30 s whatever is set here
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(config.topology.step_timeout, SHUTDOWN_TIMEOUT_S)),
            EXIT_DIR: exits,
            LOG_DIR: str(folder.logs.absolute()),
        }
        log = folder.logs / LAUNCHER_LOG
        code, received = _run([sys.executable, *_quiet(plan, folder, log)], environment)
        reported = _reported(Path(exits))
    return _outcome(code, received, reported, plan.num_processes, log)


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _open_attempt(plan: LaunchPlan, config: RunConfig, folder: RunFolder) -> None:
    """Writes what is known before training, touching nothing of an earlier run. Raises UserError where it cannot."""
    try:
        folder.open_attempt(config.trainer.resume)
        folder.attempt.config.write_text(to_yaml(config), encoding="utf-8")
        write_json(folder.attempt.plan, plan.to_json())
        write_json(folder.attempt.environment, environment())
        if not plan.in_process:
            folder.attempt.accelerate.write_text(yaml.safe_dump(dict(plan.accelerate)), encoding="utf-8")
    except OSError as error:
        what = f"the run folder cannot be written: {error.strerror}"
        raise UserError(what, where=f"trainer.output_dir ({error.filename})", fix="Name another folder.") from error


def _quiet(plan: LaunchPlan, folder: RunFolder, log: Path) -> list[str]:
    """The plan's `accelerate launch …` on the attempt's files, by the launcher that writes its own words to `log`."""
    attempted = {str(file): str(folder.attempt.root / file.name) for file in (folder.config, folder.accelerate)}
    arguments = [attempted.get(argument, argument) for argument in plan.commands[0].argv[2:]]
    return ["-m", "packtrain.launch.accelerate", str(log), *arguments]


def _run(argv: list[str], environment: dict[str, str]) -> tuple[int, int | None]:
    """The exit code of a child, and the signal that this process got and passed on meanwhile."""
    child = subprocess.Popen(argv, env=environment, start_new_session=True)
    with _passing_on(child) as received:
        code = child.wait()
    return code, received[0] if received else None


@contextmanager
def _passing_on(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    received: list[int] = []

    def pass_on(number: int, _: object) -> None:
        received.append(number)
        if child.poll() is None:
            os.killpg(child.pid, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reported(exits: Path) -> dict[int, int]:
    """Exit codes by rank, of the workers that left one."""
    return {int(file.name): int(text) for file in exits.iterdir() if (text := file.read_text()).lstrip("-").isdigit()}


def _outcome(code: int, received: int | None, reported: dict[int, int], processes: int, log: Path) -> int:
    """The exit code of the whole launch, whose `processes` left the exit codes `reported`."""
    for telling in MOST_TELLING[:2]:
        if telling in reported.values():
            _point_to_log(telling, reported, log)
            return telling
    if len(reported) == processes and not any(reported.values()):  # all at their end, a signal or not
        return 0
    if received is not None:
        if not reported:
            print(f"stopped by {signal.Signals(received).name}", file=sys.stderr)
        elif list(reported.values()) != [128 + received] * processes:
            print(f"not every process could end in order after the signal: see {log}", file=sys.stderr)
        return 128 + received
    if code == 0:
        return 0
    for telling in MOST_TELLING[2:]:
        if telling in reported.values():
            _point_to_log(telling, reported, log)
            if silent := sorted(set(range(processes)) - set(reported)):
                names = ", ".join(map(str, silent))
                print(f"process {names} ended without a word (killed, or out of memory?): see {log}", file=sys.stderr)
            return telling
    if len(reported) == processes and max(reported.values()) > 128:  # someone else signalled torchrun or all workers
        return max(reported.values())
    raise PeerFailed(
        "a process ended without a word: killed, out of memory, or crashed outside Python",
        where=str(log),
        fix=f"Its exit code and signal are in this file; {log.parent}/rank-*.log has what the others wrote.",
    )


def _point_to_log(code: int, reported: dict[int, int], log: Path) -> None:
    """Rank 0 writes to the terminal; where it is not the one that failed, say who did."""
    if reported.get(0) != code:
        rank = min(rank for rank, one in reported.items() if one == code)
        print(f"process {rank} failed: see {log.with_name(f'rank-{rank:05d}.log')}", file=sys.stderr)
