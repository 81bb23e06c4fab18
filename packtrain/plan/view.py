"""A plan as a person reads it: the config that made it so, then what will happen."""

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
from packtrain.plan.launch_plan import LaunchPlan, NodeCommand
from packtrain.plan.memory import estimate
from packtrain.run_folder import RunFolder


def print_plan(config: RunConfig, launch: LaunchPlan, verb: str, arguments: Sequence[str]) -> None:
    """The resolved config and the launcher's settings, then processes, batch, memory and commands.

    What was asked for is last, where a terminal shows it. `arguments` are those that named the config.
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
    """The plan's own document, why its processes and network are so, memory (null where not known), the config."""
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
        ("memory", memory if isinstance(memory, str) else memory.sentence()),
        *(("network", f"{one.name}{f'={one.value}' if one.value else ''}: {one.reason}") for one in launch.network),
        ("folder", str(RunFolder.of(config.trainer).root)),
        *_run(config, launch, verb, arguments),
    ]
    if launch.spread:
        lines.append(("starts", shlex.join(launch.spread)))
    if launch.in_process:
        return lines
    for command in _some(launch.commands):
        if command is None:
            lines.append(("", "… (--json has all of them)"))
            continue
        settings = [f"{name}={value}" for name, value in command.env.items()]
        host = f" ({launch.hosts[command.node]})" if launch.hosts else ""
        where = f"on machine {command.node}{host}, " if launch.nodes > 1 else ""
        lines.append(("starts", f"{where}once {RunFolder.of(config.trainer).config} is written:"))
        lines.append(("", shlex.join([*settings, *command.argv])))
    return lines


def _run(config: RunConfig, launch: LaunchPlan, verb: str, arguments: Sequence[str]) -> list[tuple[str, str]]:
    """What to type, ready to paste; and what is still in the way of it."""
    topology = config.topology
    known = ("topology.node_rank=", "topology=auto", "topology.kind=auto")
    typed = [argument for argument in arguments if not argument.startswith(known)]
    command = [*_program(), verb, *typed]
    lines = [("first", f"{one.where}: {one.what}. {one.fix}".strip()) for one in launch.obstacles]
    # another launcher, Slurm or a pod tells each machine its number: the same command everywhere
    told = launch.hosts or launch.in_process or (topology.node_rank is None and not launch.obstacles)
    in_slurm = ("run", f"in Slurm: {shlex.join([*_program(), 'sbatch', verb, *typed])} --submit")
    if topology.kind == "slurm" and launch.obstacles:
        return [*lines, in_slurm]
    if launch.nodes == 1 or told:
        return [*lines, ("run", shlex.join(command))]
    if topology.kind == "auto":
        lines += [in_slurm] if topology.node_rank is None else []
        chosen = any(argument.startswith("topology=") for argument in typed)  # a file of the user's, whose keys stay
        command.append("topology.kind=manual" if chosen else "topology=manual")
    if topology.main_address is None:
        command += [f"topology.main_address={launch.accelerate['main_process_ip']}"]
    for one in _some(launch.commands):
        text = (
            "…" if one is None else f"on machine {one.node}: {shlex.join([*command, f'topology.node_rank={one.node}'])}"
        )
        lines.append(("run" if one else "", text))
    return lines


def _some(commands: Sequence[NodeCommand]) -> list[NodeCommand | None]:
    """All of a few; of many the first, the second and the last, with None for the others."""
    return list(commands) if len(commands) <= 4 else [*commands[:2], None, commands[-1]]


def _program() -> list[str]:
    """How this packtrain was called, so that a printed command can be pasted."""
    called = sys.argv[0]
    if os.path.basename(called) != "packtrain":
        return [sys.executable, "-m", "packtrain"]
    return ["packtrain" if shutil.which("packtrain") == os.path.abspath(called) else called]
