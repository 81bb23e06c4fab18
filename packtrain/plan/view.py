"""A plan as `packtrain plan` prints it: the resolved config, then processes, batch, memory and commands."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape

from packtrain.config.compose import to_yaml
from packtrain.config.schema import RunConfig
from packtrain.plan import mixed_precision
from packtrain.plan.launch_plan import LaunchPlan
from packtrain.plan.memory import estimate
from packtrain.run_folder import RunFolder


def print_plan(config: RunConfig, launch: LaunchPlan, verb: str, arguments: Sequence[str]) -> None:
    """The resolved config and the launcher's settings, then processes, batch, memory and commands.

    The plan itself comes last, where a terminal shows it. `arguments` are those that named the config.
    """
    console = Console(highlight=False, soft_wrap=True)
    accelerate = "" if launch.in_process else yaml.safe_dump(dict(launch.accelerate))
    deepspeed = "" if launch.deepspeed is None else json.dumps(launch.deepspeed, indent=2)
    for title, text in (("config", to_yaml(config)), ("accelerate", accelerate), ("deepspeed", deepspeed)):
        if text:
            console.print(f"[bold]# {title}[/]\n{escape(text.rstrip())}\n")
    for name, text in _lines(config, launch, verb, arguments):
        console.print(f"[bold]{name:<10}[/]{escape(text)}")


def plan_json(config: RunConfig, launch: LaunchPlan) -> dict[str, Any]:
    """The plan's own document, the reasons for processes and network, memory (null if not known), the config."""
    memory = estimate(config, launch.num_processes, launch.gpu_memory)
    return {
        **launch.to_json(),
        "reason": launch.reason,
        "network": [asdict(one) for one in launch.network],
        "memory": None if isinstance(memory, str) else memory.to_json(),
        "config": asdict(config),
    }


def _lines(config: RunConfig, launch: LaunchPlan, verb: str, arguments: Sequence[str]) -> list[tuple[str, str]]:
    memory = estimate(config, launch.num_processes, launch.gpu_memory)
    lines = [
        ("processes", f"{launch.num_processes}: {launch.reason}"),
        ("batch", launch.batch.sentence()),
        ("precision", mixed_precision.sentence(config, gpu=launch.gpus > 0 or config.topology.gpu_memory is not None)),
        ("memory", memory if isinstance(memory, str) else memory.sentence()),
        *(("network", f"{one.name}{f'={one.value}' if one.value else ''}: {one.reason}") for one in launch.network),
        ("folder", str(RunFolder.of(config.trainer).root)),
        *_run(config, launch, verb, arguments),
    ]
    if launch.srun:
        lines.append(("starts", shlex.join(launch.srun)))
    if not launch.in_process:  # the others' commands are in --json
        settings = [f"{name}={value}" for name, value in launch.command.env.items()]
        where = f"on machine {launch.node}, " if launch.nodes > 1 else ""
        lines.append(("starts", f"{where}once {RunFolder.of(config.trainer).config} is written:"))
        lines.append(("", shlex.join([*settings, *launch.command.argv])))
    return lines


def _run(config: RunConfig, launch: LaunchPlan, verb: str, arguments: Sequence[str]) -> list[tuple[str, str]]:
    """The command to paste, after the obstacles that must be removed first."""
    topology = config.topology
    typed = [verb, *(one for one in arguments if not one.startswith(("topology.node_rank=", "topology=auto")))]
    lines = [("first", f"{one.where}: {one.what}. {one.fix}".strip()) for one in launch.obstacles]
    # each machine gets its number from another launcher, Slurm or a pod: the command is the same everywhere
    numbered = launch.hosts or launch.in_process or (topology.node_rank is None and not launch.obstacles)
    by_hand = launch.nodes > 1 and not numbered and topology.kind != "slurm"
    if launch.obstacles and (topology.kind == "slurm" or (by_hand and topology.kind == "auto")):
        lines.append(("run", f"in Slurm: {shlex.join([*_program(), 'sbatch', *typed])} --submit"))
    if by_hand:
        typed += ["topology.kind=manual"] if topology.kind == "auto" else []
        if topology.main_address is None:
            typed.append(f"topology.main_address={launch.accelerate['main_process_ip']}")
        on_each = shlex.join([*_program(), *typed])
        lines.append(("run", f"on each machine K, from 0 to {launch.nodes - 1}: {on_each} topology.node_rank=K"))
    elif topology.kind != "slurm" or not launch.obstacles:
        lines.append(("run", shlex.join([*_program(), *typed])))
    return lines


def _program() -> list[str]:
    """The command by which packtrain was called, so that a printed command can be pasted."""
    called = sys.argv[0]
    if os.path.basename(called) != "packtrain":
        return [sys.executable, "-m", "packtrain"]
    return ["packtrain" if shutil.which("packtrain") == os.path.abspath(called) else called]
