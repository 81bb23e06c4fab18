"""Execution of a LaunchPlan: run-folder files, this machine's processes, and one exit code for all.

torchrun ends with 1 after any failure of its workers, so each worker writes its exit code to a folder of this launch (worker.py).
The launchers of several machines find each other before they start any worker (rendezvous.py), watch their own workers
(supervisor.py), and report to machine 0 over the control channel. They end with the same code, or meet and start again
(coordinator.py).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from packtrain.config.compose import to_yaml
from packtrain.config.schema import RunConfig
from packtrain.errors import Json, UserError
from packtrain.launch.attempt import RunLock, check_free, open_attempt, writing
from packtrain.launch.coordinator import Coordinator, Reporter, Restarts, Verdict
from packtrain.launch.rendezvous import Group, MeetingPoint, Member, meet, own_addresses
from packtrain.launch.supervisor import Supervisor
from packtrain.launch.worker import EXIT_DIR, LOG_DIR, PARENT, errors_copied_to
from packtrain.mirror import Mirror
from packtrain.monitor.channel import ADDRESS, SECRET, Server, published
from packtrain.monitor.foreign_launch import watched
from packtrain.monitor.heartbeat import STACKS, TimeLimits
from packtrain.monitor.watchdog import Watchdog
from packtrain.plan.launch_plan import LaunchPlan, plan_launch
from packtrain.plan.network_settings import LOOPBACK
from packtrain.plan.origin import shared_values, shared_versions
from packtrain.plan.surroundings import detect_surroundings
from packtrain.run_folder import RunFolder, environment

LAUNCHER_LOG = "launcher.log"
MAX_SILENCE_S = 30
_LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "CROSS_SIZE")
"""Variables of torchrun, Open MPI, other MPIs, srun and DeepSpeed's launcher. A process with none was started by hand."""


def execute(
    plan: LaunchPlan,
    config: RunConfig,
    train: Callable[[], int],
    given: str | None = None,
    on_end: Callable[[RunFolder], object] = lambda _: None,
) -> int:
    """Carry out the plan. Returns the exit code: 0, or the workers' most informative one.

    A plan with `in_process` calls `train()` here; other plans start their commands. `given` is the path of the config. The one process that
    has opened the run folder calls `on_end` when the run is over, with or without success. Raises UserError if the plan cannot be carried
    out from here, or if the run folder cannot be written, holds files that packtrain did not make, or is in use; CheckFailed if machines
    differ where they must not; PeerFailed if a machine is missing.
    """
    if plan.obstacles and not plan.lacks_gpus_alone:
        raise UserError(list(plan.obstacles))
    folder = RunFolder.of(config.trainer)
    if plan.role == "srun":
        from packtrain.launch.jobs import run_srun

        begun = time.time()
        code = run_srun(plan.srun)
        # srun returns a lost machine's code, even if the run went on without it
        done = plan.survives_lost_machines and folder.status() == "done" and folder.summary.stat().st_mtime > begun
        return 0 if done else code
    if plan.role == "ray":
        from packtrain.launch.on_ray import run_on_ray

        return run_on_ray(config, folder, plan)
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
        # a single process writes the run folder under any RANK, else rank 0 does
        rank = plan.command.env.get("RANK", os.environ.get("RANK", "0")) if plan.num_processes > 1 else "0"
        if plan.node == 0 and rank == "0":
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
    """Launch a run. After a failure launch it again, up to trainer.restarts times.

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
    meeting_point = MeetingPoint(
        plan.accelerate.get("main_process_ip", LOOPBACK),
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
        with meet(me, meeting_point, prepare) as group:
            machines = list(group.names)
            resumed = replace(config, trainer=replace(config.trainer, resume=group.prepared))
            numbered = replace(group, names=dict(enumerate(group.names.values())))
            verdict = _launch_once(plan_for(*machines), resumed, folder, numbered, restarts)
        if not verdict.restart:
            return verdict.code
        if me.node == 0:
            print(restarts.sentence(), file=sys.stderr, flush=True)
        living = frozenset(machines[node] for node in verdict.restart)
        meeting_point = replace(meeting_point, expected=living, least=plan.least_nodes)


def _limits(config: RunConfig) -> TimeLimits:
    return TimeLimits(config.topology.step_timeout, config.topology.join_timeout)


def _launch_once(plan: LaunchPlan, config: RunConfig, folder: RunFolder, group: Group, restarts: Restarts) -> Verdict:
    """Run this machine's workers; return the verdict when the workers of all machines have ended.

    Machine 0 also serves the coordinator, which has the watchdog over all ranks.
    """
    limits = _limits(config)
    silence_s = min(MAX_SILENCE_S, limits.step_s / 2)  # silence that makes a machine lost
    with writing():
        folder.logs.mkdir(parents=True, exist_ok=True)
    # machines may share a disk, so each has its own file
    log = folder.logs / (LAUNCHER_LOG if plan.node == 0 else f"launcher-{plan.node:05d}.log")
    with TemporaryDirectory(prefix="packtrain-launch-", ignore_cleanup_errors=True) as temporary, ExitStack() as stack:
        scratch = Path(temporary)
        machine_0 = group.channel
        if isinstance(server := machine_0, Server):
            per_node, names = plan.gpus_per_node, sorted(group.names.items())
            ranks = [(name, range(node * per_node, (node + 1) * per_node)) for node, name in names]
            watchdog = stack.enter_context(closing(Watchdog(ranks, limits, folder.logs)))
            watchdog.attach(server)
            address = plan.accelerate.get("main_process_ip", LOOPBACK)
            stack.enter_context(published(folder.logs, server, address))
            machine_0 = Coordinator(group.names, per_node, silence_s, watchdog, restarts)
            server.serve("machine", machine_0.answer)
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
        ADDRESS: f"{group.channel.address}:{group.channel.port}",
        SECRET: group.channel.secret,
    }


def _argv_with_copies(plan: LaunchPlan, config: RunConfig, folder: RunFolder, scratch: Path, port: int) -> list[str]:
    """Return the plan's `accelerate launch …` with torch's store at `port`.

    It reads copies of the run folder's files in `scratch`, because a machine may not see that folder."""
    settings: Json = {**plan.accelerate, "main_process_port": port}
    copies = {folder.config: to_yaml(config), folder.accelerate: yaml.safe_dump(settings)}
    if plan.engine_settings is not None:
        copies[folder.engine] = json.dumps(plan.engine_settings)
    for file, text in copies.items():
        (scratch / file.name).write_text(text, encoding="utf-8")
    names = {str(file): str(scratch / file.name) for file in copies}
    argv = [names.get(argument, argument) for argument in plan.command.argv]
    if plan.num_processes > 1:
        argv[argv.index("--main_process_port") + 1] = str(port)
    return argv
