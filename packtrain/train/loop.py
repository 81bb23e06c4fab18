"""One optimizer step of every objective, in the order in which it runs.

transformers' Trainer has the loop and TRL's trainers the objective; StepTrainer is a mixin that overrides their hooks. A
loader item is a whole optimizer step of this process, which runs through these hooks:

1. data         get_batch_samples: the micro-batches of the step (loader.py; their rows: packing/schedule.py, collate.py)
2. counts       _get_num_items_in_batch: tokens and documents of the global step, summed over ranks before the first forward
3. forward      training_step → `loss_of` (objectives/) → the wrapped model.forward (model/forward.py)
4. backward     training_step: gradients are exchanged with the last micro-batch
5. optimizer    judged by spikes.py; transformers' own: clipping, optimizer (over bfloat16 weights by optim/float32_step.py), schedule
6. log          `log`, and evaluation (metrics.py)
7. checkpoint   `_save_checkpoint` (checkpoint/hooks.py)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch.utils.data import DataLoader
from transformers import PrinterCallback

from packtrain.boundary import boundary
from packtrain.config.rules.paths_and_packages import without_package
from packtrain.model.load import base_model
from packtrain.model.precision import weights_cast_once
from packtrain.model.spread import check_active
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.collate import to_device
from packtrain.train.checkpoint.hooks import CheckpointHooks
from packtrain.train.checkpoint.writer import CheckpointWriter
from packtrain.train.loader import MicroBatch, step_loader
from packtrain.train.metrics import LoggingHooks, StepFigures
from packtrain.train.optim.float32_step import loses_updates, stepping_in_float32
from packtrain.train.optim.lost_updates import LostUpdates, advice
from packtrain.train.preflight import WATCHED_STEPS, FirstStepWatch
from packtrain.train.settings import LoopSettings
from packtrain.train.spikes import SpikeHooks
from packtrain.train.sync.rank_times import EXCHANGE_EVERY, RankTimes, StepClock


class StepTrainer(SpikeHooks, CheckpointHooks, LoggingHooks):
    """Trains by LoopSettings. A subclass calls `open_loop` in its __init__ and defines `loss_of` and `evaluated`."""

    model: Any  # never None here
    state: Any
    maybe_activation_offload_context: Any
    more_forwards = 0
    """Forward passes of a step beside the trained one: of a reference, of what an estimate is made over."""

    def open_loop(self, settings: LoopSettings) -> None:
        """Replaces TRL's own data, progress lines and checkpoints."""
        self.remove_callback(PrinterCallback)
        self.settings, self.steps = settings, settings.steps
        self.writer = CheckpointWriter(settings.say, settings.first_step or None)
        self.open_spikes(settings.spikes)
        self.watch: FirstStepWatch | None = None
        self._watched = 0
        self.lost = LostUpdates()
        self.close_proofs: Callable[[], None] = lambda: None
        self.last_loss = torch.zeros((), device=self.args.device)
        self._signals = [0, 0]
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        self.clock = StepClock(self.args.device, rank, ranks, limits=settings.limits)
        self.times = RankTimes(ranks, settings.say, settings.machines)
        figured: Any = (self.accelerator, self.model, self.compute_dtype, settings.steps)
        self.step_figures = StepFigures(*figured, forwards=self.more_forwards)
        # under FSDP2 the weights are spread already, see model/spread.py
        self.is_distributed_loading_by_transformers = settings.strategy == "fsdp2"

    @property
    def compute_dtype(self) -> torch.dtype:
        """The number format of computation."""
        return self.settings.autocast or base_model(self.model).dtype

    def autocast_of_forward(self, settings: LoopSettings) -> torch.dtype | None:
        """The autocast format to wrap the forward in: accelerate does this itself, except under DeepSpeed."""
        return settings.autocast if self.is_deepspeed_enabled else None

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """As the base class, but DDP's buckets are the gradients: it need not copy what it has reduced back to them."""
        arguments = super()._build_accelerator_args(**kwargs)
        for handler in arguments["kwargs_handlers"]:
            if isinstance(handler, DistributedDataParallelKwargs):
                handler.gradient_as_bucket_view = True
        return arguments

    # Defined by the objective.

    def loss_of(self, model: torch.nn.Module, batch: MicroBatch, counts: torch.Tensor) -> torch.Tensor:
        """Scalar: what a micro-batch adds to the loss of the step, times the number of processes.

        `counts` int64 are those of the whole step: trained targets, tokens, slots, examples.
        """
        raise NotImplementedError

    def open_step(self, batches: list[MicroBatch]) -> None:
        """Called before the micro-batches of a step."""

    # The hooks of a step, in order.

    def get_train_dataloader(self) -> DataLoader:
        """All steps of the run as one "epoch" of transformers' loop, from the resumed one on."""
        return step_loader(self.steps, first=self.settings.first_step, workers=self.settings.loader_workers)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """As the base class, after the last proof; makes sure that the strategy is what the config says."""
        self.close_proofs()
        prepared, loader = super()._prepare_for_training(max_steps, train_dataloader, None)
        check_active(self.settings.strategy, self.model_wrapped, self.model)
        if resume_from_checkpoint is not None:
            self.restore(Path(resume_from_checkpoint))
        self.lost.watch(self.optimizer)
        self.read_spikes(resume_from_checkpoint)
        if self.steps.left_out:  # known from here on
            loader = self.get_train_dataloader()
        if self.settings.largest_first and self.settings.first_step < len(self.steps):
            self.clock.enter("proof")
            self.try_largest(prepared)
        return prepared, loader

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As the base class; one that steps in float32 where weights would lose updates, except under DeepSpeed, which does so."""
        name = self.settings.optim.name
        making = partial(boundary, f"the optimizer {name} cannot be made", "optim.name", without_package(name))
        with making():
            chosen, arguments = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        optim, coarse = self.settings.optim, any(map(loses_updates, self.model.parameters()))
        coarse = coarse and not self.is_deepspeed_enabled
        self.lost.advice = advice(rounds_plainly=coarse and not optim.steps_in_float32)
        asked = optim.master_weights is True or optim.rounding == "stochastic"
        if asked and not coarse and not self.is_deepspeed_enabled:  # of dtype auto config/rules/ cannot know
            self.settings.say(
                "optim.master_weights and optim.rounding have nothing to do: no trained weight is bfloat16"
            )
        if coarse and optim.steps_in_float32:
            how: Any = {"masters": optim.keeps_masters, "rounding": optim.rounding, "seed": self.args.seed}
            self.optimizer_cls_and_kwargs = stepping_in_float32(chosen, **how), arguments
        with making():
            optimizer = super().create_optimizer(model)
        names = {weight: name for name, weight in self.model.named_parameters()}
        self.order = [names[weight] for group in optimizer.param_groups for weight in group["params"]]
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As the base class; raises UserError for options that its schedule does not take."""
        with boundary(f"the schedule {self.settings.optim.schedule} cannot be made", "optim.schedule_options"):
            return super().create_scheduler(num_training_steps, optimizer)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """1. The step's micro-batches, as the base class loads them, and their counts."""
        self.clock.enter("data", step=self.state.global_step + 1)
        self.writer.tell(". Training goes on")
        if self.state.global_step == self.settings.first_step + 1:
            self.prepare_checkpoints()
        return super().get_batch_samples(*args, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: list[list[MicroBatch]], device: torch.device) -> torch.Tensor:
        """2. Counts of the global step: trained targets, tokens, slots, examples. The same reduction carries the logged
        counts, requests to stop, and every EXCHANGE_EVERY steps or more the ranks' times. It is read a step later (`take_counts`):
        now the device would have to be waited for."""
        if not batch_samples:  # the Trainer would ask forever
            raise RuntimeError(f"the data ended after step {self.state.global_step}, before the length of the loader")
        batches = batch_samples[0]
        counts = [sum(column) for column in zip(*(batch.counts for batch in batches), strict=True)]
        self.clock.enter("counts")
        self.take_counts()
        self.settings.stop.agree(*self._signals)
        with_times = (self.state.global_step + 1) % max(self.state.logging_steps, EXCHANGE_EVERY) == 0
        timed = self.clock.steps if with_times else 0
        times = self.clock.slots() if timed else []
        total = to_device(torch.tensor([*counts, *self.settings.stop.counts(), *times]), device)
        with waiting("the counts of all ranks"):
            total = cast(torch.Tensor, self.accelerator.reduce(total, reduction="sum"))
        self.step_figures.open(total[:6])
        self.times.take(total[6:], timed)
        return total[:4]

    def training_step(
        self, model: torch.nn.Module, inputs: list[MicroBatch], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """3. and 4. Forward and backward over all micro-batches; gradients are exchanged with the last one only.

        Returns this rank's part of the loss, scaled so that the mean over ranks is the loss of the global step. After it
        (5.) transformers clips gradients and steps optimizer and schedule.
        """
        self._watch_first_steps(inputs)
        if self.state.global_step == self.settings.first_step:
            self.lost.measured = sum("updates_lost" in line for line in self.state.log_history)
        self.lost.open_step(self.state.global_step + 1)
        model.train()
        assert num_items_in_batch is not None
        total = torch.zeros((), device=self.args.device)
        self.open_step(inputs)
        # sharded weights are whole for one layer at a time, which copies of all of them would undo
        with nullcontext() if self.settings.sharded else weights_cast_once():
            for number, batch in enumerate(inputs, start=1):
                self.at_work(number, batch)
                self.clock.enter("forward", micro=number)
                with self._gradients_kept(model, last=number == len(inputs)):
                    with self.maybe_activation_offload_context:
                        loss = self.loss_of(model, batch, num_items_in_batch)
                    total += loss.detach()
                    self.open_judgement(total, num_items_in_batch)
                    self.clock.enter("backward", micro=number)
                    self.accelerator.backward(loss)
        if self.accelerator.num_processes == 1:  # nobody to agree with
            self.settings.stop.agree(*self.settings.stop.counts())
        self._work = None
        self.clock.enter("optimizer")
        self.last_loss = self.judge(model, total, num_items_in_batch)
        return self.last_loss

    @contextmanager
    def without_gathering(self) -> Iterator[None]:
        """Keeps TRL from gathering figures: processes may have different numbers of micro-batches, and would hang."""
        accelerator = self.accelerator
        self.accelerator = cast(Accelerator, _LocalAccelerator(accelerator))
        try:
            yield
        finally:
            self.accelerator = accelerator

    def take_counts(self) -> None:
        """Reads the counts of the last step: tokens, for lines and checkpoints, and the requests to stop, for the next step."""
        with waiting("the counts of all ranks"):  # where a GPU is behind, here is where its process learns of it
            counts = self.step_figures.take_last()
        if counts:
            _, tokens, _, _, *self._signals = counts
            self.state.num_input_tokens_seen += tokens

    def _prepare_input(self, data: Any) -> Any:
        """`data` (a tensor, or a dict, list or tuple of them) on this device, bit for bit.

        transformers would cast floating-point tensors to the format of DeepSpeed's weights: in bfloat16 a precomputed
        log-probability of -387.3 becomes -388.
        """
        if isinstance(data, torch.Tensor):
            return to_device(data, self.args.device)
        return super()._prepare_input(data) if isinstance(data, (dict, list, tuple)) else data

    def _watch_first_steps(self, batches: list[MicroBatch]) -> None:
        """Compares the first packed rows with their documents alone; this time does not count as training."""
        rows = [batch.inputs for batch in batches if "segments" in batch.inputs]
        if self.watch is None or not rows:
            return
        started, row = time.perf_counter(), self._prepare_inputs(rows[0])
        self.watch.check(self.model, row, step=self.state.global_step + 1)
        self._watched += 1
        if self._watched == WATCHED_STEPS:
            self.watch = None
        self.step_figures.leave_out(time.perf_counter() - started)

    def _gradients_kept(self, model: torch.nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Context of a micro-batch. DDP exchanges gradients with the last one only; sharded strategies do so with each.

        DeepSpeed's engine steps within the backward pass of the micro-batch that is marked as the last.
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


class _LocalAccelerator:
    """An accelerator whose gather returns this process's tensor."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    gather_for_metrics = gather
