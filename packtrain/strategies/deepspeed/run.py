"""The ZeRO stages, by DeepSpeed. Its engine clips and updates within the last backward pass of a step.

Under ZeRO-1 and ZeRO-2 every process has the whole model, under ZeRO-3 none. Until there is an optimizer, DeepSpeed's inference engine runs
the proofs of ZeRO-3. A layer is gathered as a whole (a "leaf"), since calls within a layer may differ by process (experts).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import deepspeed_load_checkpoint
from trl.models.utils import prepare_deepspeed

from packtrain.model.load import base_model
from packtrain.model.save import gathered, return_freed_memory
from packtrain.model.spread import Placement, Ranks, layers_of
from packtrain.model.weights import put_weight, take_slices
from packtrain.plan.origin import world_of
from packtrain.strategies.deepspeed.flat_parts import FlatParts, masters_in, put_into_zero
from packtrain.strategies.spec import StrategySpec
from packtrain.system import holding
from packtrain.train.checkpoint.writer import CheckpointWriter
from packtrain.train.engine import CheckpointContents, Engine, Exact, Judge, Names, put_weights
from packtrain.train.spikes import Norm


class _ZeroPlacement(Placement):
    def spread(self, model: PreTrainedModel, ranks: Ranks, autocast: torch.dtype | None) -> None:
        """Move the model, or shard it under ZeRO-3."""
        import deepspeed.ops

        # CPU inference by shared memory: compiling it takes a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if ranks.spec.offloads:  # DeepSpeed compiles its optimizer with ninja, which may be only beside this Python
            folders = (os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent))
            os.environ["PATH"] = os.pathsep.join(folders)
        if ranks.sharded:
            _partition(model, ranks)
        else:
            super().spread(model, ranks, autocast)

    def open_proofs(self, model: PreTrainedModel, ranks: Ranks) -> Callable[[], None]:
        if not ranks.sharded:
            return super().open_proofs(model, ranks)
        import deepspeed

        engine, *_ = deepspeed.initialize(model=model, config=_without_optimizer(model, ranks))

        def end() -> None:
            engine.destroy()
            for module in model.modules():  # else they still call this engine in the backward pass
                for name in ("pre_bwd_fn", "post_bwd_fn"):
                    module.__dict__.pop(name, None)

        return end

    def reduces_unreached(self, model: PreTrainedModel, spec: StrategySpec) -> bool:
        """Only ZeRO-3 does."""
        return spec.shards_weights

    def open_accelerator(
        self, spec: StrategySpec, weights: torch.dtype, autocast: torch.dtype | None, *, max_norm: float, unused: bool
    ) -> Accelerator:
        """DeepSpeed's bf16 would round the weights: model/precision.py::compute_in wraps the forward instead."""
        from accelerate.utils import DeepSpeedPlugin
        from deepspeed.utils import logger

        logger.setLevel(logging.ERROR)
        plugin = DeepSpeedPlugin(hf_ds_config=_settings(spec, weights, max_norm))
        return Accelerator(mixed_precision="bf16" if weights == torch.bfloat16 else "no", deepspeed_plugin=plugin)

    def wrap_frozen(self, model: PreTrainedModel, accelerator: Accelerator) -> Any:
        return prepare_deepspeed(model, accelerator)


def _settings(spec: StrategySpec, weights: torch.dtype, max_grad_norm: float) -> dict[str, Any]:
    assert spec.engine_settings is not None
    return spec.engine_settings(str(weights).removeprefix("torch."), max_grad_norm)


def _without_optimizer(model: PreTrainedModel, ranks: Ranks) -> dict[str, Any]:
    settings = _settings(ranks.spec, base_model(model).dtype, 0.0)
    settings["zero_optimization"].pop("offload_optimizer", None)
    return settings


def _partition(model: PreTrainedModel, ranks: Ranks) -> None:
    import deepspeed
    from deepspeed.utils import set_z3_leaf_modules

    if classes := list({type(layer) for layer in layers_of(model)}):
        set_z3_leaf_modules(model, classes)
    base = base_model(model)
    # a layer whose input has no gradient would lose its weights before its backward pass
    if base is not model or not cast(Any, base.get_input_embeddings()).weight.requires_grad:
        base.enable_input_require_grads()
    dtype = base.dtype
    # adapters on bfloat16 are float32; DeepSpeed's optimizer keeps float32 copies itself
    for weight in model.parameters():
        if not isinstance(weight, DTensor):
            weight.data = weight.data.to(dtype)
    remote = "cpu" if ranks.spec.offloads else None
    part = partial(
        deepspeed.zero.Init, config_dict_or_path=_without_optimizer(model, ranks), remote_device=remote, dtype=dtype
    )
    # one weight after the other: the engine would put the whole model on the device first
    slices = take_slices(model)
    for names in [*slices]:
        weight = slices.pop(names)
        whole = put_weight(model, names, gathered(weight).to(dtype), weight.requires_grad)
        part(module=nn.ParameterList([whole]))
        return_freed_memory()
    part(module=model)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(ranks.device)


class _Zero(Engine):
    wrapped: Any  # a DeepSpeedEngine, which has no types
    _masters: list[torch.Tensor]

    @staticmethod
    def is_spread(spec: StrategySpec, wrapped: nn.Module, model: nn.Module) -> bool:
        """The stages shard one, two and three parts."""
        engine = cast(Any, wrapped)
        return type(engine).__name__ == "DeepSpeedEngine" and engine.zero_optimization_stage() == len(spec.shards)

    def wrap(self, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Find the masters of bfloat16-computed weights in the flat parts. Move the masters of 16-bit weights."""
        wrapped, optimizer = super().wrap(optimizer)
        self._masters, names = [], {weight: name for name, weight in self.dither.rounded.items()}
        for weight, master, first in masters_in(wrapped.optimizer, names) if names else ():
            self._masters.append(master)
            if weight.dtype == torch.bfloat16:
                self.dither.move_master(names[weight], master, first)
        return wrapped, optimizer

    def ask_before_update(self, judge: Judge) -> None:
        """The engine steps where nobody else can look at the gradients."""
        ask_before_update(self.wrapped.optimizer, judge)

    def trying(self) -> AbstractContextManager[None]:
        return counting_no_step(self.wrapped)

    def masters_of(self, stepped: torch.Tensor) -> list[torch.Tensor]:
        """One flat part holds weights of all kinds."""
        begin = stepped.data_ptr()
        own = [part for part in self._masters if begin <= part.data_ptr() < begin + stepped.nbytes]
        return own or [stepped[:0]]

    def exchanging_gradients(self, *, last: bool) -> AbstractContextManager[object]:
        """Tell the engine whether to step within the backward pass of this micro-batch."""
        self.accelerator.gradient_state._set_sync_gradients(last)
        return nullcontext()

    def clip(self) -> Norm:
        """Return the norm. The engine has already clipped."""
        norm = super().clip()
        return norm.item() if isinstance(norm, torch.Tensor) else norm

    def exact_weights(self, kept_as: str) -> Exact:
        from deepspeed.utils import safe_get_full_fp32_param

        return lambda weight: safe_get_full_fp32_param(weight) if weight.requires_grad else None

    def save(self, folder: Path, writer: CheckpointWriter) -> None:
        """DeepSpeed decides the contents of each file; the writer writes the files in the background."""
        engine, files = self.wrapped, self.wrapped.checkpoint_engine
        save, add_scripts = files.save, engine._copy_recovery_script
        files.save = lambda state_dict, path: writer.write_later(partial(save, writer.copied(state_dict), path))
        engine._copy_recovery_script = lambda path: writer.write_later(partial(add_scripts, path))
        tag = f"global_step{engine.global_steps}"
        try:
            engine.save_checkpoint(str(folder), tag, save_latest=False, exclude_frozen_parameters=self.has_adapters)
        finally:
            del files.save, engine._copy_recovery_script
        if self.accelerator.is_main_process:
            writer.write_later(partial((folder / "latest").write_text, tag))

    @staticmethod
    def read_checkpoint(checkpoint: Path, model: nn.Module) -> CheckpointContents:
        return FlatParts(checkpoint)

    def load_own(self, checkpoint: Path, contents: CheckpointContents, names: Names) -> bool:
        """Only on the same number of processes."""
        if world_of(checkpoint)[1] != self.accelerator.num_processes:
            return False
        deepspeed_load_checkpoint(self.wrapped, str(checkpoint), load_module_strict=not self.has_adapters)
        self.wrapped.optimizer.clip_grad = self._optim.max_grad_norm
        return True

    def load_by_name(self, contents: CheckpointContents, names: Names, buffers: Names) -> None:
        """Give DeepSpeed the state that this rank of so many would have saved."""
        put_into_zero(contents, self.wrapped.optimizer, names)
        put_weights(contents, buffers)

    def whole_weights(self, *, trained_only: bool) -> dict[str, torch.Tensor] | None:
        if not self.spec.shards_weights:
            return None
        return self.wrapped._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=trained_only) or {}


def ask_before_update(optimizer: Any, judge: Judge) -> None:
    """Make DeepSpeed's `optimizer` ask `judge` before each update.

    It gets a function for the norm of the gradients. If it returns True, the update is given up as if it were an overflow; None changes
    nothing.
    """
    if not hasattr(optimizer, "_update_scale"):  # ZeRO-1 of bfloat16 weights
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        step = optimizer.step

        def norm_of_all() -> torch.Tensor:
            gradients, _ = optimizer.get_grads_for_norm()
            return _valid(get_global_norm_of_tensors(gradients, mpu=optimizer.mpu, norm_type=optimizer.norm_type))

        def step_or_not(*given: object, **named: object) -> None:
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
        """Called between the overflow check and the update. The scale of bfloat16 and float32 gradients never changes."""
        verdict = judge(norm_of_parts)
        if verdict is None:
            return update_scale(overflow)
        optimizer.overflow = verdict

    optimizer._update_scale = ask


def _valid(norm: Norm) -> torch.Tensor:
    """Return DeepSpeed's norm, with NaN in place of its -1."""
    norm = torch.as_tensor(norm)
    return torch.where(norm >= 0, norm, torch.nan)


def counting_no_step(engine: Any) -> AbstractContextManager[None]:
    """Restore the counts of DeepSpeed's `engine` after the block. It counts a micro-batch that is tried as a step."""
    names = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
    return holding(engine, **{name: getattr(engine, name) for name in names})


PLACEMENT, ENGINE = _ZeroPlacement(), _Zero
