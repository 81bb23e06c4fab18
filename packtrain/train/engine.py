"""Engine: the spread model, its optimizer and schedule, with one interface for all strategies.

A checkpoint of another strategy, or of another number of processes, is loaded by the names of weights (`CheckpointContents`). Its files are
mapped into memory, so that a process holds little more than the tensors that it asks for. Each process takes its share of one whole weight after
the other. DeepSpeed's universal checkpoints offer the same for Adam only, as a second copy on disk. The optimizer's settings and its learning rate
are this run's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Protocol, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from packtrain.config.schema import Optim
from packtrain.errors import CheckFailed, boundary
from packtrain.model.layers import recompute
from packtrain.model.load import base_model
from packtrain.model.precision import weights_cast_once
from packtrain.model.save import gathered
from packtrain.strategies.spec import STRATEGIES, StrategySpec
from packtrain.train.checkpoint.writer import CheckpointWriter
from packtrain.train.objectives.loss import Loss
from packtrain.train.optim.dither import Dither
from packtrain.train.optim.float32_step import AVERAGE, MASTER, ROUNDINGS, loses_updates, stepping_in_float32
from packtrain.train.optim.fused_adamw import step_by_kernel
from packtrain.train.optim.weight_groups import group_weights
from packtrain.train.run_state import LoopSettings
from packtrain.train.spikes import Norm

Judge = Callable[[Callable[[], torch.Tensor]], bool | None]
"""Takes a function that returns the gradient norm. Returns True to skip the update, None if steps are not judged."""

Exact = Callable[[torch.Tensor], torch.Tensor | None]
"""Returns the optimizer's whole float32 tensor of a trained weight; None if it keeps none. All processes call it together."""
_Value = TypeVar("_Value", bound=torch.Tensor | float)
States = dict[str, torch.Tensor | float]
"""States of a weight in an optimizer, by name."""
Names = Mapping[torch.Tensor, str]
"""Names of the trained weights of this process's model."""


class CheckpointContents(Protocol):
    """Reader of a checkpoint, by the names of `named_parameters()`. All tensors are whole and on the CPU."""

    @property
    def order(self) -> list[str] | None:
        """The weight names in the order of the optimizer's numbers. None: its states go by name."""
        ...

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight or a buffer, in its own format or in float32."""
        ...

    def states(self, name: str) -> States:
        """Return the optimizer's states of a weight; {} if it never had a gradient.

        They are tensors of the weight's shape or plain values (for AdamW `exp_avg`, `exp_avg_sq`, `step`), and include MASTER.
        """
        ...


class Engine:
    """The spread model with its optimizer. `model` is the plain model. After `prepare`, steps call `wrapped`.

    A subclass for each strategy wraps the model, exchanges gradients, and saves and loads checkpoints.
    """

    optimizer: Optimizer
    lr_schedule: LambdaLR

    def __init__(self, loss: Loss, settings: LoopSettings) -> None:
        self._optim, self._seed = settings.optim, settings.trainer.seed
        self.spec = STRATEGIES[settings.strategy]
        self.exchanges_once, self.ema = False, settings.trainer.ema
        self.model, self.accelerator = loss.model, loss.accelerator
        self.has_adapters = base_model(self.model) is not self.model
        self.wrapped: nn.Module = self.model
        self.weight_order: list[str] = []
        """Names of the trained weights, in the order of the optimizer."""
        self.casting_once: Callable[[], AbstractContextManager[None]] = weights_cast_once
        """Context of the micro-batches of a step."""
        if self.spec.shards_weights or settings.autocast is None:  # copies would keep every gathered layer in memory
            self.casting_once = nullcontext
        self.dither = Dither()
        self.checkpointing, self._offload = "none", settings.trainer.activation_offload
        self.fallbacks: list[str] = []
        """Values of trainer.gradient_checkpointing to try if the current one lacks memory, in order."""

    def recompute(self, policy: str) -> None:
        """Make layers recompute their activations by `policy` from now on."""
        if self.has_adapters and (policy == "none") != (self.checkpointing == "none"):
            if policy == "none":
                self.model.disable_input_require_grads()
            else:
                self.model.enable_input_require_grads()  # else a recomputed layer gives its adapters no gradient
        recompute(base_model(self.model), policy, offload=self._offload)
        self.checkpointing = policy

    def prepare(self, steps: int, say: Callable[[str], None]) -> None:
        """Make optimizer and schedule for this number of `steps`, and wrap the model. Raises UserError if one of them cannot be made."""
        self.accelerator.free_memory()
        self.dither.move_weights()
        optim = self._optim
        names = {weight: name for name, weight in self.model.named_parameters()}
        optimizer = self._make_optimizer(names, say)
        self.weight_order = [names[weight] for group in optimizer.param_groups for weight in group["params"]]
        self.wrapped, self.optimizer = self.wrap(optimizer)
        what = f"the schedule {optim.schedule} cannot be made"
        with boundary(what, "optim.schedule_options", code="schedule-unusable"):
            schedule = get_scheduler(
                optim.schedule,
                optimizer=self.optimizer,
                num_warmup_steps=warmup_of(optim, steps),
                num_training_steps=steps,
                scheduler_specific_kwargs=dict(optim.schedule_options),
            )
            self.lr_schedule = cast(LambdaLR, schedule)
        check_spread(self.spec, self.wrapped, self.model)

    def _make_optimizer(self, names: Names, say: Callable[[str], None]) -> Optimizer:
        """Return the optimizer of the weights `names`. It steps in float32 where weights would lose updates."""
        optim = self._optim
        what = f"the optimizer {optim.name} cannot be made"
        with boundary(what, "optim.name", optim.spec.advice, code="optimizer-unusable"):
            kind = optim.spec.load()
            if any(map(loses_updates, self.model.parameters())) and not self.spec.keeps_masters:
                masters, seed, dither = optim.keeps_masters, self._seed, self.dither
                kind = stepping_in_float32(kind, masters=masters, seed=seed, names=names, dither=dither)
            elif not (optim.keeps_masters or self.spec.keeps_masters):
                # config/rules/ cannot see this if model.dtype=auto
                say("optim.bf16_rounding has no effect: no trained weight is bfloat16")
            make = cast(Callable[..., Optimizer], kind)
            arguments = optim.spec.arguments(optim.beta1, optim.beta2)
            made = make(group_weights(self.model, optim), lr=optim.learning_rate, **arguments)
            step_by_kernel(made, self.accelerator.device, say)
            if optim.spec.options.get("optim_bits") == 8:
                keep_embeddings_precise(self.model)
            return made

    # Parts that differ by strategy: spreading and steps.

    @staticmethod
    def is_spread(spec: StrategySpec, wrapped: nn.Module, model: nn.Module) -> bool:
        """Return whether the strategy `spec` is active. `wrapped` is called in training, `model` is inside it."""
        raise NotImplementedError

    def wrap(self, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Return the model that a step calls, and the optimizer around `optimizer`."""
        return self.accelerator.prepare(self.model, optimizer)

    def ask_before_update(self, judge: Judge) -> None:
        """Install `judge` if updates happen inside the backward pass (DeepSpeed). Otherwise the loop judges."""

    def trying(self) -> AbstractContextManager[None]:
        """Return a context for a trial micro-batch. On exit it restores the step counters."""
        return nullcontext()

    def masters_of(self, stepped: torch.Tensor) -> list[torch.Tensor]:
        """Return the float32 masters in `stepped`, a tensor that the optimizer steps. Their weights compute in bfloat16. If the run has
        masters at all, each process gets one, which may be empty."""
        if isinstance(stepped, torch.nn.Parameter):
            rounded = any(stepped is weight for weight in self.dither.rounded.values())
            return [stepped] if stepped.dtype == torch.float32 and rounded else []
        return [stepped] if getattr(self.plain_optimizer, "masters", False) else []

    def exchanging_gradients(self, *, last: bool) -> AbstractContextManager[object]:
        """Return the context of a micro-batch. Ranks exchange gradients in the `last` one; a subclass may do it in each."""
        return nullcontext() if last else self.accelerator.no_sync(self.wrapped)

    def clip(self) -> Norm:
        """Clip the step's gradients to optim.max_grad_norm; return their norm."""
        limit = self._optim.max_grad_norm or math.inf
        return cast(Norm, self.accelerator.clip_grad_norm_(self.wrapped.parameters(), limit))

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
    def plain_optimizer(self) -> Optimizer:
        """Return torch's optimizer, which accelerate and DeepSpeed wrap."""
        optimizer = self.optimizer
        while (inner := getattr(optimizer, "optimizer", None)) is not None:
            optimizer = inner
        return optimizer

    # Parts that differ by strategy: checkpoints and final/.

    def exact_weights(self, kept_as: str) -> Exact:
        """Return a function that gathers a weight's master, or its optimizer state `kept_as`. It returns None without one."""
        states = self.plain_optimizer.state

        def exact(weight: torch.Tensor) -> torch.Tensor | None:
            kept = states[weight].get(kept_as) if weight in states else None
            return None if kept is None else gathered(kept)

        return exact

    def whole_weights(self, *, trained_only: bool) -> dict[str, torch.Tensor] | None:
        """Gather the state dict of sharded weights. All ranks call it; the main one gets it, others get {}. None: no weight is sharded."""
        return None

    def save(self, folder: Path, writer: CheckpointWriter) -> None:
        """Write copies of the optimizer's state, and of sharded weights, in the background."""
        raise NotImplementedError

    @staticmethod
    def read_checkpoint(checkpoint: Path, model: nn.Module) -> CheckpointContents:
        """Open a checkpoint that a run with this strategy wrote for `model`."""
        raise NotImplementedError

    def load_own(self, checkpoint: Path, contents: CheckpointContents, names: Names) -> bool:
        """Load a checkpoint of this strategy by its own files. `names` has weights and buffers. Return whether that is possible."""
        raise NotImplementedError

    def load_by_name(self, contents: CheckpointContents, names: Names, buffers: Names) -> None:
        """Load a checkpoint of any strategy into the weights `names` and the `buffers`."""
        put_weights(contents, {**names, **buffers})
        optimizer = self.plain_optimizer
        masters, whole = getattr(optimizer, "masters", False), optimizer.state_dict()
        numbers = [number for group in whole["param_groups"] for number in group["params"]]
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        whole["state"] = {}
        for number, weight in zip(numbers, weights, strict=True):
            if not (states := contents.states(names[weight])):
                continue
            own = {key: _share(value, weight) for key, value in states_of(contents, names[weight]).items()}
            if masters and loses_updates(weight):
                own = {key: value.float() if isinstance(value, torch.Tensor) else value for key, value in own.items()}
                own[MASTER] = _share(exact_weight(contents, names[weight]), weight)
            whole["state"][number] = own | {key: states[key] for key in (ROUNDINGS,) if key in states}
        optimizer.load_state_dict(whole)


def put_weights(contents: CheckpointContents, names: Names) -> None:
    """Copy the weights, each into its format. Not for ZeRO-3: its engine holds the weights."""
    with torch.no_grad():
        for weight, name in names.items():
            weight.copy_(_share(contents.weight(name), weight))


def exact_weight(contents: CheckpointContents, name: str) -> torch.Tensor:
    """Return the weight in float32: its master, if it has one."""
    master = contents.states(name).get(MASTER)
    return master if isinstance(master, torch.Tensor) else contents.weight(name).float()


def states_of(contents: CheckpointContents, name: str) -> States:
    """Return the states of a weight for any optimizer of torch, without masters."""
    states = contents.states(name)
    kept = {key: value for key, value in states.items() if key not in (MASTER, ROUNDINGS) and value is not None}
    return kept | ({"step": torch.tensor(float(kept["step"]))} if "step" in kept else {})


def _share(value: _Value, weight: torch.Tensor) -> _Value:
    """Return this process's share of a whole tensor like `weight`, on its device. Other values come back unchanged."""
    if not isinstance(value, torch.Tensor) or value.shape != weight.shape:
        return value
    there = value.to(weight.device)
    if isinstance(weight, DTensor):
        there = distribute_tensor(there, weight.device_mesh, weight.placements, src_data_rank=None)
    return cast(_Value, there)


def engine_of(strategy: str) -> type[Engine]:
    """Return the engine of a strategy. The code of other strategies is not imported."""
    return import_module(STRATEGIES[strategy].run).ENGINE


def check_spread(spec: StrategySpec, wrapped: nn.Module, model: nn.Module) -> None:
    """Raise CheckFailed if the strategy is not active: each process would then train alone."""
    if not engine_of(spec.name).is_spread(spec, wrapped, model):
        what = f"strategy={spec.name} is not active: the wrapped model is a {type(wrapped).__name__}"
        fix = "start it by packtrain or torchrun, without other settings"
        raise CheckFailed(what, where="strategy.name", fix=fix, code="strategy-inactive")


def warmup_of(optim: Optim, steps: int) -> int:
    """Return the warm-up steps. 0 if the run has one step, whose rate would be 0; polynomial needs a step after the warm-up."""
    asked = int(optim.warmup_steps) if optim.warmup_steps >= 1 else math.ceil(steps * optim.warmup_steps)
    return min(asked, steps - 1) if steps == 1 or (optim.schedule == "polynomial" and asked == steps) else asked


def keep_embeddings_precise(model: nn.Module) -> None:
    """Make 8-bit optimizers of bitsandbytes keep the states of embeddings in 32 bits. Their gradients are rare and uneven."""
    from bitsandbytes.optim import GlobalOptimManager

    for module in model.modules():
        if isinstance(module, nn.Embedding):
            GlobalOptimManager.get_instance().register_module_override(module, "weight", {"optim_bits": 32})
