"""RunConfig → arguments of TRL's trainers: the only place where our keys meet transformers' names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel, SchedulerType
from trl import DPOConfig, SFTConfig

from packtrain.config.schema import RunConfig
from packtrain.model.spread import arguments_of

Arguments = TypeVar("Arguments", SFTConfig, DPOConfig)


def training_arguments(
    config: RunConfig,
    kind: type[Arguments],
    model: PreTrainedModel,
    *,
    total_steps: int,
    on_cpu: bool,
    has_eval: bool,
    starts_anew: bool,
    **objective: Any,
) -> Arguments:
    """Arguments of a run of `total_steps` optimizer steps on the loaded `model`; `objective` are those of the trainer's own.

    Everything about batches is left at one: a DataLoader item is a whole optimizer step of this process, already split
    into micro-batches (train/whole_steps.py), so transformers' own accumulation and sampling have nothing to do.
    """
    optim, trainer = config.optim, config.trainer
    return kind(
        output_dir=trainer.output_dir,
        max_steps=total_steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        ignore_data_skip=True,  # our sampler starts at the resumed step by itself
        optim=optim.name,
        learning_rate=optim.learning_rate,
        lr_scheduler_type=SchedulerType(optim.schedule),
        lr_scheduler_kwargs=dict(optim.schedule_options),
        warmup_steps=optim.warmup_steps if optim.warmup_steps < 1 else int(optim.warmup_steps),
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_epsilon=optim.epsilon,
        max_grad_norm=optim.max_grad_norm,
        activation_checkpointing=trainer.gradient_checkpointing,
        use_cpu=on_cpu,  # without it several CPU processes silently train copies of their own
        seed=trainer.seed,
        logging_steps=trainer.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # a NaN must be seen
        save_strategy="steps" if trainer.checkpoint_every else "no",
        save_steps=trainer.checkpoint_every or 1,
        eval_strategy="steps" if trainer.eval_every and has_eval else "no",
        eval_steps=trainer.eval_every,
        eval_on_start=has_eval and starts_anew,
        report_to=list(config.tracking.report_to) or "none",
        run_name=config.tracking.run_name or Path(trainer.output_dir).name,
        ddp_timeout=config.topology.step_timeout,
        ddp_find_unused_parameters=False,
        # what a forward pass keeps (rotary frequencies) every rank computes itself; and forward passes would wait for rank 0
        ddp_broadcast_buffers=False,
        disable_tqdm=True,
        remove_unused_columns=False,
        max_length=None,
        **arguments_of(config, model),
        **objective,
    )
