"""Carrying out a LaunchPlan: files in the run folder, the processes of this machine, and one exit code for all of them.

torchrun ends with 1 whatever happened in its workers, so each worker leaves its exit code in a folder that only this
launch knows (worker.py), and the launcher ends with the most telling one (verdict.py). The launchers of several machines
meet before they start any worker (rollcall.py), and end with the same code.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, cast

import yaml

from packtrain.config.compose import to_dict, to_yaml
from packtrain.config.schema import RunConfig
from packtrain.errors import PacktrainError, PeerFailed, UserError
from packtrain.launch.beside import watched
from packtrain.launch.children import run_children
from packtrain.launch.claim import claimed, claimed_for_others
from packtrain.launch.line import Line
from packtrain.launch.members import Member, job_of, shared_values, shared_versions
from packtrain.launch.own_folder import heartbeat_folder, own_folder
from packtrain.launch.place import Place, own_addresses
from packtrain.launch.rollcall import meet
from packtrain.launch.signals import heard_by
from packtrain.launch.verdict import MOST_TELLING
from packtrain.launch.worker import EXIT_DIR, LOG_DIR, PARENT, PLANNED, last_words
from packtrain.monitor.old.flight_recorder import recorded_into
from packtrain.monitor.old.heartbeat import HEARTBEAT_DIR
from packtrain.monitor.old.watchdog import DIAGNOSIS, Watchdog
from packtrain.plan.interfaces import LOOPBACK, short_waits
from packtrain.plan.launch_plan import LaunchPlan
from packtrain.run_folder import RunFolder, environment, in_time, write_json

LAUNCHER_LOG = "launcher.log"
SHUTDOWN_TIMEOUT_S = 120
MOST_SILENCE_S = 30
LEAST_SILENCE_S = 10  # five beats: a machine may be busy
SLURM_TIMEOUT_S = 20
_OF_SRUN = re.compile(rb"srun: (?:error|fatal): (.*)")
_OF_A_TASK = re.compile(rb"srun: (?:error: )?\S+: tasks? [\d,-]+: ")


def execute(plan: LaunchPlan, config: RunConfig, train: Callable[[], int]) -> int:
    """Carries out the plan to its end and returns the exit code: 0, or the most telling one of the workers.

    A run of one process is `train()` in this one; the others start the plan's commands. Raises UserError where the plan
    cannot be carried out from here, the run folder cannot be written or another run is going on in it; CheckFailed where
    the machines are not alike; PeerFailed where one is missing.
    """
    if plan.obstacles and not plan.lacks_gpus_alone:
        raise UserError(list(plan.obstacles))
    if plan.role == "spread":
        return _spread(plan)
    folder = RunFolder.of(config.trainer)
    with ExitStack() as stack:
        if _is_first(plan):
            stack.enter_context(claimed(folder.root))
        line = None
        if plan.role == "launch" and plan.nodes > 1:
            prepare = partial(_open_attempt, plan, config, folder, stack)
            line = stack.enter_context(meet(_member(plan, config), _place(plan, config), prepare))
        elif _is_first(plan):
            _open_attempt(plan, config, folder, stack)
        return _train_here(plan, config, folder, train) if plan.in_process else _launch_here(plan, config, folder, line)


def _spread(plan: LaunchPlan) -> int:
    """Runs packtrain on every machine of the Slurm job; each of them ends with the exit code of the whole run.

    srun itself is no way to its tasks: one SIGINT it only remarks upon, and for SIGTERM it kills them. A second signal is
    for srun. Raises PeerFailed where srun could not start its tasks, which it ends with 1 for.
    """
    step = f"packtrain-{os.getpid()}"
    argv = [plan.spread[0], f"--job-name={step}", *plan.spread[1:]]
    received: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int) -> None:
        received.append(number)
        for srun in started:
            with suppress(ProcessLookupError):
                if len(received) > 1 or not _signal_step(step, number):
                    os.killpg(srun.pid, signal.SIGTERM)

    with heard_by(pass_on):  # before there is an srun that a signal could leave behind
        try:
            srun = subprocess.Popen(argv, start_new_session=True, stderr=subprocess.PIPE)
        except FileNotFoundError as error:
            what = "srun is not found, though this is inside a Slurm job"
            raise UserError(what, where="PATH", fix="Load Slurm's module.") from error
        started.append(srun)
        if received:
            with suppress(ProcessLookupError):
                os.killpg(srun.pid, signal.SIGTERM)
        failure = _failure_of_srun(cast(IO[bytes], srun.stderr))
        code = srun.wait()
    if failure and code == 1 and not received:
        fix = "Look at sinfo and squeue: is the job there, and are its machines up? Then start the same command again."
        raise PeerFailed(
            f"srun could not start packtrain on the machines of the job: {failure}", where="Slurm", fix=fix
        )
    return 128 + received[0] if received and code not in (0, *MOST_TELLING) else code


def _failure_of_srun(said: IO[bytes]) -> str:
    """Passes on what srun and its tasks say on stderr, as it comes; the last error of srun's own, "" where a task has ended."""
    failure, started, last = "", False, b""
    while piece := os.read(said.fileno(), 2**16):
        sys.stderr.buffer.write(piece)
        sys.stderr.buffer.flush()
        *lines, last = (last + piece).split(b"\n")
        for line in lines:
            started = started or _OF_A_TASK.match(line) is not None
            if error := _OF_SRUN.match(line):
                failure = error[1].decode(errors="replace").strip()
    return "" if started else failure


def _signal_step(name: str, number: int) -> bool:
    """Has Slurm send a signal to the tasks of the step `name` of this job; False where it cannot."""
    asked = ["squeue", "--steps", "--noheader", f"--jobs={os.environ.get('SLURM_JOB_ID')}", "--format=%i %j"]
    try:
        listed = subprocess.run(asked, capture_output=True, text=True, timeout=SLURM_TIMEOUT_S, check=True).stdout
        steps = [line.split()[0] for line in listed.splitlines() if line.split()[1:] == [name]]
        command = ["scancel", f"--signal={signal.Signals(number).name[3:]}", *steps]
        if steps:
            subprocess.run(command, capture_output=True, timeout=SLURM_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return bool(steps)


def _member(plan: LaunchPlan, config: RunConfig) -> Member:
    """What this machine says of itself at the roll call."""
    return Member(
        node=plan.node,
        nodes=plan.nodes,
        per_node=plan.gpus_per_node,
        total=plan.num_processes,
        gpus=plan.gpus,
        host=plan.host,
        addresses=own_addresses(),
        versions=shared_versions(environment()),
        config=shared_values(to_dict(config)),
        clock=time.time(),
    )


def _place(plan: LaunchPlan, config: RunConfig) -> Place:
    """Where the roll call is; a machine that is silent counts as lost well before a collective's time limit, and before
    training well before that of joining."""
    silence_s = min(MOST_SILENCE_S, config.topology.step_timeout / 2)
    return Place(
        address=plan.accelerate["main_process_ip"],
        port=plan.accelerate["main_process_port"],
        timeout_s=config.topology.join_timeout,
        job=job_of(config),
        names=plan.hosts,
        silence_s=min(silence_s, max(LEAST_SILENCE_S, config.topology.join_timeout / 2)),
        training_silence_s=silence_s,
    )


def _train_here(plan: LaunchPlan, config: RunConfig, folder: RunFolder, train: Callable[[], int]) -> int:
    """The run in this process; one that is alone nobody watches, but packtrain doctor finds it."""
    _say_if_busy(plan)
    os.environ.update(plan.command.env)
    if plan.num_processes > 1:  # started by another launcher
        os.environ.update({name: value for name, value in recorded_into(folder.logs).items() if name not in os.environ})
        with watched(
            folder.logs / LAUNCHER_LOG,
            host=plan.host,
            per_node=plan.gpus_per_node,
            machines=plan.nodes,
            step_timeout=config.topology.step_timeout,
            checkpoint_timeout=config.topology.checkpoint_timeout,
            join_timeout=config.topology.join_timeout,
        ):
            return train()
    with heartbeat_folder() as heartbeats:
        os.environ[HEARTBEAT_DIR] = str(heartbeats)
        watchdog, code = _watchdog(plan, config, folder, heartbeats), 1
        with watchdog.found_by_others(0, answers=False), last_words(folder.log(0)):
            try:
                code = train()
                return code
            except (PacktrainError, KeyboardInterrupt) as error:
                code = error.exit_code if isinstance(error, PacktrainError) else 128 + signal.SIGINT
                raise
            finally:
                watchdog.codes = {0: code}


def _launch_here(plan: LaunchPlan, config: RunConfig, folder: RunFolder, line: Line | None) -> int:
    """The workers of this machine, to their end and to that of all others."""
    _say_if_busy(plan)
    begun = time.time()
    with own_folder(Path(tempfile.gettempdir()), "packtrain-launch-") as own, heartbeat_folder() as heartbeats:
        exits, log = own / "exits", _launcher_log(plan, folder)
        to_stop_s = config.topology.step_timeout + config.topology.checkpoint_timeout
        exits.mkdir()
        environment = {
            **recorded_into(folder.logs),
            **os.environ,
            **plan.command.env,
            # torchrun kills workers 30 s after a signal to it, but a step and a checkpoint may take longer; for the others
            # of a worker that failed it keeps to 30 s whatever is set here
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(to_stop_s, SHUTDOWN_TIMEOUT_S)),
            # or each process says that the others' addresses have no names
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            EXIT_DIR: str(exits),
            LOG_DIR: str(folder.logs.absolute()),
            PLANNED: f"{plan.nodes}x{plan.gpus_per_node}",
            PARENT: str(os.getpid()),
            HEARTBEAT_DIR: str(heartbeats),
            **short_waits(plan.accelerate.get("main_process_ip", LOOPBACK)),
        }
        argv = [sys.executable, *_quiet(_with_files_of_its_own(plan, config, folder, own), log)]
        watchdog = _watchdog(plan, config, folder, heartbeats)
        with watchdog.found_by_others(plan.node):
            verdict = run_children(argv, environment, exits, log, plan.ranks, plan.host, line, watchdog)
    if verdict.late:
        text = "\n".join(verdict.late) + "\n"
        in_time(lambda: (folder.logs / DIAGNOSIS).write_text(text, encoding="utf-8"), 0)
    if plan.node == 0 or verdict.alone:  # rank 0 and this are what the terminal shows
        for said in verdict.lines:
            print(said, file=sys.stderr, flush=True)
        if verdict.lines and verdict.code in MOST_TELLING:
            in_time(lambda: _keep(folder.logs / DIAGNOSIS, verdict.lines, begun), None)
    return verdict.code


def _keep(report: Path, lines: Sequence[str], begun: float) -> None:
    """Leaves for packtrain doctor what the terminal shows of a failure, which may be more than a watchdog has told of it since
    `begun`."""
    told = report.exists() and report.stat().st_mtime >= begun
    if not told or report.read_text(encoding="utf-8").partition("\n")[0] == lines[0]:
        report.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _watchdog(plan: LaunchPlan, config: RunConfig, folder: RunFolder, heartbeats: Path) -> Watchdog:
    return Watchdog(
        heartbeats,
        folder.logs,
        ranks=plan.ranks,
        host=plan.host,
        step_timeout=config.topology.step_timeout,
        checkpoint_timeout=config.topology.checkpoint_timeout,
        join_timeout=config.topology.join_timeout,
        machines=plan.nodes,
    )


def _say_if_busy(plan: LaunchPlan) -> None:
    if "OMP_WAIT_POLICY" in plan.command.env:
        print("other work keeps this machine busy: threads sleep while they wait (OMP_WAIT_POLICY=passive)", flush=True)


def _is_first(plan: LaunchPlan) -> bool:
    """Whether this process speaks for the whole run: it has rank 0, is alone (whatever RANK a shell has left), or starts it."""
    joins = plan.in_process and plan.num_processes > 1
    rank = plan.command.env.get("RANK", os.environ.get("RANK", "0")) if joins else "0"
    return plan.node == 0 and rank == "0"


def _launcher_log(plan: LaunchPlan, folder: RunFolder) -> Path:
    """Where the launcher's own words go; each machine has a file, also where they share a disk."""
    try:
        folder.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(error) from error
    return folder.logs / (LAUNCHER_LOG if plan.node == 0 else f"launcher-{plan.node:05d}.log")


def _open_attempt(plan: LaunchPlan, config: RunConfig, folder: RunFolder, stack: ExitStack) -> None:
    """Writes what is known before training, touching nothing of an earlier run. Raises UserError where it cannot.

    The folder is claimed for the machines that share its disk, until the `stack` ends.
    """
    try:
        folder.open_attempt(config.trainer.resume)
        stack.enter_context(claimed_for_others(folder.root))
        folder.attempt.config.write_text(to_yaml(config), encoding="utf-8")
        write_json(folder.attempt.plan, plan.to_json())
        write_json(folder.attempt.environment, environment())
        if not plan.in_process:
            folder.attempt.accelerate.write_text(yaml.safe_dump(dict(plan.accelerate)), encoding="utf-8")
        if plan.deepspeed is not None:
            write_json(folder.attempt.deepspeed, plan.deepspeed)
    except OSError as error:
        raise _not_writable(error) from error


def _not_writable(error: OSError) -> UserError:
    what = f"the run folder cannot be written: {error.strerror}"
    return UserError(what, where=f"trainer.output_dir ({error.filename})", fix="Name another folder.")


def _with_files_of_its_own(plan: LaunchPlan, config: RunConfig, folder: RunFolder, own: Path) -> list[str]:
    """The plan's `accelerate launch …`, on copies of the run folder's files in `own`: a machine may not see that folder."""
    copies = {folder.config: to_yaml(config), folder.accelerate: yaml.safe_dump(dict(plan.accelerate))}
    if plan.deepspeed is not None:
        copies[folder.deepspeed] = json.dumps(plan.deepspeed)
    for file, text in copies.items():
        (own / file.name).write_text(text, encoding="utf-8")
    names = {str(file): str(own / file.name) for file in copies}
    return [names.get(argument, argument) for argument in plan.command.argv]


def _quiet(argv: list[str], log: Path) -> list[str]:
    """`accelerate launch …` by the launcher that writes its own words to `log`."""
    return ["-m", "packtrain.launch.accelerate", str(log), *argv[2:]]
