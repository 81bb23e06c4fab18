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
from packtrain.attention.choice import Decision, examine_pairs
from packtrain.attention.isolation import check_as_it_comes
from packtrain.config.limits import micro_batch_limits
from packtrain.config.schema import RunConfig
from packtrain.data.pairs import PairDataset
from packtrain.data.prepare import PreparedData, prepare_pairs
from packtrain.errors import CheckFailed, UserError
from packtrain.packing.pairs import Layout
from packtrain.train import announce
from packtrain.train.arguments import training_arguments
from packtrain.train.course import callbacks_of, course_of, schedule_of
from packtrain.train.dpo import PackedDPOTrainer, unsplittable
from packtrain.train.dpo_start import check_pair_forward, check_start
from packtrain.train.loader import PairSteps
from packtrain.train.model import base_model
from packtrain.train.preflight import autocast_of, decide_together, same_everywhere
from packtrain.train.reference import kind_of, load_reference, precompute
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
    cast(Any, model).to(device)
    as_it_came = own_attention(base)
    decision = None
    layout: Layout = "padding"
    unshared = ""
    if config.packing.mode != "padding":
        decision = decide_together(config, base, setting.process.world_size)
        layout, unshared = _layout(config, base, decision, setting.process.world_size)
    steps = _steps(setting, data.train, model, tokenizer, layout, whole_set=False)
    evaluation = _steps(setting, data.eval, model, tokenizer, layout, whole_set=True) if data.eval else None
    for part in filter(None, (steps, evaluation)):
        _check_sorting_losses(config, part)
    announce.decisions(setting.log, config, model, data, steps, evaluation, setting.process.world_size)
    trainer = PackedDPOTrainer(
        model,
        _arguments(setting, steps, evaluation, starts_anew=checkpoint is None),
        tokenizer,
        course=course_of(setting, steps, evaluation, model, checkpoint),
        reference=load_reference(config, tokenizer, device),
        callbacks=callbacks_of(setting),
    )
    announce.attention(setting.log, base, decision)
    announce.pairs(setting.log, config, layout, unshared, kind_of(config))
    if config.verify.preflight:
        check_as_it_comes(base, padding=decision is None, autocast=autocast_of(config))
    if decision is not None:
        attend_by(base, decision.backend.name)
        if trainer.ref_model is not None:
            attend_by(cast(Any, trainer.accelerator.unwrap_model(trainer.ref_model)), decision.backend.name)
    if kind_of(config) == "precomputed":
        _take_precomputed(setting, trainer, data, model, tokenizer, layout)
    if config.verify.preflight:
        check_pair_forward(trainer, as_it_came)
        if kind_of(config) != "path":
            check_start(trainer)
    return trainer, decision


def _layout(config: RunConfig, model: PreTrainedModel, decision: Decision, processes: int) -> tuple[Layout, str]:
    """How pairs are laid out in rows, and why their prompts are not shared where they could be asked to be.

    Raises CheckFailed where packing.share_prefix asks for what the backend cannot do.
    """
    if config.packing.share_prefix is False:
        return "flat", "packing.share_prefix=false"
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
    layout: Layout,
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
    most = micro_batch_limits(config)[1]
    if most is not None and longest > most:
        raise UserError(
            f"the longest pair takes {longest} token slots, a micro-batch has {most}",
            where="batch.tokens_per_device",
            fix=f"set batch.tokens_per_device to at least {longest}, or data.max_length to {most // 2}",
        )


def _check_sorting_losses(config: RunConfig, steps: PairSteps) -> None:
    """Raises UserError where a loss that sorts the pairs of a step would see only some of them at a time."""
    losses = (
        config.objective.loss_type if isinstance(config.objective.loss_type, list) else [config.objective.loss_type]
    )
    most = steps.schedule.summary(steps.world_size).micro_batches_max
    if (sorting := unsplittable(losses)) and (steps.world_size > 1 or most > 1):
        raise UserError(
            f"{' and '.join(sorting)} sorts all pairs of a step, which here are spread over {steps.world_size} process"
            f"{'es' if steps.world_size > 1 else ''} and up to {most} micro-batches",
            where="objective.loss_type",
            fix="use one process and a larger batch.tokens_per_device (and batch.examples_per_device), or another loss",
        )


def _arguments(setting: Setting, steps: PairSteps, evaluation: PairSteps | None, *, starts_anew: bool) -> DPOConfig:
    objective = setting.config.objective
    losses = objective.loss_type if isinstance(objective.loss_type, list) else [objective.loss_type]
    return training_arguments(
        setting.config,
        DPOConfig,
        total_steps=len(steps),
        on_cpu=setting.process.device.type == "cpu",
        has_eval=evaluation is not None,
        starts_anew=starts_anew,
        beta=objective.beta,
        loss_type=list(losses),
        loss_weights=list(objective.loss_weights) if objective.loss_weights else None,
        label_smoothing=objective.label_smoothing,
        f_divergence_type=objective.f_divergence_type,
        f_alpha_divergence_coef=objective.f_alpha_divergence_coef,
        ld_alpha=objective.ld_alpha,
        use_weighting=objective.use_weighting,
        discopop_tau=objective.discopop_tau,
        precompute_ref_log_probs=kind_of(setting.config) == "precomputed",
        router_aux_loss_coef=0.0,
    )


def _take_precomputed(
    setting: Setting,
    trainer: PackedDPOTrainer,
    data: Prepared,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layout: Layout,
) -> None:
    """Has what the reference says of every pair come with the batches."""
    sets = [part for part in (data.train, data.eval) if part is not None]
    whole = [_steps(setting, part, model, tokenizer, layout, whole_set=True) for part in sets]
    said = precompute(trainer, setting.config, whole)
    course = trainer.course
    steps = replace(cast(PairSteps, course.steps), reference=said[0])
    evaluation = replace(cast(PairSteps, course.evaluation), reference=said[1]) if len(said) > 1 else None
    trainer.course = replace(course, steps=steps, evaluation=evaluation)
    trainer.steps = steps
