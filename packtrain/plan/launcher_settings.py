"""Launcher settings of accelerate: one source for the plan and the launch.

Every launcher setting is on the command line AND in the YAML: without --config_file, accelerate mixes in the user's answers to
`accelerate config`. The launcher only starts processes; strategies/*/run.py makes the strategy active in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packtrain.plan.topology import Processes
from packtrain.strategies.spec import Launcher

WORKER = ("packtrain", "worker")  # python -m …
_NOT_KNOWN_YET = "MAIN_ADDRESS"  # in plans for machines whose names are not known yet


def launch_config(processes: Processes, node: int, strategy: Launcher, *, port: int, gpus: bool) -> dict[str, Any]:
    """Return accelerate's YAML for machine `node`.

    CPUs use MULTI_GPU too: accelerate's `cpu` path ignores the number of processes.
    """
    alone = processes.num_processes == 1 or processes.joins
    config = {
        "compute_environment": "LOCAL_MACHINE",
        **({"distributed_type": "NO"} if alone else strategy.settings),
        "num_machines": 1 if alone else processes.nodes,
        "num_processes": 1 if alone else processes.num_processes,  # accelerate counts them over all machines
        "machine_rank": node,
        "mixed_precision": "no",  # trainer.mixed_precision is set when the model is made
        "use_cpu": not gpus and alone,
        "debug": False,
    }
    if not alone:
        address = "127.0.0.1" if processes.nodes == 1 else processes.main_address or _NOT_KNOWN_YET
        config |= {"main_process_ip": address, "main_process_port": port, "same_network": True, "gpu_ids": "all"}
    return config


def launch_argv(
    accelerate: str,
    config_file: str,
    config: dict[str, Any],
    strategy: Launcher,
    worker: Sequence[str],
    *,
    join_timeout_s: int,
) -> list[str]:
    """Return the `accelerate launch` command that runs `python -m WORKER worker…` in every process of `config`.

    Processes that have not found each other after `join_timeout_s` seconds give up.
    """
    flags = ["--config_file", config_file, *strategy.flags, "--same_network"]
    for name in ("num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port"):
        flags += [f"--{name}", str(config[name])]
    flags += ["--rdzv_conf", f"timeout={join_timeout_s}", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [accelerate, "launch", *flags, "-m", *WORKER, *worker]
