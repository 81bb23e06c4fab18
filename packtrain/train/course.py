"""The course of a run: its steps, its callbacks, and what a resumed run must agree on with its checkpoint."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, TrainerCallback

from packtrain.config.schema import RunConfig
from packtrain.data.dataset import PairDataset, TokenDataset
from packtrain.model.load import base_model
from packtrain.model.spread import elements
from packtrain.monitor.heartbeat import TimeLimits
from packtrain.packing.schedule import Schedule, make_schedule
from packtrain.plan.accelerate import STAGES
from packtrain.train.checkpoint import step_of
from packtrain.train.loader import PairSteps, Steps
from packtrain.train.loop import LoopSettings, StopCallback
from packtrain.train.metrics import EarlyStop, Intervals, MetricsFile, TerminalProgress
from packtrain.train.preflight import autocast_of
from packtrain.train.setting import Setting


def loop_settings(
    setting: Setting,
    steps: Steps | PairSteps,
    evaluation: Steps | PairSteps | None,
    model: PreTrainedModel,
    checkpoint: Path | None,
) -> LoopSettings:
    """Where the run goes, from `checkpoint` on where there is one."""
    trainer, topology, peers = setting.config.trainer, setting.config.topology, setting.process.peers
    return LoopSettings(
        steps=steps,
        evaluation=evaluation,
        stop=setting.stop,
        checkpoints=setting.folder.checkpoints,
        origin=origin_of(setting.config, steps.data) | trained_by(setting.config, model, setting.process.world_size),
        strategy=setting.config.strategy.name,
        computed_in=autocast_of(setting.config),
        keep_checkpoints=trainer.keep_checkpoints,
        first_step=step_of(checkpoint) if checkpoint else 0,
        loader_workers=trainer.loader_workers,
        machines=peers.machines() if peers and setting.process.main else (),
        say=lambda text: setting.log.say(f"[yellow]{text}[/]"),
        limits=TimeLimits(topology.step_timeout, topology.checkpoint_timeout),
    )


def callbacks_of(setting: Setting) -> list[TrainerCallback]:
    """What watches, logs and stops a run."""
    trainer, folder = setting.config.trainer, setting.folder
    callbacks: list[TrainerCallback] = [Intervals(), StopCallback(setting.stop), MetricsFile(folder.metrics)]
    callbacks.append(TerminalProgress(setting.log))
    if trainer.early_stop_patience:
        callbacks.append(EarlyStop(trainer.early_stop_patience, folder.checkpoints, setting.log))
    return callbacks


def schedule_of(config: RunConfig, lengths: np.ndarray, model: PreTrainedModel, *, whole_set: bool) -> Schedule:
    """The optimizer steps over documents (or pairs) of `lengths`, or, with `whole_set`, one pass over them in order."""
    trainer = config.trainer
    return make_schedule(
        lengths,
        config.packing,
        config.batch,
        max_steps=None if whole_set else trainer.max_steps,
        epochs=1.0 if whole_set else trainer.epochs,
        seed=trainer.seed,
        shuffle=config.data.shuffle and not whole_set,
        attention_cost=attention_cost(model),
    )


def origin_of(config: RunConfig, data: TokenDataset | PairDataset) -> dict[str, Any]:
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


def trained_by(config: RunConfig, model: PreTrainedModel, processes: int) -> dict[str, Any]:
    """What the weights and the state of the optimizer in a checkpoint have to fit."""
    trained = sum(elements(p) for p in model.parameters() if p.requires_grad)
    return {
        "model": f"{type(base_model(model)).__name__} with {trained:,} trained weights",
        # the scheduler and the optimizer go on with what the checkpoint holds: another value would do nothing, silently
        **{f"optim.{key.name}": getattr(config.optim, key.name) for key in fields(config.optim)},
        "strategy.name": config.strategy.name,
        # DeepSpeed's files are the shards of that many processes
        "the number of processes": processes if config.strategy.name in STAGES else None,
    }


def attention_cost(model: PreTrainedModel) -> float:
    """Cost of a document of l tokens is l + attention_cost · l², in units of one token's linear layers.

    Forward and backward take 6 · parameters operations a token, and 6 · layers · heads · head_dim · l for causal attention.
    """
    config = base_model(model).config.get_text_config()
    try:
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        parameters = sum(elements(parameter) for parameter in base_model(model).parameters())
        return config.num_hidden_layers * heads * width / max(parameters, 1)
    except (AttributeError, RuntimeError, TypeError):  # no attention, or heads that differ by layer: tokens alone count
        return 0.0
