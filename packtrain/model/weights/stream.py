"""Writing a sharded model as a folder that from_pretrained loads, without a whole copy.

The files are planned only from shapes. Then all processes gather one weight after the other, and the main one writes a file as soon as
it has all its weights: beside its share it holds one file and one weight. If the library saves another form than it computes with
(experts), it converts each weight alone. If it makes one saved weight from several, the model is left to whole_weights.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from packtrain.monitor.heartbeat import progress, waiting

FILE_BYTES = 5 * 10**9
"""Largest size of a file, unless a single weight is larger; huggingface_hub's own default."""
_PATTERN = "model{suffix}.safetensors"
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The saved weights: their `names` in the state dict, in order. `files`: the saved names by file. `index`: the index file."""

    names: tuple[str, ...]
    files: dict[str, list[str]]
    index: dict[str, Any] | None


def plan_files(model: Any, dtype: torch.dtype) -> FilePlan | None:
    """Plan the files of a `model` saved in `dtype`. None if weights have to be converted together."""
    held = model.state_dict(keep_vars=True)
    marks = {id(value): torch.zeros(1) for value in held.values()}  # tied weights have the same
    kept = remove_tied_weights_from_state_dict({name: marks[id(value)] for name, value in held.items()}, model)
    kept = {name for name in kept if name not in (model._keys_to_ignore_on_save or ())}
    shapes = {
        name: torch.empty(
            getattr(value, "ds_shape", value.shape),  # ZeRO-3's parameters are empty
            dtype=dtype if isinstance(value, torch.nn.Parameter) else value.dtype,
            device="meta",
        )
        for name, value in held.items()
        if name in kept
    }
    single: dict[str, torch.Tensor] = {}
    try:
        together = revert_weight_conversion(model, dict(shapes))
        for name, shape in shapes.items():
            single |= revert_weight_conversion(model, {name: shape})
    except Exception:  # from a conversion that lacks the other weights
        return None
    if {name: value.shape for name, value in single.items()} != {name: value.shape for name, value in together.items()}:
        return None
    split = split_torch_state_dict_into_shards(single, filename_pattern=_PATTERN, max_shard_size=FILE_BYTES)
    counts = {"total_parameters": sum(getattr(one, "ds_numel", one.numel()) for one in model.parameters())}
    index = {"metadata": counts | split.metadata, "weight_map": split.tensor_to_filename} if split.is_sharded else None
    return FilePlan(tuple(shapes), split.filename_to_tensors, index)


def write_files(
    model: Any, plan: FilePlan, folder: Path, made: Callable[[torch.Tensor], torch.Tensor | None], *, main: bool
) -> None:
    """Write the weights of `model` into `folder` by `plan`, on the `main` process. All processes call it.

    `made` returns the tensor to save for a parameter, whole and on the CPU (None elsewhere). If the disk fails, the weights are still gathered
    to the end, since the others wait for that; then the error is raised.
    """
    held, place = model.state_dict(keep_vars=True), {name: file for file, names in plan.files.items() for name in names}
    open_files: dict[str, dict[str, torch.Tensor]] = {file: {} for file in plan.files}
    failure: Exception | None = None
    for name in plan.names:
        value = held[name]
        whole = made(value) if isinstance(value, torch.nn.Parameter) else value.detach().cpu()
        progress()
        parts = {} if not main or whole is None or failure else revert_weight_conversion(model, {name: whole})
        del whole
        for key, part in parts.items():
            file = place[key]
            open_files[file][key] = part.contiguous()
            if len(open_files[file]) == len(plan.files[file]):
                try:
                    save_file(open_files.pop(file), folder / file, metadata={"format": "pt"})
                except (OSError, SafetensorError) as error:
                    failure = error
        parts = {}
        return_freed_memory()
    if failure:
        raise failure
    if main and plan.index:
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(plan.index, indent=2, sort_keys=True) + "\n")


def gathered(weight: torch.Tensor) -> torch.Tensor:
    """Gather all of a weight whose rows may be sharded. All processes call it. It broadcasts into place: gloo's all-gather takes
    one more copy, and `full_tensor` two."""
    if hasattr(weight, "ds_id"):
        import deepspeed

        with waiting("the other ranks to gather a weight"), deepspeed.zero.GatheredParameters([weight]):
            return weight.detach().clone()
    weight = weight.detach()
    if not isinstance(weight, DTensor):
        return weight
    mesh, own = weight.device_mesh, weight.to_local().to(weight.device_mesh.device_type)
    last = mesh.ndim - 1
    whole, group = own.new_empty(weight.shape), mesh.get_group(last)
    with waiting("the other ranks to gather a weight"):
        for number, part in enumerate(whole.split(-(-len(weight) // mesh.size(last)))):
            if number == mesh.get_local_rank(last):
                part.copy_(own)
            dist.broadcast(part, group=group, group_src=number)
    return whole


def return_freed_memory() -> None:
    """Call malloc_trim. glibc would keep the memory of freed weights, as much as a whole model."""
    with suppress(OSError, AttributeError):  # another library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def map_large_blocks() -> None:
    """Make glibc unmap each block of 1 MiB or more when it is freed.

    Its heap keeps the holes between gathered layers: three whole models in each of four processes.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_MMAP_THRESHOLD, 2**20)
