"""What every objective's trainer has in common: a loader item is a whole optimizer step of this process.

A mixin in front of a trainer of TRL. What it changes, and nothing else: a step has any number of micro-batches; what the step
holds is counted as tensors and reduced over ranks before the first forward pass, so that a loss can be normalised by
the global batch; checkpoints are complete or absent; nothing is reported to anyone.
"""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import datasets
import torch
from torch.utils.data import DataLoader
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    SchedulerType,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from trl import DPOConfig, SFTConfig
from trl.trainer.utils import compute_flops_per_token, get_peak_flops_per_device

from packtrain.config.schema import SHARDED_WEIGHTS, RunConfig
from packtrain.errors import CheckFailed
from packtrain.model.load import base_model
from packtrain.model.spread import (
    arguments_of,
    check_active,
    compute_in,
    load_shards,
    load_weights,
    save_shards,
    whole_weights,
)
from packtrain.monitor.heartbeat import TimeLimits, waiting
from packtrain.run_folder import write_json
from packtrain.train import checkpoint
from packtrain.train.loader import MicroBatch, PairSteps, Steps, step_loader
from packtrain.train.metrics import TerminalProgress
from packtrain.train.preflight import WATCHED_STEPS, FirstStepWatch
from packtrain.train.rank_times import TOLD_EVERY, Machines, RankTimes, StepClock

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object  # the trainer of TRL that this stands in front of


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """The steps of a run and where it stands in them.

    `origin` is what a resumed run must agree on with its checkpoint, `strategy` is strategy.name, `computed_in` what mixed
    precision computes in (None: the format of the weights). The main process knows the `machines`.
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
    computed_in: torch.dtype | None = None
    limits: TimeLimits | None = None


def placeholder(columns: dict[str, list[Any]]) -> datasets.Dataset:
    """TRL wants a datasets.Dataset to look at; ours are never read through it."""
    return datasets.Dataset.from_dict(columns)


class StepTrainer(_Trainer):
    """Trains along a LoopSettings. The trainer that uses it calls `open_loop` in its __init__, and says what a loss is."""

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
        self._last_loss = torch.zeros((), device=self.args.device)
        self._window = _Window()
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        self.clock = StepClock(self.args.device, rank, ranks, limits=settings.limits)
        self.times = RankTimes(self.accelerator.num_processes, settings.say, settings.machines)
        self._flops_share = self._flops_share_of_a_token()
        self.is_distributed_loading_by_transformers = (
            settings.strategy == "fsdp2"
        )  # spread already, see train/strategy.py
        if settings.computed_in is not None and self.is_deepspeed_enabled:
            compute_in(base_model(self.model), settings.computed_in)

    @property
    def precision(self) -> torch.dtype:
        """What the model computes in."""
        return self.settings.computed_in or base_model(self.model).dtype

    # -- what an objective says

    def loss_of(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """Scalar: what a micro-batch adds to the loss of the step, times the number of processes.

        `counts` int64 are those of the whole step: trained targets, tokens, slots, examples.
        """
        raise NotImplementedError

    def open_step(self, batches: list[MicroBatch]) -> None:
        """Called before the micro-batches of a step."""

    def figures(self) -> dict[str, Any]:
        """What the objective adds to a logged training line; called on every rank."""
        return {}

    # -- what a step is made of

    def get_train_dataloader(self) -> DataLoader:
        """All steps of the run as one "epoch" of transformers' loop, from the resumed one on."""
        return step_loader(self.steps, first=self.settings.first_step, workers=self.settings.loader_workers)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class: the next step's data and its counts."""
        self.clock.enter("data", step=self.state.global_step + 1)
        return super().get_batch_samples(*args, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: list[list[MicroBatch]], device: torch.device) -> torch.Tensor:
        """Counts of the global step: trained targets, tokens, slots, examples. The same reduction counts what is logged, and agrees on stopping."""
        if not batch_samples:  # Trainer's loop would ask for ever
            raise RuntimeError(
                f"the data ended after step {self.state.global_step}, before the length that the loader told"
            )
        batches = batch_samples[0]
        counts = [sum(column) for column in zip(*(batch.counts for batch in batches), strict=True)]
        self.clock.enter("counts")
        told = (self.state.global_step + 1) % max(self.state.logging_steps, TOLD_EVERY) == 0
        timed = self.clock.steps if told else 0
        times = self.clock.slots() if timed else []
        total = torch.tensor([*counts, *self.settings.stop.counts(), *times], device=device)
        with waiting("the counts of all ranks"):
            total = cast(torch.Tensor, self.accelerator.reduce(total, reduction="sum"))
        self._window.open(total[:6])
        self.times.take(total[6:], timed)
        return total[:4]

    def training_step(
        self, model: torch.nn.Module, inputs: list[MicroBatch], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Forward and backward over all micro-batches; gradients are exchanged with the last one only.

        Returns this rank's part of the loss, scaled so that the mean over ranks is the loss of the global step.
        """
        if self.watch is not None and (rows := [batch.inputs for batch in inputs if "segments" in batch.inputs]):
            self._watch(self.watch, self._prepare_inputs(rows[0]))
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
        _, tokens, _, _, *signals = self._window.last.tolist()
        # with the step and not with the logged line: a checkpoint may lie between two lines
        self.state.num_input_tokens_seen += tokens
        self.settings.stop.agree(*signals)
        self._last_loss = total
        self.clock.enter("optimizer")
        return total

    def _watch(self, watch: FirstStepWatch, row: dict[str, Any]) -> None:
        """Has the first steps compared with padded ones; the time that it takes is not training's."""
        started = time.perf_counter()
        watch.check(self.model, row, step=self.state.global_step + 1)
        if not self._watched and self.settings.strategy not in SHARDED_WEIGHTS:
            watch.check_gradients(self.model, row)
        self._watched += 1
        self.watch = watch if self._watched < WATCHED_STEPS else None
        self._window.leave_out(time.perf_counter() - started)

    def _gradients_kept(self, model: torch.nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch. DDP exchanges gradients with the last one only; what spreads them does so with each.

        DeepSpeed's engine steps within the backward pass of the micro-batch that it is told to be the last.
        """
        if self.is_deepspeed_enabled:
            self.accelerator.gradient_state._set_sync_gradients(last)
            return nullcontext()
        return nullcontext() if last else self.accelerator.no_sync(model)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class, after the last proof; makes sure that the strategy is what the config says."""
        self.close_proofs()
        prepared = super()._prepare_for_training(*args, **kwargs)
        check_active(self.settings.strategy, self.model_wrapped, self.model)
        return prepared

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted here: the logged MFU comes from token counts."""
        return 0

    # -- what is reported

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Adds the exact counts of the steps since the last line to a training line."""
        self.state.epoch = self.steps.schedule.epoch_of(self.state.global_step)
        if "loss" in logs:
            self.clock.enter("step end")
            self._refuse_nan(logs["loss"])
            counts, seconds = self._window.close()
            _, tokens, slots, examples, _, _ = counts.tolist()
            rate = tokens / max(seconds, 1e-9)
            logs["tokens"] = self.state.num_input_tokens_seen
            logs["tokens_per_second"] = rate
            logs["padding_fraction"] = 1 - tokens / max(slots, 1)
            logs["examples"] = examples
            logs["mfu"] = rate * self._flops_share if self._flops_share else None
            logs |= self.figures() | self.times.figures()
        super().log(logs, start_time)

    def _refuse_nan(self, loss: float) -> None:
        """Raises CheckFailed on every process for a loss that is no number: nothing after it is worth its time."""
        if not math.isfinite(loss):
            raise CheckFailed(
                f"the loss is {loss:g} at step {self.state.global_step}",
                where="optim.learning_rate",
                fix="lower it, warm up, or clip (optim.max_grad_norm); the checkpoints before this step are kept",
            )

    def _flops_share_of_a_token(self) -> float | None:
        """Model FLOPs of a token at the mean document length / peak FLOPs of all devices in a second, by TRL's tables.

        None where TRL knows neither the device nor the architecture.
        """
        if self.args.device.type != "cuda":
            return None
        precision = str(self.precision).removeprefix("torch.")
        peak = get_peak_flops_per_device(self.accelerator, precision)
        try:
            flops = compute_flops_per_token(base_model(self.model).config, int(self.steps.data.lengths.mean()))
        except (AttributeError, RuntimeError, TypeError):  # its formula asks for fields that not every config has
            return None
        return flops / (peak * self.accelerator.num_processes) if peak else None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class; the live bar is taken down also when training ends by an error."""
        try:
            return super().train(*args, **kwargs)
        finally:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, TerminalProgress):
                    callback.close()

    @torch.no_grad()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The objective's figures over the whole evaluation set, whatever the layout and the number of ranks."""
        started = time.perf_counter()
        self.clock.enter("eval", step=self.state.global_step)
        self.model.eval()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in self.evaluated().items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self.model.train()
        self._window.leave_out(time.perf_counter() - started)
        return metrics

    def evaluated(self) -> dict[str, float]:
        """Figures over the evaluation set by name, `loss` among them; called in eval mode, on every rank."""
        raise NotImplementedError

    def evaluation_batches(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the evaluation set. The ranks meet after each of its steps, as in training: so the
        faster ones wait for one step of the slower ones at a time, whatever time the whole takes."""
        assert self.settings.evaluation is not None
        for number, batches in enumerate(step_loader(self.settings.evaluation, workers=self.settings.loader_workers)):
            for batch in batches:
                self.clock.enter("eval", micro=number)
                yield batch
            with waiting("the others' part of the evaluation"):
                self.accelerator.reduce(torch.zeros((), device=self.args.device))

    # -- what is kept

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Writes the checkpoint of this step aside and renames it when all ranks have written."""
        self.clock.enter("checkpoint", step=self.state.global_step)
        with waiting("the loss of all ranks"):
            last = cast(torch.Tensor, self.accelerator.reduce(self._last_loss, reduction="sum")).item()
        self._refuse_nan(last)
        step, main = self.state.global_step, self.accelerator.is_main_process
        target = checkpoint.folder_of(self.settings.checkpoints, step)
        staging = checkpoint.staging_of(self.settings.checkpoints, step)
        if main:
            shutil.rmtree(staging, ignore_errors=True)  # an interrupted write, maybe of more ranks than these
            staging.mkdir(parents=True)
        self._meet("rank 0 to make the folder of the checkpoint")
        if self.settings.strategy not in SHARDED_WEIGHTS:  # else they would have to be gathered for it
            self.save_model(str(staging), _internal_call=True)
        self._save_optimizer_and_scheduler(str(staging))
        self._save_rng_state(str(staging))
        if main:
            for callback in (*self.callback_handler.callbacks, self.control):
                if isinstance(callback, ExportableState):
                    self.state.stateful_callbacks[type(callback).__name__] = callback.state()
            self.state.save_to_json(str(staging / TRAINER_STATE_NAME))
            write_json(staging / checkpoint.ORIGIN, self.settings.origin)
        self._meet("all ranks to write their parts of the checkpoint")
        if main:
            checkpoint.complete(staging, target)
            best = self.state.best_global_step
            kept = checkpoint.folder_of(self.settings.checkpoints, best) if best else None
            checkpoint.prune(self.settings.checkpoints, self.settings.keep_checkpoints, kept)
        self._meet("rank 0 to complete the checkpoint")

    def _meet(self, what: str) -> None:
        with waiting(what):
            self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes a folder that from_pretrained loads; called by all processes, written by the main one."""
        main, adapters = self.accelerator.is_main_process, base_model(self.model) is not self.model
        if self.settings.strategy == "fsdp2":
            weights = whole_weights(self.model, keep=main, trained_only=adapters)
            if main:
                self._save(output_dir, state_dict=weights)
        elif self.settings.strategy in SHARDED_WEIGHTS:
            super().save_model(output_dir, _internal_call)
        elif main:
            self._save(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.settings.strategy != "fsdp2":
            return super()._save_optimizer_and_scheduler(output_dir)
        save_shards(self.model, self._plain_optimizer(), Path(output_dir))
        if self.accelerator.is_main_process:
            torch.save(cast(Any, self.lr_scheduler).state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.settings.strategy != "fsdp2":
            return super()._load_optimizer_and_scheduler(checkpoint)
        load_shards(self.model, self._plain_optimizer(), Path(checkpoint))
        cast(Any, self.lr_scheduler).load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.settings.strategy != "fsdp2":  # whose weights come with the optimizer's state
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        return cast(Any, self.optimizer).optimizer

    def load_best_weights(self) -> None:
        """Puts the weights of the evaluation with the lowest loss back into the model."""
        if self.state.best_global_step and self.state.best_global_step != self.state.global_step:
            self.state.best_model_checkpoint = str(
                checkpoint.folder_of(self.settings.checkpoints, self.state.best_global_step)
            )
            if self.settings.strategy == "fsdp2":
                load_weights(self.model, Path(self.state.best_model_checkpoint))
            else:
                self._load_best_model()

    def _send_telemetry(self) -> None:
        """packtrain reports to nobody."""


class _Window:
    """Counts and time of the steps since the last logged line."""

    def __init__(self) -> None:
        self.last = torch.zeros(6, dtype=torch.int64)
        self._sum = torch.zeros(6, dtype=torch.int64)
        self._since: float | None = None

    def open(self, counts: torch.Tensor) -> None:
        self.last = counts
        self._sum = self._sum.to(counts.device) + counts
        self._since = time.perf_counter() if self._since is None else self._since

    def leave_out(self, seconds: float) -> None:
        self._since = None if self._since is None else self._since + seconds

    def close(self) -> tuple[torch.Tensor, float]:
        """(counts, seconds), and starts anew."""
        counts, seconds = self._sum, time.perf_counter() - (self._since or time.perf_counter())
        self._sum, self._since = torch.zeros_like(self._sum), None
        return counts, seconds


class StopRequest:
    """The signal that this process was sent (0: none), and the one that all ranks have agreed to stop for."""

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


class StopCallback(TrainerCallback):
    """Ends the loop after the step in which the ranks agreed, with a checkpoint."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs
    ) -> TrainerControl:
        """Asks for the checkpoint and the end."""
        if self._stop.agreed:
            control.should_log = control.should_save = control.should_training_stop = True
        return control


Arguments = TypeVar("Arguments", SFTConfig, DPOConfig)


def training_arguments(
    config: RunConfig,
    kind: type[Arguments],
    model: PreTrainedModel,
    *,
    total_steps: int,
    on_cpu: bool,
    has_eval: bool,
    starts_anew: bool,
    **objective: Any,
) -> Arguments:
    """Arguments of a run of `total_steps` optimizer steps on the loaded `model`; `objective` are those of the trainer's own.

    Everything about batches is left at one: a DataLoader item is a whole optimizer step of this process, already split
    into micro-batches (train/whole_steps.py), so transformers' own accumulation and sampling have nothing to do.
    """
    optim, trainer = config.optim, config.trainer
    return kind(
        output_dir=trainer.output_dir,
        max_steps=total_steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        ignore_data_skip=True,  # our sampler starts at the resumed step by itself
        optim=optim.name,
        learning_rate=optim.learning_rate,
        lr_scheduler_type=SchedulerType(optim.schedule),
        lr_scheduler_kwargs=dict(optim.schedule_options),
        warmup_steps=optim.warmup_steps if optim.warmup_steps < 1 else int(optim.warmup_steps),
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_epsilon=optim.epsilon,
        max_grad_norm=optim.max_grad_norm,
        activation_checkpointing=trainer.gradient_checkpointing,
        use_cpu=on_cpu,  # without it several CPU processes silently train copies of their own
        seed=trainer.seed,
        logging_steps=trainer.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # a NaN must be seen
        save_strategy="steps" if trainer.checkpoint_every else "no",
        save_steps=trainer.checkpoint_every or 1,
        eval_strategy="steps" if trainer.eval_every and has_eval else "no",
        eval_steps=trainer.eval_every,
        eval_on_start=has_eval and starts_anew,
        report_to=list(config.tracking.report_to) or "none",
        run_name=config.tracking.run_name or Path(trainer.output_dir).name,
        ddp_timeout=config.topology.step_timeout,
        ddp_find_unused_parameters=False,
        # what a forward pass keeps (rotary frequencies) every rank computes itself; and forward passes would wait for rank 0
        ddp_broadcast_buffers=False,
        disable_tqdm=True,
        remove_unused_columns=False,
        max_length=None,
        **arguments_of(config, model),
        **objective,
    )
