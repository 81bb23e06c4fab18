"""The loop over optimizer steps (`run_steps`), and its parts (`StepTrainer`).

The objective defines the loss (objectives/loss.py). engine.py has the model with its optimizer and schedule, for all strategies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from transformers.trainer_utils import align_special_tokens

from packtrain.errors import Json
from packtrain.model.spread import max_over_ranks
from packtrain.monitor.heartbeat import waiting
from packtrain.packing.collate import on_device
from packtrain.train.checkpoint.folder import folder_of
from packtrain.train.checkpoint.state import Checkpoints
from packtrain.train.engine import engine_of
from packtrain.train.loader import MicroBatch, StepDocuments, Steps, WorkRecord, step_loader
from packtrain.train.log.ledger import Ledger
from packtrain.train.log.metrics import EXCHANGE_EVERY, RankTimes, SourceCounts, StepClock, StepMetrics, StepSums
from packtrain.train.objectives.loss import Loss
from packtrain.train.optim.dither import FEW, SeenUpdates
from packtrain.train.preflight import WATCHED_STEPS, FirstStepWatch, try_largest
from packtrain.train.run_state import Listener, LoopSettings, Measure, RunState
from packtrain.train.spikes import Judgement, Norm, SpikeJudge


def run_steps(trainer: StepTrainer, checkpoint: Path | None) -> None:
    """Run the steps after `checkpoint`, or all, until a stop request.

    Under DeepSpeed, parts 4 to 6 happen inside the last backward pass of a step, in DeepSpeed's engine: their code here only reads the results.
    Raises CheckFailed if a spike ends the run.
    """
    trainer.prepare(checkpoint)
    for listener in trainer.listeners:
        listener.train_begin(trainer.state)
    if trainer.evaluation and not trainer.settings.first_step:
        trainer.evaluate()
    upcoming = trainer.load_steps(checkpoint)
    while trainer.should_continue():
        # 1. data: this rank's micro-batches of the step, laid out by packing/schedule.py and collated by loader.py
        micro_batches = trainer.next_batches(upcoming)
        # 2. counts of the whole step: every share of the loss is divided by one, so they are needed before the first forward pass
        counts = trainer.sum_counts(micro_batches)
        # 3. forward and backward of each micro-batch; gradients add up
        loss = trainer.forward_and_backward(micro_batches, counts)
        # 4. clip
        norm = trainer.clip()
        # 5. judge: a step whose loss or gradient norm is a spike gets no update, or takes the run back to a checkpoint
        judgement = trainer.judge(loss, norm, counts)
        if judgement.rollback_to is not None:
            upcoming = trainer.roll_back(*judgement.rollback_to)
            continue
        # 6. update
        rate = trainer.update(judgement.loss)
        # 7. log
        if trainer.should_log():
            trainer.log_step(judgement.norm, rate)
        # 8. evaluate
        if trainer.should_evaluate():
            trainer.evaluate()
        # 9. checkpoint
        if trainer.should_save():
            trainer.save_checkpoint()


class StepTrainer:
    """Trainer of a run. `listeners` are told of its steps, logged lines and evaluations."""

    def __init__(self, loss: Loss, settings: LoopSettings, listeners: Sequence[Listener] = ()) -> None:
        self.loss, self.settings = loss, settings
        self.steps, self.evaluation = settings.steps, dict(settings.evaluation)
        self.model, self.accelerator = loss.model, loss.accelerator
        self.engine = engine_of(settings.strategy)(loss, settings)
        self.checkpoints = Checkpoints(self.engine, settings, loss.tokenizer)
        self.writer = self.checkpoints.writer
        self.spikes = SpikeJudge(settings.spikes, self.accelerator, settings.say)
        self.work = WorkRecord(loss.device)
        self.changes: dict[str, str] = {}
        """Decisions about changes to how the model computes (preflight.py), by name."""
        self.first_step_watch: FirstStepWatch | None = None
        self.seen_updates = SeenUpdates()
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        self.clock = StepClock(loss.device, rank, ranks, limits=settings.limits)
        self.times = RankTimes(ranks)
        dtype, forwards = loss.compute_dtype, loss.extra_forwards
        self.step_metrics = StepMetrics(self.accelerator, self.model, dtype, settings.steps, forwards=forwards)
        self.source_counts = SourceCounts(settings.steps.data.report.sources)
        loss.report_phase = self.clock.enter
        self.ledger: Ledger | None = None
        self.measures: list[Measure] = []
        self.state, self.listeners = RunState(), [*listeners]
        self._steps_watched, self._resumed_from = 0, None
        self._loss_and_counts = (torch.zeros(()), torch.zeros(4))  # of the current step, for `_judge_for_engine`
        self._sums: StepSums  # of the current step
        self._documents: StepDocuments  # of the current step
        self._losses_since_log: list[torch.Tensor] = []
        self._documents_since_log: list[StepDocuments] = []
        self._forget_step: Callable[[], None] = lambda: None
        """Removes the current step's figures from the objective's metrics: a skipped step leaves none."""

    # Before the first step.

    def prepare(self, checkpoint: Path | None) -> None:
        """Spread the model, make optimizer and schedule, and restore the state of `checkpoint`."""
        self.restore_state(checkpoint)
        align_special_tokens(self.model, self.loss.tokenizer)
        self.engine.prepare(len(self.steps), self.settings.say)
        if checkpoint is not None:
            self.checkpoints.restore(checkpoint)
        if self.engine.dither.rounded and "fp8" not in self.loss.changes:  # fp8 has other cells
            self.seen_updates.watch(self.engine.plain_optimizer, self.engine.masters_of)
        self.seen_updates.measured = sum("updates_seen" in line for line in self.state.lines)
        self.engine.ask_before_update(self._judge_for_engine)
        self.spikes.read(checkpoint)
        self._resumed_from = checkpoint
        self.steps = self.spikes.without_skipped(self.steps)
        if self.settings.largest_first and self.settings.first_step < len(self.steps):
            self.clock.enter("proof")
            try_largest(self)
        self.engine.wrapped.zero_grad()

    def restore_state(self, checkpoint: Path | None) -> None:
        """Restore the state of the run from `checkpoint`, if any. The length of the run is this run's."""
        self.state = RunState() if checkpoint is None else RunState.load(checkpoint)
        self.state.last_step = len(self.steps)
        self._losses_since_log, self._documents_since_log = [], []
        self.source_counts.restore(self.state.lines)

    def load_steps(self, checkpoint: Path | None) -> Iterator[list[MicroBatch]]:
        """Return an iterator over the coming steps: this rank's micro-batches of each.

        Restores the random generators from `checkpoint`.
        """
        if checkpoint is not None:
            self.checkpoints.restore_random_state(checkpoint, self.state.step)
            if self.steps.feed is not None:
                self.steps.feed.go_on_from(checkpoint, self.state.step)
                self.state.last_step = self.steps.feed.end_after(self.state.step, self.state.last_step)
        return iter(step_loader(self.steps, first=self.state.step))

    # The parts of a step, in order.

    def should_continue(self) -> bool:
        """Return whether to run another step."""
        stops = self.state.stops or self.settings.stop.agreed
        return self.state.step < self.state.last_step and not stops

    def next_batches(self, upcoming: Iterator[list[MicroBatch]]) -> list[MicroBatch]:
        """Return this rank's micro-batches of the next step."""
        self.clock.enter("data", step=self.state.step + 1)
        since, batches = time.perf_counter(), next(upcoming)
        self.step_metrics.add_waiting(time.perf_counter() - since)
        if self.steps.feed is not None:
            self.state.last_step = self.steps.feed.end_after(self.state.step + 1, self.state.last_step)
        return batches

    def sum_counts(self, micro_batches: list[MicroBatch]) -> torch.Tensor:
        """Return the counts of the global step, int64 [4]: trained targets, tokens, slots, examples.

        The same reduction carries stop requests, at times the ranks' times, and a stream's marks, which show whether ranks read the same
        rows. The host reads the result after the update (`_read_counts`): reading it here would wait for the device.
        """
        counts = [sum(column) for column in zip(*(batch.own_counts for batch in micro_batches), strict=True)]
        self.clock.enter("counts")
        with_times = (self.state.step + 1) % max(self.settings.trainer.log_every, EXCHANGE_EVERY) == 0
        timed = self.clock.steps if with_times else 0
        parts = {
            "counts": counts,
            "stops": self.settings.stop.counts(),
            "times": self.clock.reduction_values() if timed else [],
            "marks": self.steps.feed.marks if self.steps.feed else [],
        }
        with waiting("the counts of all ranks"):
            self._sums = StepSums(self.accelerator, self.loss.device, parts)
        total = self._sums.on_device
        self.step_metrics.open(total["counts"], self.state.step)
        self.times.store(total["times"], timed)
        return total["counts"]

    def forward_and_backward(self, micro_batches: list[MicroBatch], counts: torch.Tensor) -> torch.Tensor:
        """Run all micro-batches forward and backward. Ranks exchange gradients when Engine.exchanging_gradients says so.

        Returns this rank's part of the step's loss, float32 scalar. The mean of the parts over ranks is the loss of the global step.
        """
        self._watch_first_steps(micro_batches)
        self.seen_updates.step = self.state.step + 1
        model = self.engine.wrapped
        model.train()
        total = torch.zeros((), device=self.loss.device)
        self._forget_step = self.loss.mark_metrics()
        self.loss.open_step(micro_batches)
        steps, step = self.steps.at(self.state.step)
        self._documents = steps.list_trained(step, self.state.step + 1)
        with self.engine.casting_once():
            for number, batch in enumerate(micro_batches, start=1):
                self.work.begin(self.state.step, number, batch)
                self.clock.enter("forward", micro=number)
                with self.engine.exchanging_gradients(last=number == len(micro_batches)):
                    loss = self.loss.compute(model, batch, counts)
                    self._documents.found.append((batch.numbers, self.loss.by_document))
                    total += loss.detach()
                    self._loss_and_counts = total, counts
                    self.clock.enter("backward", micro=number)
                    self.accelerator.backward(loss)
        if self.accelerator.num_processes == 1:  # stop now: with more ranks, `_read_counts` says what all agreed on
            self.settings.stop.agree(*self.settings.stop.counts())
        self.work.end()
        return total

    def clip(self) -> Norm:
        """Clip the step's gradients to optim.max_grad_norm; return their norm before clipping."""
        self.clock.enter("optimizer")
        return self.engine.clip()

    def judge(self, loss: torch.Tensor, norm: Norm, counts: torch.Tensor) -> Judgement:
        """Judge a step before its update. `loss` is this rank's part of the step's loss.

        Raises CheckFailed if the run stops at a spike.
        """
        if not self.spikes.judges_every_step:
            return Judgement(loss, norm)
        step = self.state.step + 1
        # DeepSpeed's engine called `_judge_for_engine` within the backward pass
        if not self.engine.spec.steps_in_backward and self.spikes.judge(step, loss, norm, counts):
            self.engine.wrapped.zero_grad()  # the update then changes no weight: optimizers skip weights without a grad
        if not self.spikes.spike_reason:
            return Judgement(loss, norm)
        self._forget_step()
        back = self.spikes.decide(step, self._newest_checkpoint, self._measure_example_losses)
        return Judgement(None, torch.tensor(self.spikes.recent.last()[1]), back)

    def update(self, loss: torch.Tensor | None) -> float:
        """Update the weights; return the learning rate.

        `loss` is this rank's part of the step's loss, for the log. None: the step was skipped, has no gradients, and only the schedule advances.
        """
        self.clock.enter("optimizer")
        if loss is not None:
            self._losses_since_log.append(loss)
            self._documents_since_log.append(self._documents)
        rate = self.engine.update()
        self.source_counts.add(self.steps.at(self.state.step)[0], self._documents)
        self.state.step += 1
        self.state.epoch = self.steps.schedule.epoch_of(self.state.step)
        self._read_counts()
        for listener in self.listeners:
            listener.step_end(self.state)
        return rate

    def should_log(self) -> bool:
        """Return whether to log this step.

        It is due after the first, every trainer.log_every, the last, and each evaluated or saved step. A line sums up the steps since the last line. A saved step ends a line, so a run that resumes from it writes the same lines.
        """
        step = self.state.step
        due = step in (1, self.state.last_step) or step % self.settings.trainer.log_every == 0
        return due or self.should_evaluate() or self.should_save()

    def log_step(self, norm: Norm, rate: float) -> None:
        """Log a line on the steps since the last one.

        It has their mean loss, counts and figures, the last gradient `norm` and learning `rate`. If all of them were skipped, the loss is the one of the last step before them.
        """
        self.clock.enter("step end")
        self.writer.warn_of_failures(". Training goes on")
        losses = self._losses_since_log or [torch.tensor(self.spikes.recent.last()[0], device=self.loss.device)]
        with waiting("the loss of all ranks"):
            loss = cast(torch.Tensor, self.accelerator.gather(torch.stack(losses).mean())).mean().item()
        self._raise_if_not_finite(loss)
        if self.ledger is not None and self._documents_since_log:
            self.ledger.gather(self.loss, self._documents_since_log)
        self._losses_since_log, self._documents_since_log = [], []
        line = {
            "loss": loss,
            "grad_norm": norm.item() if isinstance(norm, torch.Tensor) else norm,
            "learning_rate": rate,
            "tokens": self.state.tokens,
        }
        line |= (
            self.source_counts.metrics()
            | self.step_metrics.close()
            | self.loss.pop_metrics()
            | self.times.pop_metrics()
        )
        self._log(line | self._pop_seen_updates() | self.spikes.pop_metrics())

    def should_evaluate(self) -> bool:
        """Return whether to evaluate after this step: every trainer.eval_every, and the last."""
        step, every = self.state.step, self.settings.eval_every
        return every is not None and (step % every == 0 or step >= self.state.last_step)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Log the objective's metrics over all evaluation sets together and over each named one.

        They depend neither on the layout of rows nor on the number of ranks.
        """
        started = time.perf_counter()
        self.clock.enter("eval", step=self.state.step)
        self.model.eval()
        sets = {name: partial(self._evaluation_batches, steps) for name, steps in self.evaluation.items()}
        found = self.loss.evaluate(sets)
        for measure in self.measures:
            found |= measure.figures(self.state)
        metrics = {f"eval_{name}": value for name, value in found.items()}
        self.state.epoch = self.steps.schedule.epoch_of(self.state.step)
        self._log(dict(metrics))
        for listener in self.listeners:
            listener.evaluate(self.state, metrics)
        self.model.train()
        self.step_metrics.exclude_time(time.perf_counter() - started)

    def should_save(self) -> bool:
        """Return whether to write a checkpoint after this step.

        It is due every trainer.checkpoint_every, after the last and the best step, and when the run stops.
        """
        step = self.state.step
        every = self.settings.trainer.checkpoint_every
        due = every is not None and (step % every == 0 or step >= self.state.last_step)
        return due or self.state.saves or bool(self.settings.stop.agreed)

    def save_checkpoint(self) -> None:
        """Start to write the checkpoint of this step in the background. The step has been logged, so its loss is finite."""
        self.clock.enter("checkpoint", step=self.state.step)
        if self.ledger is not None:
            self.writer.write_later(self.ledger.wait)
        self.checkpoints.save(self.state, self.spikes.recent)
        self.state.saves = False

    def roll_back(self, step: int, folder: Path) -> Iterator[list[MicroBatch]]:
        """Restore everything from the checkpoint of `step`; return the micro-batches of the steps after it."""
        self.clock.enter("checkpoint", step=step)
        self.step_metrics.forget()
        self.loss.pop_metrics()
        self.engine.wrapped.zero_grad()
        self.checkpoints.restore(folder)
        self.restore_state(folder)
        self.spikes.roll_back(folder)
        self.steps = self.spikes.without_skipped(self.steps)
        for listener in self.listeners:  # lines of later steps will be written again
            listener.rolled_back(self.state)
        return self.load_steps(folder)

    # Parts of parts.

    def _read_counts(self) -> None:
        """Read the step's tokens, stop requests and marks on the host."""
        with waiting("the counts of all ranks"):  # the host waits here if its GPU lags behind
            total = self._sums.read()
        if self.steps.feed is not None and total["marks"]:
            self.steps.feed.check_marks(*total["marks"], self.accelerator.num_processes)
        _, tokens, _, _ = total["counts"]
        self.state.tokens += tokens
        self.settings.stop.agree(*total["stops"])

    def _watch_first_steps(self, micro_batches: list[MicroBatch]) -> None:
        """Compare packed rows of the first steps with runs of their single documents. The time does not count as training."""
        rows = [batch.inputs for batch in micro_batches if "segments" in batch.inputs and batch.parts == 1]
        if self.first_step_watch is None or not rows:
            return
        started, row = time.perf_counter(), on_device(rows[0], self.loss.device)
        self.first_step_watch.check(self.model, row, step=self.state.step + 1)
        self._steps_watched += 1
        if self._steps_watched == WATCHED_STEPS:
            self.first_step_watch = None
        self.step_metrics.exclude_time(time.perf_counter() - started)

    def _judge_for_engine(self, norm: Callable[[], torch.Tensor]) -> bool | None:
        """Judge a step before DeepSpeed's engine updates. Return whether it is a spike. None: steps are not judged."""
        if self.work.tried is not None:  # preflight.py tries a row: no step runs
            return True  # no update
        loss, counts = self._loss_and_counts
        step, judges = self.state.step + 1, self.spikes.judges_every_step
        return self.spikes.judge(step, loss, norm(), counts) if judges else None

    def _newest_checkpoint(self) -> tuple[int, Path] | None:
        """Return step and folder of the newest checkpoint, as rank 0 finds it. None if there is none, or its folder is gone."""
        self.clock.enter("checkpoint")
        self.writer.wait()
        step, folder = self.writer.outcome.newest, None
        if step is not None and self.accelerator.is_main_process:
            # the checkpoint that the run resumed from may be in another run folder
            resumed_from = self._resumed_from if step == self.settings.first_step else None
            places = (folder_of(self.settings.checkpoints, step), resumed_from)
            folder = next((place for place in places if place is not None and place.is_dir()), None)
        with waiting("rank 0 to find the checkpoint"):
            folder = cast(list, broadcast_object_list([folder]))[0]
        return None if step is None or folder is None else (step, folder)

    def _measure_example_losses(self) -> list[tuple[int, float]]:
        """Return number and loss of each example of the current step. All ranks together measure them, with the current weights."""
        losses = list[tuple[int, float]]()
        steps, step = self.steps.at(self.state.step)
        parts = steps.schedule.micro_batches(step, steps.rank, steps.world_size)
        mine = [(number, split) for part, split in parts for number in part.tolist() if steps.trains_on(number, step)]
        self.model.eval()
        with torch.no_grad(), self.loss.keeping_metrics():
            # with sharded weights every rank must run the same number of forward passes
            for at in range(max_over_ranks(len(mine), self.loss.device)):
                number, is_split = mine[at] if at < len(mine) else (None, False)
                batch = steps.collate_part(np.array([] if number is None else [number], np.int64), is_split)
                counts = torch.tensor(batch.counts, device=self.loss.device)
                loss = self.loss.compute(self.model, batch, counts).item() / self.accelerator.num_processes
                losses += [] if number is None else [(number, loss)]
        self.model.train()
        with waiting("the example losses of all ranks"):
            every = gather_object(losses)
        of_parts: dict[int, float] = {}  # each of the ranks that split a document has a part of its loss
        for number, loss in every:
            of_parts[number] = of_parts.get(number, 0.0) + loss
        return list(of_parts.items())

    def _raise_if_not_finite(self, loss: float) -> None:
        """Raise CheckFailed on every process if `loss` is not finite.

        `loss` is a mean since the last line; the error names the first step with a loss that is not finite.
        """
        if math.isfinite(loss):
            return
        last, losses = self.state.step, torch.stack(self._losses_since_log)
        with waiting("the losses of all ranks"):
            losses = cast(torch.Tensor, self.accelerator.reduce(losses, reduction="sum")).tolist()
        first = next((at for at, one in enumerate(losses) if not math.isfinite(one)), len(losses) - 1)
        step = last - len(losses) + 1 + first
        steps, at = self.steps.at(step - 1)
        self.spikes.stop_at(step, losses[first], steps.schedule.documents(at).tolist())

    def _log(self, line: Json) -> None:
        """Keep a line in the state of the run, and tell the listeners."""
        line["epoch"] = self.state.epoch
        self.state.lines.append({**line, "step": self.state.step})
        for listener in self.listeners:
            listener.log(self.state, line)

    def _pop_seen_updates(self) -> dict[str, float]:
        """Return `updates_seen` (dither.py) since the last line, if measured. Warn once if it is small."""
        sums = self.seen_updates.pop(self.loss.device)
        if sums is None:
            return {}
        with waiting("the seen updates of all ranks"):
            seen, made = cast(torch.Tensor, self.accelerator.reduce(sums, reduction="sum")).tolist()
        if not made:
            return {}
        if seen / made < FEW and not self.seen_updates.warned:
            self.seen_updates.warned = True
            what = "of the weight updates are seen by the model, which computes in bfloat16"
            self.settings.say(f"{max(seen / made, 0):.0%} {what}: {self.seen_updates.advice} (docs/precision.md)")
        return {"updates_seen": seen / made}

    def _evaluation_batches(
        self, steps: Steps, transform: Callable[[Any], Any] = lambda steps: steps
    ) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of an evaluation set; `transform` may replace its steps.

        All ranks wait for each other after each step, so that no collective waits longer than one step takes.
        """
        for number, batches in enumerate(step_loader(transform(steps))):
            for batch in batches:
                self.clock.enter("eval", micro=number)
                yield batch
            with waiting("the others' part of the evaluation"):
                self.accelerator.reduce(torch.zeros((), device=self.loss.device))
