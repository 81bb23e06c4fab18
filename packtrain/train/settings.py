"""Inputs of a training loop: steps, folders, stop request, arguments of transformers' Trainer."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import SchedulerType, TrainingArguments

from packtrain.config.schema import Optim, Tracking, Trainer
from packtrain.model.precision import Precision
from packtrain.monitor.heartbeat import TimeLimits
from packtrain.strategies.spec import DEFAULT, STRATEGIES
from packtrain.train.loader import Steps
from packtrain.train.patches import arguments_on_one_gpu
from packtrain.train.spikes import SpikeRules


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Settings of a training loop.

    `origin`: values that must be equal in a resumed run and its checkpoint. `strategy`: strategy.name. `exchange_once`:
    Memory.exchanges_once. `autocast`: the format of mixed precision (None: the weights' format). `backend`: the attention backend
    of packed rows (None: the model's own attention). `trainer` and `optim`: the config's groups.
    `checkpointing`: the decision on trainer.gradient_checkpointing.
    """

    steps: Steps
    evaluation: Mapping[str, Steps]
    """One pass over each set of data.eval, by name; {} for none."""
    stop: StopRequest
    checkpoints: Path
    origin: dict[str, Any]
    first_step: int = 0
    say: Callable[[str], None] = print
    strategy: str = DEFAULT
    exchange_once: bool = False
    autocast: torch.dtype | None = None
    backend: str | None = None
    trainer: Trainer = field(default_factory=Trainer)
    optim: Optim = field(default_factory=Optim)
    limits: TimeLimits | None = None
    spikes: SpikeRules | None = None
    largest_first: bool = False
    checkpointing: str = "none"
    unused_at_times: bool = False
    """Weights (of experts) get a gradient in some batches only."""

    @property
    def eval_every(self) -> int | None:
        """trainer.eval_every, None without an evaluation set."""
        return self.trainer.eval_every if self.evaluation else None

    @property
    def sharded(self) -> bool:
        """Whether no process has all weights."""
        return STRATEGIES[self.strategy].shards_weights


class StopRequest:
    """Request to stop: this process's `signal` (0: none), and the signal `agreed` by all ranks.

    Signals reach processes at different times. So each rank only notes its own and sends it with the counts of the next step. All ranks
    read them at the step's end and stop after the same step, which is logged, with a checkpoint and exit code 128 + the signal's number. A
    process that is alone stops after the current step.
    """

    def __init__(self, grace_s: float | None = None) -> None:
        """`grace_s` is topology.grace."""
        self.signal = self.agreed = 0
        self._grace_s, self._ends_at = grace_s, math.inf

    def shortage_of_time(self, seconds: float) -> str:
        """Return why `seconds` of work do not fit before this process is ended, or ""."""
        left = self._ends_at - time.monotonic()
        if seconds <= left:
            return ""
        return f"the last one took {seconds:.0f} s, and {max(left, 0):.0f} of the {self._grace_s:g} s after SIGTERM are left (topology.grace)"

    def counts(self) -> list[int]:
        """Count this process's signals for the reduction over ranks: [SIGINT, SIGTERM], 0 or 1."""
        return [int(self.signal == signal.SIGINT), int(self.signal == signal.SIGTERM)]

    def listen(self) -> None:
        """Start to note SIGTERM and SIGINT. A second SIGINT ends the process at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
        self._count_down(number)

    def agree(self, interrupts: int, terminations: int) -> None:
        """Agree on a signal, from the numbers of ranks that received SIGINT and SIGTERM."""
        if not self.agreed and (interrupts or terminations):
            self.agreed = signal.SIGTERM if terminations else signal.SIGINT
            self._count_down(self.agreed)

    def _count_down(self, number: int) -> None:
        """Start the grace time at the first known SIGTERM. Another process may have received it."""
        if number == signal.SIGTERM and self._grace_s is not None:
            self._ends_at = min(self._ends_at, time.monotonic() + self._grace_s)


def training_arguments(
    trainer: Trainer, optim: Optim, tracking: Tracking, precision: Precision, settings: LoopSettings
) -> TrainingArguments:
    """Return the arguments of the loss's Trainer for a run with these `settings`.

    Everything about batches is left at one: a DataLoader item is a whole optimizer step of this process, already split
    into micro-batches, so transformers' own accumulation and sampling have nothing to do.
    """
    evaluates, limits = bool(settings.evaluation), settings.limits or TimeLimits()
    dtype = str(precision.weights).removeprefix("torch.")
    make = STRATEGIES[settings.strategy].engine_settings
    engine = make and make(dtype, optim.max_grad_norm)
    arguments = {
        "output_dir": trainer.output_dir,
        "max_steps": len(settings.steps),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "ignore_data_skip": True,  # our sampler starts at the resumed step itself
        "optim": "adamw_torch" if optim.spec.own else optim.name,
        "learning_rate": optim.learning_rate,
        "lr_scheduler_type": SchedulerType(optim.schedule),
        "lr_scheduler_kwargs": dict(optim.schedule_options),
        "warmup_steps": optim.warmup_steps if optim.warmup_steps < 1 else int(optim.warmup_steps),
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.beta1,
        "adam_beta2": optim.beta2,
        "max_grad_norm": optim.max_grad_norm,
        "activation_checkpointing": settings.checkpointing != "none",
        "use_cpu": not torch.cuda.is_available(),  # else several CPU processes silently train separate copies
        "seed": trainer.seed,
        "logging_steps": trainer.log_every,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,  # a NaN must be seen
        "save_strategy": "steps" if trainer.checkpoint_every else "no",
        "save_steps": trainer.checkpoint_every or 1,
        "eval_strategy": "steps" if trainer.eval_every and evaluates else "no",
        "eval_steps": trainer.eval_every,
        "eval_on_start": evaluates and not settings.first_step,
        "report_to": "none",  # trackers.py makes them
        "run_name": tracking.run_name or Path(trainer.output_dir).name,
        "ddp_timeout": int(limits.step_s),
        # else DDP orders its buckets anew after the first step of each start, and so changes the sums of three or more ranks
        "ddp_find_unused_parameters": trainer.deterministic or settings.unused_at_times,
        # buffers (rotary frequencies) are equal on all ranks; broadcasting them would make forward passes wait for rank 0
        "ddp_broadcast_buffers": False,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        # DeepSpeed's bf16 would round the weights, so there `model.precision.compute_in` wraps the forward instead
        "bf16": precision.weights == torch.bfloat16 if engine else precision.autocast is not None,
        **({"deepspeed": engine} if engine else {}),
    }
    return arguments_on_one_gpu(**arguments)
