"""The ZeRO stages, by DeepSpeed. Its engine clips and updates within the last backward pass of a step.

Under ZeRO-1 and ZeRO-2 every process has the whole model, under ZeRO-3 none. Until there is an optimizer, DeepSpeed's inference engine runs
the proofs of ZeRO-3. A layer is gathered as a whole (a "leaf"), since calls within a layer may differ by process (experts).

Each process keeps one flat part of every optimizer group's float32 weights and states. A weight is found in these parts of a checkpoint by
`_FlatParts`, and in the optimizer of this process by `_place`.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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

from packtrain.errors import Json
from packtrain.model.load import base_model
from packtrain.model.save import gathered, return_freed_memory
from packtrain.model.spread import Placement, Ranks, layers_of
from packtrain.model.towers import towers_of
from packtrain.model.weights import put_weight, take_slices
from packtrain.plan.origin import world_of
from packtrain.strategies.spec import StrategySpec
from packtrain.system import holding
from packtrain.train.checkpoint.writer import CheckpointWriter
from packtrain.train.engine import (
    CheckpointContents,
    Engine,
    Exact,
    Judge,
    Names,
    States,
    exact_weight,
    put_weights,
    states_of,
)
from packtrain.train.spikes import Norm

_Untyped = Any
"""The engine of DeepSpeed, its optimizer, and its attributes of weights."""
_Saved = dict[str, Any]
_FLATS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""Attributes with the float32 weights: of ZeRO-3, of ZeRO-1 and ZeRO-2, and of ZeRO-1 over bfloat16 weights."""


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

    def wrap_frozen(self, model: PreTrainedModel, accelerator: Accelerator) -> nn.Module:
        return prepare_deepspeed(model, accelerator)


def _settings(spec: StrategySpec, weights: torch.dtype, max_grad_norm: float) -> Json:
    assert spec.engine_settings is not None
    return spec.engine_settings(str(weights).removeprefix("torch."), max_grad_norm)


def _without_optimizer(model: PreTrainedModel, ranks: Ranks) -> Json:
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
    if base is not model or not cast(nn.Embedding, base.get_input_embeddings()).weight.requires_grad:
        base.enable_input_require_grads()
    if towers := [base.get_submodule(name) for name in towers_of(base)]:
        base.register_forward_pre_hook(partial(_give_pixels_gradients, towers), with_kwargs=True)
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


def _give_pixels_gradients(
    towers: Sequence[nn.Module], model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """Let pixels require gradients if towers are trained.

    DeepSpeed would not release the weights of a tower's first layer after a backward pass without a gradient of its input.
    """
    pixels = [value for name, value in named.items() if "pixel" in name and value.is_floating_point()]
    if pixels and torch.is_grad_enabled() and any(one.requires_grad for part in towers for one in part.parameters()):
        for value in pixels:
            value.requires_grad_()


class _Zero(Engine):
    wrapped: _Untyped
    _masters: list[torch.Tensor]

    @staticmethod
    def is_spread(spec: StrategySpec, wrapped: nn.Module, model: nn.Module) -> bool:
        """The stages shard one, two and three parts."""
        engine = cast(_Untyped, wrapped)
        return type(engine).__name__ == "DeepSpeedEngine" and engine.zero_optimization_stage() == len(spec.shards)

    def wrap(self, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Find the masters of bfloat16-computed weights in the flat parts. Move the masters of 16-bit weights."""
        wrapped, optimizer = super().wrap(optimizer)
        self._masters, names = [], {weight: name for name, weight in self.dither.rounded.items()}
        for weight, master, first in _masters_in(wrapped.optimizer, names) if names else ():
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
        return _FlatParts(checkpoint)

    def load_own(self, checkpoint: Path, contents: CheckpointContents, names: Names) -> bool:
        """Only on the same number of processes."""
        if world_of(checkpoint)[1] != self.accelerator.num_processes:
            return False
        deepspeed_load_checkpoint(self.wrapped, str(checkpoint), load_module_strict=not self.has_adapters)
        self.wrapped.optimizer.clip_grad = self._optim.max_grad_norm
        return True

    def load_by_name(self, contents: CheckpointContents, names: Names, buffers: Names) -> None:
        """Give DeepSpeed the state that this rank of so many would have saved."""
        _put_into_zero(contents, self.wrapped.optimizer, names)
        put_weights(contents, buffers)

    def whole_weights(self, *, trained_only: bool) -> dict[str, torch.Tensor] | None:
        if not self.spec.shards_weights:
            return None
        return self.wrapped._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=trained_only) or {}


def ask_before_update(optimizer: _Untyped, judge: Judge) -> None:
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


def counting_no_step(engine: _Untyped) -> AbstractContextManager[None]:
    """Restore the counts of DeepSpeed's `engine` after the block. It counts a micro-batch that is tried as a step."""
    names = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
    return holding(engine, **{name: getattr(engine, name) for name in names})


class _FlatParts:
    """Reader of a checkpoint of DeepSpeed. Each process wrote a flat float32 part of each group's weights and states."""

    def __init__(self, checkpoint: Path) -> None:
        folder = checkpoint / (checkpoint / "latest").read_text().strip()
        self._ranks = list[_Saved]()
        while files := list(folder.glob(f"*zero_pp_rank_{len(self._ranks)}_mp_rank_00_optim_states.pt")):
            self._ranks.append(_opened(files[0])["optimizer_state_dict"])
        first = folder / "mp_rank_00_model_states.pt"  # stages 1 and 2 keep weights whole
        first = first if first.is_file() else folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
        engine = _opened(first)
        groups, self._module = engine["param_shapes"], engine["module"]
        self._shapes = {name: shape for group in groups for name, shape in group.items()}
        self.order = list(self._shapes)
        self._pieces = self._by_partition(groups) if "fp32_flat_groups" in self._ranks[0] else self._by_fragment()

    def weight(self, name: str) -> torch.Tensor:
        if name not in self._pieces:  # a buffer
            return self._module[name]
        key = "fp32_flat_groups" if "fp32_flat_groups" in self._ranks[0] else "single_partition_of_fp32_groups"
        kept = [self._ranks[rank][key][group] for rank, group, _, _ in self._pieces[name]]
        return cast(torch.Tensor, self._whole(name, kept))

    def states(self, name: str) -> States:
        kept = [self._state(rank, group) for rank, group, _, _ in self._pieces[name]]
        return {key: self._whole(name, [state[key] for state in kept]) for key in kept[0]}

    def _state(self, rank: int, group: int) -> States:
        kept = self._ranks[rank]
        part = kept["optimizer_state_dict" if "optimizer_state_dict" in kept else "base_optimizer_state"]
        return part["state"].get(group, {})

    def _whole(self, name: str, parts: Sequence[torch.Tensor | float]) -> torch.Tensor | float:
        """Concatenate the parts. Values that are not split are equal on all ranks; return the first."""
        if not isinstance(parts[0], torch.Tensor) or not parts[0].dim():
            return parts[0]
        places = [(start, count) for _, _, start, count in self._pieces[name]]
        pieces = [
            part.narrow(0, *place) for part, place in zip(cast(Sequence[torch.Tensor], parts), places, strict=True)
        ]
        return torch.cat(pieces).view(self._shapes[name])

    def _by_fragment(self) -> dict[str, list[tuple[int, int, int, int]]]:
        """Map name → (rank, group, start, count) of its pieces, in order. Stages 1 and 2 cut a group as a whole."""
        pieces = defaultdict(list)
        for rank, kept in enumerate(self._ranks):
            for group, fragments in enumerate(kept["param_slice_mappings"]):
                for name, fragment in fragments.items():
                    pieces[name].append((rank, group, fragment.start, fragment.numel))
        return pieces

    def _by_partition(self, groups: list[dict[str, torch.Size]]) -> dict[str, list[tuple[int, int, int, int]]]:
        """Map name → (rank, group, start, count) of its pieces. Stage 3 cuts each weight and pads its last part."""
        pieces = defaultdict(list)
        for group, shapes in enumerate(groups):
            start = 0
            for name, shape in shapes.items():
                size = math.ceil(shape.numel() / len(self._ranks))
                for rank in range(len(self._ranks)):
                    count = max(0, min(size, shape.numel() - rank * size))
                    pieces[name].append((rank, group, start, count))
                start += size
        return pieces


def _opened(file: Path) -> _Saved:
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)  # they contain classes of DeepSpeed


def _put_into_zero(contents: CheckpointContents, zero: _Untyped, names: Names) -> None:
    """Fill `zero`, DeepSpeed's optimizer: float32 weights and states, and the model's weights."""
    partitioned, flats = hasattr(zero, _FLATS[0]), _flats(zero)
    counts_plainly = type(zero.optimizer).__module__.startswith(
        "deepspeed"
    )  # its own optimizers; torch's count in tensors
    filled = [_Saved() for _ in flats]
    for weight, name in names.items():
        if (place := _place(zero, weight)) is None:
            continue
        group, at, start, count = place
        for key, value in {"": exact_weight(contents, name), **states_of(contents, name)}.items():
            if isinstance(value, torch.Tensor) and value.dim():
                part = filled[group].setdefault(key, torch.zeros_like(flats[group], requires_grad=False))
                part[at : at + count] = value.reshape(-1)[start : start + count]
            else:
                filled[group].setdefault(key, int(value) if key == "step" and counts_plainly else value)
    own = zero.state_dict()
    exact = [state.pop("", flat) for state, flat in zip(filled, flats, strict=True)]
    own["fp32_flat_groups" if partitioned else "single_partition_of_fp32_groups"] = exact
    states = {group: state for group, state in enumerate(filled) if state}
    own["optimizer_state_dict" if partitioned else "base_optimizer_state"]["state"] = states
    if partitioned:
        zero.checkpoint_event_prologue()
    zero.load_state_dict({torch.distributed.get_rank(): own}, load_optimizer_states=True, load_from_fp32_weights=True)
    if partitioned:
        zero.checkpoint_event_epilogue()
    else:
        put_weights(contents, names)


def _masters_in(zero: _Untyped, names: Names) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yield each weight, this process's part of its float32 master, and the part's start.

    The start is a flat index in the weight. The part is DeepSpeed's own tensor, so changes take effect."""
    flats = _flats(zero)
    for weight in names:
        if (place := _place(zero, weight)) is not None:
            group, at, start, count = place
            yield weight, flats[group].detach()[at : at + count], start


def _flats(zero: _Untyped) -> list[torch.Tensor]:
    """Return the flat float32 weights of each group."""
    return next(getattr(zero, name) for name in _FLATS if hasattr(zero, name))


def _place(zero: _Untyped, weight: _Untyped) -> tuple[int, int, int, int] | None:
    """Return the place of this process's part of a weight; None if it has none.

    The numbers are optimizer group, start in its flat tensor, start in the weight, and count.
    """
    if hasattr(zero, _FLATS[0]):  # ZeRO-3 cuts each weight and pads its last part
        group, at, size = zero.grad_position[zero.get_param_id(weight)]
        start = torch.distributed.get_rank() * size
        return group, at, start, max(0, min(size, weight.ds_numel - start))
    if (mapping := getattr(weight, "_hp_mapping", None)) is None:  # ZeRO-1 and ZeRO-2 cut a group as a whole
        return None
    part = mapping.lp_fragment_address
    return mapping.param_group_index, mapping.hp_fragment_address.start, part.start, part.numel


PLACEMENT, ENGINE = _ZeroPlacement(), _Zero
