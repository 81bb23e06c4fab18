"""One optimizer step of every objective, in the order in which it runs.

transformers' Trainer has the loop and TRL's trainers the objective; StepTrainer stands in front of them (a mixin), and a
loader item is a whole optimizer step of this process. The hooks below are those that such a step goes through:

1. data         get_batch_samples: the micro-batches of the step (loader.py; their rows: packing/schedule.py, collate.py)
2. counts       _get_num_items_in_batch: tokens and documents of the global step, summed over ranks before the first forward
3. forward      training_step → `loss_of` (sft.py, dpo.py) → model.forward with all that is put around it (model/forward.py)
4. backward     training_step: gradients are exchanged with the last micro-batch
5. optimizer    transformers' own: clipping, optimizer, learning-rate schedule
6. log          `log`, and evaluation (metrics.py)
7. checkpoint   `_save_checkpoint` (checkpoint.py)
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import datasets
import torch
from torch.utils.data import DataLoader
from transformers import (
    PrinterCallback,
    SchedulerType,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback

from packtrain.config.schema import SHARDED_WEIGHTS, Optim, Tracking, Trainer
from packtrain.model.load import base_model
from packtrain.model.precision import Precision
from packtrain.model.spread import check_active
from packtrain.monitor.heartbeat import TimeLimits, waiting
from packtrain.plan.launcher_settings import deepspeed_config
from packtrain.train.checkpoint import CheckpointHooks
from packtrain.train.loader import MicroBatch, PairSteps, Steps, step_loader
from packtrain.train.metrics import LoggingHooks, StepFigures
from packtrain.train.preflight import WATCHED_STEPS, FirstStepWatch
from packtrain.train.sync.rank_times import TOLD_EVERY, Machines, RankTimes, StepClock


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What the loop runs over, and how.

    `origin` is what a resumed run must agree on with its checkpoint, `strategy` is strategy.name, `autocast` what mixed
    precision computes in (None: the format of the weights), `backend` what serves packed rows (None: the model's own
    attention). The main process knows the `machines`.
    """

    steps: Steps | PairSteps
    evaluation: Steps | PairSteps | None
    stop: StopRequest
    checkpoints: Path
    origin: dict[str, Any]
    keep_checkpoints: int | None = None
    first_step: int = 0
    loader_workers: int = 0
    machines: Machines = ()
    say: Callable[[str], None] = print
    strategy: str = "ddp"
    autocast: torch.dtype | None = None
    backend: str | None = None
    limits: TimeLimits | None = None

    @property
    def sharded(self) -> bool:
        """Whether no process has all weights."""
        return self.strategy in SHARDED_WEIGHTS


class StepTrainer(CheckpointHooks, LoggingHooks):
    """Trains by LoopSettings. The trainer that uses it calls `open_loop` in its __init__, and says what a loss is."""

    model: Any  # never None here
    state: Any
    maybe_activation_offload_context: Any

    def open_loop(self, settings: LoopSettings) -> None:
        """Takes the place of TRL's own ideas of data, progress and checkpoints."""
        self.remove_callback(PrinterCallback)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback):  # not into a folder with the machine's name
                callback.logging_dir = f"{self.args.output_dir}/tensorboard"
        self.settings, self.steps = settings, settings.steps
        self.watch: FirstStepWatch | None = None
        self._watched = 0
        self.close_proofs: Callable[[], None] = lambda: None
        self.last_loss = torch.zeros((), device=self.args.device)
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        self.clock = StepClock(self.args.device, rank, ranks, limits=settings.limits)
        self.times = RankTimes(ranks, settings.say, settings.machines)
        self.step_figures = StepFigures(self.accelerator, base_model(self.model), self.compute_dtype, settings.steps)
        # under FSDP2 the weights are spread already, see model/spread.py
        self.is_distributed_loading_by_transformers = settings.strategy == "fsdp2"

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self.settings.autocast or base_model(self.model).dtype

    def autocast_of_forward(self, settings: LoopSettings) -> torch.dtype | None:
        """What the forward has to be put under autocast for: accelerate does so itself but for DeepSpeed's engine."""
        return settings.autocast if self.is_deepspeed_enabled else None

    # What an objective says.

    def loss_of(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """Scalar: what a micro-batch adds to the loss of the step, times the number of processes.

        `counts` int64 are those of the whole step: trained targets, tokens, slots, examples.
        """
        raise NotImplementedError

    def open_step(self, batches: list[MicroBatch]) -> None:
        """Called before the micro-batches of a step."""

    # The hooks of a step, in their order.

    def get_train_dataloader(self) -> DataLoader:
        """All steps of the run as one "epoch" of transformers' loop, from the resumed one on."""
        return step_loader(self.steps, first=self.settings.first_step, workers=self.settings.loader_workers)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class, after the last proof; makes sure that the strategy is what the config says."""
        self.close_proofs()
        prepared = super()._prepare_for_training(*args, **kwargs)
        check_active(self.settings.strategy, self.model_wrapped, self.model)
        return prepared

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """1. The step's micro-batches, as the base class loads them, and their counts."""
        self.clock.enter("data", step=self.state.global_step + 1)
        return super().get_batch_samples(*args, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: list[list[MicroBatch]], device: torch.device) -> torch.Tensor:
        """2. Counts of the global step: trained targets, tokens, slots, examples. The same reduction carries what is logged,
        the signals to stop, and every now and then the ranks' times."""
        if not batch_samples:  # the Trainer would ask forever
            raise RuntimeError(f"the data ended after step {self.state.global_step}, before the length of the loader")
        batches = batch_samples[0]
        counts = [sum(column) for column in zip(*(batch.counts for batch in batches), strict=True)]
        self.clock.enter("counts")
        with_times = (self.state.global_step + 1) % max(self.state.logging_steps, TOLD_EVERY) == 0
        timed = self.clock.steps if with_times else 0
        times = self.clock.slots() if timed else []
        total = torch.tensor([*counts, *self.settings.stop.counts(), *times], device=device)
        with waiting("the counts of all ranks"):
            total = cast(torch.Tensor, self.accelerator.reduce(total, reduction="sum"))
        self.step_figures.open(total[:6])
        self.times.take(total[6:], timed)
        return total[:4]

    def training_step(
        self, model: torch.nn.Module, inputs: list[MicroBatch], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """3. and 4. Forward and backward over all micro-batches; gradients are exchanged with the last one only.

        Returns this rank's part of the loss, scaled so that the mean over ranks is the loss of the global step. What comes
        after it (5.) is transformers': clipping, optimizer, schedule.
        """
        self._watch_first_steps(inputs)
        model.train()
        assert num_items_in_batch is not None
        total = torch.zeros((), device=self.args.device)
        self.open_step(inputs)
        for number, batch in enumerate(inputs, start=1):
            self.clock.enter("forward", micro=number)
            with self._gradients_kept(model, last=number == len(inputs)):
                with self.maybe_activation_offload_context:
                    loss = self.loss_of(model, batch, num_items_in_batch)
                self.clock.enter("backward", micro=number)
                self.accelerator.backward(loss)
            total += loss.detach()
        _, tokens, _, _, *signals = self.step_figures.last.tolist()
        # with the step and not with the logged line: a checkpoint may lie between two lines
        self.state.num_input_tokens_seen += tokens
        self.settings.stop.agree(*signals)
        self.last_loss = total
        self.clock.enter("optimizer")
        return total

    def _watch_first_steps(self, batches: list[MicroBatch]) -> None:
        """Has the first packed rows compared with padded ones; the time that it takes is not training's."""
        rows = [batch.inputs for batch in batches if "segments" in batch.inputs]
        if self.watch is None or not rows:
            return
        started, row = time.perf_counter(), self._prepare_inputs(rows[0])
        self.watch.check(self.model, row, step=self.state.global_step + 1)
        if not self._watched and not self.settings.sharded:
            self.watch.check_gradients(self.model, row)
        self._watched += 1
        if self._watched == WATCHED_STEPS:
            self.watch = None
        self.step_figures.leave_out(time.perf_counter() - started)

    def _gradients_kept(self, model: torch.nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch. DDP exchanges gradients with the last one only; what spreads them does so with each.

        DeepSpeed's engine steps within the backward pass of the micro-batch that it is told to be the last.
        """
        if self.is_deepspeed_enabled:
            self.accelerator.gradient_state._set_sync_gradients(last)
            return nullcontext()
        return nullcontext() if last else self.accelerator.no_sync(model)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted here: the logged MFU comes from token counts."""
        return 0

    def _send_telemetry(self) -> None:
        """packtrain sends nothing to anyone."""


class StopRequest:
    """The signal that this process was sent (0: none), and the one that all ranks have agreed to stop for.

    Signals reach the processes of a launch at different moments. So each rank only notes its own; the number travels with
    the counts of the next step, and all ranks stop after the same one, with a checkpoint and exit code 128 + the number.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.agreed = 0

    def counts(self) -> list[int]:
        """[1 if this process was sent SIGINT, 1 if it was sent SIGTERM], for the reduction over ranks."""
        return [int(self.signal == signal.SIGINT), int(self.signal == signal.SIGTERM)]

    def listen(self) -> None:
        """Notes SIGTERM and SIGINT; a second SIGINT ends the process at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    def agree(self, interrupts: int, terminations: int) -> None:
        """Called with the number of ranks that were sent SIGINT and SIGTERM by the time of a step."""
        if not self.agreed and (interrupts or terminations):
            self.agreed = signal.SIGTERM if terminations else signal.SIGINT


class StepControl(TrainerCallback):
    """What transformers does after a step: it stops where the ranks agreed to, with a checkpoint, and logs the last step.

    Intervals are this run's, not those of the checkpoint that it resumes from.
    """

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        """Puts this run's log_every, eval_every and checkpoint_every in place of those of the checkpoint."""
        state.compute_steps(args, state.max_steps)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> TrainerControl:
        """Asks for the last line, and for the checkpoint and the end."""
        if self._stop.agreed:
            control.should_log = control.should_save = control.should_training_stop = True
        if state.global_step >= state.max_steps:
            control.should_log = True
        return control


def training_arguments(
    trainer: Trainer,
    optim: Optim,
    tracking: Tracking,
    precision: Precision,
    *,
    strategy: str,
    step_timeout: int,
    total_steps: int,
    on_cpu: bool,
    evaluates: bool,
    starts_anew: bool,
) -> dict[str, Any]:
    """The arguments that all of TRL's trainers share, of a run of `total_steps` optimizer steps.

    Everything about batches is left at one: a DataLoader item is a whole optimizer step of this process, already split
    into micro-batches, so transformers' own accumulation and sampling have nothing to do.
    """
    dtype = str(precision.weights).removeprefix("torch.")
    deepspeed = deepspeed_config(strategy, dtype=dtype, max_grad_norm=optim.max_grad_norm)
    return {
        "output_dir": trainer.output_dir,
        "max_steps": total_steps,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "ignore_data_skip": True,  # our sampler starts at the resumed step by itself
        "optim": optim.name,
        "learning_rate": optim.learning_rate,
        "lr_scheduler_type": SchedulerType(optim.schedule),
        "lr_scheduler_kwargs": dict(optim.schedule_options),
        "warmup_steps": optim.warmup_steps if optim.warmup_steps < 1 else int(optim.warmup_steps),
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.beta1,
        "adam_beta2": optim.beta2,
        "adam_epsilon": optim.epsilon,
        "max_grad_norm": optim.max_grad_norm,
        "activation_checkpointing": trainer.gradient_checkpointing,
        "use_cpu": on_cpu,  # without it several CPU processes silently train copies of their own
        "seed": trainer.seed,
        "logging_steps": trainer.log_every,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,  # a NaN must be seen
        "save_strategy": "steps" if trainer.checkpoint_every else "no",
        "save_steps": trainer.checkpoint_every or 1,
        "eval_strategy": "steps" if trainer.eval_every and evaluates else "no",
        "eval_steps": trainer.eval_every,
        "eval_on_start": evaluates and starts_anew,
        "report_to": list(tracking.report_to) or "none",
        "run_name": tracking.run_name or Path(trainer.output_dir).name,
        "ddp_timeout": step_timeout,
        "ddp_find_unused_parameters": False,
        # what a forward pass keeps (rotary frequencies) every rank computes itself; and forward passes would wait for rank 0
        "ddp_broadcast_buffers": False,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "max_length": None,
        # DeepSpeed's bf16 would round the weights; `compute_in` is what mixed precision means under every strategy
        "bf16": precision.weights == torch.bfloat16 if deepspeed else precision.autocast is not None,
        **({"deepspeed": deepspeed} if deepspeed else {}),
    }


def unread_data(columns: dict[str, list[Any]], *, evaluates: bool) -> dict[str, Any]:
    """The arguments of TRL's trainers about data: they want a datasets.Dataset to look at; ours are never read through it."""
    looked_at = datasets.Dataset.from_dict(columns)
    return {"data_collator": list, "train_dataset": looked_at, "eval_dataset": looked_at if evaluates else None}
