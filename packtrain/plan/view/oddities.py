"""What is odd about a plan although it works: settings without effect, idle devices, steps that are not what they seem."""

from __future__ import annotations

import math
from collections.abc import Iterator

from packtrain.config.objective import Objective
from packtrain.config.schema import Batch, Data, Model, Optim, Peft, Trainer
from packtrain.plan.data_size import DataSize
from packtrain.plan.known_model.model_config import positions_of_config
from packtrain.plan.launch_plan import LaunchPlan
from packtrain.wording import counted

_MANY_STEPS = 1000
_WARM, _HOT = 1e-3, 1e-2
"""Learning rates above which a trained model, or adapters, are mostly spoilt."""


def steps_of(batch: Batch, trainer: Trainer, size: DataSize | None) -> tuple[int | None, int | None]:
    """(steps of an epoch, steps of the run), each None if it is not known; of rows they are rounded up and may be a few more."""
    each = None
    if size is not None and batch.examples_per_step:
        each = math.ceil(size.documents / batch.examples_per_step)
    elif size is not None and batch.tokens_per_step:
        each = math.ceil(size.tokens / batch.tokens_per_step)
    if trainer.max_steps is not None:
        return each, trainer.max_steps
    return each, None if each is None else max(math.ceil(trainer.epochs * each - 1e-9), 1)


def of_batch(batch: Batch, launch: LaunchPlan, size: DataSize | None, mode: str) -> Iterator[str]:
    """What is odd about the batch: processes without work, rows that never fill."""
    processes, examples, unit = launch.num_processes, batch.examples_per_step, launch.batch.unit
    if examples is not None and examples < processes:
        yield f"batch.examples_per_step={examples} leaves {processes - examples} of {processes} processes without work"
    elif examples is not None and examples % processes and examples < 8 * processes:
        yield f"{examples} {unit} do not divide over {processes} processes: some wait for the others in every step"
    if size is None or examples is None:
        return
    if examples > size.documents:
        yield f"a step of {examples:,} is more than all {counted(size.documents, unit)} of an epoch"
    share, row = size.tokens / size.documents * examples / processes, launch.batch.tokens_per_device
    if mode == "packed" and row and size.longest <= row and 2 * share < row:
        yield f"a process gets about {share:,.0f} tokens a step: rows of batch.tokens_per_device={row:,} never fill"


def of_estimate(
    objective: Objective, batch: Batch, size: DataSize | None, each: int | None, steps: int | None
) -> Iterator[str]:
    """Whether kto would refuse the data: `each` and `steps` are those of `steps_of`."""
    examples = batch.examples_per_step
    if objective.losses != ["kto"] or size is None or not examples:
        return
    if size.documents % examples == 1 and (steps or 0) >= (each or 0):
        yield (
            f"of {counted(size.documents, 'answers')} the last step of an epoch has a single one, and the KL estimate is made "
            "of two or more: the run will refuse it; take another batch.examples_per_step, or objective.loss=apo_zero_unpaired"
        )


def of_training(
    model: Model, optim: Optim, trainer: Trainer, peft: Peft, steps: int | None, *, deepspeed: bool
) -> Iterator[str]:
    """What is odd about the length of the run and its optimizer."""
    if steps is not None:
        if optim.warmup_steps >= max(steps, 1):
            yield f"optim.warmup_steps={optim.warmup_steps:g} of {steps:,} steps: the learning rate never reaches its peak"
        for key in ("eval_every", "checkpoint_every"):
            every = getattr(trainer, key)
            if every is not None and every > steps:
                yield f"trainer.{key}={every} is more than the run's {steps:,} steps"
        if trainer.checkpoint_every is None and steps >= _MANY_STEPS:
            yield f"no checkpoints in {steps:,} steps (trainer.checkpoint_every): a run that is killed starts anew"
    rate, spoilt = optim.learning_rate, _WARM if peft.kind == "none" else _HOT
    if rate == 0:
        yield "optim.learning_rate=0 trains nothing"
    elif rate >= spoilt and model.init == "pretrained" and optim.name.startswith(("adam", "paged_adam")):
        yield f"optim.learning_rate={rate:g} is large for a trained model; 1e-5 to 1e-4 is usual, with adapters ten times that"
    plain = optim.bf16_rounding == "nearest" and model.dtype == "bfloat16"
    if plain and peft.kind == "none" and not deepspeed:
        yield "bfloat16 weights without masters lose most updates in rounding (optim.bf16_rounding=auto)"


def of_lengths(model: Model, data: Data, size: DataSize | None) -> Iterator[str]:
    """Documents that are longer than what the model is made for, or may be."""
    positions = positions_of_config(model)
    if positions is not None and size is not None and size.longest > positions:
        yield (
            f"the longest document has {size.longest:,} tokens, the model is made for {positions:,} positions: the run will "
            f"refuse it; set data.max_length={positions}"
        )
    elif positions is not None and data.max_length and data.max_length > positions:
        yield f"data.max_length={data.max_length:,} is more than the model's {positions:,} positions"


def of_machine(launch: LaunchPlan) -> Iterator[str]:
    """GPUs that are there and not used, or processes without any."""
    used = launch.gpus_per_node
    if not launch.gpus and launch.nodes == 1 and used > 1 and launch.gpu_memory is None:
        yield f"here, where no GPU is visible, the {used} processes would train on the CPU"
    if launch.gpus > used and launch.role != "srun" and not launch.in_process:
        yield f"{launch.gpus - used} of {launch.gpus} visible GPUs are not used"
    elif launch.in_process and launch.num_processes == 1 and launch.gpus > 1:
        yield f"{launch.gpus - 1} of {launch.gpus} visible GPUs are not used"
