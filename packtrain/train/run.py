"""One training run of one process, from the resolved config to the trained model: read `train_in` top to bottom."""

from __future__ import annotations

import errno
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
from packtrain.config.schema import RunConfig
from packtrain.errors import CheckFailed, PacktrainError, PeerFailed, UserError
from packtrain.run_folder import RunFolder, write_json
from packtrain.train import announce, dpo_stages, sft_stages
from packtrain.train.checkpoint import check_origin, find_resume, set_aside, step_of
from packtrain.train.course import origin_of, trained_by
from packtrain.train.final import save_final
from packtrain.train.model import base_model, check_positions, check_trainable, load_model, load_tokenizer
from packtrain.train.quiet import quiet_libraries, warnings_to
from packtrain.train.rank_log import RankLog
from packtrain.train.samples import answer
from packtrain.train.setting import Process, Setting
from packtrain.train.stop import StopRequest
from packtrain.train.verify import verify

STAGES = {"sft": sft_stages, "dpo": dpo_stages}


def train(verb: str, config: RunConfig) -> int:
    """Runs `verb` in this process (of one or of many). Returns the exit code; raises PacktrainError for the user."""
    quiet_libraries(on_cpu=not torch.cuda.is_available())
    process = _join(config)
    try:
        return verify(config, process) if verb == "verify" else train_in(config, process)
    except (RuntimeError, OSError, SafetensorError) as error:
        if known := _no_bug_of_ours(error, process, RunFolder.of(config)):
            raise known from error
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def train_in(config: RunConfig, process: Process) -> int:
    """The run in `process`, in order: data, model, steps and proofs, training, results."""
    started = time.perf_counter()
    stages = STAGES[config.objective.kind]
    folder = RunFolder.of(config)
    log = RankLog(folder.log(process.rank), main=process.main)
    warnings_to(log)
    setting = Setting(config, process, folder, log, StopRequest())
    checkpoint = _checkpoint_to_resume(setting)

    tokenizer = load_tokenizer(config.model)
    show = process.main and sys.stderr.isatty()
    data: Any = stages.prepare_data(config.data, tokenizer, seed=config.trainer.seed, progress=show)
    if checkpoint is not None:
        check_origin(checkpoint, origin_of(config, data.train))
    model = load_model(config.model, config.peft, tokenizer, seed=config.trainer.seed)
    if checkpoint is not None:
        check_origin(checkpoint, trained_by(config, model))
    check_trainable(model)
    longest = max(stages.longest_document(part) for part in (data.train, data.eval) if part)
    check_positions(model, longest, padded=config.packing.mode == "padding")
    as_it_came = own_attention(base_model(model))
    trainer, decision = stages.build(setting, data, model, tokenizer, checkpoint)
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
    if data.eval and announce.last_evaluated(trainer) != trainer.state.global_step:
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
            fix=f"start them by packtrain {config.objective.kind} CONFIG topology.gpus_per_node=N, or by torchrun",
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
