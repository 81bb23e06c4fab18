"""What TRL's constructors and DeepSpeed's engine leave no other way for, each with its reason; packtrain patches them nowhere else.

TRL's trainers are held for their losses (objectives/), and never train. Their constructors want data and do work that is done
elsewhere; their losses gather figures over ranks. DeepSpeed's engine updates the weights within the backward pass.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import datasets
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, TrainingArguments
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from packtrain.boundary import holding
from packtrain.model.load import base_model

Arguments = TypeVar("Arguments", bound=TrainingArguments)


def arguments_on_one_gpu(kind: type[Arguments], **arguments: Any) -> Arguments:
    """TRL's arguments of that `kind`. A process that is alone would split its batches over all GPUs that it sees, or be refused."""
    made = kind(**arguments)
    made._n_gpu = min(made.n_gpu, 1)
    return made


def hold_trainer(
    kind: type[Any],
    model: PreTrainedModel,
    args: Any,
    tokenizer: PreTrainedTokenizerBase,
    columns: dict[str, list[Any]],
    **given: Any,
) -> Any:
    """A TRL trainer of that `kind`, to be asked for losses. `columns` is the row of data that its constructor reads.

    What is set before the constructor runs stands before the methods of the class:
    - data is not prepared: there is one row, since a datasets.Dataset is required;
    - log-probabilities of the reference are not precomputed: they come with the batches (model/reference.py);
    - nothing is sent to anyone.
    """
    trainer: Any = object.__new__(kind)
    trainer._prepare_dataset = lambda dataset, *_, **__: dataset
    trainer._precompute_ref_logps = lambda dataset, *_, **__: dataset
    trainer._send_telemetry = lambda: None
    data = datasets.Dataset.from_dict(columns)
    text_config = base_model(model).config.get_text_config()
    routers = getattr(text_config, "output_router_logits", None)
    # KTO refuses 1, as it estimates KL over one batch
    several = holding(args, per_device_train_batch_size=max(args.per_device_train_batch_size, 2))
    # TRL hashes weights for its cache of log-probabilities, which fails on sharded ones (model/reference.py has its own)
    unhashed = holding(sys.modules[kind.__module__], hash_module=lambda _: "")
    # else it rounds adapters on quantised weights to bfloat16, in which small updates are lost
    base: Any = base_model(model)
    in_bits = {name: False for name in ("is_loaded_in_4bit", "is_loaded_in_8bit") if getattr(base, name, False)}
    with _adapters_not_copied(model), several, unhashed, holding(base, **in_bits):
        trainer.__init__(
            model=model,
            args=args,
            processing_class=tokenizer,
            data_collator=list,
            train_dataset=data,
            eval_dataset=None if args.eval_strategy == "no" else data,
            **given,
        )
    if routers is not None:  # TRL turns them on for an auxiliary loss of its own
        text_config.output_router_logits = routers
    if trainer.accelerator.ddp_handler is not None:  # DDP need not copy what it has reduced back to the gradients
        trainer.accelerator.ddp_handler.gradient_as_bucket_view = True
    return trainer


def without_gathering(accelerator: Accelerator) -> Accelerator:
    """A copy that gathers nothing: TRL gathers figures of each micro-batch, of which ranks may have different numbers, and would hang."""
    local: Any = copy.copy(accelerator)
    local.gather = local.gather_for_metrics = lambda tensor, *_, **__: tensor
    return local


@contextmanager
def _adapters_not_copied(model: Any) -> Iterator[None]:
    """TRL copies adapters as a reference, which fails on sharded ones and is not needed.

    New adapters are zero, like adapters off; continued ones are also loaded as `ref` (model/adapters.py).
    """
    if not hasattr(model, "peft_config"):
        yield
        return
    find = model.get_parameter
    model.add_adapter = lambda *_, **__: None
    model.get_parameter = lambda name: find(name.replace(".ref.", ".default."))
    try:
        yield
    finally:
        del model.add_adapter, model.get_parameter


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
