"""Execution of a LaunchPlan: run-folder files, this machine's processes, and one exit code for all.

torchrun ends with 1 after any failure of its workers, so each worker writes its exit code to a folder of this launch (worker.py).
The launchers of several machines find each other before they start any worker (rendezvous.py), watch their own workers
(supervisor.py), and report to machine 0 over the control channel (coordinator.py). They end with the same code (exit_status.py), or
meet and start again (Restarts).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from packtrain.config.compose import to_yaml
from packtrain.config.schema import RunConfig
from packtrain.errors import UserError
from packtrain.launch.attempt import RunLock, check_free, open_attempt, writing
from packtrain.launch.coordinator import Coordinator, Reporter, Restarts
from packtrain.launch.exit_status import Verdict
from packtrain.launch.on_ray import ON_RAY, run_on_ray
from packtrain.launch.rendezvous import Group, MeetingPoint, meet, own_addresses
from packtrain.launch.slurm_jobs import run_srun
from packtrain.launch.supervisor import Supervisor
from packtrain.launch.worker import EXIT_DIR, LOG_DIR, PARENT, errors_copied_to
from packtrain.mirror import Mirror
from packtrain.monitor.channel import ADDRESS, SECRET, published
from packtrain.monitor.foreign_launch import watched
from packtrain.monitor.heartbeat import TimeLimits
from packtrain.monitor.processes import STACKS
from packtrain.monitor.watchdog import Watchdog
from packtrain.plan.agreement import Member, shared_values, shared_versions
from packtrain.plan.launch_plan import LaunchPlan, plan_launch
from packtrain.plan.surroundings import detect_surroundings
from packtrain.run_folder import RunFolder, environment

LAUNCHER_LOG = "launcher.log"
MAX_SILENCE_S = 30
LOOPBACK = "127.0.0.1"
_LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "CROSS_SIZE", ON_RAY)
"""Variables of torchrun, Open MPI, other MPIs, srun, DeepSpeed's launcher and Ray. A process with none was started by hand."""


def execute(
    plan: LaunchPlan,
    config: RunConfig,
    train: Callable[[], int],
    given: str | None = None,
    on_end: Callable[[RunFolder], object] = lambda _: None,
) -> int:
    """Carry out the plan. Returns the exit code: 0, or the workers' most informative one.

    A run of one process calls `train()` here; other plans start their commands. `given` is the path of the config. The one process that
    has opened the run folder calls `on_end` when the run is over, with or without success. Raises UserError if the plan cannot be carried
    out from here, or if the run folder cannot be written, holds files that packtrain did not make, or is in use; CheckFailed if machines
    differ where they must not; PeerFailed if a machine is missing.
    """
    if plan.obstacles and not plan.lacks_gpus_alone:
        raise UserError(list(plan.obstacles))
    folder = RunFolder.of(config.trainer)
    if plan.role == "srun":
        begun = time.time()
        code = run_srun(plan.srun)
        # srun returns a lost machine's code, even if the run went on without it
        done = plan.survives_lost_machines and folder.status() == "done" and folder.summary.stat().st_mtime > begun
        return 0 if done else code
    if plan.role == "ray":
        numbers = dict.fromkeys(("nodes", "gpus_per_node", "min_nodes"))  # Ray decides them
        joined = replace(config, topology=replace(config.topology, kind="env", **numbers))
        inside = to_yaml(replace(joined, trainer=replace(config.trainer, restarts=0)))
        return run_on_ray(inside, config.objective.kind, folder, plan, config.topology.join_timeout)
    with ExitStack() as stack:
        lock, has_opened = stack.enter_context(RunLock()), False

        def open_folder(plan: LaunchPlan, resume: str) -> None:
            nonlocal has_opened
            url, keep = config.trainer.mirror, config.trainer.keep_checkpoints
            mirror = Mirror(url, folder, keep) if url and not has_opened else None
            if mirror is not None:
                check_free(folder.root)
                mirror.fetch(resume)
            open_attempt(config, given, folder, lock, plan, resume)
            if mirror is not None:
                mirror.start()
                stack.callback(mirror.close)
            if not has_opened:
                stack.callback(on_end, folder)
            has_opened = True

        if not plan.in_process:
            if plan.nodes == 1:  # several machines meet first, so that all of them get the error
                check_free(folder.root)
            return _launch_and_restart(plan, config, folder, open_folder)
        if _writes_run_folder(plan):
            open_folder(plan, config.trainer.resume)
            Restarts(0, folder).write_record([])  # drop the record of launches that did not begin to train
        os.environ.update(plan.command.env)
        by_hand = plan.num_processes == 1 or not any(name in os.environ for name in _LAUNCHER_VARIABLES)
        stack.enter_context(watched(folder.logs, _limits(config), plan.num_processes, by_hand=by_hand))
        if plan.num_processes == 1:
            stack.enter_context(errors_copied_to(folder.log(0)))
        return train()


def _launch_and_restart(
    plan: LaunchPlan, config: RunConfig, folder: RunFolder, open_folder: Callable[[LaunchPlan, str], None]
) -> int:
    """Launch a run, and again after each failure that trainer.restarts allows.

    Only machines that are still up start again. On machine 0 `open_folder` opens the run folder. Returns the last exit code."""
    restarts = Restarts(plan.restarts, folder)
    me = Member(
        node=plan.node,
        nodes=plan.nodes,
        per_node=plan.gpus_per_node,
        gpus=plan.gpus,
        host=plan.host,
        addresses=own_addresses(),
        versions=shared_versions(environment()),
        config=shared_values(asdict(config)),
    )
    place = MeetingPoint(
        _main_address(plan),
        plan.accelerate["main_process_port"] if plan.nodes > 1 else config.topology.main_port or 0,  # 0: any free port
        config.topology.join_timeout,
        config.trainer.output_dir,
        plan.hosts,
    )

    @cache
    def plan_for(*machines: int) -> LaunchPlan:  # renumbered from 0 in their order
        if machines == tuple(range(plan.nodes)):
            return plan
        return plan_launch(config, detect_surroundings(), config.objective.kind, machines=machines)

    def prepare(names: Mapping[int, str]) -> str:
        resume = restarts.resume_mode(config.trainer.resume)
        open_folder(plan_for(*names), resume)
        restarts.write_record(list(names.values()))
        return resume

    while True:
        with meet(me, place, prepare) as group:
            machines = list(group.names)
            resumed = replace(config, trainer=replace(config.trainer, resume=group.prepared))
            numbered = replace(group, names=dict(enumerate(group.names.values())))
            verdict = _launch_once(plan_for(*machines), resumed, folder, numbered, restarts)
        if not verdict.restart:
            return verdict.code
        if me.node == 0:
            print(restarts.sentence(), file=sys.stderr, flush=True)
        living = frozenset(machines[node] for node in verdict.restart)
        place = replace(place, expected=living, least=plan.least_nodes)


def _limits(config: RunConfig) -> TimeLimits:
    return TimeLimits(config.topology.step_timeout, config.topology.join_timeout)


def _main_address(plan: LaunchPlan) -> str:
    return plan.accelerate.get("main_process_ip", LOOPBACK)


def _writes_run_folder(plan: LaunchPlan) -> bool:
    """Return whether this process writes the run folder. It must have rank 0, or be alone; RANK is then ignored."""
    rank = plan.command.env.get("RANK", os.environ.get("RANK", "0")) if plan.num_processes > 1 else "0"
    return plan.node == 0 and rank == "0"


def _launch_once(plan: LaunchPlan, config: RunConfig, folder: RunFolder, group: Group, restarts: Restarts) -> Verdict:
    """Run this machine's workers; return the verdict when the workers of all machines have ended."""
    limits = _limits(config)
    silence_s = min(MAX_SILENCE_S, limits.step_s / 2)  # silence that makes a machine lost
    with writing():
        folder.logs.mkdir(parents=True, exist_ok=True)
    # machines that share a disk need a file each
    log = folder.logs / (LAUNCHER_LOG if plan.node == 0 else f"launcher-{plan.node:05d}.log")
    with TemporaryDirectory(prefix="packtrain-launch-", ignore_cleanup_errors=True) as made, ExitStack() as stack:
        scratch = Path(made)
        serving = _serving_coordinator(plan, folder, group, limits, silence_s, restarts)
        machine_0 = group.client or stack.enter_context(serving)
        argv = _argv_with_copies(plan, config, folder, scratch, group.store_port)
        # worker.py runs `accelerate launch …` and writes torchrun's messages to the log
        torchrun = [sys.executable, "-m", "packtrain.launch.worker", str(log), *argv[2:]]
        command = argv if plan.num_processes == 1 else torchrun
        with Reporter(plan.node, group.names[0], silence_s, machine_0) as reporter:
            supervisor = Supervisor(scratch, log, plan.ranks, plan.host, reporter)
            verdict = supervisor.run(command, _environment(plan, folder, group, scratch, limits))
            if plan.node == 0 or reporter.lost:
                for line in verdict.lines:
                    print(line, file=sys.stderr, flush=True)
            if isinstance(machine_0, Coordinator):
                machine_0.wait_until_all_informed()
            # a signal may have arrived after the verdict
            return verdict if reporter.report.signal is None else replace(verdict, restart=())


@contextmanager
def _serving_coordinator(
    plan: LaunchPlan, folder: RunFolder, group: Group, limits: TimeLimits, silence_s: float, restarts: Restarts
) -> Iterator[Coordinator]:
    """Serve machine 0's part of the control channel. It has the watchdog over all ranks, and the record of all machines."""
    assert group.server is not None
    per_node = plan.gpus_per_node
    ranks = [(name, range(node * per_node, (node + 1) * per_node)) for node, name in sorted(group.names.items())]
    watchdog = Watchdog(ranks, limits, folder.logs)
    watchdog.attach(group.server)
    coordinator = Coordinator(group.names, per_node, silence_s, watchdog, restarts)
    group.server.serve("machine", coordinator.answer)
    with closing(watchdog), published(folder.logs, group.server, _main_address(plan)):
        yield coordinator


def _environment(
    plan: LaunchPlan, folder: RunFolder, group: Group, scratch: Path, limits: TimeLimits
) -> dict[str, str]:
    """Return the environment variables of torchrun and its workers."""
    return {
        **os.environ,
        **plan.command.env,
        # torchrun kills workers 30 s after it gets a signal, but a step and a checkpoint may take longer
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(limits.step_s + limits.collective_s("checkpoint")),
        # hide the warning that torch prints in each process about an address without a host name
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        EXIT_DIR: str(scratch),
        STACKS: str(scratch),
        LOG_DIR: str(folder.logs.absolute()),
        PARENT: str(os.getpid()),
        ADDRESS: f"{group.address}:{group.port}",
        SECRET: group.secret,
    }


def _argv_with_copies(plan: LaunchPlan, config: RunConfig, folder: RunFolder, scratch: Path, port: int) -> list[str]:
    """Return the plan's `accelerate launch …` with torch's store at `port`.

    It reads copies of the run folder's files in `scratch`, because a machine may not see that folder."""
    settings: dict[str, Any] = {**plan.accelerate, "main_process_port": port}
    copies = {folder.config: to_yaml(config), folder.accelerate: yaml.safe_dump(settings)}
    if plan.deepspeed is not None:
        copies[folder.deepspeed] = json.dumps(plan.deepspeed)
    for file, text in copies.items():
        (scratch / file.name).write_text(text, encoding="utf-8")
    names = {str(file): str(scratch / file.name) for file in copies}
    argv = [names.get(argument, argument) for argument in plan.command.argv]
    if plan.num_processes > 1:
        argv[argv.index("--main_process_port") + 1] = str(port)
    return argv
