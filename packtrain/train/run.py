"""One training run of one process, from the resolved config to the trained model: read `train_sft` top to bottom."""

from __future__ import annotations

import errno
import os
import sys
import time
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from rich.markup import escape
from safetensors import SafetensorError
from transformers import PreTrainedModel, TrainerCallback
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from packtrain.attention.backends import own_attention
from packtrain.attention.choice import Decision
from packtrain.attention.isolation import check_as_it_comes, tolerance_of
from packtrain.config.limits import micro_batch_limits
from packtrain.config.schema import RunConfig
from packtrain.data.dataset import TokenDataset
from packtrain.data.prepare import prepare
from packtrain.errors import CheckFailed, PacktrainError, PeerFailed, UserError
from packtrain.packing.balance import Limits
from packtrain.packing.batches import Schedule, make_schedule
from packtrain.run_folder import RunFolder, write_json
from packtrain.train import announce
from packtrain.train.arguments import training_arguments
from packtrain.train.callbacks import EarlyStop, Intervals, MetricsFile, TerminalProgress
from packtrain.train.checkpoint import check_origin, find_resume, set_aside, step_of
from packtrain.train.final import save_final
from packtrain.train.loader import Steps
from packtrain.train.model import base_model, check_positions, load_model, load_tokenizer
from packtrain.train.preflight import FirstStepWatch, autocast_of, fit_head, put_attention_in_place
from packtrain.train.quiet import quiet_libraries, warnings_to
from packtrain.train.rank_log import RankLog
from packtrain.train.samples import answer
from packtrain.train.sft import PackedSFTTrainer
from packtrain.train.stop import StopCallback, StopRequest
from packtrain.train.verify import verify
from packtrain.train.whole_steps import Course


@dataclass(frozen=True, slots=True)
class Process:
    """Where this process stands in the run."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is the process that talks and writes."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class Setting:
    """What every stage of a run looks at."""

    config: RunConfig
    process: Process
    folder: RunFolder
    log: RankLog
    stop: StopRequest


def train(verb: str, config: RunConfig) -> int:
    """Runs `verb` in this process (of one or of many). Returns the exit code; raises PacktrainError for the user."""
    quiet_libraries(on_cpu=not torch.cuda.is_available())
    process = _join(config)
    try:
        return {"sft": train_sft, "verify": verify}[verb](config, process)
    except (RuntimeError, OSError, SafetensorError) as error:
        if known := _no_bug_of_ours(error, process, RunFolder.of(config)):
            raise known from error
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def train_sft(config: RunConfig, process: Process) -> int:
    """The run, in order: data, model, steps, proof, training, results."""
    started = time.perf_counter()
    folder = RunFolder.of(config)
    log = RankLog(folder.log(process.rank), main=process.main)
    warnings_to(log)
    setting = Setting(config, process, folder, log, StopRequest())
    checkpoint = _checkpoint_to_resume(setting)

    tokenizer = load_tokenizer(config.model)
    data = prepare(config.data, tokenizer, seed=config.trainer.seed, progress=process.main and sys.stderr.isatty())
    if checkpoint is not None:
        check_origin(checkpoint, origin_of(config, data.train))
    model = load_model(config.model, config.peft, tokenizer, seed=config.trainer.seed)
    if checkpoint is not None:
        check_origin(checkpoint, trained_by(config, model))
    check_positions(model, max(int(part.lengths.max()) for part in (data.train, data.eval) if part))
    as_it_came = own_attention(base_model(model))
    steps = _steps(setting, data.train, model, tokenizer, whole_set=False)
    evaluation = _steps(setting, data.eval, model, tokenizer, whole_set=True) if data.eval else None
    announce.decisions(log, config, model, data, steps, evaluation, process.world_size)

    trainer = _trainer(setting, model, tokenizer, steps, evaluation, checkpoint)
    decision = _preflight(setting, trainer, as_it_came)
    before = _answers(setting, model, tokenizer, as_it_came)
    announce.first_step(log, time.perf_counter() - started, checkpoint)
    _clear_the_way(setting, checkpoint)
    setting.stop.listen()  # until here a signal ends the process as usual: there is nothing to save
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    summary = announce.Summary(config, trainer, data, decision, started)
    if setting.stop.agreed:
        _write(setting, summary.to_json("stopped"))
        announce.stopped(log, setting.stop.agreed, trainer.state.global_step)
        return 128 + setting.stop.agreed
    if evaluation is not None and announce.last_evaluated(trainer) != trainer.state.global_step:
        trainer.evaluate()
    if config.trainer.early_stop_patience:
        trainer.load_best_weights()
    saved = save_final(config, folder, trainer, model, tokenizer)
    after = _answers(setting, model, tokenizer, as_it_came)
    _write(setting, summary.to_json("done"))
    announce.results(log, summary, before, after, saved, folder)
    return 0


def _join(config: RunConfig) -> Process:
    """Joins the other processes of the launch, and checks that they are as many as it meant to start."""
    on_cpu = not torch.cuda.is_available()
    state = PartialState(cpu=on_cpu, timeout=timedelta(seconds=config.topology.step_timeout))
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != expected:
        raise CheckFailed(
            f"{expected} processes were launched, but this one sees {state.num_processes}",
            fix="start them by packtrain sft CONFIG topology.gpus_per_node=N, or by torchrun",
        )
    return Process(state.process_index, state.num_processes, cast(torch.device, state.device))


def _no_bug_of_ours(error: Exception, process: Process, folder: RunFolder) -> PacktrainError | None:
    """What the user is told of a lost process or a full disk; None for any other error.

    NCCL and the store have an error type of their own; gloo's errors are known by the source file they name. So are
    those of torch.save; safetensors says the system's words.
    """
    said = str(error).strip().partition("\n")[0]
    if process.world_size > 1 and (isinstance(error, torch.distributed.DistError) or "gloo/" in said):
        fix = f"the process that ended first says why: {folder.logs}/rank-*.log and launcher.log"
        return PeerFailed(f"rank {process.rank} lost the other processes: {said}", fix=fix)
    if "DataLoader worker (pid" in said:
        fix = "the system kills for want of memory: set it lower, or to 0"
        return PeerFailed(said, where="trainer.loader_workers", fix=fix)
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
    if full or "inline_container.cc" in said or "No space left" in said:
        fix = "make room and start the same command again: complete checkpoints are kept"
        return UserError(f"cannot write: {said}", where=f"trainer.output_dir ({folder.root})", fix=fix)
    return None


def _checkpoint_to_resume(setting: Setting) -> Path | None:
    """The checkpoint to go on from; decided by the main process, for all."""
    resume, folder = setting.config.trainer.resume, setting.folder
    if resume == "auto" and folder.gives_way(resume):
        resume = "never"
    found = [find_resume(resume, folder.checkpoints) if setting.process.main else None]
    checkpoint, remarks = cast(list, broadcast_object_list(found))[0]
    for remark in remarks:
        setting.log.say(f"[yellow]{remark}[/]")
    return checkpoint


def _clear_the_way(setting: Setting, checkpoint: Path | None) -> None:
    """Makes the run folder this run's, now that every process is ready to train.

    An earlier run moves out of the way, or what an earlier course of this run left and this one will not make true again.
    """
    PartialState().wait_for_everyone()
    if not setting.process.main:
        return
    folder = setting.folder
    try:
        if moved := folder.begin(setting.config.trainer.resume):
            setting.log.say(escape(f"{folder.root} held another run: it is in {moved} now"))
    except OSError as error:
        raise UserError(f"cannot begin: {error}", where=f"trainer.output_dir ({folder.root})") from error
    folder.summary.unlink(missing_ok=True)
    for remark in set_aside(folder.checkpoints, step_of(checkpoint) if checkpoint else 0):
        setting.log.say(f"[yellow]{remark}[/]")


def _steps(
    setting: Setting,
    data: TokenDataset,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    whole_set: bool,
) -> Steps:
    """The optimizer steps over `data`, or, with `whole_set`, one pass over it in order for evaluation."""
    config, process = setting.config, setting.process
    schedule = _schedule(config, data, attention_cost(model), whole_set)
    padded = config.packing.mode == "padding"
    pad = int(cast(Any, tokenizer.pad_token_id) or 0)
    return Steps(data, schedule, padded, pad, process.rank, process.world_size)


def _schedule(config: RunConfig, data: TokenDataset, cost: float, whole_set: bool) -> Schedule:
    batch, packing, trainer = config.batch, config.packing, config.trainer
    examples, tokens = micro_batch_limits(config)
    return make_schedule(
        data.lengths,
        limits=Limits(examples=examples, tokens=tokens),
        mode=packing.mode,
        strategy=packing.strategy,
        examples_per_step=batch.examples_per_step,
        tokens_per_step=batch.tokens_per_step,
        max_steps=None if whole_set else trainer.max_steps,
        epochs=1.0 if whole_set else trainer.epochs,
        seed=trainer.seed,
        shuffle=config.data.shuffle and not whole_set,
        attention_cost=cost,
    )


def origin_of(config: RunConfig, data: TokenDataset) -> dict[str, Any]:
    """What the documents of every step hang on: a resumed run must agree with its checkpoint on all of it."""
    batch = config.batch
    return {
        "data.train": f"{len(data):,} documents, {data.lengths.sum():,} tokens (fingerprint {data.fingerprint[:12]})",
        "data.shuffle": config.data.shuffle,
        "trainer.seed": config.trainer.seed,
        "batch.examples_per_step": batch.examples_per_step,
        "batch.tokens_per_step": batch.tokens_per_step,
        # with tokens_per_step the rows of an epoch decide which documents make a step
        "packing.strategy": config.packing.strategy if batch.tokens_per_step else None,
        "batch.tokens_per_device": batch.tokens_per_device if batch.tokens_per_step else None,
    }


def trained_by(config: RunConfig, model: PreTrainedModel) -> dict[str, Any]:
    """What the weights and the state of the optimizer in a checkpoint have to fit."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "model": f"{type(base_model(model)).__name__} with {trained:,} trained weights",
        # the scheduler and the optimizer go on with what the checkpoint holds: another value would do nothing, silently
        **{f"optim.{key.name}": getattr(config.optim, key.name) for key in fields(config.optim)},
    }


def attention_cost(model: PreTrainedModel) -> float:
    """Cost of a document of l tokens is l + attention_cost · l², in units of one token's linear layers.

    Forward and backward take 6 · parameters operations a token, and 6 · layers · heads · head_dim · l for causal attention.
    """
    config = base_model(model).config.get_text_config()
    try:
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return config.num_hidden_layers * heads * width / max(base_model(model).num_parameters(), 1)
    except (AttributeError, RuntimeError, TypeError):  # no attention, or heads that differ by layer: tokens alone count
        return 0.0


def _trainer(
    setting: Setting,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    steps: Steps,
    evaluation: Steps | None,
    checkpoint: Path | None,
) -> PackedSFTTrainer:
    config, folder, stop = setting.config, setting.folder, setting.stop
    callbacks: list[TrainerCallback] = [Intervals(), StopCallback(stop), MetricsFile(folder.metrics)]
    callbacks.append(TerminalProgress(setting.log))
    if config.trainer.early_stop_patience:
        callbacks.append(EarlyStop(config.trainer.early_stop_patience, folder.checkpoints, setting.log))
    arguments = training_arguments(
        config,
        total_steps=len(steps),
        on_cpu=setting.process.device.type == "cpu",
        has_eval=evaluation is not None,
        starts_anew=checkpoint is None,
    )
    course = Course(
        steps=steps,
        evaluation=evaluation,
        stop=stop,
        checkpoints=folder.checkpoints,
        origin=origin_of(config, steps.data) | trained_by(config, model),
        keep_checkpoints=config.trainer.keep_checkpoints,
        first_step=step_of(checkpoint) if checkpoint else 0,
        loader_workers=config.trainer.loader_workers,
    )
    return PackedSFTTrainer(model, arguments, tokenizer, course=course, objective=config.objective, callbacks=callbacks)


def _preflight(setting: Setting, trainer: PackedSFTTrainer, as_it_came: str) -> Decision | None:
    """Puts the attention of packed rows in place, after proving it, and has step 1 watched; None for padded batches."""
    config, model = setting.config, base_model(trainer.model)
    decision = None
    if config.packing.mode != "padding":
        decision = put_attention_in_place(config, model, setting.process.world_size)
        if config.verify.preflight:
            tolerance = tolerance_of(autocast_of(config) or model.dtype)
            trainer.watch = FirstStepWatch(as_it_came, tolerance, trainer.steps.pad_token_id)
    announce.attention(setting.log, model, decision)
    if config.verify.preflight:
        check_as_it_comes(model, padding=decision is None, autocast=autocast_of(config))
    announce.head(setting.log, model, trainer.head, fit_head(config, model, trainer.head, trainer.probe()))
    if trainer.routers is not None:
        setting.log.say(
            f"[bold]routers[/]    {trainer.routers.weight:g} × load-balancing loss over the tokens of a step"
        )
        if config.verify.preflight:
            trainer.routers.check(model, trainer.probe(), autocast=autocast_of(config))
    return decision


def _answers(setting: Setting, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, attention: str) -> list[str]:
    """Answers to trainer.samples; made by the main process alone, without touching the random state."""
    settings = setting.config.trainer
    if not (setting.process.main and settings.samples):
        return []
    with torch.random.fork_rng():
        prompts, most = list(settings.samples), settings.sample_tokens
        return answer(base_model(model), tokenizer, prompts, attention=attention, max_tokens=most)


def _write(setting: Setting, summary: dict) -> None:
    if setting.process.main:
        write_json(setting.folder.summary, summary)
