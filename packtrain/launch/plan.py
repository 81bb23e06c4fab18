"""RunConfig + Surroundings → LaunchPlan: everything that will be started, as a value that `packtrain plan` prints. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packtrain.config.schema import RunConfig
from packtrain.launch.accelerate import WORKER, launch_argv, launch_config
from packtrain.launch.batch import BatchPlan, plan_batch
from packtrain.launch.topology import Processes, Surroundings, choose_processes
from packtrain.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """What starts the processes of one machine; `env` holds only what is set in addition."""

    node: int
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The processes of a run and why; `in_process` where the calling process itself is the one that trains."""

    num_processes: int
    nodes: int
    gpus_per_node: int
    commands: tuple[NodeCommand, ...]
    accelerate: Mapping[str, Any]
    deepspeed: Mapping[str, Any] | None
    batch: BatchPlan
    in_process: bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Plain containers; the keys are a promise to users (docs/config.md does not repeat them)."""
        return {
            "num_processes": self.num_processes,
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "commands": [{"node": one.node, "argv": list(one.argv), "env": dict(one.env)} for one in self.commands],
            "accelerate": dict(self.accelerate),
            "deepspeed": None if self.deepspeed is None else dict(self.deepspeed),
            "batch": self.batch.to_json(),
        }


def plan_launch(config: RunConfig, surroundings: Surroundings, verb: str = "sft") -> LaunchPlan:
    """The plan of a run of `packtrain verb` on one machine. Raises UserError where it is impossible there."""
    processes = choose_processes(config.topology, surroundings)
    batch = plan_batch(config, processes.total)
    folder = RunFolder.of(config)
    worker = [verb, str(folder.config)]
    alone = processes.total == 1 or processes.joins
    port = None if alone else config.topology.main_port or surroundings.free_port
    accelerate = launch_config(1 if alone else processes.total, port, gpus=surroundings.gpus > 0)
    timeout = config.topology.join_timeout
    if alone:
        argv = [surroundings.python, "-m", WORKER, *worker]
    else:
        argv = launch_argv(surroundings.accelerate, str(folder.accelerate), accelerate, worker, join_timeout_s=timeout)
    return LaunchPlan(
        num_processes=processes.total,
        nodes=processes.nodes,
        gpus_per_node=processes.per_node,
        commands=(NodeCommand(0, tuple(argv), _env(processes, surroundings)),),
        accelerate=accelerate,
        deepspeed=None,
        batch=batch,
        in_process=alone,
        reason=processes.reason,
    )


def _env(processes: Processes, surroundings: Surroundings) -> dict[str, str]:
    """What the processes need to be told: their share of the cores, and one GPU where one process has several.

    Threads that spin while they wait for one another are many times slower where other work holds a core; asleep they are
    not, and the sums stay the same, which another number of threads would change.
    """
    if processes.joins:
        return {}
    told = {}
    if processes.total > 1:
        told["OMP_NUM_THREADS"] = str(max(1, surroundings.cpus // processes.per_node))
    threads = surroundings.env.get("OMP_NUM_THREADS") or told.get("OMP_NUM_THREADS")
    if threads != "1" and not surroundings.gpus and surroundings.load > surroundings.cpus / 2:
        told["OMP_WAIT_POLICY"] = "passive"
    if processes.total == 1 and surroundings.gpus > 1:  # transformers would spread it over all of them (DataParallel)
        told["CUDA_VISIBLE_DEVICES"] = surroundings.env.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    return {name: value for name, value in told.items() if not name.startswith("OMP") or name not in surroundings.env}
