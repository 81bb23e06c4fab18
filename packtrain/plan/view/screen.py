"""A plan as `packtrain plan` prints it: the answer on one screen, and with --full all that it stands for."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from packtrain.config.compose import to_yaml
from packtrain.config.schema import Data, RunConfig, sources
from packtrain.plan import mixed_precision
from packtrain.plan.data_size import DataSize, recall
from packtrain.plan.known_model.model_config import left_to_loading
from packtrain.plan.launch_plan import LaunchPlan, NodeCommand
from packtrain.plan.launcher_settings import STAGES
from packtrain.plan.memory import Memory, estimate
from packtrain.plan.view.memory_bar import memory_bars, memory_head
from packtrain.plan.view.oddities import of_batch, of_estimate, of_lengths, of_machine, of_training, steps_of
from packtrain.run_folder import RunFolder
from packtrain.wording import counted, visible

_NAME = 11
_WIDEST, _NARROWEST = 100, 40
_MOST_SOURCES = 3
_MOST_COMMANDS = 100
_BY_COMMAND = ("topology.nodes", "topology.kind", "topology.node_rank")
"""Obstacles that the command to paste removes."""


def print_plan(
    config: RunConfig, launch: LaunchPlan, verb: str, arguments: Sequence[str], *, full: bool = False
) -> None:
    """The answer: what is trained on what, by which processes, in which steps and memory, what is odd, and the command.

    With `full` also the resolved config, the launcher's settings and every machine's command. `arguments` are those that named
    the config. Lines are as wide as the terminal (or COLUMNS), 100 at most; commands are never broken.
    """
    console = Console(highlight=False, soft_wrap=True)
    sized = console.is_terminal or "COLUMNS" in os.environ
    width = max(min(console.width, _WIDEST), _NARROWEST) if sized else _WIDEST
    for name, text in _answer(config, launch, width, plain=not (console.encoding or "").lower().startswith("utf")):
        console.print(Text.assemble((f"{name:<{_NAME}}", "bold"), text))
    for name, text in _to_do(config, launch, verb, arguments, width):
        console.print(Text.assemble((f"{name:<{_NAME}}", "bold"), text))
    if not full:
        console.print(Text(f"{'':<{_NAME}}(packtrain plan --full: every setting and command behind this)", "dim"))
        return
    for title, text in _behind(config, launch):
        console.print(Text.assemble((f"\n# {title}\n", "bold"), text.rstrip()))


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


def _answer(config: RunConfig, launch: LaunchPlan, width: int, *, plain: bool) -> Iterator[tuple[str, Text]]:
    """Name and text of each line above the commands, wrapped."""
    memory = estimate(config, launch.num_processes, launch.gpu_memory)
    size = recall(config.model, config.data, config.objective.kind, config.trainer.seed)
    gpu = launch.gpus > 0 or launch.gpu_memory is not None
    yield from _wrapped("model", _model(config, memory), width)
    yield from _wrapped("data", _data(config.data, size, launch.batch.unit), width)
    strategy = f", {config.strategy.name}" if launch.num_processes > 1 else ""
    yield from _wrapped("processes", f"{launch.num_processes}{strategy}: {launch.reason}", width)
    yield from _wrapped("batch", replace(launch.batch, steps=None).sentence(), width)
    each, steps = steps_of(config.batch, config.trainer, size)
    yield from _wrapped("steps", _steps(config, size, each, steps, launch.batch.unit), width)
    yield from _wrapped("precision", mixed_precision.sentence(config, gpu=gpu), width)
    if isinstance(memory, str):
        yield from _wrapped("memory", memory, width)
    else:
        style = "bold red" if memory.fits is False else ""
        yield from _wrapped("memory", memory_head(memory), width, style)
        yield from (("", row) for row in memory_bars(memory, width - _NAME, plain=plain))
    if launch.network:
        chosen = ", ".join(f"{one.name}={one.value}" if one.value else one.name for one in launch.network)
        yield from _wrapped("network", f"{chosen} (--full says why)", width)
    yield from _wrapped("folder", _folder(config), width)
    odd = [
        *of_batch(config.batch, launch, size, config.packing.mode),
        *of_estimate(config.objective, config.batch, size, each, steps),
        *of_training(
            config.model, config.optim, config.trainer, config.peft, steps, deepspeed=config.strategy.name in STAGES
        ),
        *of_lengths(config.model, config.data, size),
        *of_machine(launch),
    ]
    for number, one in enumerate(odd):
        yield from _wrapped("" if number else "odd", one, width, "yellow")


def _model(config: RunConfig, memory: Memory | str) -> str:
    model, name = config.model, config.model.path or f"a new {config.model.config.get('model_type', 'model')}"
    name += ", new weights" if model.path and model.init == "random" else ""
    unseen = left_to_loading(model, config.peft)
    unseen = f"; not known before loading: {unseen}" if unseen else ""
    if isinstance(memory, str):
        return f"{name}{', LoRA' if config.peft.kind == 'lora' else ''}{unseen}"
    trained = "all trained" if memory.trained == memory.parameters else f"{_many(memory.trained)} trained (LoRA)"
    return f"{name}, {_many(memory.parameters)} parameters, {trained}{unseen}"


def _data(data: Data, size: DataSize | None, unit: str) -> str:
    paths = [one.path for one in sources(data.train)]
    named = ", ".join(paths[:_MOST_SOURCES]) or "none"
    more = f" and {len(paths) - _MOST_SOURCES} more" if len(paths) > _MOST_SOURCES else ""
    found = f": {counted(size.documents, unit)}, {size.tokens:,} tokens, the longest {size.longest:,}" if size else ""
    held = ", ".join(one.path for one in sources(data.eval, "eval")) or (f"{data.eval:g} of it" if data.eval else "")
    most = f"; cut at {data.max_length:,} tokens" if data.max_length else ""
    return f"{named}{more}{found}{f'; held out: {held}' if held else ''}{most}"


def _steps(config: RunConfig, size: DataSize | None, each: int | None, steps: int | None, unit: str) -> str:
    """How many, and what that is of the data, if an earlier command has counted it."""
    if size is None or each is None:
        epochs = f"{config.trainer.epochs:g} epoch{'' if config.trainer.epochs == 1 else 's'}"
        return f"{f'{steps:,}' if steps else epochs}; what an epoch is, is known once packtrain inspect or a run has tokenised the data"
    passes = f"{steps / each:.3g}" if steps else ""
    about = "about " if config.batch.tokens_per_step else ""
    tokens = f"{size.tokens / each:,.0f} tokens a step"
    return f"{about}{steps:,}: {passes} epochs of {each:,} steps ({size.documents:,} {unit}, {tokens})"


def _folder(config: RunConfig) -> str:
    folder, trainer = RunFolder.of(config.trainer), config.trainer
    if folder.gives_way(trainer.resume):
        return f"{folder.root}: holds another run, which is moved aside"
    if trainer.resume not in ("auto", "never"):
        return f"{folder.root}: goes on from {trainer.resume}"
    goes_on = trainer.resume == "auto" and any(folder.checkpoints.glob("step-*"))
    return f"{folder.root}{': goes on from its newest checkpoint' if goes_on else ''}"


def _to_do(
    config: RunConfig, launch: LaunchPlan, verb: str, arguments: Sequence[str], width: int
) -> Iterator[tuple[str, Text]]:
    """The one command for this place, after the obstacles that it does not remove. Commands are not wrapped."""
    topology = config.topology
    for one in launch.obstacles:
        if one.where not in _BY_COMMAND:
            yield from _wrapped("first", f"{one.where}: {one.what}. {one.fix}".strip(), width, "yellow")
    typed = [verb, *(one for one in arguments if not one.startswith(("topology.node_rank=", "topology=auto")))]
    # each machine gets its number from another launcher, Slurm or a pod: the command is the same everywhere
    numbered = launch.hosts or launch.in_process or (topology.node_rank is None and not launch.obstacles)
    by_hand = launch.nodes > 1 and not numbered and topology.kind != "slurm"
    if launch.obstacles and (topology.kind == "slurm" or (by_hand and topology.kind == "auto" and _slurm_is_here())):
        yield "run", Text(f"{_joined([*_program(), 'sbatch', *typed])} --submit", "bold green")
        return
    if by_hand:
        typed += ["topology.kind=manual"] if topology.kind == "auto" else []
        where = f"on each machine K, from 0 to {launch.nodes - 1}"
        if topology.main_address is None:
            typed.append(f"topology.main_address={launch.accelerate['main_process_ip']}")
            where += ", with the first one's name or address"
        yield from _wrapped("run", f"{where}:", width)
        yield "", Text(f"{_joined([*_program(), *typed])} topology.node_rank=K", "bold green")
        return
    yield "run", Text(_joined([*_program(), *typed]), "bold green")


def _behind(config: RunConfig, launch: LaunchPlan) -> Iterator[tuple[str, str]]:
    """Title and text of all that the answer stands for."""
    yield "config", to_yaml(config)
    if not launch.in_process:
        yield "accelerate", yaml.safe_dump(dict(launch.accelerate))
    if launch.deepspeed is not None:
        yield "deepspeed", json.dumps(launch.deepspeed, indent=2)
    if launch.network:
        reasons = (f"{one.name}{f'={one.value}' if one.value else ''}: {one.reason}" for one in launch.network)
        yield "network", visible("\n".join(reasons), whitespace=True)
    if launch.srun:
        yield "starts", _joined(launch.srun)
    if not launch.in_process:
        yield f"starts, once {visible(str(RunFolder.of(config.trainer).config))} is written", _commands(launch)


def _commands(launch: LaunchPlan) -> str:
    """The command of each machine."""

    def one_line(command: NodeCommand) -> str:
        return _joined([*(f"{name}={value}" for name, value in command.env.items()), *command.argv])

    if len(launch.commands) == 1:
        return one_line(launch.command)
    lines = [f"machine {one.node}: {one_line(one)}" for one in launch.commands[:_MOST_COMMANDS]]
    alike = len(launch.commands) - len(lines)
    return "\n".join([*lines, *([f"… and of {alike:,} more, each with its number"] if alike else [])])


def _wrapped(name: str, text: str, width: int, style: str = "") -> Iterator[tuple[str, Text]]:
    """The text in lines of `width`, `name` in front of the first; whatever is in it, it only prints."""
    lines = textwrap.wrap(visible(text, whitespace=True), width - _NAME, break_on_hyphens=False)
    for number, line in enumerate(lines or [""]):
        yield "" if number else name, Text(line, style)


def _joined(words: Sequence[str]) -> str:
    """As shlex.join; a word with characters that cannot be printed is in bash's $'…'."""
    return " ".join(
        shlex.quote(one) if one.isprintable() else "$'" + repr("'" + one)[2:-1].replace("'", "\\'") + "'"
        for one in words
    )


def _many(number: int) -> str:
    if number >= 10**9:
        return f"{number / 10**9:,.1f} billion"
    return f"{number / 10**6:,.1f} million" if number >= 10**6 else f"{number:,}"


def _slurm_is_here() -> bool:
    return shutil.which("sbatch") is not None


def _program() -> list[str]:
    """The command by which packtrain was called, so that a printed command can be pasted."""
    called = sys.argv[0]
    if os.path.basename(called) != "packtrain":
        return [sys.executable, "-m", "packtrain"]
    return ["packtrain" if shutil.which("packtrain") == os.path.abspath(called) else called]
