"""The loop over optimizer steps, from top to bottom (`run_steps`), and the parts that it calls (`StepTrainer`).

transformers makes optimizer and schedule, accelerate spreads the model, TRL's trainers have the loss; the loop is ours.
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
from transformers import PrinterCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import DefaultFlowCallback
from transformers.trainer_utils import align_special_tokens

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


def run_steps(trainer: StepTrainer, checkpoint: Path | None) -> None:
    """Runs the steps from that of `checkpoint` (None: from the first one) to the last, or until the run is to stop.

    Raises CheckFailed where a step's figures end the run.
    """
    model = trainer.prepare(checkpoint)
    trainer.notify("train_begin")
    if trainer.settings.evaluation and not trainer.settings.first_step:
        trainer.evaluate()
    batches = trainer.batches(checkpoint)
    while trainer.goes_on():
        trainer.notify("step_begin")
        # 1. data: this rank's micro-batches of the step, laid out by packing/schedule.py and collated by loader.py
        micro_batches = trainer.next_batches(batches)
        # 2. counts: trained targets, tokens, slots and examples of the step, summed over ranks before the first forward pass
        counts = trainer.sum_counts(micro_batches)
        # 3. forward and backward: the loss is the sum over the step's tokens (or examples) over their number
        part = trainer.forward_and_backward(model, micro_batches, counts)
        # 4. clip
        norm = trainer.clip(model)
        # 5. judge: whether the step is a spike, whose update is not made
        judged = trainer.judge(model, part, norm, counts)
        if judged.back is not None:
            batches = trainer.go_back(model, *judged.back)
            continue
        # 6. update
        trainer.clock.enter("optimizer")
        rate = trainer.update(model, judged.loss)
        trainer.notify("step_end")
        # 7. log
        if trainer.logs():
            trainer.log_step(judged.norm, rate)
        # 8. evaluate
        if trainer.evaluates():
            trainer.evaluate()
        # 9. checkpoint
        if trainer.saves():
            trainer.save_checkpoint()
            trainer.notify("save")
    trainer.notify("train_end")


class StepTrainer(SpikeHooks, CheckpointHooks, LoggingHooks):
    """Trains by LoopSettings. A subclass calls `open_loop` in its __init__ and defines `loss_of` and `evaluated`."""

    model: Any  # never None here
    state: Any
    maybe_activation_offload_context: Any
    more_forwards = 0
    """Forward passes of a step beside the trained one: of a reference, of what an estimate is made over."""

    def open_loop(self, settings: LoopSettings) -> None:
        """Replaces TRL's own data, progress lines and checkpoints."""
        for callback in (PrinterCallback, DefaultFlowCallback):
            self.remove_callback(callback)
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

    # Before the first step.

    def prepare(self, checkpoint: Path | None) -> Any:
        """The model as it is called in a step: spread, with optimizer and schedule, and in the state of `checkpoint`."""
        self.open_state(checkpoint)
        self.accelerator.free_memory()
        if self.args.activation_checkpointing:
            how = self.args.activation_checkpointing_kwargs or None
            self.model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
        align_special_tokens(self.model, self.processing_class)
        self.close_proofs()
        model, _ = self._prepare_for_training(len(self.steps), None, None)
        check_active(self.settings.strategy, self.model_wrapped, self.model)
        if checkpoint is not None:
            self.restore(checkpoint)
        self.lost.watch(self.optimizer)
        self.lost.measured = sum("updates_lost" in line for line in self.state.log_history)
        self.read_spikes(checkpoint)
        if self.settings.largest_first and self.settings.first_step < len(self.steps):
            self.clock.enter("proof")
            self.try_largest(model)
        model.zero_grad()
        return model

    def open_state(self, checkpoint: Path | None) -> None:
        """Begins the state of the run, or takes it up from `checkpoint`; this run's log_every, eval_every and length hold."""
        self.state = TrainerState()
        if checkpoint is not None:
            self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        self.state.init_training_references(self, len(self.steps), 1, None)
        self.state.compute_steps(self.args, len(self.steps))
        self.loss_since_line = torch.zeros((), device=self.args.device)
        self._last_line = self.state.global_step

    def batches(self, checkpoint: Path | None) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step to come, on this rank; the state of chance is that of `checkpoint`."""
        if checkpoint is not None:
            self._load_rng_state(str(checkpoint))
        return iter(step_loader(self.steps, first=self.state.global_step))

    def notify(self, event: str) -> None:
        """Tells those that listen to the run: metrics.jsonl, the terminal, trackers (run.py)."""
        self.control = getattr(self.callback_handler, f"on_{event}")(self.args, self.state, self.control)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As the base class; one that steps in float32 where weights would lose updates, except under DeepSpeed, which does so."""
        name = self.settings.optim.name
        making = partial(boundary, f"the optimizer {name} cannot be made", "optim.name", without_package(name))
        with making():
            chosen, arguments = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        optim, coarse = self.settings.optim, any(map(loses_updates, self.model.parameters()))
        coarse = coarse and not self.is_deepspeed_enabled
        self.lost.advice = advice(rounds_plainly=coarse and not optim.steps_in_float32)
        asked = optim.bf16_rounding in ("stochastic", "nearest")
        if asked and not coarse and not self.is_deepspeed_enabled:  # of dtype auto config/rules/ cannot know
            self.settings.say("optim.bf16_rounding has nothing to do: no trained weight is bfloat16")
        if coarse and optim.steps_in_float32:
            how: Any = {"masters": optim.keeps_masters, "rounding": optim.bf16_rounding, "seed": self.args.seed}
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

    # The parts of a step, in order.

    def goes_on(self) -> bool:
        """Whether another step is to be made."""
        stops = self.control.should_training_stop or self.settings.stop.agreed
        return self.state.global_step < self.state.max_steps and not stops

    def next_batches(self, batches: Iterator[list[MicroBatch]]) -> list[MicroBatch]:
        """This rank's micro-batches of the next step."""
        self.clock.enter("data", step=self.state.global_step + 1)
        self.writer.tell(". Training goes on")
        if self.state.global_step == self.settings.first_step + 1:
            self.prepare_checkpoints()
        return next(batches)

    def sum_counts(self, batches: list[MicroBatch]) -> torch.Tensor:
        """int64 [4], counts of the global step: trained targets, tokens, slots, examples.

        The same reduction carries the logged counts, requests to stop, and every EXCHANGE_EVERY steps or more the ranks' times. Its
        result is read on the host a step later (`take_counts`): now the device would have to be waited for.
        """
        counts = [sum(column) for column in zip(*(batch.counts for batch in batches), strict=True)]
        self.clock.enter("counts")
        self.take_counts()
        self.settings.stop.agree(*self._signals)
        with_times = (self.state.global_step + 1) % max(self.state.logging_steps, EXCHANGE_EVERY) == 0
        timed = self.clock.steps if with_times else 0
        times = self.clock.slots() if timed else []
        total = to_device(torch.tensor([*counts, *self.settings.stop.counts(), *times]), self.args.device)
        with waiting("the counts of all ranks"):
            total = cast(torch.Tensor, self.accelerator.reduce(total, reduction="sum"))
        self.step_figures.open(total[:6])
        self.times.take(total[6:], timed)
        return total[:4]

    def forward_and_backward(self, model: Any, batches: list[MicroBatch], counts: torch.Tensor) -> torch.Tensor:
        """Over all micro-batches; gradients are exchanged with the last one only.

        Returns this rank's part of the loss, scaled so that the mean over ranks is the loss of the global step.
        """
        self._watch_first_steps(batches)
        self.lost.open_step(self.state.global_step + 1)
        model.train()
        part = torch.zeros((), device=self.args.device)
        self.open_step(batches)
        # sharded weights are whole for one layer at a time, which copies of all of them would undo
        with nullcontext() if self.settings.sharded else weights_cast_once():
            for number, batch in enumerate(batches, start=1):
                self.at_work(number, batch)
                self.clock.enter("forward", micro=number)
                with self._gradients_kept(model, last=number == len(batches)):
                    with self.maybe_activation_offload_context:
                        loss = self.loss_of(model, batch, counts)
                    part += loss.detach()
                    self.open_judgement(part, counts)
                    self.clock.enter("backward", micro=number)
                    self.accelerator.backward(loss)
        if self.accelerator.num_processes == 1:  # nobody to agree with
            self.settings.stop.agree(*self.settings.stop.counts())
        self._work = None
        return part

    def clip(self, model: Any) -> Any:
        """The norm of the step's gradients, which are clipped to optim.max_grad_norm; DeepSpeed's engine has done so."""
        self.clock.enter("optimizer")
        norm = self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        return self._get_grad_norm(model, norm)

    def update(self, model: Any, loss: torch.Tensor) -> float:
        """Makes the update of the step, whose part of the loss on this rank is `loss`; returns its learning rate."""
        self.last_loss = loss
        self.loss_since_line += loss
        cast(Any, self.optimizer).step()
        rate = self._get_learning_rate()
        if not self.accelerator.optimizer_step_was_skipped:
            cast(Any, self.lr_scheduler).step()
        model.zero_grad()
        self.state.global_step += 1
        self.state.epoch = self.steps.schedule.epoch_of(self.state.global_step)
        return rate

    def logs(self) -> bool:
        """Whether this step has a line: the first, every trainer.log_every, and the last."""
        step, state = self.state.global_step, self.state
        return (
            step == 1 or step % state.logging_steps == 0 or step >= state.max_steps or bool(self.settings.stop.agreed)
        )

    def evaluates(self) -> bool:
        """Whether the evaluation set is run after this step: every trainer.eval_every, and the last."""
        step, state = self.state.global_step, self.state
        return self.args.eval_strategy == "steps" and (step % state.eval_steps == 0 or step >= state.max_steps)

    def saves(self) -> bool:
        """Whether this step has a checkpoint: every trainer.checkpoint_every, the last, the best one, one that the run stops after."""
        step = self.state.global_step
        timely = step % self.state.save_steps == 0 or step >= self.state.max_steps
        wanted = self.control.should_save or bool(self.settings.stop.agreed)
        return wanted or (timely and self.args.save_strategy != "no")

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
