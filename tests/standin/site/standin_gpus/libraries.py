"""Parts of torch that go below its dispatcher where tensors are on a GPU, and so would not meet the stand-in's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from sitecustomize import Changed
from torch.utils._pytree import tree_map_only

from standin_gpus.tensor import Bytes, GpuTensor


def install() -> None:
    torch.Generator = _generator(torch.Generator)
    torch.nn.Module.to = _module_to(torch.nn.Module.to)
    torch.nn.Module.load_state_dict = _load_in_place(torch.nn.Module.load_state_dict)
    torch.load = _load(torch.load)
    _fsdp()
    _staging()
    sys.meta_path.insert(0, Changed("trl.kernels.chunked_logprob", _head))
    sys.meta_path.insert(0, Changed("packtrain.model.forward", _sum))


def _generator(own: Any) -> Any:
    class Generator(own):
        """Random numbers are drawn by the CPU's generators."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return own.__new__(cls, "cpu")

    return Generator


def _module_to(own: Any) -> Any:
    """A module that is on the device is not moved: exchanging tensors fails where somebody refers to a parameter."""

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        there = all(one.device.type == "cuda" for one in self.parameters())
        if dtype is not None or device is None or device.type != "cuda" or not there:
            return own(self, *args, **kwargs)
        for module in self.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "cuda":
                    module._buffers[name] = buffer.to(device)
        return self

    return to


def _load_in_place(own: Any) -> Any:
    """Weights are copied into those that are there, as without stand-ins: they cannot be exchanged where DeepSpeed refers to them."""

    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        torch.__future__.set_swap_module_params_on_conversion(False)
        try:
            return own(*args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(True)

    return load_state_dict


def _load(own: Any) -> Any:
    """What is loaded onto a device is loaded on the CPU first: storages are made below the dispatcher."""

    def load(*args: Any, map_location: Any = None, **kwargs: Any) -> Any:
        if not isinstance(map_location, (str, torch.device)) or torch.device(map_location).type != "cuda":
            return own(*args, map_location=map_location, **kwargs)
        found = own(*args, map_location="cpu", **kwargs)
        return tree_map_only(torch.Tensor, lambda one: one.to(map_location), found)

    return load


def _fsdp() -> None:
    """FSDP2 moves what it shards by `.data`, and resizes the storages of what it gathers."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fsdp_param_group

    def move(params: Any, buffers: Any, device: torch.device) -> None:
        for tensor in [*params, *buffers]:
            if tensor.device != device and tensor.device.type != "meta":
                with torch.no_grad():
                    moved = tensor.to(device)
                if isinstance(tensor, torch.nn.Parameter):
                    moved = torch.nn.Parameter(moved, tensor.requires_grad)
                torch.utils.swap_tensors(tensor, moved)

    _fsdp_init._move_states_to_device = move

    def alloc_storage(tensor: GpuTensor) -> None:
        Bytes.resize(tensor, tensor.numel() * tensor.itemsize)

    def free_storage(tensor: GpuTensor) -> None:
        Bytes.resize(tensor, 0)

    _fsdp_param.alloc_storage, _fsdp_param.free_storage = alloc_storage, free_storage
    _fsdp_param_group.alloc_storage = alloc_storage


def _staging() -> None:
    """The copies that checkpoints are written from are made of storages."""
    from torch.distributed.checkpoint import _state_dict_stager

    stager: Any = _state_dict_stager.StateDictStager
    offload = stager._offload_tensor

    def of_inner(self: Any, x: Any, memo: Any, non_blocking: bool = False) -> Any:
        return offload(self, x.inner if isinstance(x, GpuTensor) else x, memo, non_blocking=non_blocking)

    stager._offload_tensor = of_inner


def _head(trl: Any) -> None:
    """TRL's kernels for tiles of logits are Triton's on a GPU, where they need no memory of their own."""

    def as_one(kernel: Callable[..., None]) -> Callable[..., None]:
        def run(*tensors: Any, **options: Any) -> None:
            kernel(*tree_map_only(GpuTensor, lambda one: one.inner, tensors), **options)

        return run

    trl._forward_tile, trl._backward_tile = as_one(trl._forward_tile), as_one(trl._backward_tile)


def _sum(loss: Any) -> None:
    """So are those of the sum of losses."""
    in_steps = loss._by_torch

    def as_one(logits: torch.Tensor, targets: torch.Tensor, weigh: Any, **options: Any) -> torch.Tensor:
        if not isinstance(logits, GpuTensor):
            return in_steps(logits, targets, weigh, **options)
        total = in_steps(
            logits.inner,
            cast(GpuTensor, targets).inner,
            lambda log_probs: weigh(GpuTensor(log_probs, logits.index)).inner,  # it sees tensors of the GPU
            **options,
        )
        return GpuTensor(total, logits.index)

    loss._by_torch = as_one
