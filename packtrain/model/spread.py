"""Placing a model on the processes of a run, by its strategy (`spread`).

Under some strategies every process has the whole model. Under others none has: each process loads it on the CPU, and it is sharded right
after. From then on all processes make each call of the model together, proofs included: one that calls it once more hangs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel
from transformers.integrations import deepspeed as hf_deepspeed

from packtrain.attention.forwards import language_model
from packtrain.errors import UserError
from packtrain.model.load import base_model
from packtrain.model.save import map_large_blocks
from packtrain.monitor.heartbeat import waiting
from packtrain.strategies.spec import DEFAULT, STRATEGIES, StrategySpec
from packtrain.system import holding

FSDP = "fsdp"
"""The dimension of a mesh over which models are sharded; peft knows it by this name."""
_ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a run and this process's own, known once they have joined. `strategy` is strategy.name."""

    rank: int
    world_size: int
    device: torch.device
    strategy: str = DEFAULT
    copies: int = 1
    """Number of copies of a sharded model. Neighbouring ranks hold each copy between them."""

    @property
    def main(self) -> bool:
        """Return whether this process prints and writes."""
        return self.rank == 0

    @property
    def spec(self) -> StrategySpec:
        """Return the declaration of the strategy."""
        return STRATEGIES[self.strategy]

    @property
    def sharded(self) -> bool:
        """Return whether no process has all weights. All processes then have to call the model together."""
        return self.spec.shards_weights


def machines_of(processes: int) -> int:
    """Return the number of machines of a launch. Raises UserError unless all have the same number of processes."""
    machines, left = divmod(processes, int(os.environ.get("LOCAL_WORLD_SIZE", processes)))
    if left:
        what = f"{processes} processes are not as many on each machine (LOCAL_WORLD_SIZE)"
        fix = "start as many on each, or set it to all"
        raise UserError(what, where="strategy.shard_within", fix=fix, code="machines-uneven")
    return machines


def open_strategy(spec: StrategySpec) -> None:
    """Prepare the environment, before the processes join. Removes a launcher's strategy settings. A single process becomes a group of one if
    there is anything to split."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    if spec.shards and "RANK" not in os.environ:
        os.environ.update({**_ONE_PROCESS, "MASTER_PORT": "0"})


class Placement:
    """How a strategy places a model on the processes. Here each process has all of it."""

    def spread(self, model: PreTrainedModel, ranks: Ranks, autocast: torch.dtype | None) -> None:
        """Move or shard `model`, adapters included. `autocast` is the format of mixed precision."""
        model.to(ranks.device)  # type: ignore[arg-type]
        frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
        # frozen weights are equal (train/sync.py): DDP would send a whole base from the first rank, and cannot send 8-bit weights
        vars(model)["_ddp_params_and_buffers_to_ignore"] = frozen

    def open_proofs(self, model: PreTrainedModel, ranks: Ranks) -> Callable[[], None]:
        """Make a sharded model callable without an optimizer. Returns the function that ends this."""
        return lambda: None

    def reduces_unreached(self, model: PreTrainedModel, spec: StrategySpec) -> bool:
        """Return whether ranks reduce the same weights although batches reach different ones. May prepare `model` for it."""
        return True

    def open_accelerator(
        self, spec: StrategySpec, weights: torch.dtype, autocast: torch.dtype | None, *, max_norm: float, unused: bool
    ) -> Accelerator:
        """Return the accelerator of a run with these formats. `unused`: some trained weights may have no gradient in a step."""
        return Accelerator(mixed_precision="bf16" if autocast else "no")

    def wrap_frozen(self, model: PreTrainedModel, accelerator: Accelerator) -> nn.Module:
        """Return a spread model without updates, ready to be called in training."""
        return accelerator.prepare_model(model, evaluation_mode=True)


def placement_of(spec: StrategySpec) -> Placement:
    """Return the placement of a strategy. The code of other strategies is not imported."""
    return import_module(spec.run).PLACEMENT


def spread(model: PreTrainedModel, ranks: Ranks, autocast: torch.dtype | None = None) -> None:
    """Move or shard `model` (adapters included) by the strategy. `autocast` is the format of mixed precision."""
    if ranks.sharded and ranks.device.type == "cpu":
        map_large_blocks()
    placement_of(ranks.spec).spread(model, ranks, autocast)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a transformers model: the modules named in its `_no_split_modules`."""
    base = base_model(model)
    names = set(getattr(base, "_no_split_modules", None) or ())
    return [module for module in base.modules() if type(module).__name__ in names]


def language_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the language part. Layers of vision and audio towers are left out."""
    inside = {id(module) for module in language_model(base_model(model)).modules()}
    return [layer for layer in layers_of(model) if id(layer) in inside]


def embedding_apart(base: PreTrainedModel) -> nn.Embedding | None:
    """Return the token embedding if it shares no weights and has no adapters; else None."""
    embedding = base.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        return None
    held = [weight for module in base.modules() for weight in module._parameters.values()]
    return embedding if sum(weight is embedding.weight for weight in held) == 1 else None


@cache
def mesh_of(ranks: Ranks) -> DeviceMesh | None:
    """Return the mesh of a sharded model; None if each process has all of it. The last dimension shards, the first of
    two copies. All ranks make the first call together."""
    if not ranks.sharded:
        return None
    shape = (ranks.copies, ranks.world_size // ranks.copies) if ranks.copies > 1 else (ranks.world_size,)
    with waiting("the other ranks to form groups"):
        return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("copies", FSDP)[-len(shape) :])


def reading_mesh(ranks: Ranks) -> DeviceMesh | None:
    """Return the processes that read a model's weights together; None if each reads all."""
    mesh = mesh_of(ranks)
    return None if mesh is None else mesh[FSDP]


def loading_whole() -> AbstractContextManager[None]:
    """Load models whole inside the block. With a ZeRO-3 trainer, transformers would shard each one."""
    return holding(hf_deepspeed, _hf_deepspeed_config_weak_ref=None)


def elements(parameter: torch.Tensor) -> int:
    """Return the number of elements of the whole parameter. This process may hold only a part of it, or it is packed in 4 bits."""
    if packed := getattr(parameter, "quant_state", None):
        return packed.shape.numel()
    return getattr(parameter, "packed_numbers", getattr(parameter, "ds_numel", parameter.numel()))


def max_over_ranks(number: int, device: torch.device) -> int:
    """Return the largest `number` of all processes."""
    most = torch.tensor(number, device=device)
    if dist.is_initialized():
        with waiting("the numbers of all ranks"):
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most.item())
