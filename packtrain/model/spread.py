"""Sharding of weights, gradients and optimizer states over the processes, by `strategy.name`.

Under DDP, ZeRO-1 and ZeRO-2 every process has the whole model. Under ZeRO-3 and FSDP2 none has: each process loads it on the CPU, and it is
sharded right after. From then on all processes make each call of the model together, proofs included: one that calls it once more hangs.

FSDP2 is applied here, not by accelerate, which would silently use DDP on CPUs. There is one group for each layer, one for the embedding if no
other layer has its weights, and one for the rest. The rest stays gathered during a forward pass, since the loss reads the output head's
weights without calling it. The embedding is not gathered for its backward pass, which needs only the tokens. No order of prefetching is
set (torchtitan sets one only for expert parallelism): the CPU queues the next layer's gathering while the device computes one, because nothing
in a layer waits for it (experts run by grouped_mm). Gradients are summed in float32. Any number of processes can load its checkpoints.

ZeRO-3 is DeepSpeed's. Until there is an optimizer, its inference engine runs the proofs. A layer is gathered as a whole (a
"leaf"), since calls within a layer may differ by process (experts).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.integrations import deepspeed as hf_deepspeed

from packtrain.boundary import holding
from packtrain.config.schema import SHARDED_WEIGHTS
from packtrain.errors import CheckFailed, UserError
from packtrain.model.load import base_model
from packtrain.model.weights.slices import put_slices, put_weight, take_slices
from packtrain.model.weights.stream import gathered, map_large_blocks, return_freed_memory
from packtrain.monitor.heartbeat import waiting
from packtrain.plan.launcher_settings import STAGES, deepspeed_config

SHARDS = "shards"
"""The folder of a checkpoint with FSDP2's weights and optimizer states."""
FSDP = "fsdp"
"""The dimension of a mesh over which models are sharded; peft knows it by this name."""
_OPTIONS = StateDictOptions(ignore_frozen_params=True)
_ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a run and this process's own, known once they have joined. `strategy` is strategy.name."""

    rank: int
    world_size: int
    device: torch.device
    strategy: str = "ddp"
    copies: int = 1
    """Number of copies of a sharded model. Neighbouring ranks hold each copy between them."""

    @property
    def main(self) -> bool:
        """Return whether this process prints and writes."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """Return whether no process has all weights. All processes then have to call the model together."""
        return self.strategy in SHARDED_WEIGHTS

    @property
    def gathers_by_engine(self) -> bool:
        """Return whether ZeRO-3's engine gathers weights. It has no backward pass without an optimizer."""
        return self.sharded and self.strategy in STAGES


def machines_of(processes: int) -> int:
    """Return the number of machines of a launch. Raises UserError unless all have the same number of processes."""
    machines, left = divmod(processes, int(os.environ.get("LOCAL_WORLD_SIZE", processes)))
    if left:
        what = f"{processes} processes are not as many on each machine (LOCAL_WORLD_SIZE)"
        raise UserError(what, where="strategy.shard_within", fix="start as many on each, or set it to all")
    return machines


def open_strategy(strategy: str) -> None:
    """Prepare the environment for `strategy`, before the processes join. Removes a launcher's strategy settings, and makes a single process
    a group of one if the strategy needs a group."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    if strategy == "ddp":
        return
    if strategy == "zero3_offload":  # DeepSpeed compiles its optimizer with ninja, which may be only beside this Python
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    if "RANK" not in os.environ:
        os.environ.update({**_ONE_PROCESS, "MASTER_PORT": "0"})


def spread(model: PreTrainedModel, ranks: Ranks, autocast: torch.dtype | None = None) -> None:
    """Move or shard `model` (adapters included) by the strategy. FSDP2 gathers weights in `autocast`, the format of mixed precision."""
    if ranks.sharded and ranks.device.type == "cpu":
        map_large_blocks()
    if ranks.strategy in STAGES:
        import deepspeed.ops

        # CPU inference by shared memory: compiling it takes a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if ranks.gathers_by_engine:
        _partition(model, ranks)
    elif ranks.sharded:
        _fully_shard(model, cast(Any, mesh_of(ranks)), autocast)
    else:
        cast(Any, model).to(ranks.device)
        frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
        # frozen weights are equal (train/sync.py): DDP would send a whole base from the first rank, and cannot send 8-bit weights
        cast(Any, model)._ddp_params_and_buffers_to_ignore = frozen


def open_proofs(model: PreTrainedModel, ranks: Ranks) -> Callable[[], None]:
    """Make a sharded model callable without an optimizer. Returns the function that ends this."""
    if not ranks.gathers_by_engine:
        return lambda: None
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, config=_without_optimizer(model, ranks))

    def end() -> None:
        engine.destroy()
        for module in model.modules():  # else they still call this engine in the backward pass
            for name in ("pre_bwd_fn", "post_bwd_fn"):
                module.__dict__.pop(name, None)

    return end


def _without_optimizer(model: PreTrainedModel, ranks: Ranks) -> dict[str, Any]:
    dtype = str(base_model(model).dtype).removeprefix("torch.")
    settings: Any = deepspeed_config(ranks.strategy, dtype=dtype, max_grad_norm=0.0)
    settings["zero_optimization"].pop("offload_optimizer", None)
    return settings


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a transformers model: the modules named in its `_no_split_modules`."""
    base = base_model(model)
    names = set(getattr(base, "_no_split_modules", None) or ())
    return [module for module in base.modules() if type(module).__name__ in names]


def embedding_apart(base: PreTrainedModel) -> Any:
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


def _fully_shard(model: PreTrainedModel, mesh: DeviceMesh, autocast: torch.dtype | None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # autocast casts the inputs; gradients are added up in float32, also for bfloat16 weights
    policy = MixedPrecisionPolicy(param_dtype=autocast, reduce_dtype=torch.float32, cast_forward_inputs=False)
    base: Any = base_model(model)
    layers, embedding, slices = layers_of(model), embedding_apart(base), take_slices(model)
    for part in (*reversed(layers), *filter(None, [embedding]), base):  # inner ones first
        own = type(part)
        # torch's default keeps the last group gathered
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        type(part).__name__, type(part).__module__ = own.__name__, own.__module__  # libraries look classes up by name
    put_slices(model, slices)
    for module in model.modules():
        if state := getattr(module, "quant_state", None):  # the shard of a packed weight does not know its real shape
            cast(Any, module).weight.packed_numbers = state.shape.numel()
    if embedding is not None:
        embedding.set_unshard_in_backward(False)
    base._is_fsdp_managed_module = True  # makes transformers generate on all processes together
    if base is not model:  # peft calls its model's forward by name, past the hooks that gather the weights
        cast(Any, model).base_model.forward = lambda *args, **kwargs: base(*args, **kwargs)


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
    remote = "cpu" if ranks.strategy == "zero3_offload" else None
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


def check_active(wanted: str, wrapped: Any, model: nn.Module) -> None:
    """Raise CheckFailed if the model is not sharded by `wanted`. Each process would train alone.
    `wrapped` is called in training, `model` is inside it."""
    if wanted == "fsdp2":
        active = isinstance(base_model(model), FSDPModule)
    elif wanted in STAGES:
        active = type(wrapped).__name__ == "DeepSpeedEngine" and wrapped.zero_optimization_stage() == STAGES[wanted]
    else:
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        active = alone or isinstance(wrapped, nn.parallel.DistributedDataParallel)
    if not active:
        what = f"the run is to train by {wanted}, but its model is a {type(wrapped).__name__}, which does not"
        raise CheckFailed(what, where="strategy.name", fix="start it by packtrain or torchrun, without other settings")


def shards_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return this process's share of the trained weights and of the optimizer's state, for `save_shards`."""
    weights, states = get_state_dict(model, optimizer, options=_OPTIONS)
    return {"model": weights, "optimizer": states}


def save_shards(shards: dict[str, Any], checkpoint: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write `shards_of` the model. All processes call it, and talk over `group` (None: the group of training)."""
    with _own_errors():
        dcp.save(shards, checkpoint_id=checkpoint / SHARDS, process_group=group)


def load_shards(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Load the shards that `save_shards` wrote into the model and the optimizer."""
    weights, states = get_state_dict(model, optimizer, options=_OPTIONS)
    with _own_errors():
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=checkpoint / SHARDS)
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options)


def shards_in(checkpoint: Path) -> dict[str, Any]:
    """Return torch's descriptions of the shards in a checkpoint, by name (`model.…`, `optimizer.state.…`)."""
    return dict(dcp.FileSystemReader(checkpoint / SHARDS).read_metadata().state_dict_metadata)


def read_shards(checkpoint: Path, described: dict[str, Any]) -> list[Any]:
    """Return the whole tensors and plain values of `described` (from `shards_in`), on the CPU. Only this process reads."""
    values = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in described.items()
    }
    if values:
        dcp.load(values, checkpoint_id=checkpoint / SHARDS, no_dist=True)
    return [values[key] for key in described]


def whole_weights(model: nn.Module, *, trained_only: bool) -> dict[str, Any]:
    """Gather the state dict of a model under FSDP2. All ranks call it; the main process gets it on the CPU, others get {}."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained_only)
    whole = get_model_state_dict(model, options=options)
    first: dict[int, str] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if trained_only and not weight.requires_grad:
            whole.pop(name, None)  # torch leaves the second name of tied weights
        elif first.setdefault(id(weight), name) != name and name in whole:
            whole[name] = whole[first[id(weight)]]  # tied: must be the same tensor object
    return whole


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise an error of one process (a full disk) on all. CheckpointException itself is not an Exception."""
    try:
        yield
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise first from error
