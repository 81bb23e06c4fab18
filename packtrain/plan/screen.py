"""A plan as `packtrain plan` prints it: the answer on one screen, what is odd about it, and with --full all that it stands for."""

from __future__ import annotations

import json
import math
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
from packtrain.plan import known_model
from packtrain.plan.data_size import DataSize, recall
from packtrain.plan.launch_plan import LaunchPlan, NodeCommand
from packtrain.plan.launcher_settings import STAGES
from packtrain.plan.memory import OUTSIDE, PARTS, Memory, estimate, in_gib
from packtrain.run_folder import RunFolder
from packtrain.wording import counted, visible

_NAME = 11
_WIDEST, _NARROWEST = 100, 40
_MOST_SOURCES, _MOST_COMMANDS, _MANY_STEPS = 3, 100, 1000
_BY_COMMAND = ("topology.nodes", "topology.kind", "topology.node_rank")
"""Obstacles that the command to paste removes."""
_LARGE_RATE = {"none": 1e-3, "lora": 1e-2}
"""Learning rates above which a trained model, or adapters, are mostly spoilt."""


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
    plain = not (console.encoding or "").lower().startswith("utf")
    for name, text in (*_answer(config, launch, width, plain=plain), *_to_do(config, launch, verb, arguments, width)):
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
        "network": [asdict(item) for item in launch.network],
        "memory": None if isinstance(memory, str) else memory.to_json(),
        "config": asdict(config),
    }


def _answer(config: RunConfig, launch: LaunchPlan, width: int, *, plain: bool) -> Iterator[tuple[str, Text]]:
    """Name and text of each line above the commands, wrapped."""
    memory = estimate(config, launch.num_processes, launch.gpu_memory)
    size = recall(config.model, config.data, config.objective.kind, config.trainer.seed)
    each, steps = _count_steps(config, size)
    gpu = launch.gpus > 0 or launch.gpu_memory is not None
    strategy = f", {config.strategy.name}" if launch.num_processes > 1 else ""
    lines = {
        "model": _model(config, memory),
        "data": _data(config.data, size, launch.batch.unit),
        "processes": f"{launch.num_processes}{strategy}: {launch.reason}",
        "batch": replace(launch.batch, steps=None).sentence(),
        "steps": _steps(config, size, each, steps, launch.batch.unit),
        "precision": known_model.precision_in_words(config, gpu=gpu),
        "memory": memory if isinstance(memory, str) else memory.sentence(),
    }
    for name, text in lines.items():
        fails = name == "memory" and isinstance(memory, Memory) and memory.fits is False
        yield from _wrapped(name, text, width, "bold red" if fails else "")
    if isinstance(memory, Memory):
        yield from (("", row) for row in memory_bars(memory, width - _NAME, plain=plain))
    if launch.network:
        chosen = ", ".join(f"{item.name}={item.value}" if item.value else item.name for item in launch.network)
        yield from _wrapped("network", f"{chosen} (--full says why)", width)
    yield from _wrapped("folder", _folder(config), width)
    for number, odd in enumerate(_oddities(config, launch, size, steps)):
        yield from _wrapped("" if number else "odd", odd, width, "yellow")


def _model(config: RunConfig, memory: Memory | str) -> str:
    model, name = config.model, config.model.path or f"a new {config.model.config.get('model_type', 'model')}"
    name += ", new weights" if model.path and model.init == "random" else ""
    unseen = known_model.left_to_loading(model, config.peft)
    unseen = f"; not known before loading: {unseen}" if unseen else ""
    if isinstance(memory, str):
        return f"{name}{', LoRA' if config.peft.kind == 'lora' else ''}{unseen}"
    trained = "all trained" if memory.trained == memory.parameters else f"{_many(memory.trained)} trained (LoRA)"
    return f"{name}, {_many(memory.parameters)} parameters, {trained}{unseen}"


def _data(data: Data, size: DataSize | None, unit: str) -> str:
    paths = [item.path for item in sources(data.train)]
    named = ", ".join(paths[:_MOST_SOURCES]) or "none"
    more = f" and {len(paths) - _MOST_SOURCES} more" if len(paths) > _MOST_SOURCES else ""
    counts = f": {counted(size.documents, unit)}, {size.tokens:,} tokens, the longest {size.longest:,}" if size else ""
    held = ", ".join(item.path for item in sources(data.eval, "eval")) or (f"{data.eval:g} of it" if data.eval else "")
    most = f"; cut at {data.max_length:,} tokens" if data.max_length else ""
    return f"{named}{more}{counts}{f'; held out: {held}' if held else ''}{most}"


def _count_steps(config: RunConfig, size: DataSize | None) -> tuple[int | None, int | None]:
    """(steps of an epoch, steps of the run), each None if it is not known; of rows they are rounded up and may be a few more."""
    batch, trainer, each = config.batch, config.trainer, None
    if size is not None and batch.examples_per_step:
        each = math.ceil(size.documents / batch.examples_per_step)
    elif size is not None and batch.tokens_per_step:
        each = math.ceil(size.tokens / batch.tokens_per_step)
    if trainer.max_steps is not None:
        return each, trainer.max_steps
    return each, None if each is None else max(math.ceil(trainer.epochs * each - 1e-9), 1)


def _steps(config: RunConfig, size: DataSize | None, each: int | None, steps: int | None, unit: str) -> str:
    """How many, and what that is of the data, if an earlier command has counted it."""
    if size is None or each is None:
        epochs = f"{config.trainer.epochs:g} epoch{'' if config.trainer.epochs == 1 else 's'}"
        return f"{f'{steps:,}' if steps else epochs}; what an epoch is, is known once packtrain inspect or a run has tokenised the data"
    passes = f"{steps / each:.3g}" if steps else ""
    about = "about " if config.batch.tokens_per_step else ""
    tokens = f"{size.tokens / each:,.0f} tokens a step"
    return f"{about}{steps:,}: {passes} epochs of {each:,} steps ({size.documents:,} {unit}, {tokens})"


def memory_bars(memory: Memory, width: int, *, plain: bool) -> Iterator[Text]:
    """A row for each part, where the one before it ends, and one for the sum against the device, each at most `width` cells wide;
    `plain`: of ASCII characters."""
    full, free, over = "#.!" if plain else "█░▒"
    parts = {name: getattr(memory, name) or 0 for name in PARTS}
    if memory.device is not None:
        parts["CUDA, NCCL" if memory.outside > OUTSIDE else "CUDA"] = memory.outside
    whole, cells, done = sum(parts.values()), max(width - 21, 8), 0
    scale = max(whole, memory.device or 0, 1)
    for name, size in parts.items():
        if size:
            first, last = min(cells * done // scale, cells - 1), cells * (done + size) // scale
            bar = " " * first + full * max(last - first, 1)
            most = " at most" if name == "activations" and len(bar) + 8 <= cells else ""
            yield Text(f"{name:<11}{in_gib(size):>8} {bar}{most}")
        done += size
    limit = cells if memory.device is None else min(cells * memory.device // scale, cells)
    used = cells * whole // scale
    bar = full * min(used, limit) + over * (used - limit)
    bar += free * (limit - used) if memory.device is not None else ""
    yield Text(f"{'sum':<11}{in_gib(whole):>8} {bar}", "bold red" if memory.fits is False else "bold")


def _folder(config: RunConfig) -> str:
    folder, trainer = RunFolder.of(config.trainer), config.trainer
    if folder.gives_way(trainer.resume):
        return f"{folder.root}: holds another run, which is moved aside"
    if trainer.resume not in ("auto", "never"):
        return f"{folder.root}: goes on from {trainer.resume}"
    goes_on = trainer.resume == "auto" and any(folder.checkpoints.glob("step-*"))
    return f"{folder.root}{': goes on from its newest checkpoint' if goes_on else ''}"


def _oddities(config: RunConfig, launch: LaunchPlan, size: DataSize | None, steps: int | None) -> Iterator[str]:
    """What is odd although it works: settings without effect, idle devices, steps that are not what they seem."""
    optim, trainer, examples = config.optim, config.trainer, config.batch.examples_per_step
    processes, unit, row = launch.num_processes, launch.batch.unit, launch.batch.tokens_per_device
    if examples is not None and examples < processes:
        yield f"batch.examples_per_step={examples} leaves {processes - examples} of {processes} processes without work"
    elif examples is not None and examples % processes and examples < 8 * processes:
        yield f"{examples} {unit} do not divide over {processes} processes: some wait for the others in every step"
    if size is not None and examples is not None:
        share = size.tokens / size.documents * examples / processes
        if examples > size.documents:
            yield f"a step of {examples:,} is more than all {counted(size.documents, unit)} of an epoch"
        if config.packing.mode == "packed" and row and size.longest <= row and 2 * share < row:
            yield f"a process gets about {share:,.0f} tokens a step: rows of batch.tokens_per_device={row:,} never fill"
    if steps is not None:
        if optim.warmup_steps >= max(steps, 1):
            yield f"optim.warmup_steps={optim.warmup_steps:g} of {steps:,} steps: the learning rate never reaches its peak"
        for key in ("eval_every", "checkpoint_every"):
            if (every := getattr(trainer, key)) is not None and every > steps:
                yield f"trainer.{key}={every} is more than the run's {steps:,} steps"
        if trainer.checkpoint_every is None and steps >= _MANY_STEPS:
            yield f"no checkpoints in {steps:,} steps (trainer.checkpoint_every): a run that is killed starts anew"
    rate, adam = optim.learning_rate, optim.name.startswith(("adam", "paged_adam"))
    if rate == 0:
        yield "optim.learning_rate=0 trains nothing"
    elif rate >= _LARGE_RATE[config.peft.kind] and config.model.init == "pretrained" and adam:
        yield f"optim.learning_rate={rate:g} is large for a trained model; 1e-5 to 1e-4 is usual, with adapters ten times that"
    plain = optim.bf16_rounding == "nearest" and config.model.dtype == "bfloat16" and config.peft.kind == "none"
    if plain and config.strategy.name not in STAGES:
        yield "bfloat16 weights without masters lose most updates in rounding (optim.bf16_rounding=auto)"
    positions, most = known_model.positions_of_config(config.model), config.data.max_length
    if positions is not None and size is not None and size.longest > positions:
        yield (
            f"the longest document has {size.longest:,} tokens, the model is made for {positions:,} positions: the run will "
            f"refuse it; set data.max_length={positions}"
        )
    elif positions is not None and most and most > positions:
        yield f"data.max_length={most:,} is more than the model's {positions:,} positions"
    used = launch.gpus_per_node
    if not launch.gpus and launch.nodes == 1 and used > 1 and launch.gpu_memory is None:
        yield f"here, where no GPU is visible, the {used} processes would train on the CPU"
    if launch.gpus > used and launch.role != "srun" and (not launch.in_process or processes == 1):
        yield f"{launch.gpus - used} of {launch.gpus} visible GPUs are not used"


def _to_do(
    config: RunConfig, launch: LaunchPlan, verb: str, arguments: Sequence[str], width: int
) -> Iterator[tuple[str, Text]]:
    """The one command for this place, after the obstacles that it does not remove. Commands are not wrapped."""
    topology = config.topology
    for item in launch.obstacles:
        if item.where not in _BY_COMMAND:
            yield from _wrapped("first", f"{item.where}: {item.what}. {item.fix}".strip(), width, "yellow")
    typed = [verb, *(item for item in arguments if not item.startswith(("topology.node_rank=", "topology=auto")))]
    # each machine gets its number from another launcher, Slurm or a pod: the command is the same everywhere
    numbered = launch.hosts or launch.in_process or (topology.node_rank is None and not launch.obstacles)
    by_hand = launch.nodes > 1 and not numbered and topology.kind != "slurm"
    slurm = by_hand and topology.kind == "auto" and shutil.which("sbatch") is not None
    if launch.obstacles and (topology.kind == "slurm" or slurm):
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
        reasons = (f"{item.name}{f'={item.value}' if item.value else ''}: {item.reason}" for item in launch.network)
        yield "network", visible("\n".join(reasons), whitespace=True)
    if launch.srun:
        yield "starts", _joined(launch.srun)
    if not launch.in_process:
        yield f"starts, once {visible(str(RunFolder.of(config.trainer).config))} is written", _commands(launch)


def _commands(launch: LaunchPlan) -> str:
    """The command of each machine."""

    def in_a_line(command: NodeCommand) -> str:
        return _joined([*(f"{name}={value}" for name, value in command.env.items()), *command.argv])

    if len(launch.commands) == 1:
        return in_a_line(launch.command)
    lines = [f"machine {item.node}: {in_a_line(item)}" for item in launch.commands[:_MOST_COMMANDS]]
    more = len(launch.commands) - len(lines)
    return "\n".join([*lines, *([f"… and of {more:,} more, each with its number"] if more else [])])


def _wrapped(name: str, text: str, width: int, style: str = "") -> Iterator[tuple[str, Text]]:
    """The text in lines of `width`, `name` in front of the first; whatever is in it, it only prints."""
    lines = textwrap.wrap(visible(text, whitespace=True), width - _NAME, break_on_hyphens=False)
    for number, line in enumerate(lines or [""]):
        yield "" if number else name, Text(line, style)


def _joined(words: Sequence[str]) -> str:
    """As shlex.join; a word with characters that cannot be printed is in bash's $'…'."""
    return " ".join(
        shlex.quote(item) if item.isprintable() else "$'" + repr("'" + item)[2:-1].replace("'", "\\'") + "'"
        for item in words
    )


def _many(number: int) -> str:
    if number >= 10**9:
        return f"{number / 10**9:,.1f} billion"
    return f"{number / 10**6:,.1f} million" if number >= 10**6 else f"{number:,}"


def _program() -> list[str]:
    """The command by which packtrain was called, so that a printed command can be pasted."""
    called = sys.argv[0]
    if os.path.basename(called) != "packtrain":
        return [sys.executable, "-m", "packtrain"]
    return ["packtrain" if shutil.which("packtrain") == os.path.abspath(called) else called]
