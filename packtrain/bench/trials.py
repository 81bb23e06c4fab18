"""`packtrain bench` in one process: the run's own model, data, trainer and loop, in which the layout of steps changes.

An optimizer step is whatever the loader gives (train/loop.py), so one training visits all candidates: the model is loaded once,
all of them train on the same documents, and every process follows the same visits (search.py). Between visits the attention is
switched as packed rows and padded batches need it. The weights that come out are thrown away.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from rich.markup import escape
from transformers import TrainerCallback, TrainerControl

from packtrain.attention.backends import attending_by
from packtrain.bench.peak_memory import free_memory, peak_memory, reset_peak
from packtrain.bench.search import Candidate, Limits, Measured, Trial, Visit, best_of, families, is_clear, search
from packtrain.config.rules import check
from packtrain.config.schema import PackingMode, RunConfig, Tracking
from packtrain.errors import CheckFailed, PacktrainError, UserError
from packtrain.model.flops import training_flops
from packtrain.model.load import base_model, check_positions
from packtrain.model.score_head import outputs_of_tokens
from packtrain.model.spread import Ranks
from packtrain.monitor.heartbeat import TimeLimits, waiting
from packtrain.packing.schedule import Schedule, make_schedule
from packtrain.plan.batch import plan_batch
from packtrain.proof.isolation import check_as_it_comes
from packtrain.run_folder import RunFolder, write_json
from packtrain.train.library_errors import out_of_memory
from packtrain.train.loader import MicroBatch, PairSteps, ScoredSteps, Steps, attention_cost, step_loader
from packtrain.train.log.console import Log, warnings_to
from packtrain.train.loop import StepTrainer, run_steps
from packtrain.train.preparation import (
    begin,
    check_model,
    choose_attention,
    load,
    objective_of,
    prepare_data,
    settle_precision,
    spread_model,
)
from packtrain.train.settings import LoopSettings, StopRequest, training_arguments
from packtrain.train.sync.checks import Peers

_ENDLESS = 10**6
_COMPARED_STEPS = 8


def bench_in(config: RunConfig, ranks: Ranks, peers: Peers | None = None) -> int:
    """Measures in this process, of one or of many, and writes the report into the run folder."""
    folder = RunFolder.of(config.trainer)
    log = Log(folder.log(ranks.rank), main=ranks.main)
    warnings_to(log)
    lab = Workbench(config, ranks, peers, log)
    trials = Conductor(lab, folder, log).run()
    if ranks.main:
        known = json.loads(folder.benchmark.read_text())
        write_json(folder.benchmark, {**known, "report": lab.report(trials)})
    if not any(one.outcomes for one in trials):
        raise UserError(trials[0].why or "nothing could be measured", where="packtrain bench")
    return 0


class Workbench:
    """The loaded model and data of a config, and a trainer whose steps can be laid out by any candidate."""

    def __init__(self, config: RunConfig, ranks: Ranks, peers: Peers | None, log: Log) -> None:
        self.config, self.ranks = config, ranks
        self.pairs = config.objective.traits.pairs
        # what packed rows can do decides on all modes; `share_prefix` is tried both ways
        asked = replace(config, packing=replace(config.packing, mode="packed", share_prefix=None))
        self.run = run = begin(asked, ranks, peers)
        prepare_data(run)
        self.data: Any = run.data
        load(run)
        self.model, self.longest = run.model, run.objective.longest_document(run.data.train)
        check_model(run, padded=False)
        settle_precision(run)
        self.precision = run.precision
        spread_model(run)
        self.lack = self._choose_attention()
        objective: Any = run.objective
        self.shares, self.unshared = getattr(objective, "layout", "") == "shared", getattr(objective, "unshared", "")
        self.padding_lack = self._why_not_padded()
        self.cost, self.pad = attention_cost(self.model), int(run.tokenizer.pad_token_id or 0)
        self.trainer = self._trainer(objective, run.tokenizer, log)
        self.visits: tuple[Visit, ...] = ()
        if config.objective.kind == "sft":  # fits the output head; the others have none to fit
            objective.prove(self.trainer, log, run.attention, preflight=False, ranks=ranks, precision=self.precision)
        run.close_proofs()
        forwards = self.trainer.loss.extra_forwards
        self.flops = training_flops(self.model, forwards=forwards) if self.trainer.step_figures.peak else None
        self._known: dict[tuple[Candidate, float], Steps] = {}

    def _choose_attention(self) -> str:
        """Chooses the attention of packed rows as a run does; returns why there is none, "" if there is one."""
        try:
            choose_attention(self.run)
        except CheckFailed as refused:
            return refused.problems[0].what
        return ""

    def _why_not_padded(self) -> str:
        base = base_model(self.model)
        try:
            check_positions(self.model, self.longest, padded=True)
            if self.config.verify.preflight:
                with outputs_of_tokens(base):
                    check_as_it_comes(base, padding=True, autocast=self.precision.autocast)
        except PacktrainError as refused:
            return refused.problems[0].what
        return ""

    def _trainer(self, objective: Any, tokenizer: Any, log: Log) -> StepTrainer:
        """The trainer of the run, whose loop has no end; the attention of packed rows is switched on for each visit."""
        config = self.config
        least = self.least
        batch = replace(config.batch, tokens_per_device=max(config.batch.limits("packed")[1] or least, least))
        slots = self.data.train.lengths
        schedule = make_schedule(slots, replace(config.packing, mode="packed"), batch, max_steps=_ENDLESS)
        steps = self._with_stand_ins(objective, schedule) if not self.pairs else None
        of_pairs = ScoredSteps if config.objective.traits.scores else PairSteps
        ranks = self.ranks.rank, self.ranks.world_size
        steps = steps or of_pairs(self.data.train, schedule, "flat", self.pad, *ranks, reference=self._logps())
        settings = LoopSettings(
            steps,
            None,
            StopRequest(),
            RunFolder.of(config.trainer).checkpoints,
            {},
            say=log.warn,
            strategy=self.ranks.strategy,
            autocast=self.precision.autocast,
            optim=config.optim,
            limits=TimeLimits(config.topology.step_timeout),
        )
        arguments = training_arguments(config.trainer, config.optim, Tracking(), self.precision, settings)
        return StepTrainer(objective.loss(self.model, arguments, tokenizer, settings), settings)

    def _with_stand_ins(self, objective: Any, schedule: Schedule) -> Steps:
        """The steps, with stand-ins for precomputed log-probabilities, if any."""
        steps = objective.steps(self.data.train, schedule, self.pad, self.ranks)
        if self.pairs:
            return replace(steps, reference=self._logps())
        if self.config.objective.kind == "kto" and (known := self._logps()) is not None:
            endless = np.broadcast_to(np.float32(0), (1 << 40,))  # no memory
            return replace(steps, reference=known[:, 0], reference_mismatched=endless)
        return steps

    def _logps(self) -> np.ndarray | None:
        """Stand-ins for precomputed log-probabilities, which cost nothing in a step whatever they are."""
        precomputed = self.config.objective.reference == "precomputed"
        return np.zeros((len(self.data.train), 2), np.float32) if precomputed else None

    @property
    def least(self) -> int:
        """The smallest batch.tokens_per_device that the config may have: rows hold the longest document, or pair."""
        longest = max(self.longest, self.config.data.max_length or 0)
        return longest * (2 if self.pairs else 1)

    def refused(self, mode: PackingMode, shared: bool) -> str:
        """Why a mode cannot be had with this config; "" if it can."""
        if mode == "padding":
            return self.padding_lack
        if shared and not self.shares:
            return f"prompts cannot be shared: {self.unshared or self.lack}"
        return self.lack

    def changed(self, candidate: Candidate, part: float) -> RunConfig:
        """The config with a candidate's settings, and steps of only a `part`. Raises UserError if that cannot be."""
        config, world = self.config, self.ranks.world_size
        batch = candidate.batch(config.batch)
        made = replace(config, packing=candidate.packing(config.packing), batch=batch)
        for fault in check(made, set()):
            raise UserError(fault.what, where=", ".join(fault.keys))
        plan_batch(batch, candidate.mode, config.objective, config.trainer, world)
        if part < 1 and batch.examples_per_step:
            batch = replace(
                batch, examples_per_step=max(round(part * batch.examples_per_step), min(world, batch.examples_per_step))
            )
        elif part < 1 and batch.tokens_per_step and batch.tokens_per_device:
            unit = batch.tokens_per_device * world
            batch = replace(batch, tokens_per_step=max(int(part * batch.tokens_per_step) // unit, 1) * unit)
        return replace(made, batch=batch)

    def steps_of(self, candidate: Candidate, part: float) -> Steps:
        """Endless steps in a candidate's layout. Raises UserError if its micro-batches cannot hold a document."""
        if (candidate, part) not in self._known:
            config = self.changed(candidate, part)
            objective: Any = objective_of(config)
            if self.pairs:
                flat = "shared" if candidate.shared else "flat"
                objective.layout = "padding" if candidate.mode == "padding" else flat
            schedule = make_schedule(
                objective.slots(self.data.train),
                config.packing,
                config.batch,
                max_steps=_ENDLESS,
                seed=config.trainer.seed,
                shuffle=config.data.shuffle,
                attention_cost=self.cost,
            )
            self._known[candidate, part] = self._with_stand_ins(objective, schedule)
        return self._known[candidate, part]

    def layout_of(self, candidate: Candidate, part: float) -> str:
        """What names the micro-batches of the first steps of a candidate."""
        schedule, kind = self.steps_of(candidate, part).schedule, candidate.mode == "padding"
        some = (schedule.layout(step, self.ranks.world_size) for step in range(_COMPARED_STEPS))
        return repr((kind, candidate.shared, [[[one.tolist() for one in rank] for rank in step] for step in some]))

    def attend(self, candidate: Candidate) -> ExitStack:
        """Has the model, and the reference, run the rows of a candidate until the stack is closed."""
        stack = ExitStack()
        if candidate.mode != "padding" and self.run.backend is not None:
            for model in (self.trainer.model, getattr(self.trainer.loss.trl, "ref_model", None)):
                if model is not None:
                    stack.enter_context(attending_by(base_model(model), self.run.backend.backend.name))
        return stack

    def tokens(self, steps: Steps, numbers: range) -> int:
        """The tokens of all documents of these steps, whatever was computed once or padded."""
        return sum(int(steps.documents_of(number)[0].sum()) for number in numbers)

    def mfu(self, steps: Steps, numbers: range, seconds: float) -> float | None:
        """What these steps took of the devices' peak; None if that is not known."""
        peak = self.trainer.step_figures.peak
        if peak is None or self.flops is None:
            return None
        made = sum(self.flops.of(*steps.documents_of(number)) for number in numbers)
        return made / seconds / (peak.flops * self.ranks.world_size)

    def whole_step(self) -> float:
        """The mean tokens of a step of the config."""
        batch = self.config.batch
        if batch.tokens_per_step:
            return float(batch.tokens_per_step)
        return float(self.data.train.lengths.mean()) * min(batch.examples_per_step or 1, len(self.data.train))

    def report(self, trials: list[Trial]) -> dict[str, Any]:
        """All that was found, in plain values; the keys are a promise to users."""
        config, device, best = self.config, self.ranks.device, best_of(trials)
        name = (
            torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"the CPU, {torch.get_num_threads()} threads"
        )
        formats = str(self.precision.weights).removeprefix("torch.")
        mixed = self.precision.autocast and str(self.precision.autocast).removeprefix("torch.")
        unit = config.objective.traits.unit
        batch = config.batch
        configured = trials[0]
        part = self.visits[-1].part if self.visits else 1.0
        return {
            "model": config.model.path or f"a new {config.model.config.get('model_type')}",
            "objective": config.objective.kind,
            "device": name,
            "processes": self.ranks.world_size,
            "strategy": self.ranks.strategy,
            "precision": f"{formats}{f' computed in {mixed}' if mixed else ''}",
            "attention": self.run.backend and f"{self.run.backend.backend.name} ({self.run.backend.backend.why})",
            "step": {
                "size": f"{min(batch.examples_per_step, len(self.data.train))} {unit}"
                if batch.examples_per_step
                else f"{batch.tokens_per_step} tokens",
                "tokens": self.whole_step(),
                "part": part,
            },
            "trials": [self._told(one, configured) for one in trials],
            "best": None if best is None else self._told(best, configured) | {"clear": is_clear(best, configured)},
        }

    def _told(self, trial: Trial, configured: Trial) -> dict[str, Any]:
        documents, tokens = trial.candidate.batch(self.config.batch).limits(trial.candidate.mode)
        last = list(trial.outcomes.values())[-1:]
        ratios = trial.beside(configured)
        return {
            "mode": trial.candidate.mode,
            "share_prefix": trial.candidate.shared,
            "tokens_per_device": tokens,
            "examples_per_device": documents,
            "overrides": trial.candidate.overrides(),
            "configured": trial.configured,
            "why": trial.why,
            "tokens_per_second": trial.speed if last else None,
            "spread": trial.spread,
            "ratio": float(np.median(ratios)) if ratios else None,
            "rounds": len(trial.outcomes),
            "mfu": last[0].mfu if last else None,
            "peak_memory": max((one.peak for one in trial.outcomes.values()), default=None),
            "padding": last[0].padding if last else None,
            "micro_batches": last[0].micro_batches if last else None,
            "first_step_seconds": next(iter(trial.outcomes.values())).first_seconds if last else None,
        }


class Conductor(TrainerCallback):
    """Leads the trainer's loop through the visits; the loader gives the steps of the one at hand."""

    def __init__(self, lab: Workbench, folder: RunFolder, log: Log) -> None:
        self.lab, self._folder, self._log = lab, folder, log
        self._known = json.loads(folder.benchmark.read_text())
        self._limits = Limits(**self._agreed(self._known.get("limits") or asdict(self._own_limits())))
        if lab.ranks.main:  # a launch after this one decides by the same
            write_json(folder.benchmark, {**self._known, "limits": asdict(self._limits)})
        asked = lab.config.packing.share_prefix
        packing = replace(lab.config.packing, share_prefix=lab.shares if asked is None else asked)
        found = families(lab.config.batch, packing, lab.least, pairs=lab.pairs, refused=lab.refused)
        self._search = search(found, self._limits, lab.layout_of)
        self._trials: list[Trial] | None = None
        self._visit: Visit | None = None
        self._failed = ""
        self._stack = ExitStack()
        self._done, self._since, self._begun = 0, 0.0, 0.0
        self._counts = np.zeros(3)  # tokens and slots of the model's inputs, micro-batches
        self._first_seconds, self._loaded = 0.0, time.perf_counter()

    def run(self) -> list[Trial]:
        """All visits; returns the trials."""
        self._replay()
        if self._trials is not None:
            return self._trials
        trainer: Any = self.lab.trainer
        trainer.listeners.append(self)
        trainer.batches = lambda _: self._batches()
        trainer.forward_and_backward = self._caught(trainer.forward_and_backward)
        try:
            run_steps(trainer, None)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if out_of_memory(error) and not self._failed:  # between two steps
                self._failed = f"out of memory on {self.lab.ranks.device.type}"
                self._note()
            raise
        finally:
            self._stack.close()
        assert self._trials is not None
        return self._trials

    def _own_limits(self) -> Limits:
        lab, config = self.lab, self.lab.config
        batch, world = config.batch, lab.ranks.world_size
        rows = (batch.limits("packed")[1] or 1) / (batch.tokens_per_step or 1)
        # a step has at least a row of each process
        probe = world * (rows if batch.tokens_per_step else 2 / (batch.examples_per_step or 1))
        memory = None if lab.ranks.device.type == "cuda" else free_memory(world)
        return Limits(self._known["seconds"], memory, lab.whole_step(), min(probe, 1.0))

    def _agreed(self, own: Any) -> Any:
        """The value of rank 0, on all ranks."""
        if self.lab.ranks.world_size == 1:
            return own
        with waiting("rank 0"):
            return cast(list, broadcast_object_list([own]))[0]

    def _replay(self) -> None:
        """Goes through what launches before this one have measured, as long as the search asks for it."""
        events = self._agreed(self._known["events"])
        self._next(None)
        for event in events:
            visit = Visit(**{**event["visit"], "candidate": Candidate(**event["visit"]["candidate"])})
            if self._visit != visit:
                return
            self._next(Measured(**event["outcome"]))

    def _next(self, outcome: Measured | None) -> None:
        """Asks the search for the next visit."""
        self._stack.close()
        try:
            self._visit = next(self._search) if outcome is None else self._search.send(outcome)
        except StopIteration as end:
            self._visit, self._trials = None, end.value
            return
        self.lab.visits += (self._visit,)

    def _open(self, visit: Visit) -> Iterator[list[MicroBatch]]:
        """The steps of a visit, as the run's loader gives them."""
        lab = self.lab
        steps = lab.steps_of(visit.candidate, visit.part)
        self._stack = lab.attend(visit.candidate)
        self._done, self._failed, self._counts = 0, "", np.zeros(3)
        last = visit.first + visit.warm + visit.steps
        short = replace(steps, schedule=replace(steps.schedule, total_steps=last))
        reset_peak(lab.ranks.device)
        self._begun = self._since = time.perf_counter()
        return iter(step_loader(short, first=visit.first))

    def _batches(self) -> Iterator[list[MicroBatch]]:
        while (visit := self._visit) is not None:
            for batches in self._open(visit):
                yield batches
                if self._visit is not visit:  # it failed
                    break

    def _caught(self, step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The trainer's step; running out of memory ends the visit, or, of several processes, the launch."""

        def forward_and_backward(batches: list[MicroBatch], counts: torch.Tensor) -> torch.Tensor:
            self._counts += [sum(one.tokens for one in batches), sum(one.slots for one in batches), len(batches)]
            try:
                return step(batches, counts)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                self._failed = f"out of memory on {self.lab.ranks.device.type}"
                if self.lab.ranks.world_size > 1 or self.lab.ranks.strategy != "ddp":
                    self._note()
                    raise
            self.lab.trainer.engine.wrapped.zero_grad()
            gc.collect()
            torch.cuda.empty_cache()
            return torch.zeros((), device=self.lab.ranks.device)

        return forward_and_backward

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> TrainerControl:
        """Closes the visit after its last step, and chooses the next one."""
        visit = self._visit
        assert visit is not None
        self._done += 1
        if self._done == 1:
            self._settle()
            self._first_seconds = time.perf_counter() - self._begun
        if self._done == visit.warm and not self._failed:
            self._settle()
            self._since, self._counts = time.perf_counter(), np.zeros(3)
        if self._failed or self._done == visit.warm + visit.steps:
            outcome = self._outcome(visit)
            self._write(visit, outcome)
            self._next(outcome)
            control.should_training_stop = self._visit is None
        return control

    def _settle(self) -> None:
        if self.lab.ranks.device.type == "cuda":
            torch.cuda.synchronize()

    def _outcome(self, visit: Visit) -> Measured:
        """What the visit measured, the same on all processes."""
        lab = self.lab
        self._settle()
        seconds = max(time.perf_counter() - self._since, 1e-9)
        own = (peak_memory(lab.ranks.device), *self._counts.tolist())
        with waiting("what all ranks measured"):
            every = gather_object([own]) if lab.ranks.world_size > 1 else [own]
        peak, (tokens, slots, micro) = max(one[0] for one in every), np.sum([one[1:] for one in every], axis=0)
        if self._failed:
            return self._agreed(Measured(failed=self._failed, elapsed=self._elapsed()))
        steps = lab.steps_of(visit.candidate, visit.part)
        numbers = range(visit.first + visit.warm, visit.first + visit.warm + visit.steps)
        return self._agreed(
            Measured(
                tokens=lab.tokens(steps, numbers),
                seconds=seconds,
                first_seconds=self._first_seconds,
                peak=peak,
                padding=float(1 - tokens / max(slots, 1)),
                micro_batches=float(micro / visit.steps / lab.ranks.world_size),
                mfu=lab.mfu(steps, numbers, seconds),
                elapsed=self._elapsed(),
            )
        )

    def _elapsed(self) -> float:
        """Seconds of measuring, those of earlier launches included."""
        before = max((one["outcome"]["elapsed"] for one in self._known["events"]), default=0.0)
        return before + time.perf_counter() - self._loaded

    def _write(self, visit: Visit, outcome: Measured) -> None:
        """Keeps the outcome for a launch after this one, and tells of it (main process only)."""
        if not self.lab.ranks.main:
            return
        written = json.loads(self._folder.benchmark.read_text())
        event = {"visit": asdict(visit), "outcome": asdict(outcome)}
        write_json(self._folder.benchmark, {**written, "events": [*written["events"], event]})
        said = outcome.failed or f"{outcome.tokens / outcome.seconds:,.0f} tokens/s"
        self._log.say(f"{outcome.elapsed:4.0f} s  {escape(' '.join(visit.candidate.overrides()))}: {said}")

    def _note(self) -> None:
        """Says in a file of its own what this process had no memory for."""
        event = {
            "visit": asdict(cast(Visit, self._visit)),
            "outcome": asdict(Measured(failed=self._failed, elapsed=self._elapsed())),
        }
        write_json(self._folder.root / f"out-of-memory-{self.lab.ranks.rank:05d}.json", event)
