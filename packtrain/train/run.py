"""One training run of one process, from the resolved config to the trained model: read `train_in` top to bottom."""

from __future__ import annotations

import gc
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from rich.markup import escape
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from packtrain.attention.backends import own_attention
from packtrain.config.schema import SHARDED_WEIGHTS, RunConfig
from packtrain.errors import CheckFailed, LostPeers, UserError
from packtrain.model.load import base_model, check_positions, check_trainable, load_model, load_tokenizer
from packtrain.model.spread import open_strategy
from packtrain.monitor.heartbeat import own_heartbeat, waiting
from packtrain.monitor.inside import beat_to_rank_0
from packtrain.plan.agreement import shared_values
from packtrain.run_folder import RunFolder, write_json
from packtrain.train import console, dpo_stages, results, sft_stages
from packtrain.train.checkpoint import check_origin, find_resume, set_aside, step_of
from packtrain.train.console import Log, quiet_libraries, warnings_to
from packtrain.train.course import origin_of, trained_by
from packtrain.train.library_errors import explained, keep_in_full
from packtrain.train.loop import StopRequest
from packtrain.train.results import answer, save_final
from packtrain.train.setting import Process, Setting
from packtrain.train.sync.checks import (
    agree_on_data,
    agree_on_model,
    agree_on_start,
    check_run_folder,
    connect,
    limit_collectives,
)
from packtrain.train.sync.store import join, preparing_s
from packtrain.train.verify.report import verify

STAGES = {"sft": sft_stages, "dpo": dpo_stages}


def train(verb: str, config: RunConfig) -> int:
    """Runs `verb` in this process (of one or of many). Returns the exit code; raises PacktrainError for the user."""
    quiet_libraries(on_cpu=not torch.cuda.is_available())
    own_heartbeat().enter("join")
    process = _join(verb, config)
    own_heartbeat().enter("proof")
    try:
        return verify(config, process) if verb == "verify" else train_in(config, process)
    except (RuntimeError, OSError, SafetensorError) as error:
        own_heartbeat().progress()  # who has waited for others that are gone does not keep anybody waiting
        if known := explained(error, process, config):
            if isinstance(known, LostPeers):
                keep_in_full(RunFolder.of(config.trainer).log(process.rank), error)
            raise known from error
        raise
    finally:
        gc.collect()  # DeepSpeed's engine holds groups, whose threads must not outlive them
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def train_in(config: RunConfig, process: Process) -> int:
    """The run in `process`, in order: data, model, steps and proofs, training, results."""
    started = time.perf_counter()
    stages = STAGES[config.objective.kind]
    folder = RunFolder.of(config.trainer)
    log = Log(folder.log(process.rank), main=process.main)
    warnings_to(log)
    setting = Setting(config, process, folder, log, StopRequest())
    checkpoint = _checkpoint_to_resume(setting)
    needed = checkpoint is not None or config.trainer.checkpoint_every is not None
    if process.world_size > 1 and (remark := check_run_folder(folder.logs, main=process.main, needed=needed)):
        log.say(f"[yellow]{escape(remark)}[/]")

    own_heartbeat().enter("prepare")
    tokenizer = load_tokenizer(config.model)
    show = process.main and sys.stderr.isatty()
    data: Any = stages.prepare_data(config.data, tokenizer, seed=config.trainer.seed, progress=show)
    preparing = preparing_s(config.topology.step_timeout)
    agree_on_data(process.peers, data, timeout_s=preparing)
    if checkpoint is not None:
        check_origin(checkpoint, origin_of(config, data.train))
    own_heartbeat().enter("load")
    model = load_model(config.model, config.peft, tokenizer, seed=config.trainer.seed)
    agree_on_model(process.peers, model, timeout_s=preparing)
    if checkpoint is not None:
        check_origin(checkpoint, trained_by(config, model, process.world_size))
    check_trainable(model)
    longest = max(stages.longest_document(part) for part in (data.train, data.eval) if part)
    check_positions(model, longest, padded=config.packing.mode == "padding")
    as_it_came = own_attention(base_model(model))
    own_heartbeat().enter("proof")
    trainer, decision = stages.build(setting, data, model, tokenizer, checkpoint)
    before = _answers(setting, model, tokenizer, as_it_came)
    console.first_step(log, time.perf_counter() - started, checkpoint)
    _clear_the_way(setting, checkpoint)
    if checkpoint is not None:
        limit_collectives(config.topology.checkpoint_timeout)  # until the first step: some have read it before others
    setting.stop.listen()  # until here a signal ends the process as usual: there is nothing to save
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    summary = results.Summary(config, trainer, data, decision, started)
    if setting.stop.agreed:
        _write(setting, summary.to_json("stopped"))
        results.stopped(log, setting.stop.agreed, trainer.state.global_step)
        return 128 + setting.stop.agreed
    if data.eval and results.last_evaluated(trainer) != trainer.state.global_step:
        trainer.evaluate()
    trainer.clock.enter("final")
    if config.trainer.early_stop_patience:
        trainer.load_best_weights()
    saved = save_final(config, folder, trainer, model, tokenizer)
    if config.strategy.name in SHARDED_WEIGHTS:
        _meet(setting, "results")  # the answers take all of them, and the main process has been writing alone
    after = _answers(setting, model, tokenizer, as_it_came)
    _write(setting, summary.to_json("done"))
    results.show(log, summary, before, after, saved, folder)
    return 0


def _join(verb: str, config: RunConfig) -> Process:
    """Joins the other processes of the launch, after checking that they are alike; their first sum must be right."""
    on_cpu, limit_s = not torch.cuda.is_available(), config.topology.join_timeout
    peers = join(timeout_s=limit_s)
    heartbeat = own_heartbeat()
    heartbeat.enter("join")  # anew, for each of these may take topology.join_timeout
    own = ("trainer.output_dir",) if verb == "verify" else ()  # each launcher makes one of its own
    shared = {key: value for key, value in shared_values(config).items() if key not in own}
    agree_on_start(peers, shared, "cpu" if on_cpu else "cuda", timeout_s=limit_s)
    if peers is not None:
        beat_to_rank_0(lambda said: peers.share("channel", said, timeout_s=limit_s))
    open_strategy(config)
    heartbeat.enter("join")
    connect(peers, lambda: _open_group(limit_s, on_cpu=on_cpu), "gloo" if on_cpu else "nccl", timeout_s=limit_s)
    state = PartialState()
    device = cast(torch.device, state.device)
    if not on_cpu:
        torch.cuda.set_device(device)  # each thread has its own
    limit_collectives(config.topology.step_timeout)
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if state.num_processes != expected:
        raise CheckFailed(
            f"{expected} processes were launched, but this one sees {state.num_processes}",
            fix=f"start them by packtrain {config.objective.kind} CONFIG topology.gpus_per_node=N, or by torchrun",
        )
    return Process(state.process_index, state.num_processes, device, peers)


def _open_group(limit_s: float, *, on_cpu: bool) -> torch.device:
    return cast(torch.device, PartialState(cpu=on_cpu, timeout=timedelta(seconds=limit_s)).device)


def _checkpoint_to_resume(setting: Setting) -> Path | None:
    """The checkpoint to go on from; decided by the main process, for all."""
    resume, folder = setting.config.trainer.resume, setting.folder
    if resume == "auto" and folder.gives_way(resume):
        resume = "never"
    found = [find_resume(resume, folder.checkpoints) if setting.process.main else None]
    _meet(setting, "checkpoint")  # it reads whole ones, for longer than a collective operation may take
    with waiting("rank 0 to find the checkpoint"):
        checkpoint, remarks = cast(list, broadcast_object_list(found))[0]
    for remark in remarks:
        setting.log.say(f"[yellow]{remark}[/]")
    return checkpoint


def _meet(setting: Setting, stage: str) -> None:
    """Waits for the others, as long as one of them is at work, without a collective operation, which would have a limit."""
    if peers := setting.process.peers:
        peers.meet_again(stage, timeout_s=preparing_s(setting.config.topology.checkpoint_timeout))


def _clear_the_way(setting: Setting, checkpoint: Path | None) -> None:
    """Makes the run folder this run's, now that every process is ready to train.

    An earlier run moves out of the way, or what an earlier course of this run left and this one will not make true again.
    """
    with waiting("all ranks to be ready to train"):
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


def _answers(setting: Setting, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, attention: str) -> list[str]:
    """Answers to trainer.samples, without touching the random state; made by the main process alone where it has the model."""
    settings = setting.config.trainer
    together = setting.config.strategy.name in SHARDED_WEIGHTS
    if not (settings.samples and (setting.process.main or together)):
        return []
    with torch.random.fork_rng():
        prompts, most = list(settings.samples), settings.sample_tokens
        return answer(base_model(model), tokenizer, prompts, attention=attention, max_tokens=most)


def _write(setting: Setting, summary: dict) -> None:
    if setting.process.main:
        write_json(setting.folder.summary, summary)
