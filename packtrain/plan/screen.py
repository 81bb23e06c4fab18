"""Screen of `packtrain plan`: the answer, oddities, and with --full everything behind it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import yaml
from rich.console import Console
from rich.text import Text

from packtrain.config.compose import to_yaml
from packtrain.config.rules.paths_and_packages import check_packages
from packtrain.config.schema import Data, RunConfig, sources
from packtrain.errors import boundary
from packtrain.plan.fit import OUTSIDE, PARTS, Memory, in_gib
from packtrain.plan.known_model import precision_in_words
from packtrain.plan.launch_plan import LaunchPlan, NodeCommand
from packtrain.plan.memory import estimate
from packtrain.plan.surroundings import command_of
from packtrain.run_folder import RunFolder
from packtrain.wording import in_millions, visible

_INDENT = 11
_WIDEST, _NARROWEST = 100, 40
_MAX_SOURCES, _MAX_COMMANDS, _MANY_STEPS = 3, 100, 1000
_BY_COMMAND = ("topology.nodes", "topology.kind", "topology.node_rank")
"""Obstacles that the printed command removes."""
_LARGE_RATE = {"none": 1e-3, "lora": 1e-2}
"""Learning rates that mostly spoil a trained model, or adapters, when exceeded."""


def print_plan(
    config: RunConfig, launch: LaunchPlan, verb: str, arguments: Sequence[str], *, full: bool = False
) -> None:
    """Print the plan: model, data, processes, steps, memory, oddities, and the command.

    With `full` also the resolved config, the launcher's settings and every machine's command. `arguments` are those that named
    the config. Lines are as wide as the terminal (or COLUMNS), 100 at most; commands are never broken.
    """
    console = Console(highlight=False, soft_wrap=True)
    sized = console.is_terminal or "COLUMNS" in os.environ
    width = max(min(console.width, _WIDEST), _NARROWEST) if sized else _WIDEST
    for name, text in (*_answer(config, launch, width), *_to_do(config, launch, verb, arguments, width)):
        console.print(Text.assemble((f"{name:<{_INDENT}}", "bold"), text))
    if not full:
        console.print(Text(f"{'':<{_INDENT}}(--full: every setting and command behind this)", "dim"))
        return
    for title, text in _behind(config, launch):
        console.print(Text.assemble((f"\n# {title}\n", "bold"), text.rstrip()))


def plan_json(config: RunConfig, launch: LaunchPlan) -> dict[str, object]:
    """Return the launch plan, its reasons, the memory (null if not known), and the config."""
    memory = estimate(config, launch.num_processes, launch.gpu_memory, launch.nodes)
    return {
        **launch.to_json(),
        "reason": launch.reason,
        "network": [asdict(item) for item in launch.network],
        "memory": None if isinstance(memory, str) else memory.to_json(),
        "needed_there": [*_needed_there(config)],
        "config": asdict(config),
    }


def _answer(config: RunConfig, launch: LaunchPlan, width: int) -> Iterator[tuple[str, Text]]:
    """Yield name and text of each line above the commands, wrapped."""
    memory = estimate(config, launch.num_processes, launch.gpu_memory, launch.nodes)
    trainer = config.trainer
    gpu = launch.gpus > 0 or launch.gpu_memory is not None
    strategy = f", {config.strategy.name}" if launch.num_processes > 1 else ""
    epochs = f"{trainer.epochs:g} epoch{'' if trainer.epochs == 1 else 's'} (packtrain inspect counts the documents)"
    lines = {
        "model": _model(config, memory),
        "data": _data(config.data),
        "processes": f"{launch.num_processes}{strategy}: {launch.reason}",
        "batch": launch.batch.sentence(),
        "steps": f"{trainer.max_steps:,}" if trainer.max_steps else epochs,
        "precision": precision_in_words(config, gpu=gpu),
        "memory": memory if isinstance(memory, str) else memory.sentence(),
    }
    for name, text in lines.items():
        fails = name == "memory" and isinstance(memory, Memory) and memory.fits is False
        yield from _wrapped(name, text, width, "bold red" if fails else "")
    if isinstance(memory, Memory):
        parts = {name: getattr(memory, name) or 0 for name in PARTS}
        parts |= {"CUDA, NCCL" if memory.outside > OUTSIDE else "CUDA": memory.outside} if memory.device else {}
        yield from _wrapped("", " + ".join(f"{name} {in_gib(size)}" for name, size in parts.items() if size), width)
        if memory.device or memory.checkpointing != "none":
            yield from _wrapped("recompute", f"{memory.checkpointing} ({memory.chosen})", width)
        if exchange := memory.exchange():
            yield from _wrapped("gradients", exchange, width)
    if launch.network:
        chosen = ", ".join(f"{item.name}={item.value}" if item.value else item.name for item in launch.network)
        yield from _wrapped("network", f"{chosen} (--full says why)", width)
    yield from _wrapped("folder", _folder(config), width)
    for number, odd in enumerate(_oddities(config, launch)):
        yield from _wrapped("" if number else "odd", odd, width, "yellow")


def _model(config: RunConfig, memory: Memory | str) -> str:
    model, name = config.model, config.model.path or f"a new {config.model.config.get('model_type', 'model')}"
    name += ", new weights" if model.path and model.init == "random" else ""
    if isinstance(memory, str):
        return f"{name}{', LoRA' if config.peft.kind == 'lora' else ''}"
    trained = "all" if memory.trained == memory.parameters else in_millions(memory.trained)
    kind = " (LoRA)" if config.peft.kind == "lora" else ""
    return f"{name}, {in_millions(memory.parameters)} parameters, {trained} trained{kind}"


def _data(data: Data) -> str:
    paths = [item.path for item in sources(data.train)]
    text = ", ".join(paths[:_MAX_SOURCES]) or "none"
    text += f" and {len(paths) - _MAX_SOURCES} more" if len(paths) > _MAX_SOURCES else ""
    held_out = ", ".join(item.path for item in sources(data.eval, "eval"))
    held_out = held_out or (f"{data.eval:g} of it" if data.eval else "")
    text += f"; held out: {held_out}" if held_out else ""
    return f"{text}; cut at {data.max_length:,} tokens" if data.max_length else text


def _folder(config: RunConfig) -> str:
    folder, resume = RunFolder.of(config.trainer), config.trainer.resume
    where, fix = "trainer.output_dir", "Name another place."
    with boundary("cannot look into the run folder", where, fix, code="run-folder-unreadable"):
        gives_way = folder.gives_way(resume)
    if gives_way:
        return f"{folder.root}: holds an earlier run, which is moved aside"
    if resume not in ("auto", "never"):
        return f"{folder.root}: goes on from {resume}"
    goes_on = resume == "auto" and any(folder.checkpoints.glob("step-*"))
    return f"{folder.root}{': goes on from its newest checkpoint' if goes_on else ''}"


def _oddities(config: RunConfig, launch: LaunchPlan) -> Iterator[str]:
    """Yield what is odd although it works: settings without effect, idle devices, lost updates."""
    optim, trainer, examples = config.optim, config.trainer, config.batch.examples_per_step
    processes, steps = launch.num_processes, trainer.max_steps
    if examples is not None and examples < processes:
        yield f"batch.examples_per_step={examples} leaves {processes - examples} of {processes} processes without work"
    if steps is not None:
        if optim.warmup_steps >= steps > 1:
            yield f"optim.warmup_steps={optim.warmup_steps:g} of {steps:,} steps: the learning rate never reaches its peak"
        if trainer.checkpoint_every is None and steps >= _MANY_STEPS:
            yield f"no checkpoints in {steps:,} steps (trainer.checkpoint_every): a run that is killed starts anew"
    rate, adam = optim.learning_rate, optim.name.startswith(("adam", "paged_adam"))
    if rate >= _LARGE_RATE[config.peft.kind] and config.model.init == "pretrained" and adam:
        yield f"optim.learning_rate={rate:g} is large for a trained model; 1e-5 to 1e-4 is usual, with adapters ten times that"
    if launch.gpus > launch.gpus_per_node and launch.role != "srun" and (not launch.in_process or processes == 1):
        yield f"{launch.gpus - launch.gpus_per_node} of {launch.gpus} visible GPUs are not used"
    yield from _needed_there(config)


def _needed_there(config: RunConfig) -> Iterator[str]:
    """Yield packages that this machine lacks. `plan` refuses them already if the run would start here."""
    for fault in check_packages(config):
        yield f"{fault.keys[0]}: needed there: {fault.what} here: {fault.fix}"


def _to_do(
    config: RunConfig, launch: LaunchPlan, verb: str, arguments: Sequence[str], width: int
) -> Iterator[tuple[str, Text]]:
    """Yield the obstacles that remain, then the one command for this place. Commands are not wrapped."""
    topology = config.topology
    for item in launch.obstacles:
        if item.where not in _BY_COMMAND:
            yield from _wrapped("first", f"{item.where}: {item.what}. {item.fix}".strip(), width, "yellow")
    typed = [verb, *(item for item in arguments if not item.startswith(("topology.node_rank=", "topology=auto")))]
    # another launcher, Slurm or a pod numbers the machines: the command is the same everywhere
    numbered = launch.hosts or launch.in_process or (topology.node_rank is None and not launch.obstacles)
    by_hand = launch.nodes > 1 and not numbered and topology.kind != "slurm"
    slurm = by_hand and topology.kind == "auto" and shutil.which("sbatch") is not None
    if launch.obstacles and (topology.kind == "slurm" or slurm):
        yield "run", Text(f"{_command([*command_of('packtrain'), 'sbatch', *typed])} --submit", "bold green")
        return
    if by_hand:
        typed += ["topology.kind=manual"] if topology.kind == "auto" else []
        where = f"on each machine K, from 0 to {launch.nodes - 1}"
        if topology.main_address is None:
            typed.append(f"topology.main_address={launch.accelerate['main_process_ip']}")
            where += ", with the first one's name or address"
        yield from _wrapped("run", f"{where}:", width)
        yield "", Text(f"{_command([*command_of('packtrain'), *typed])} topology.node_rank=K", "bold green")
        return
    yield "run", Text(_command([*command_of("packtrain"), *typed]), "bold green")


def _behind(config: RunConfig, launch: LaunchPlan) -> Iterator[tuple[str, str]]:
    """Yield title and text of everything behind the answer."""
    yield "config", to_yaml(config)
    if not launch.in_process:
        yield "accelerate", yaml.safe_dump(dict(launch.accelerate))
    yield from ((name, json.dumps(settings, indent=2)) for name, settings in launch.engines.items() if settings)
    if launch.network:
        reasons = (f"{item.name}{f'={item.value}' if item.value else ''}: {item.reason}" for item in launch.network)
        yield "network", visible("\n".join(reasons), whitespace=True)
    if launch.srun:
        yield "starts", _command(launch.srun)
    if not launch.in_process:
        yield f"starts, once {visible(str(RunFolder.of(config.trainer).config))} is written", _commands(launch)


def _commands(launch: LaunchPlan) -> str:
    """Return the command of each machine, a line for each."""

    def in_a_line(command: NodeCommand) -> str:
        return _command([*(f"{name}={value}" for name, value in command.env.items()), *command.argv])

    if len(launch.commands) == 1:
        return in_a_line(launch.command)
    lines = [f"machine {item.node}: {in_a_line(item)}" for item in launch.commands[:_MAX_COMMANDS]]
    more = len(launch.commands) - len(lines)
    return "\n".join([*lines, *([f"… and of {more:,} more, each with its number"] if more else [])])


def _wrapped(name: str, text: str, width: int, style: str = "") -> Iterator[tuple[str, Text]]:
    """Yield the text in lines of `width`, with `name` before the first. Control characters are made visible."""
    lines = textwrap.wrap(visible(text, whitespace=True), width - _INDENT, break_on_hyphens=False)
    for number, line in enumerate(lines or [""]):
        yield "" if number else name, Text(line, style)


def _command(words: Sequence[str]) -> str:
    return visible(shlex.join(words), whitespace=True)
