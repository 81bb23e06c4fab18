"""transformers' Trainer, held for its accelerator and its optimizer."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers import trainer as library
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from packtrain.system import holding


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
