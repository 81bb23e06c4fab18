"""accelerate's words for a plan: its command line, its YAML, and a launcher of it that keeps torchrun's noise in a file.

Every choice is on the command line AND in the YAML: without --config_file, accelerate mixes in whatever the user once
answered to `accelerate config` (DeepSpeed and dynamo settings among it). `--multi_gpu` also on CPU: `--cpu` takes another
path that ignores the number of processes.

`python -m packtrain.launch.accelerate LOG ARGUMENTS…` is `accelerate launch ARGUMENTS…` with the launcher's own words
(among them a traceback for every worker that ends with an error, whatever the reason) in LOG. Workers inherit the real
stdout and stderr, so a terminal stays one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from packtrain.launch.worker import PARENT, end_with_parent
from packtrain.plan.topology import Processes

WORKER = "packtrain.worker"
NOT_KNOWN_YET = "MAIN_ADDRESS"  # in plans for machines whose names are still to come


def launch_config(
    processes: Processes, node: int, strategy: dict[str, Any], *, port: int | None, gpus: bool
) -> dict[str, Any]:
    """The accelerate YAML of machine `node`; `strategy` is what launch/strategy.py says of it."""
    alone = processes.total == 1 or processes.joins
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        **({"distributed_type": "NO"} if alone else strategy),
        "num_machines": 1 if alone else processes.nodes,
        "num_processes": 1 if alone else processes.total,  # of all machines: never those of one
        "machine_rank": node,
        "mixed_precision": "no",  # trainer.mixed_precision is set where the model is made
        "use_cpu": not gpus and alone,
        "debug": False,
    }
    if not alone:
        address = "127.0.0.1" if processes.nodes == 1 else processes.main_address or NOT_KNOWN_YET
        config |= {"main_process_ip": address, "main_process_port": port, "same_network": True, "gpu_ids": "all"}
    return config


def launch_argv(
    accelerate: str,
    config_file: str,
    config: dict[str, Any],
    strategy: list[str],
    worker: list[str],
    *,
    join_timeout_s: int,
) -> list[str]:
    """The `accelerate launch` command that runs `python -m WORKER worker…` in every process of a `launch_config`.

    `strategy` are the flags of launch/strategy.py. Processes that have not found each other after `join_timeout_s` seconds give up.
    """
    flags = ["--config_file", config_file, *strategy, "--same_network"]
    for name in ("num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port"):
        flags += [f"--{name}", str(config[name])]
    flags += ["--rdzv_conf", f"timeout={join_timeout_s}", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [accelerate, "launch", *flags, "-m", WORKER, *worker]


class _Told(subprocess.Popen):
    """A worker of torchrun. How it ended is written down as soon as torchrun knows, which says so itself only if it has the time."""

    def poll(self) -> int | None:
        """As Popen's."""
        known, code = self.returncode, super().poll()
        if known is None and code is not None:
            print(f"exitcode: {code} (pid: {self.pid})", file=sys.stderr, flush=True)
        return code


def main(log: str, arguments: list[str]) -> None:
    """`accelerate launch arguments…` in this process; ends it with torchrun's exit code (1 for any failure).

    It ends with the launcher that started it, and its workers with it.
    """
    end_with_parent(int(os.environ[PARENT]))
    os.environ[PARENT] = str(os.getpid())
    subprocess.Popen = _Told
    # Never closed: Python writes the last traceback to it after main() has ended.
    sys.stderr = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    from accelerate.commands.launch import launch_command, launch_command_parser

    launch_command(launch_command_parser().parse_args(arguments))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
