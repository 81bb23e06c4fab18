"""The model as accelerate prepares it: spread, with its optimizer and schedule, alike under DDP, DeepSpeed and FSDP2 (`Engine`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import get_scheduler
from transformers.integrations.deepspeed import deepspeed_init

from packtrain.boundary import boundary
from packtrain.config.rules.paths_and_packages import without_package
from packtrain.config.schema import Optim
from packtrain.model.load import base_model
from packtrain.model.recomputation import recompute
from packtrain.model.spread import check_active
from packtrain.train.objectives.loss import Loss
from packtrain.train.optim.float32_step import loses_updates, stepping_in_float32
from packtrain.train.optim.lost_updates import advice, optimizer_inside


class Engine:
    """`model` is the plain model, `wrapped` the one that a step calls, once `prepare` was called.

    The base class of the TRL trainer that the `loss` holds makes the optimizer.
    """

    optimizer: Any
    lr_schedule: Any

    def __init__(self, loss: Loss, strategy: str, checkpointing: str = "none", *, exchange_once: bool = False) -> None:
        """`strategy` is strategy.name, `checkpointing` how layers compute activations again (model/recomputation.py);
        `exchange_once` is for fsdp2 (plan/memory.py::Memory.exchanges_once)."""
        self._trl, self.strategy = loss.trl, strategy
        self.exchanges_once = exchange_once
        self.model, self.accelerator, self.args = loss.model, loss.accelerator, loss.trl.args
        self.wrapped: Any = self.model
        self.deepspeed: bool = loss.trl.is_deepspeed_enabled
        self.weight_order: list[str] = []
        """The names of the trained weights, in the order of the optimizer."""
        self.advice = ""
        """What to do where updates are lost in rounding."""
        if checkpointing != "none":
            recompute(base_model(self.model), checkpointing)

    def prepare(self, steps: int, optim: Optim, say: Callable[[str], None]) -> None:
        """Makes optimizer and schedule for this number of `steps`, and spreads the model. Raises UserError for what cannot be made."""
        self.accelerator.free_memory()
        optimizer = self._make_optimizer(steps, optim, say)
        names = {weight: name for name, weight in self.model.named_parameters()}
        self.weight_order = [names[weight] for group in optimizer.param_groups for weight in group["params"]]
        if self.strategy == "fsdp2":  # sharded already (model/spread.py)
            self.wrapped = self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
            self.optimizer = self.accelerator.prepare(optimizer)
        else:
            self.wrapped, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        with boundary(f"the schedule {optim.schedule} cannot be made", "optim.schedule_options"):
            self.lr_schedule = get_scheduler(
                self.args.lr_scheduler_type,
                optimizer=self.optimizer,
                num_warmup_steps=self.args.get_warmup_steps(steps),
                num_training_steps=steps,
                scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
            )
        check_active(self.strategy, self.wrapped, self.model)

    def _make_optimizer(self, steps: int, optim: Optim, say: Callable[[str], None]) -> Any:
        """transformers' optimizer; one that steps in float32 where weights would lose updates, except under DeepSpeed, which does that itself."""
        making = partial(
            boundary, f"the optimizer {optim.name} cannot be made", "optim.name", without_package(optim.name)
        )
        with making():
            kind, arguments = self._trl.get_optimizer_cls_and_kwargs(self.args, self.model)
        coarse = any(map(loses_updates, self.model.parameters())) and not self.deepspeed
        self.advice = advice(rounds_plainly=coarse and not optim.steps_in_float32)
        asked = optim.bf16_rounding in ("stochastic", "nearest")
        if asked and not coarse and not self.deepspeed:  # config/rules/ cannot know it of model.dtype=auto
            say("optim.bf16_rounding has no effect: no trained weight is bfloat16")
        if coarse and optim.steps_in_float32:
            how: Any = {"masters": optim.keeps_masters, "rounding": optim.bf16_rounding, "seed": self.args.seed}
            self._trl.optimizer_cls_and_kwargs = stepping_in_float32(kind, **how), arguments
        with making():
            return deepspeed_init(self._trl, steps)[0] if self.deepspeed else self._trl.create_optimizer()

    def exchanging_gradients(self, *, last: bool) -> AbstractContextManager[Any]:
        """The context to run a micro-batch in. DDP exchanges gradients with the `last` one only, FSDP2 if it `exchanges_once`; else
        sharded strategies do so with each.

        DeepSpeed's engine steps within the backward pass of the micro-batch that is marked as the last.
        """
        if self.exchanges_once:
            cast(FSDPModule, base_model(self.model)).set_requires_gradient_sync(last)
            return nullcontext()
        if self.deepspeed:
            self.accelerator.gradient_state._set_sync_gradients(last)
            return nullcontext()
        return nullcontext() if last else self.accelerator.no_sync(self.wrapped)

    def clip(self) -> Any:
        """The norm of the step's gradients, which are clipped to optim.max_grad_norm; DeepSpeed's engine has done so."""
        norm: Any = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.args.max_grad_norm or math.inf)
        return norm.item() if self.deepspeed and isinstance(norm, torch.Tensor) else norm

    def update(self) -> float:
        """Makes the update; returns its learning rate."""
        self.optimizer.step()
        rate = self.lr_schedule.get_last_lr()[0]
        if not self.accelerator.optimizer_step_was_skipped:
            self.lr_schedule.step()
        self.wrapped.zero_grad()
        return rate.item() if isinstance(rate, torch.Tensor) else rate

    @property
    def plain_optimizer(self) -> Any:
        """torch's optimizer inside accelerate's and DeepSpeed's."""
        return optimizer_inside(self.optimizer)
