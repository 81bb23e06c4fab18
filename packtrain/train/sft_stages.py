"""The stages of a run that are supervised fine-tuning's own: its data, its steps, its trainer, its proofs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import SFTConfig

from packtrain.attention.backends import attend_by, own_attention
from packtrain.data.dataset import TokenDataset
from packtrain.data.prepare import PreparedData, prepare
from packtrain.model.load import base_model
from packtrain.model.spread import open_proofs, spread
from packtrain.proof.choice import Decision
from packtrain.proof.isolation import check_as_it_comes, tolerance_of
from packtrain.train import console
from packtrain.train.course import callbacks_of, loop_settings, schedule_of
from packtrain.train.loader import Steps
from packtrain.train.loop import training_arguments
from packtrain.train.preflight import FirstStepWatch, autocast_of, decide_together, fit_head
from packtrain.train.setting import Setting
from packtrain.train.sft import PackedSFTTrainer

Prepared = PreparedData[TokenDataset]
prepare_data = prepare


def longest_document(data: TokenDataset) -> int:
    """Tokens of the longest document."""
    return int(data.lengths.max())


def build(
    setting: Setting,
    data: Prepared,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Path | None,
) -> tuple[PackedSFTTrainer, Decision | None]:
    """The trainer, ready for step 1, and which attention was decided on for packed rows."""
    as_it_came = own_attention(base_model(model))
    spread(model, setting.config, setting.process.device)
    steps = _steps(setting, data.train, model, tokenizer, whole_set=False)
    evaluation = _steps(setting, data.eval, model, tokenizer, whole_set=True) if data.eval else None
    console.decisions(setting.log, setting.config, model, data, steps, evaluation, setting.process.world_size)
    arguments = training_arguments(
        setting.config,
        SFTConfig,
        model,
        total_steps=len(steps),
        on_cpu=setting.process.device.type == "cpu",
        has_eval=evaluation is not None,
        starts_anew=checkpoint is None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = PackedSFTTrainer(
        model,
        arguments,
        tokenizer,
        settings=loop_settings(setting, steps, evaluation, model, checkpoint),
        objective=setting.config.objective,
        callbacks=callbacks_of(setting),
    )
    trainer.close_proofs = open_proofs(model, setting.config)
    return trainer, _preflight(setting, trainer, as_it_came)


def _steps(
    setting: Setting,
    data: TokenDataset,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    whole_set: bool,
) -> Steps:
    config, process = setting.config, setting.process
    schedule = schedule_of(config, data.lengths, model, whole_set=whole_set)
    padded = config.packing.mode == "padding"
    return Steps(data, schedule, padded, int(cast(Any, tokenizer.pad_token_id) or 0), process.rank, process.world_size)


def _preflight(setting: Setting, trainer: PackedSFTTrainer, as_it_came: str) -> Decision | None:
    """Puts the attention of packed rows in place, after proving it, and has step 1 watched; None for padded batches."""
    config, model = setting.config, base_model(trainer.model)
    decision = None
    if config.packing.mode != "padding":
        decision = decide_together(config, model, setting.process.world_size)
    console.attention(setting.log, model, decision)
    if config.verify.preflight:
        check_as_it_comes(model, padding=decision is None, autocast=autocast_of(config))
    if decision is not None:
        attend_by(model, decision.backend.name)
        if config.verify.preflight:
            tolerance = tolerance_of(autocast_of(config) or model.dtype)
            trainer.watch = FirstStepWatch(as_it_came, tolerance, trainer.steps.pad_token_id)
    console.head(setting.log, model, trainer.head, fit_head(config, model, trainer.head, trainer.probe()))
    if trainer.routers is not None:
        setting.log.say(
            f"[bold]routers[/]    {trainer.routers.weight:g} × load-balancing loss over the tokens of a step"
        )
        if config.verify.preflight:
            trainer.routers.check(model, trainer.probe(), autocast=autocast_of(config))
    return decision
