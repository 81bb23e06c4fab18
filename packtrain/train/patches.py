"""Work with transformers' Trainer and DeepSpeed's engine: both do more than packtrain asks of them.

A Trainer is held for its accelerator and its optimizer, and never trains. DeepSpeed's engine updates the weights within the backward
pass. packtrain patches them nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers import trainer as library
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from packtrain.boundary import holding


def arguments_on_one_gpu(**arguments: Any) -> TrainingArguments:
    """Return transformers' arguments for one device: a process that is alone would split its batches over all GPUs."""
    made = TrainingArguments(**arguments)
    made._n_gpu = min(made.n_gpu, 1)
    return made


def hold_trainer(model: PreTrainedModel, arguments: TrainingArguments, tokenizer: PreTrainedTokenizerBase) -> Trainer:
    """Return a Trainer of `model` that is asked for its accelerator and its optimizer, and never trains."""
    if isinstance(model, PeftModel) and arguments.activation_checkpointing:
        model.enable_input_require_grads()  # else a recomputed layer whose inputs are frozen gives its adapters no gradient
    nothing: Any = [0]  # a data set is required
    given: Any = {"data_collator": list, "train_dataset": nothing, "eval_dataset": nothing}
    # quantised models may be evaluated; model/load.py::check_trainable refuses to train them
    with holding(library, validate_quantization_for_training=lambda model: None):
        trainer = Trainer(model=model, args=arguments, processing_class=tokenizer, **given)
    if trainer.accelerator.ddp_handler is not None:  # DDP need not copy what it has reduced back to the gradients
        trainer.accelerator.ddp_handler.gradient_as_bucket_view = True
    return trainer


def ask_before_update(optimizer: Any, judge: Callable[[Callable[[], torch.Tensor]], bool | None]) -> None:
    """Has DeepSpeed's `optimizer` ask `judge` before an update, with what computes the norm of its gradients.

    True: the update is given up as if it were an overflow; None: not judged. The engine steps within the last backward pass, where
    nobody else can look at the gradients.
    """
    if not hasattr(optimizer, "_update_scale"):  # ZeRO-1 of bfloat16 weights
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        step = optimizer.step

        def norm_of_all() -> torch.Tensor:
            gradients, _ = optimizer.get_grads_for_norm()
            return _valid(get_global_norm_of_tensors(gradients, mpu=optimizer.mpu, norm_type=optimizer.norm_type))

        def step_or_not(*given: Any, **named: Any) -> None:
            if judge(norm_of_all):
                optimizer.clear_hp_grads()
                optimizer.clear_lp_grads()
                return
            step(*given, **named)

        optimizer.step = step_or_not
        return

    def norm_of_parts() -> torch.Tensor:
        if hasattr(optimizer, "scaled_global_norm"):
            return _valid(optimizer.scaled_global_norm())
        groups = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in optimizer._get_norm_groups()])
        return torch.full((), torch.nan) if (groups < 0).any() else torch.linalg.vector_norm(groups)

    update_scale = optimizer._update_scale

    def ask(overflow: bool) -> None:
        """Between the overflow check and the update; the scale of bfloat16 and float32 gradients never changes."""
        verdict = judge(norm_of_parts)
        if verdict is None:
            return update_scale(overflow)
        optimizer.overflow = verdict

    optimizer._update_scale = ask


def _valid(norm: Any) -> torch.Tensor:
    """DeepSpeed's norm, which is -1 for what is no number."""
    norm = torch.as_tensor(norm)
    return torch.where(norm >= 0, norm, torch.nan)


def counting_no_step(engine: Any) -> AbstractContextManager[None]:
    """Puts the counts of DeepSpeed's `engine` back after the block: it counts a micro-batch that is tried as a step."""
    names = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
    return holding(engine, **{name: getattr(engine, name) for name in names})
