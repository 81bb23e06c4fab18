"""accelerate's words for a plan: its command line, its YAML, and a launcher of it that keeps torchrun's noise in a file.

Every choice is on the command line AND in the YAML: without --config_file, accelerate mixes in whatever the user once
answered to `accelerate config` (DeepSpeed and dynamo settings among it). `--multi_gpu` also on CPU: `--cpu` takes another
path that ignores the number of processes.

`python -m packtrain.launch.accelerate LOG ARGUMENTS…` is `accelerate launch ARGUMENTS…` with the launcher's own words
(among them a traceback for every worker that ends with an error, whatever the reason) in LOG. Workers inherit the real
stdout and stderr, so a terminal stays one.
"""

from __future__ import annotations

import sys
from typing import Any

WORKER = "packtrain.worker"


def launch_config(processes: int, port: int | None, *, gpus: bool) -> dict[str, Any]:
    """The accelerate YAML of `processes` on one machine; `port` is None for one process."""
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if processes > 1 else "NO",
        "num_machines": 1,
        "num_processes": processes,
        "machine_rank": 0,
        "mixed_precision": "no",  # trainer.mixed_precision is set where the model is made
        "use_cpu": not gpus and processes == 1,
        "debug": False,
    }
    if port is not None:
        config |= {"main_process_ip": "127.0.0.1", "main_process_port": port, "same_network": True, "gpu_ids": "all"}
    return config


def launch_argv(
    accelerate: str, config_file: str, config: dict[str, Any], worker: list[str], *, join_timeout_s: int
) -> list[str]:
    """The `accelerate launch` command that runs `python -m WORKER worker…` in every process of a `launch_config`.

    Processes that have not found each other after `join_timeout_s` seconds give up.
    """
    flags = ["--config_file", config_file, "--multi_gpu", "--same_network"]
    for name in ("num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port"):
        flags += [f"--{name}", str(config[name])]
    flags += ["--rdzv_conf", f"timeout={join_timeout_s}", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [accelerate, "launch", *flags, "-m", WORKER, *worker]


def main(log: str, arguments: list[str]) -> None:
    """`accelerate launch arguments…` in this process; ends it with torchrun's exit code (1 for any failure)."""
    # Never closed: Python writes the last traceback to it after main() has ended.
    sys.stderr = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    from accelerate.commands.launch import launch_command, launch_command_parser

    launch_command(launch_command_parser().parse_args(arguments))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
