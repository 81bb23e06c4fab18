"""A plan as a person reads it: the config that made it so, then what will happen."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape

from packtrain.config.compose import to_dict, to_yaml
from packtrain.config.schema import RunConfig
from packtrain.launch.memory import estimate
from packtrain.launch.plan import LaunchPlan
from packtrain.run_folder import RunFolder


def print_plan(config: RunConfig, launch: LaunchPlan, verb: str, arguments: Sequence[str]) -> None:
    """The resolved config and the launcher's settings, then processes, batch, memory and commands.

    What was asked for is last, where a terminal shows it. `arguments` are those that named the config.
    """
    console = Console(highlight=False, soft_wrap=True)
    parts = [("config", to_yaml(config))]
    if not launch.in_process:
        parts.append(("accelerate", yaml.safe_dump(dict(launch.accelerate))))
    if launch.deepspeed is not None:
        parts.append(("deepspeed", json.dumps(launch.deepspeed, indent=2)))
    for title, text in parts:
        console.print(f"[bold]# {title}[/]\n{escape(text.rstrip())}\n")
    for name, text in _lines(config, launch, verb, arguments):
        console.print(f"[bold]{name:<10}[/]{escape(text)}")


def plan_json(config: RunConfig, launch: LaunchPlan) -> dict[str, Any]:
    """The plan's own document, the reason for its processes, the memory (null where it is not known) and the config."""
    memory = estimate(config, launch.num_processes)
    return {
        **launch.to_json(),
        "reason": launch.reason,
        "memory": None if isinstance(memory, str) else memory.to_json(),
        "config": to_dict(config),
    }


def _lines(config: RunConfig, launch: LaunchPlan, verb: str, arguments: Sequence[str]) -> list[tuple[str, str]]:
    memory = estimate(config, launch.num_processes)
    lines = [
        ("processes", f"{launch.num_processes}: {launch.reason}"),
        ("batch", launch.batch.sentence()),
        ("memory", memory if isinstance(memory, str) else memory.sentence()),
        ("folder", str(RunFolder.of(config).root)),
        ("run", shlex.join([*_program(), verb, *arguments])),
    ]
    if launch.in_process:
        return lines
    for command in launch.commands:
        settings = [f"{name}={value}" for name, value in command.env.items()]
        where = f"on machine {command.node}, " if launch.nodes > 1 else ""
        lines.append(("starts", f"{where}once {RunFolder.of(config).config} is written:"))
        lines.append(("", shlex.join([*settings, *command.argv])))
    return lines


def _program() -> list[str]:
    """How this packtrain was called, so that a printed command can be pasted."""
    called = sys.argv[0]
    if os.path.basename(called) != "packtrain":
        return [sys.executable, "-m", "packtrain"]
    return ["packtrain" if shutil.which("packtrain") == os.path.abspath(called) else called]
