"""The stages of a run that are preference optimisation's own: its data, its steps, its reference, its trainer, its proofs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from trl import DPOConfig

from packtrain.attention.backends import attend_by, own_attention
from packtrain.config.schema import RunConfig
from packtrain.data.dataset import PairDataset
from packtrain.data.formats.columns import number_of
from packtrain.data.prepare import PreparedData, prepare_pairs
from packtrain.errors import CheckFailed, UserError
from packtrain.model.adapters import add_reference
from packtrain.model.load import base_model, weights_hash
from packtrain.model.reference import load_reference, precompute
from packtrain.model.spread import open_proofs, spread
from packtrain.packing.collate import PairRows
from packtrain.plan.dpo_reference import reference_of
from packtrain.proof.choice import Decision, examine_pairs
from packtrain.proof.isolation import check_as_it_comes
from packtrain.train import console
from packtrain.train.checkpoint import check_origin
from packtrain.train.course import callbacks_of, loop_settings, schedule_of
from packtrain.train.dpo import PackedDPOTrainer, check_routers, objective_arguments
from packtrain.train.dpo_start import check_pair_forward, check_start
from packtrain.train.loader import PairSteps
from packtrain.train.loop import training_arguments
from packtrain.train.preflight import autocast_of, decide_together, same_everywhere
from packtrain.train.setting import Setting

Prepared = PreparedData[PairDataset]
prepare_data = prepare_pairs


def longest_document(data: PairDataset) -> int:
    """Tokens of the longest prompt with an answer."""
    return int(data.documents.lengths.max())


def build(
    setting: Setting,
    data: Prepared,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Path | None,
) -> tuple[PackedDPOTrainer, Decision | None]:
    """The trainer, ready for step 1, and which attention was decided on for packed rows."""
    config, device, base = setting.config, setting.process.device, base_model(model)
    check_routers(base)
    as_it_came = own_attention(base)
    decided = reference_of(config.model, config.peft, config.objective, config.strategy)
    if decided.kind == "adapters":
        add_reference(model, decided.adapters)
    reference, weights = load_reference(config, tokenizer, device)
    identity = identity_of_reference(config, model, weights := weights or weights_hash(model))  # before they are spread
    held_to = {"objective.reference": f"one of weights with hash {weights[:12]}"}
    if checkpoint is not None:
        check_origin(checkpoint, held_to)
    spread(model, config, device)
    close_proofs = open_proofs(model, config)
    decision = None
    layout: PairRows = "padding"
    unshared = ""
    if config.packing.mode != "padding":
        pairs = config.packing.share_prefix is not False
        decision = decide_together(config, base, setting.process.world_size, pairs=pairs)
        layout, unshared = _layout(config, base, decision, setting.process.world_size)
    steps = _steps(setting, data.train, model, tokenizer, layout, whole_set=False)
    evaluation = _steps(setting, data.eval, model, tokenizer, layout, whole_set=True) if data.eval else None
    for part in filter(None, (steps, evaluation)):
        _check_sorting_losses(config, part)
    console.decisions(setting.log, config, model, data, steps, evaluation, setting.process.world_size)
    settings = loop_settings(setting, steps, evaluation, model, checkpoint)
    trainer = PackedDPOTrainer(
        model,
        _arguments(setting, model, steps, evaluation, starts_anew=checkpoint is None),
        tokenizer,
        settings=replace(settings, origin=settings.origin | held_to),
        reference=reference,
        callbacks=callbacks_of(setting),
    )
    trainer.close_proofs = close_proofs
    console.attention(setting.log, base, decision)
    console.pairs(setting.log, config, layout, unshared, decided.kind)
    if config.verify.preflight:
        check_as_it_comes(base, padding=decision is None, autocast=autocast_of(config))
    if decision is not None:
        attend_by(base, decision.backend.name)
        if trainer.ref_model is not None:
            attend_by(cast(Any, trainer.accelerator.unwrap_model(trainer.ref_model)), decision.backend.name)
    if decided.kind == "precomputed":
        _take_precomputed(setting, trainer, data, model, tokenizer, layout, identity)
    if config.verify.preflight:
        check_pair_forward(trainer, as_it_came)
        if decided.at_start:
            check_start(trainer)
    return trainer, decision


def identity_of_reference(config: RunConfig, model: PreTrainedModel, weights: str) -> str:
    """What kept log-probabilities of `model` hang on: the hash of its `weights`, and its settings."""
    settings = base_model(model).config.to_dict()
    said = {name: value for name, value in settings.items() if name not in ("_name_or_path", "transformers_version")}
    return f"{weights} {number_of(said)} {config.peft.alpha / config.peft.r if config.peft.kind == 'lora' else 1}"


def _layout(config: RunConfig, model: PreTrainedModel, decision: Decision, processes: int) -> tuple[PairRows, str]:
    """How pairs are laid out in rows, and why their prompts are not shared where they could be asked to be.

    Raises CheckFailed where packing.share_prefix asks for what the backend cannot do.
    """
    if config.packing.share_prefix is False:
        return "flat", "packing.share_prefix=false"
    lack = decision.unshared
    if lack is None:  # nothing was proved
        lack, _ = examine_pairs(decision.backend.name, model, autocast_of(config))
    same_everywhere("shared" if not lack else "flat", "layout of pairs", "packing.share_prefix", processes)
    if lack and config.packing.share_prefix:
        raise CheckFailed(f"prompts cannot be shared: {lack}", where="packing.share_prefix", fix="set it to false")
    return ("flat", lack) if lack else ("shared", "")


def _steps(
    setting: Setting,
    data: PairDataset,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layout: PairRows,
    *,
    whole_set: bool,
) -> PairSteps:
    config, process = setting.config, setting.process
    # slots of a pair: padded it takes two rows as long as the longer of its documents
    longer = 2 * data.documents.lengths.reshape(-1, 2).max(axis=1)
    lengths = {"padding": longer, "flat": data.lengths, "shared": data.shared_lengths}[layout].astype(np.int32)
    _check_fit(config, int(lengths.max(initial=0)))
    schedule = schedule_of(config, lengths, model, whole_set=whole_set)
    pad = int(cast(Any, tokenizer.pad_token_id) or 0)
    return PairSteps(data, schedule, layout, pad, process.rank, process.world_size)


def _check_fit(config: RunConfig, longest: int) -> None:
    """Raises UserError where a pair of `longest` token slots is more than a micro-batch takes: pairs are never split."""
    most = config.batch.limits(config.packing.mode)[1]
    if most is not None and longest > most:
        raise UserError(
            f"the longest pair takes {longest} token slots, a micro-batch has {most}",
            where="batch.tokens_per_device",
            fix=f"set batch.tokens_per_device to at least {longest}, or data.max_length to {most // 2}",
        )


def _check_sorting_losses(config: RunConfig, steps: PairSteps) -> None:
    """Raises UserError where a loss that sorts the pairs of a step would see only some of them at a time."""
    most = steps.schedule.summary(steps.world_size).micro_batches_max
    if (sorting := config.objective.sorting_losses) and (steps.world_size > 1 or most > 1):
        raise UserError(
            f"{' and '.join(sorting)} sorts all pairs of a step, which here are spread over {steps.world_size} process"
            f"{'es' if steps.world_size > 1 else ''} and up to {most} micro-batches",
            where="objective.loss_type",
            fix="use one process and a larger batch.tokens_per_device (and batch.examples_per_device), or another loss",
        )


def _arguments(
    setting: Setting, model: PreTrainedModel, steps: PairSteps, evaluation: PairSteps | None, *, starts_anew: bool
) -> DPOConfig:
    return training_arguments(
        setting.config,
        DPOConfig,
        model,
        total_steps=len(steps),
        on_cpu=setting.process.device.type == "cpu",
        has_eval=evaluation is not None,
        starts_anew=starts_anew,
        **objective_arguments(setting.config.objective),
        precompute_ref_log_probs=reference_of(
            setting.config.model, setting.config.peft, setting.config.objective, setting.config.strategy
        ).kind
        == "precomputed",
    )


def _take_precomputed(
    setting: Setting,
    trainer: PackedDPOTrainer,
    data: Prepared,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layout: PairRows,
    identity: str,
) -> None:
    """Has what the reference says of every pair come with the batches."""
    sets = [part for part in (data.train, data.eval) if part is not None]
    whole = [_steps(setting, part, model, tokenizer, layout, whole_set=True) for part in sets]
    said = precompute(trainer, setting.config, whole, identity)
    settings = trainer.settings
    steps = replace(cast(PairSteps, settings.steps), reference=said[0])
    evaluation = replace(cast(PairSteps, settings.evaluation), reference=said[1]) if len(said) > 1 else None
    trainer.settings = replace(settings, steps=steps, evaluation=evaluation)
    trainer.steps = steps
