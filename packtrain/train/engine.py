"""The model after accelerate spread it, with optimizer and schedule (`Engine`). DDP, DeepSpeed and FSDP2 have the same interface."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import get_scheduler
from transformers.integrations.deepspeed import deepspeed_init

from packtrain.boundary import boundary
from packtrain.config.schema import Optim
from packtrain.model.load import base_model
from packtrain.model.recomputation import recompute
from packtrain.model.spread import check_active
from packtrain.train.checkpoint.reshard import masters_in
from packtrain.train.objectives.loss import Loss
from packtrain.train.optim.dither import Dither
from packtrain.train.optim.float32_step import MASTER, loses_updates, stepping_in_float32
from packtrain.train.optim.groups import AVERAGE, group_weights
from packtrain.train.optim.seen_updates import optimizer_inside


class Engine:
    """The spread model with its optimizer. `model` is the plain model; `wrapped` is the one a step calls, after `prepare`.

    The Trainer that the `loss` holds makes the optimizer.
    """

    optimizer: Any
    lr_schedule: Any

    def __init__(
        self,
        loss: Loss,
        strategy: str,
        checkpointing: str = "none",
        *,
        offload: bool = False,
        exchange_once: bool = False,
        ema: float = 0.0,
    ) -> None:
        """`strategy` is strategy.name. `checkpointing` says how layers recompute activations (model/recomputation.py), `offload` whether the
        kept ones go to the CPU. `exchange_once` is for fsdp2 (plan/memory.py::Memory.exchanges_once), `ema` is trainer.ema."""
        self._held, self._changes, self.strategy = loss.held, loss.changes, strategy
        self.exchanges_once, self.ema = exchange_once, ema
        self.model, self.accelerator, self.args = loss.model, loss.accelerator, loss.held.args
        self.wrapped: Any = self.model
        self.deepspeed: bool = loss.held.is_deepspeed_enabled
        self.weight_order: list[str] = []
        """Names of the trained weights, in the order of the optimizer."""
        self.dither = Dither()
        self._masters: list[torch.Tensor] = []
        if checkpointing != "none":
            recompute(base_model(self.model), checkpointing, offload=offload)

    def prepare(self, steps: int, optim: Optim, say: Callable[[str], None]) -> None:
        """Make optimizer and schedule for this number of `steps`, and spread the model. Raises UserError if one of them cannot be made."""
        self.accelerator.free_memory()
        self.dither.move_weights()
        optimizer = self._make_optimizer(steps, optim, say)
        names = {weight: name for name, weight in self.model.named_parameters()}
        self.weight_order = [names[weight] for group in optimizer.param_groups for weight in group["params"]]
        if self.strategy == "fsdp2":  # model/spread.py has sharded it
            self.wrapped = self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
            self.optimizer = self.accelerator.prepare(optimizer)
        else:
            self.wrapped, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        if self.deepspeed:
            self._find_masters()
        with boundary(f"the schedule {optim.schedule} cannot be made", "optim.schedule_options"):
            self.lr_schedule = get_scheduler(
                self.args.lr_scheduler_type,
                optimizer=self.optimizer,
                num_warmup_steps=warmup_of(optim.schedule, self.args.get_warmup_steps(steps), steps),
                num_training_steps=steps,
                scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
            )
        check_active(self.strategy, self.wrapped, self.model)

    def _make_optimizer(self, steps: int, optim: Optim, say: Callable[[str], None]) -> Any:
        """Return transformers' optimizer. It steps in float32 where weights would lose updates; DeepSpeed does that itself."""
        what = f"the optimizer {optim.name} cannot be made"
        making = partial(boundary, what, "optim.name", optim.spec.advice)
        with making():
            kind, arguments = self._held.get_optimizer_cls_and_kwargs(self.args, self.model)
        if optim.spec.own:
            kind = import_module(optim.spec.own).OPTIMIZER
            arguments = {name: arguments[name] for name in ("lr", "betas", "eps")}
        if optim.groups or optim.spec.own:
            decayed = self._held.get_decay_parameter_names(self.model)
            arguments = {**arguments, "params": group_weights(self.model, optim, decayed)}
            self._held.optimizer_cls_and_kwargs = kind, arguments
        coarse = any(map(loses_updates, self.model.parameters())) and not self.deepspeed
        if not (optim.keeps_masters or coarse or self.deepspeed):  # config/rules/ cannot know it with model.dtype=auto
            say("optim.bf16_rounding has no effect: no trained weight is bfloat16")
        if coarse:
            names = {weight: name for name, weight in self.model.named_parameters()}
            how: Any = {"masters": optim.keeps_masters, "seed": self.args.seed, "names": names, "dither": self.dither}
            self._held.optimizer_cls_and_kwargs = stepping_in_float32(kind, **how), arguments
        with making():
            return deepspeed_init(self._held, steps)[0] if self.deepspeed else self._held.create_optimizer()

    def masters_of(self, stepped: torch.Tensor) -> list[torch.Tensor]:
        """Return the masters of bfloat16-computed weights among the numbers that the optimizer steps. If the run has such masters, every
        process gets at least an empty one. With fp8 there are none: fp8 has other cells."""
        if "fp8" in self._changes or not self.dither.rounded:
            return []
        if self.deepspeed:  # one flat part holds weights of all kinds
            begin = stepped.data_ptr()
            own = [part for part in self._masters if begin <= part.data_ptr() < begin + stepped.nbytes]
            return own or [stepped[:0]]
        if isinstance(stepped, torch.nn.Parameter):
            rounded = any(stepped is weight for weight in self.dither.rounded.values())
            return [stepped] if stepped.dtype == torch.float32 and rounded else []
        return [stepped] if getattr(self.plain_optimizer, "masters", False) else []

    def _find_masters(self) -> None:
        """Find the masters of bfloat16-computed weights in DeepSpeed's flat parts. Move the masters of 16-bit weights."""
        names = {weight: name for name, weight in self.dither.rounded.items()}
        for weight, master, first in masters_in(self.wrapped.optimizer, names) if names else ():
            self._masters.append(master)
            if weight.dtype == torch.bfloat16:
                self.dither.move_master(names[weight], master, first)

    def exchanging_gradients(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context to run a micro-batch in. DDP exchanges gradients only with the `last` one, as does FSDP2 if it `exchanges_once`;
        otherwise sharded strategies exchange them with each micro-batch.

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
        """Clip the step's gradients to optim.max_grad_norm; return their norm. DeepSpeed's engine has already clipped."""
        norm: Any = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.args.max_grad_norm or math.inf)
        return norm.item() if self.deepspeed and isinstance(norm, torch.Tensor) else norm

    def update(self) -> float:
        """Make the update; return its learning rate."""
        self.optimizer.step()
        if self.ema:
            self._average()
        rate = self.lr_schedule.get_last_lr()[0]
        if not self.accelerator.optimizer_step_was_skipped:
            self.lr_schedule.step()
        self.wrapped.zero_grad()
        return rate.item() if isinstance(rate, torch.Tensor) else rate

    @torch.no_grad()
    def _average(self) -> None:
        """Update the running averages of the stepped weights. From the first step on they are an optimizer state."""
        states = self.plain_optimizer.state
        for weight in (weight for weight in self.model.parameters() if weight.grad is not None):
            exact = states[weight].get(MASTER, weight).detach().float()
            if AVERAGE in states[weight]:
                states[weight][AVERAGE].lerp_(exact, 1 - self.ema)
            else:
                states[weight][AVERAGE] = exact.clone()

    @property
    def plain_optimizer(self) -> Any:
        """Return torch's optimizer, which accelerate and DeepSpeed wrap."""
        return optimizer_inside(self.optimizer)


def warmup_of(schedule: str, asked: int, steps: int) -> int:
    """Return the warm-up steps. 0 if the run has one step, whose rate would be 0; polynomial needs a step after the warm-up."""
    return min(asked, steps - 1) if steps == 1 or (schedule == "polynomial" and asked == steps) else asked
