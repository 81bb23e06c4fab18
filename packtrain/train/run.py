"""A training run in one process, from the resolved config to the trained model (`train_in`).

This file and preparation.py see the whole config. Code below them takes its own group, and values that are decided here once.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import cast

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from rich.markup import escape

from packtrain.attention.backends import deterministic
from packtrain.attention.kernel_choice import keep_kernels
from packtrain.changes.spec import proposals
from packtrain.config.schema import DEFAULT_ROW_TOKENS, RunConfig, Trainer
from packtrain.config.yaml_files import shown
from packtrain.data.prepare import PreparedData
from packtrain.errors import Json, LostPeers, PacktrainError, UserError, boundary
from packtrain.inspect.audit import sample_answers
from packtrain.inspect.corpus import RowPlaces, find_places, open_corpus
from packtrain.model.forward import outputs_of_tokens
from packtrain.model.layers import can_recompute
from packtrain.model.load import base_model, check_positions, check_trainable, is_reward_model
from packtrain.model.precision import settle_kernels
from packtrain.model.save import end_answers_at, mend_generation_config, try_saving
from packtrain.model.spread import Ranks, machines_of, open_strategy
from packtrain.monitor.foreign_launch import beat_to_rank_0
from packtrain.monitor.heartbeat import TimeLimits, own_heartbeat, waiting
from packtrain.objectives.spec import RIGHT_ANSWERS
from packtrain.packing.feed import Feed
from packtrain.plan.fit import Memory
from packtrain.plan.memory import Found, possible_policies
from packtrain.plan.origin import check_length, check_origin, length_of, origin_in, shared_values
from packtrain.proof.exhibits import check_pictures
from packtrain.proof.isolation import check_causal_and_padding
from packtrain.run_folder import RunFolder, object_of, write_json
from packtrain.system import stopped_by, told_at_once
from packtrain.train import preparation, results
from packtrain.train.checkpoint.folder import find_resume, origin_of, prune, set_aside, step_of
from packtrain.train.checkpoint.state import KERNELS
from packtrain.train.library_errors import explained, memory_error
from packtrain.train.loader import Steps
from packtrain.train.log import console
from packtrain.train.log.console import Log, quiet_libraries
from packtrain.train.log.ledger import Ledger
from packtrain.train.log.metrics import EarlyStop, MetricsFile, TerminalProgress
from packtrain.train.log.trackers import Tracker, leave_stuck_ones, trackers_of
from packtrain.train.loop import StepTrainer, run_steps
from packtrain.train.measures.due import Measures
from packtrain.train.measures.generation import ALONE, Generator
from packtrain.train.measures.harness import HarnessTasks, load_tasks
from packtrain.train.measures.right_answers import RightAnswers, score_of
from packtrain.train.objectives.loss import Setup
from packtrain.train.objectives.training_objective import Start
from packtrain.train.optim.dither import Dither
from packtrain.train.optim.weight_groups import freeze_unreached, reduce_unreached
from packtrain.train.preflight import find_largest, make_changes
from packtrain.train.preparation import Prepared
from packtrain.train.questions import Question, make_questions
from packtrain.train.run_state import Listener, LoopSettings, RunState, StopRequest
from packtrain.train.sight import exhibits_of, picture_batch, take_sight
from packtrain.train.spikes import SpikeRules
from packtrain.train.sync import Peers, agree_on_start, check_run_folder, connect, join, limit_collectives, preparing_s
from packtrain.wording import clean, counted, listed

_MAX_DESCRIBED = 200_000
"""Describe the data at the end of a run up to this many documents (2 s at most); `packtrain report` describes larger data."""


@dataclass(slots=True)
class Run:
    """State shared by the functions of this file. `prepared` is set once preparation begins.

    `questions`: trainer.samples. `before`: answers of the untrained model to them.
    """

    config: RunConfig
    ranks: Ranks
    peers: Peers | None
    folder: RunFolder
    log: Log
    stop: StopRequest
    progress: TerminalProgress
    prepared: Prepared = field(init=False)
    questions: list[Question] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    tasks: Json = field(default_factory=dict)
    trackers: list[Tracker] = field(default_factory=list)
    closing: ExitStack = field(default_factory=ExitStack)


Work = Callable[[RunConfig, Ranks, Peers | None], int]
Finish = Callable[[Run, StepTrainer, results.Summary], None]


def train(verb: str, config: RunConfig, work: Work | None = None) -> int:
    """Run `verb` in this process, which may be one of many. Return the exit code.

    `work` is for verbs that do not train. Raises PacktrainError for the user.
    """
    quiet_libraries(on_cpu=not torch.cuda.is_available())
    settle_kernels()
    own_heartbeat().enter("join")
    ranks, peers = _join(verb, config)
    own_heartbeat().enter("proof")
    try:
        run = work or (verify_in if verb == "verify" else train_in)
        with deterministic(config.trainer.deterministic):
            code = run(config, ranks, peers)
            leave_stuck_ones(code)
            return code
    except (Exception, SystemExit) as error:
        own_heartbeat().progress()  # tells the watchdog that this rank does not hang
        folder = RunFolder.of(config.trainer)
        known = error if isinstance(error, PacktrainError) else explained(error, ranks, folder, config.batch)
        leave_stuck_ones(1 if known is None else known.exit_code)
        if known is None:
            raise
        cause = error.__cause__ if known is error else error
        if cause is not None and folder.logs.is_dir():  # the user sees one sentence of it
            words = str(cause) if isinstance(known, LostPeers) else "".join(traceback.format_exception(cause))
            with suppress(OSError):  # a full disk may be the cause
                Log(folder.log(ranks.rank), main=False).note(clean(words))
        raise known from cause
    finally:
        gc.collect()  # frees DeepSpeed's engine before its process groups are destroyed
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def train_in(config: RunConfig, ranks: Ranks, peers: Peers | None = None, finish: Finish | None = None) -> int:
    """Run data, model, steps and proofs, training, results in this process. `finish` replaces the results."""
    started = time.perf_counter()
    folder = RunFolder.of(config.trainer)
    log = Log(folder.log(ranks.rank), main=ranks.main)
    answers = [RIGHT_ANSWERS] if config.trainer.answers else []
    progress = TerminalProgress(log, [*config.objective.spec.figures, *answers])
    run = Run(config, ranks, peers, folder, log, StopRequest(config.topology.grace), progress)
    with run.closing:
        return _train(run, *_prepare(run, started), finish, started)


def _train(run: Run, trainer: StepTrainer, checkpoint: Path | None, finish: Finish | None, started: float) -> int:
    """Run from step 1 on; return the exit code."""
    config, log = run.config, run.log
    if checkpoint is not None:
        # until the first step: ranks finish reading at different times
        limit_collectives(TimeLimits(config.topology.step_timeout).collective_s("checkpoint"))
    early = config.trainer.early_stop_patience is not None
    run.stop.listen()  # before this a signal simply ends the process: there is nothing to save
    summary = results.Summary(trainer, run.prepared.data, run.prepared.backend, started, early)
    with ExitStack() as ending:
        ending.enter_context(told_at_once(lambda number: log.say(_while_stopping(trainer, number))))
        for writer in (*run.trackers, *([trainer.ledger] if trainer.ledger else [])):
            ending.callback(writer.close)
        try:
            with trainer.writer:
                run_steps(trainer, checkpoint)
                trainer.clock.enter("checkpoint")
        except RuntimeError as error:
            if known := memory_error(error, trainer, run.prepared):
                raise known from error
            raise
        except KeyboardInterrupt:  # the second Ctrl-C
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            run.progress.close()
            _say_stopped(run, trainer, summary, signal.SIGINT)
            raise
        finally:
            run.progress.close()
        step = trainer.state.step
        if not run.stop.agreed or step >= trainer.state.last_step:  # after the last step nothing is left to stop
            (finish or _finish)(run, trainer, summary)
            return 0
        _say_stopped(run, trainer, summary, run.stop.agreed)
        return 128 + run.stop.agreed


def _while_stopping(trainer: StepTrainer, number: int) -> str:
    """Say what happens after the first signal."""
    step, newest = trainer.state.step + 1, trainer.writer.outcome.newest
    what = f"finishing step {step}" if step <= trainer.state.last_step else "finishing the run"
    again = f"again stops now, {f'from checkpoint {newest}' if newest else 'without a checkpoint'}"
    return f"{what}; {again}" if number == signal.SIGINT else f"{what}, after SIGTERM"


def _say_stopped(run: Run, trainer: StepTrainer, summary: results.Summary, number: int) -> None:
    """Write and say where a run stopped, and where it can resume."""
    _write_summary(run, summary.to_json("stopped"))
    step, newest = trainer.state.step, trainer.writer.outcome.newest
    place = "there" if newest == step else f"step {newest}" if newest else "the start, for there is no checkpoint"
    run.log.say(f"{stopped_by(number)} after step {step}; the same command goes on from {place}")


def _prepare(run: Run, started: float) -> tuple[StepTrainer, Path | None]:
    """Prepare everything before step 1. Return the trainer, and the checkpoint to resume from."""
    config, ranks, peers, log = run.config, run.ranks, run.peers, run.log
    console.warn_of_compiler(log, ranks.device)
    if config.trainer.answers:
        score_of(config.trainer.answers, "trainer.answers")  # refused before anything large is loaded
    checkpoint, today = _checkpoint_to_resume(run)
    needed = checkpoint is not None or config.trainer.checkpoint_every is not None
    if ranks.world_size > 1 and (remark := check_run_folder(run.folder.logs, main=ranks.main, needed=needed)):
        log.warn(remark)
    if checkpoint is not None and "model.attention" not in config.trainer.resume_despite:
        keep_kernels(object_of(checkpoint / KERNELS), log.warn)

    prepared = run.prepared = preparation.begin(config, ranks, peers)
    prepared.day = (origin_in(checkpoint) if checkpoint else {}).get("data.day") or today
    preparation.prepare_data(prepared, progress=ranks.main and sys.stderr.isatty())
    data, tokenizer = prepared.data, prepared.tokenizer
    remarks, ends = sample_answers(data.train, tokenizer, config.data.max_length)
    for remark in remarks if ranks.main and not log.evaluates else ():
        log.warn(remark)

    if config.trainer.tasks:
        run.tasks = load_tasks(config.trainer.tasks, "trainer.tasks")
    preparation.load(prepared)
    take_sight(prepared)
    base, scores = base_model(prepared.model), config.objective.spec.scores
    if not scores and is_reward_model(base.config) and config.model.init == "pretrained":
        log.warn(f"{config.model.path} is a reward model or classifier: its head is left away, and final/ has none")
    if not log.evaluates:
        check_trainable(prepared.model)
    check_positions(prepared.model, prepared.longest, padded=config.packing.mode == "padding")

    trainer = _make_trainer(run, checkpoint)
    if not log.evaluates:
        _try_saving(run, ends)
    run.questions = make_questions(config.trainer.samples, tokenizer, config.data.system, data.eval)
    run.before = _answers(run)
    if config.trainer.answers or run.tasks:
        trainer.measures.append(_measures_of(run))
    begins = f"resuming from {checkpoint.name}" if checkpoint else "evaluating" if log.evaluates else "training"
    with suppress(OSError):  # a later write reports the disk's error
        if ranks.main and (remark := trainer.checkpoints.warning_of_space(config.trainer.checkpoint_every)):
            log.warn(remark)
    log.fact("ready", f"{begins} after {time.perf_counter() - started:.1f} s")
    _wait_for_all(run, "ready")
    _begin_run_folder(run, checkpoint, trainer.settings.origin)
    _wait_for_all(run, "run folder")
    prepared.close_proofs()
    return trainer, checkpoint


def evaluate_in(config: RunConfig, ranks: Ranks, peers: Peers | None = None) -> int:
    """Run the evaluation of `packtrain eval` in this process. It is prepared like a training, without a step; the summary has the figures."""
    folder = RunFolder.of(config.trainer)
    log = Log(folder.log(ranks.rank), main=ranks.main, evaluates=True)
    run = Run(config, ranks, peers, folder, log, StopRequest(), TerminalProgress(log))
    with run.closing:
        trainer, _ = _prepare(run, time.perf_counter())
        trainer.listeners, trainer.settings = [], replace(trainer.settings, largest_first=False)
        trainer.prepare(None)
        trainer.evaluate()
    figures = {name: value for name, value in trainer.state.lines[-1].items() if name.startswith("eval_")}
    if ranks.main:
        write_json(folder.summary, figures)
    return 0


def verify_in(config: RunConfig, ranks: Ranks, peers: Peers | None = None) -> int:
    """Run the proof of `packtrain verify` in this process; see train/verify/measure.py."""
    from packtrain.train.verify.measure import verify

    return verify(config, ranks, peers)


def _make_trainer(run: Run, checkpoint: Path | None) -> StepTrainer:
    """Make the trainer, ready for step 1."""
    config, ranks, log, prove = run.config, run.ranks, run.log, run.config.verify.preflight
    prepared = run.prepared
    data, model, base = prepared.data, prepared.model, base_model(prepared.model)
    preparation.settle_precision(prepared, {} if checkpoint is None else origin_in(checkpoint))
    origin = origin_of(asdict(config), data.train, model, prepared.tokenizer, ranks.world_size) | prepared.origin
    if checkpoint is not None:
        check_origin(checkpoint, origin)  # before proofs take time
    preparation.spread_model(prepared)
    preparation.settle_attention(prepared)
    split = preparation.settle_split(prepared)
    frozen, at_times = freeze_unreached(model, prepared.longest, prepared.precision.autocast, picture_batch(prepared))
    reduce_unreached(model, ranks, at_times)
    steps = _training_steps(run)
    evaluation = {name: prepared.steps(part, evaluation=True) for name, part in data.sets.items()}
    origin |= length_of(config.optim.schedule, config.optim.warmup_steps, len(steps))
    if checkpoint is not None:
        check_length(checkpoint, step_of(checkpoint), len(steps))
        console.log_changes(log, checkpoint.name, *check_origin(checkpoint, origin))
    console.log_model(log, prepared)
    console.log_ways(log, frozen, split, prepared.compiled)
    console.log_steps(log, prepared, steps, evaluation)
    console.log_attention(log, base, prepared.backend)
    console.log_pictures(log, prepared)
    if prove:
        with outputs_of_tokens(base):
            padded, autocast = prepared.backend is None, prepared.precision.autocast
            check_causal_and_padding(base, padding=padded, autocast=autocast)
            if exhibits := exhibits_of(prepared):
                check_pictures(base, exhibits, padding=padded, autocast=autocast)
    settings = LoopSettings(
        steps,
        evaluation,
        run.stop,
        run.folder.checkpoints,
        origin,
        first_step=step_of(checkpoint) if checkpoint else 0,
        say=log.warn,
        fact=log.fact,
        strategy=ranks.strategy,
        autocast=prepared.precision.autocast,
        backend=prepared.backend.backend.name if prepared.backend else None,
        trainer=config.trainer,
        optim=config.optim,
        limits=TimeLimits(config.topology.step_timeout),
        spikes=_spike_rules(run, data, steps),
        largest_first=tries_largest(config.trainer, ranks),
        unused_at_times=at_times,
    )
    with boundary("the trainer cannot be made", "optim", code="trainer-unusable"):
        loss = prepared.objective.loss(Setup(model, prepared.tokenizer, settings))
        trainer = StepTrainer(loss, settings, _listeners(run))
    if config.trainer.ledger and loss.document_figures:
        read = partial(RowPlaces, config, data.train.stores) if data.stream is None else lambda: None
        trainer.ledger = Ledger(run.folder.ledger if ranks.main else None, read, log.warn)
        trainer.listeners.append(trainer.ledger)
    if peak := trainer.step_metrics.peak:
        log.fact("mfu", f"of {peak / 1e12:,.0f} TFLOP/s a device, without sparsity")
    largest = find_largest(steps, settings.first_step)
    _settle_memory(run, trainer, largest)  # without changes: their proofs must fit, too
    trainer.changes |= make_changes(loss, ranks, proposals(prepared.situation), log)
    console.log_memory(log, prepared, _settle_memory(run, trainer, largest))
    trainer.engine.dither = _dither_of(run, trainer)
    prepared.objective.prove(Start(trainer, log, ranks, prepared.precision, prepared.attention, prove))
    return trainer


def _settle_memory(run: Run, trainer: StepTrainer, largest: Found) -> str:
    """Plan the memory of the `largest` micro-batch, with the changes made so far. By it choose the layers that recompute, and when
    gradients are exchanged. Return why."""
    engine = trainer.engine
    memory = preparation.plan_memory(run.prepared, replace(largest, fused="kernels" in trainer.loss.changes))
    asked = run.config.trainer.gradient_checkpointing
    following = [*possible_policies(run.config)][1:] if asked == "auto" else []  # after none
    if isinstance(memory, Memory):
        engine.exchanges_once, following = memory.exchanges_once, memory.fallbacks
    engine.fallbacks = [one for one in following if can_recompute(base_model(engine.model), one)]
    policy, why = preparation.choose_checkpointing(asked, memory)
    if policy != engine.checkpointing:
        engine.recompute(policy)
    return f"{policy} ({why})"


def _training_steps(run: Run) -> Steps:
    """Return the training steps over a data set or a stream."""
    trainer, data = run.config.trainer, run.prepared.data
    steps = run.prepared.steps(
        data.train, max_steps=trainer.max_steps, epochs=trainer.epochs, shuffle=run.config.data.shuffle
    )
    if data.stream is None:
        return steps
    feed = Feed(data.stream, run.prepared.objective.slots, run.log.warn)
    run.closing.push(data.stream.stack)
    run.closing.callback(feed.close)
    return feed.attach(steps)


def _dither_of(run: Run, trainer: StepTrainer) -> Dither:
    """Choose the masters to dither, and log their number."""
    dither, more = (
        preparation.masters_of(run.prepared),
        "begin with weights in bfloat16, as optim.bf16_rounding=final leaves them",
    )
    more = "set optim.bf16_rounding=auto" if run.config.optim.bf16_rounding == "undithered" else more
    trainer.seen_updates.advice = f"{more}, raise optim.learning_rate, or set trainer.mixed_precision=no"
    if dither.moved:
        run.log.fact("dither", f"{counted(len(dither.moved), 'weights')} start off the middle of their bfloat16 cells")
    return dither


def _listeners(run: Run) -> list[Listener]:
    """Make all listeners to the steps."""
    trainer, listeners = run.config.trainer, list[Listener]()
    if run.ranks.main:
        run.trackers = trackers_of(run.config, run.folder, run.log.warn)
        listeners = [MetricsFile(run.folder.metrics, run.log.warn), *run.trackers]
    if trainer.early_stop_patience and trainer.eval_every:
        listeners.append(EarlyStop(trainer.early_stop_patience, trainer.best_by, run.log))
    return [*listeners, run.progress]


def _try_saving(run: Run, ends: list[int]) -> None:
    """Mend or refuse now what cannot be saved; let answers stop at `ends`."""
    prepared, whole = run.prepared, results.saves_whole_model(run.config.model, run.config.peft)
    if remark := mend_generation_config(prepared.model, prepared.tokenizer):
        run.log.warn(remark)
    if new := end_answers_at(prepared.model, ends):
        names = listed(prepared.tokenizer.convert_ids_to_tokens(new))
        run.log.fact("ends", f"{names} ends trained answers: it joins eos_token_id of final/generation_config.json")
    if run.ranks.main:
        try_saving(prepared.model, prepared.tokenizer, whole=whole)
    _wait_for_all(run, "saving")


def _spike_rules(run: Run, data: PreparedData, steps: Steps) -> SpikeRules:
    """Make the rules for judging steps, with the places of their examples."""
    config = run.config

    def places(numbers: list[int]) -> list[str]:
        corpus = open_corpus(config, tokenizer=run.prepared.tokenizer, prepared=data)
        rows = corpus.row_of[corpus.train.rows.reshape(-1, corpus.spec.documents)[numbers, 0]].tolist()
        by_row = find_places(corpus, rows)
        return [by_row[row] for row in rows]

    how = config.trainer.on_spike, config.trainer.spike_factor, run.folder.spikes
    return SpikeRules(*how, places if steps.feed is None else steps.feed.rows)


def tries_largest(trainer: Trainer, ranks: Ranks) -> bool:
    """Return whether the largest micro-batch runs before step 1. Not with torch.compile: its kernels depend on the first input."""
    return ranks.device.type == "cuda" and not trainer.torch_compile


def _join(verb: str, config: RunConfig) -> tuple[Ranks, Peers | None]:
    """Join the other processes of the launch. Compare versions and config first, then check the first all-reduce."""
    on_cpu, limit_s = not torch.cuda.is_available(), config.topology.join_timeout
    peers = join(timeout_s=limit_s)
    if "RANK" not in os.environ:  # accelerate takes a lone LOCAL_RANK for a launch
        os.environ.pop("LOCAL_RANK", None)
    heartbeat = own_heartbeat()
    heartbeat.enter("join")  # again: each of these steps may take topology.join_timeout
    own = ("trainer.output_dir",) if verb in ("verify", "eval") else ()  # each launcher makes its own folder
    shared = {key: value for key, value in shared_values(asdict(config)).items() if key not in own}
    agree_on_start(peers, shared, "cpu" if on_cpu else "cuda", timeout_s=limit_s)
    if peers is not None:
        beat_to_rank_0(lambda address: peers.share("channel", address))
    open_strategy(config.strategy.spec)
    heartbeat.enter("join")

    def open_group() -> torch.device:
        device = cast(torch.device, PartialState(cpu=on_cpu, timeout=timedelta(seconds=limit_s)).device)
        return device if on_cpu else torch.device("cuda", device.index or 0)  # accelerate gives no index to one process

    device = connect(peers, open_group, "gloo" if on_cpu else "nccl", timeout_s=limit_s)
    if not on_cpu:
        torch.cuda.set_device(device)  # each thread has its own
    limit_collectives(config.topology.step_timeout)
    state = PartialState()
    copies = machines_of(state.num_processes) if config.strategy.shard_within == "machine" else 1
    return Ranks(state.process_index, state.num_processes, device, config.strategy.name, copies), peers


def _checkpoint_to_resume(run: Run) -> tuple[Path | None, str]:
    """Return the checkpoint to resume from, and the day. The main process decides for all."""
    resume, folder = run.config.trainer.resume, run.folder
    if resume == "auto" and folder.gives_way(resume):
        resume = "never"
    answer = [(find_resume(resume, folder.checkpoints), date.today().isoformat()) if run.ranks.main else None]
    _wait_for_all(run, "checkpoint")  # rank 0 reads whole checkpoints, for longer than a collective's time limit
    with waiting("rank 0 to find the checkpoint"):
        (checkpoint, remarks), today = cast(list, broadcast_object_list(answer))[0]
    for remark in remarks:
        run.log.warn(remark)
    return checkpoint, today


def _wait_for_all(run: Run, stage: str) -> None:
    """Wait for all ranks through the store. It waits while any rank makes progress; a collective would have a time limit."""
    if run.peers:
        run.peers.settle(stage, {}, {}, timeout_s=preparing_s(run.config.topology.step_timeout))


def _begin_run_folder(run: Run, checkpoint: Path | None, origin: Json) -> None:
    """Take over the run folder once every process is ready to train. Move away results that would be wrong from now on."""
    if not run.ranks.main:
        return
    folder = run.folder
    try:
        if moved := folder.begin(checkpoint):
            what = "earlier results" if checkpoint else "an earlier run"
            run.log.say(escape(f"{folder.root} held {what}: now in {shown(moved)}"))
        write_json(folder.facts, {"started": run.log.started, "facts": run.log.facts})
    except OSError as error:
        what = f"cannot begin: {error}"
        raise UserError(what, where=f"trainer.output_dir ({folder.root})", code="run-folder-unwritable") from error
    for stale in (folder.summary, folder.data):
        stale.unlink(missing_ok=True)
    for remark in set_aside(folder.checkpoints, step_of(checkpoint) if checkpoint else 0):
        run.log.warn(remark)
    if checkpoint:  # a kill may have come between the newest checkpoint and the removal of the oldest
        with suppress(OSError):
            prune(folder.checkpoints, run.config.trainer.keep_checkpoints, RunState.load(checkpoint).best_step, origin)


def _finish(run: Run, trainer: StepTrainer, summary: results.Summary) -> None:
    """End a completed run: last evaluation, final/, summary.json, last lines."""
    config, folder = run.config, run.folder
    evaluated = [line["step"] for line in trainer.state.lines if "eval_loss" in line]
    if trainer.evaluation and evaluated[-1:] != [trainer.state.step]:
        trainer.evaluate()
    trainer.clock.enter("final")
    if summary.early:
        trainer.checkpoints.restore_best_weights(trainer.state)
    folders = results.save_final(folder, trainer, run.prepared.model, config.model, config.peft)
    if run.ranks.sharded and config.trainer.samples:
        _wait_for_all(run, "results")  # all ranks compute the answers, and the main process has been writing alone
    answers = list(zip(run.questions, run.before, _answers(run), strict=False))
    summary = replace(summary, answers=answers)
    _describe_data(run, summary.data)
    _write_summary(run, summary.to_json("done"))  # last: after it the same command begins a new run
    commands = results.next_commands(folder, held_out=bool(config.data.eval), scores=config.objective.spec.scores)
    results.print_results(run.log, summary, folder, folders, commands)


def _describe_data(run: Run, data: PreparedData) -> None:
    """Write data.json for the report, while data and tokenizer are open. It is an extra: errors are only noted in the log."""
    if not run.ranks.main or len(data.train) > _MAX_DESCRIBED or data.stream is not None:
        return
    from packtrain.inspect.picture_facts import add_thumbnails
    from packtrain.inspect.summary import summarise

    try:
        corpus = open_corpus(run.config, tokenizer=run.prepared.tokenizer, prepared=data)
        add_thumbnails((summary := summarise(corpus, run.ranks.world_size))["shown"])
        write_json(run.folder.data, summary)
    except Exception as error:
        run.log.note(f"no data.json: {type(error).__name__}: {error}")


def _answers(run: Run) -> list[str]:
    """Answer trainer.samples without touching the random state. Only the main process answers if it has the whole model."""
    if not (run.questions and (run.ranks.main or run.ranks.sharded)):
        return []
    generator = replace(_generator_of(run, replace(run.ranks, rank=0, world_size=1)), way=ALONE)
    made = generator.answers([question.document for question in run.questions], 64) or {}
    return [made[number].strip() for number in range(len(run.questions))]


def _generator_of(run: Run, ranks: Ranks) -> Generator:
    config, prepared = run.config, run.prepared
    if ranks.sharded and prepared.sight:  # ranks make the same calls, also of towers: all answer everything
        ranks = replace(ranks, rank=0, world_size=1)
    most = config.batch.limits(config.packing.mode)[1] or DEFAULT_ROW_TOKENS
    base, autocast = base_model(prepared.model), prepared.precision.autocast
    return Generator(base, prepared.tokenizer, prepared.attention, prepared.sight, autocast, ranks, most)


def _measures_of(run: Run) -> Measures:
    """Make the measures of trainer.answers and trainer.tasks. Raises UserError for a score that fails."""
    trainer, warn, generator = run.config.trainer, run.log.warn, _generator_of(run, run.ranks)
    answers = [RightAnswers(trainer, run.prepared.data.sets, generator, warn)] if trainer.answers else []
    tasks = [HarnessTasks(run.tasks, trainer.measured_rows, generator)] if run.tasks else []
    return Measures(trainer, run.ranks.device, run.stop, warn, [*answers, *tasks])


def _write_summary(run: Run, summary: dict) -> None:
    if run.ranks.main:
        write_json(run.folder.summary, {**summary, "restarts": run.folder.restarts()})
