"""fsdp2: torch shards weights, gradients and optimizer states.

It is applied here, not by accelerate, which would silently use DDP on CPUs. There is one group for each layer, one for the embedding if no
other layer has its weights, and one for the rest. The rest stays gathered during a forward pass, since the loss reads the output head's
weights without calling it. The embedding is not gathered for its backward pass, which needs only the tokens. No order of prefetching is
set (torchtitan sets one only for expert parallelism): the CPU queues the next layer's gathering while the device computes one, because nothing
in a layer waits for it (experts run by grouped_mm). Gradients are summed in float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from packtrain.model.load import base_model
from packtrain.model.spread import Placement, Ranks, embedding_apart, layers_of, mesh_of
from packtrain.model.weights.slices import put_slices, take_slices
from packtrain.strategies.fsdp2.shards import Shards, load_shards, save_shards, shards_of, whole_weights
from packtrain.strategies.spec import StrategySpec
from packtrain.train.checkpoint.contents import CheckpointContents
from packtrain.train.checkpoint.reshard import Names
from packtrain.train.checkpoint.writer import CheckpointWriter
from packtrain.train.engine import Engine


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
            type(part).__name__, type(part).__module__ = (
                own.__name__,
                own.__module__,
            )  # libraries look classes up by name
        put_slices(model, slices)
        if embedding is not None:
            embedding.set_unshard_in_backward(False)
        base._is_fsdp_managed_module = True  # makes transformers generate on all processes together
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
    def is_spread(spec: StrategySpec, wrapped: Any, model: nn.Module) -> bool:
        return isinstance(base_model(model), FSDPModule)

    def wrap(self, optimizer: Any) -> tuple[Any, Any]:
        """The model is sharded already."""
        wrapped = self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
        return wrapped, self.accelerator.prepare(optimizer)

    def exchanging_gradients(self, *, last: bool) -> AbstractContextManager[Any]:
        """Exchange gradients with the last micro-batch if the run `exchanges_once`, else with each one."""
        if self.exchanges_once:
            cast(FSDPModule, base_model(self.model)).set_requires_gradient_sync(last)
            return nullcontext()
        return super().exchanging_gradients(last=last)

    def save(self, folder: Path, writer: CheckpointWriter) -> None:
        shards = writer.copied(shards_of(self.model, self.optimizer.optimizer))
        writer.write_later(lambda: save_shards(shards, folder, writer.group))

    @staticmethod
    def read_checkpoint(checkpoint: Path, model: nn.Module) -> CheckpointContents:
        return Shards(checkpoint)

    def load_own(self, checkpoint: Path, contents: CheckpointContents, names: Names) -> bool:
        """Not with averages of weights: torch's target has none before the first step."""
        if self.ema:
            return False
        load_shards(self.model, self.plain_optimizer, checkpoint)
        return True

    def whole_weights(self, *, trained_only: bool) -> dict[str, torch.Tensor] | None:
        return whole_weights(self.model, trained_only=trained_only)


PLACEMENT, ENGINE = _FSDP2Placement(), _FSDP2
