"""fsdp2: torch shards weights, gradients and optimizer states.

It is applied here, not by accelerate, which would silently use DDP on CPUs. There is one group for each layer, one for the embedding if no
other layer has its weights, and one for the rest. The rest stays gathered during a forward pass, since the loss reads the output head's
weights without calling it. The embedding is not gathered for its backward pass, which needs only the tokens. No order of prefetching is
set (torchtitan sets one only for expert parallelism): the CPU queues the next layer's gathering while the device computes one, because nothing
in a layer waits for it (experts run by grouped_mm). Gradients are summed in float32.

Checkpoints are torch's distributed ones. Any number of processes can load them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer
from transformers import PreTrainedModel

from packtrain.model.load import base_model
from packtrain.model.spread import Placement, Ranks, embedding_apart, layers_of, mesh_of
from packtrain.model.weights import put_slices, take_slices
from packtrain.strategies.spec import StrategySpec
from packtrain.train.checkpoint.writer import CheckpointWriter
from packtrain.train.engine import CheckpointContents, Engine, Names, States

_SHARDS = "shards"
"""The folder of a checkpoint with weights and optimizer states."""
_OPTIONS = StateDictOptions(ignore_frozen_params=True)


class _FSDP2Placement(Placement):
    def spread(self, model: PreTrainedModel, ranks: Ranks, autocast: torch.dtype | None) -> None:
        """Shard the model; weights are gathered in `autocast`."""
        # autocast casts the inputs; gradients are added up in float32, also for bfloat16 weights
        policy = MixedPrecisionPolicy(param_dtype=autocast, reduce_dtype=torch.float32, cast_forward_inputs=False)
        base: Any = base_model(model)
        layers, embedding, slices = layers_of(model), embedding_apart(base), take_slices(model)
        for part in (*reversed(layers), *filter(None, [embedding]), base):  # inner ones first
            own = type(part)
            # torch's default keeps the last group gathered
            fully_shard(part, mesh=mesh_of(ranks), mp_policy=policy, reshard_after_forward=True)
            # libraries look classes up by name
            type(part).__name__, type(part).__module__ = own.__name__, own.__module__
        put_slices(model, slices)
        for module in model.modules():
            if state := getattr(
                module, "quant_state", None
            ):  # the shard of a packed weight does not know its real shape
                cast(Any, module).weight.packed_numbers = state.shape.numel()
        if embedding is not None:
            cast(Any, embedding).set_unshard_in_backward(False)
        base._is_fsdp_managed_module = True  # makes transformers generate on all processes together
        # makes it run towers within the forward, where weights are gathered
        base._supports_mm_encoder_outputs = lambda: False
        if base is not model:  # peft calls its model's forward by name, past the hooks that gather the weights
            cast(Any, model).base_model.forward = lambda *args, **kwargs: base(*args, **kwargs)

    def reduces_unreached(self, model: PreTrainedModel, spec: StrategySpec) -> bool:
        """Only newer versions of torch can."""
        base: Any = base_model(model)
        if not hasattr(base, "set_reduce_scatter_unused_params"):
            return False
        base.set_reduce_scatter_unused_params(True)
        return True


class _FSDP2(Engine):
    @staticmethod
    def is_spread(spec: StrategySpec, wrapped: nn.Module, model: nn.Module) -> bool:
        return isinstance(base_model(model), FSDPModule)

    def wrap(self, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """The model is sharded already."""
        wrapped = self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
        return wrapped, self.accelerator.prepare(optimizer)

    def exchanging_gradients(self, *, last: bool) -> AbstractContextManager[object]:
        """Exchange gradients with the last micro-batch if the run `exchanges_once`, else with each one."""
        if self.exchanges_once:
            cast(FSDPModule, base_model(self.model)).set_requires_gradient_sync(last)
            return nullcontext()
        return super().exchanging_gradients(last=last)

    def save(self, folder: Path, writer: CheckpointWriter) -> None:
        weights, states = get_state_dict(self.model, self.plain_optimizer, options=_OPTIONS)
        shards = writer.copied({"model": weights, "optimizer": states})

        def write() -> None:
            with _own_errors():
                dcp.save(shards, checkpoint_id=folder / _SHARDS, process_group=writer.group)

        writer.write_later(write)

    @staticmethod
    def read_checkpoint(checkpoint: Path, model: nn.Module) -> CheckpointContents:
        return _Shards(checkpoint)

    def load_own(self, checkpoint: Path, contents: CheckpointContents, names: Names) -> bool:
        """Not with averages of weights: torch's target has none before the first step."""
        if self.ema:
            return False
        weights, states = get_state_dict(self.model, self.plain_optimizer, options=_OPTIONS)
        with _own_errors():
            dcp.load({"model": weights, "optimizer": states}, checkpoint_id=checkpoint / _SHARDS)
        options = StateDictOptions(ignore_frozen_params=True, strict=False)
        set_state_dict(
            self.model, self.plain_optimizer, model_state_dict=weights, optim_state_dict=states, options=options
        )
        return True

    def whole_weights(self, *, trained_only: bool) -> dict[str, torch.Tensor] | None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained_only)
        whole = cast(dict[str, torch.Tensor], get_model_state_dict(self.model, options=options))
        first: dict[int, str] = {}
        for name, weight in self.model.named_parameters(remove_duplicate=False):
            if trained_only and not weight.requires_grad:
                whole.pop(name, None)  # torch leaves the second name of tied weights
            elif first.setdefault(id(weight), name) != name and name in whole:
                whole[name] = whole[first[id(weight)]]  # tied: must be the same tensor object
        return whole


class _Shards:
    """Reader of a checkpoint of fsdp2."""

    order = None

    def __init__(self, checkpoint: Path) -> None:
        self._folder = checkpoint / _SHARDS
        self._kept = dict(dcp.FileSystemReader(self._folder).read_metadata().state_dict_metadata)

    def weight(self, name: str) -> torch.Tensor:
        return self._read([f"model.{name}"])[0]

    def states(self, name: str) -> States:
        prefix = f"optimizer.state.{name}."
        keys = [key for key in self._kept if key.startswith(prefix)]
        return dict(zip((key.removeprefix(prefix) for key in keys), self._read(keys), strict=True))

    def _read(self, keys: list[str]) -> list[Any]:
        """Return whole tensors and plain values, on the CPU. Only this process reads."""
        values: dict[str, Any] = {}
        for key in keys:
            kept = self._kept[key]
            is_tensor = isinstance(kept, TensorStorageMetadata)
            values[key] = torch.empty(kept.size, dtype=kept.properties.dtype) if is_tensor else None
        if values:
            dcp.load(values, checkpoint_id=self._folder, no_dist=True)
        return [values[key] for key in keys]


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise an error of one process (a full disk) on all. CheckpointException itself is not an Exception."""
    try:
        yield
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise first from error


PLACEMENT, ENGINE = _FSDP2Placement(), _FSDP2
