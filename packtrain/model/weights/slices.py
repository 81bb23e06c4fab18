"""Slices of weights: every process reads only its own rows, as FSDP2 will keep them.

transformers reads safetensors by slices into parameters that are DTensors, also if experts are stacked while they are read
(core_model_loading.DtensorShardOperation). So inside `reading_slices` a model on the meta device gets such parameters before its files are
read: `Shard(0)` on the mesh, as fully_shard makes them. model/spread.py takes them over; for ZeRO-3 it puts them together one by one.

These stay whole in every process until then: weights that are in no file (a new head), buffers, weights that the library makes from whole
ones (a fused projection that is cut into three), and all weights of other kinds of files (.bin, .gguf) and of quantised models.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, apply_converters

from packtrain.boundary import holding
from packtrain.model.weights.hashes import sampled_hash


def reading_slices(mesh: DeviceMesh | None) -> AbstractContextManager[None]:
    """Make `from_pretrained` read only this process's rows, on a one-dimensional `mesh`; None: whole weights."""
    if mesh is None:
        return nullcontext()
    read = PreTrainedModel._load_pretrained_model

    def read_slices(model: Any, state_dict: Any, files: list[str] | None, settings: Any, *more: Any) -> Any:
        by_slices = state_dict is None and settings.hf_quantizer is None
        if not (by_slices and files and all(file.endswith(".safetensors") for file in files)):
            return read(model, state_dict, files, settings, *more)
        model.hash_of_files = sampled_hash(files)
        _place(model, mesh, settings.weight_mapping or [])
        loaded, rest = read(model, state_dict, files, settings, *more)
        for names, weight in _sliced(model).items():
            # the converter of experts fails where a process has none of them
            if not weight.to_local().numel() and (broken := loaded.conversion_errors.keys() & names):
                loaded.conversion_errors.pop(broken.pop())
                loaded.missing_keys -= {*names}
                put_weight(
                    model, names, _like(weight, torch.empty_like(weight.to_local(), device="cpu"))
                )._is_hf_initialized = True
            elif (
                weight.to_local().is_meta
            ):  # it is tied or initialised later: whole, since random numbers depend on the shape
                put_weight(model, names, torch.empty(weight.shape, dtype=weight.dtype, device="meta"))
        return loaded, rest

    return holding(PreTrainedModel, _load_pretrained_model=staticmethod(read_slices))


def _place(model: nn.Module, mesh: DeviceMesh, conversions: list[Any]) -> None:
    """Make the meta parameters of `model` DTensors. Each process has the rows that fully_shard would give it."""
    whole: list[Any] = [
        made.reverse_transform() for made in conversions if isinstance(made, WeightConverter) and not _by_rows(made)
    ]
    for names, weight in _named(model).items():
        if weight.dim() and not any(apply_converters(name, whole)[1] for name in names):
            shape, _ = compute_local_shape_and_global_offset(weight.shape, mesh, [Shard(0)])
            part = torch.empty(shape, dtype=weight.dtype, device="meta")
            made = DTensor.from_local(part, mesh, [Shard(0)], shape=weight.shape, stride=weight.stride())
            put_weight(model, names, made, weight.requires_grad)


def _by_rows(made: WeightConverter) -> bool:
    """Return whether rows of the converted weight come from the same rows of the files. Rows may be experts."""
    return all(
        (isinstance(step, MergeModulelist) and step.dim == 0) or (isinstance(step, Concatenate) and step.dim > 0)
        for step in made.operations
    )


def take_slices(model: nn.Module) -> dict[tuple[str, ...], DTensor]:
    """Take the sliced parameters of `model`, by their names (several if tied). Whole ones on the meta device replace them."""
    taken = _sliced(model)
    for names, weight in taken.items():
        put_weight(model, names, torch.empty(weight.shape, dtype=weight.dtype, device="meta"), weight.requires_grad)
    return taken


def put_slices(model: nn.Module, taken: dict[tuple[str, ...], DTensor]) -> None:
    """Put the slices of `take_slices` back. fully_shard has replaced their parameters on the meta device."""
    for names, weight in taken.items():
        made = model.get_parameter(names[0])  # FSDP2 knows this object, and keeps it
        part = weight.to_local()  # a view of its file is copied: see `let_copy`; torch's checkpoints copy deeply too
        read = _like(cast(DTensor, made), part.clone() if part.storage_offset() else part)
        torch.utils.swap_tensors(made, nn.Parameter(read, requires_grad=weight.requires_grad))


def let_copy(model: nn.Module, modules: list[str]) -> None:
    """Give slices that are views of their file a separate storage. `modules` are ends of module names. A DTensor of such a view has an
    address that is not 0, and deepcopy then looks for a storage where there is none."""
    for names, weight in _sliced(model).items():
        if weight.storage_offset() and any(name.rpartition(".")[0].endswith((*modules,)) for name in names):
            put_weight(model, names, _like(weight, weight.to_local().clone()), weight.requires_grad)


def _sliced(model: nn.Module) -> dict[tuple[str, ...], DTensor]:
    return {names: weight for names, weight in _named(model).items() if isinstance(weight, DTensor)}


def _named(model: nn.Module) -> dict[tuple[str, ...], Any]:
    """Return each parameter by all its names."""
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names[weight] = (*names.get(weight, ()), name)
    return {all_of_it: weight for weight, all_of_it in names.items()}


def put_weight(model: nn.Module, names: tuple[str, ...], value: torch.Tensor, trained: bool = True) -> Any:
    """Make `value` the parameter of these `names`, and return it."""
    made = nn.Parameter(value, requires_grad=trained and value.is_floating_point())
    for name in names:
        place, _, last = name.rpartition(".")
        setattr(model.get_submodule(place), last, made)
    return made


def _like(weight: DTensor, part: torch.Tensor) -> DTensor:
    """Return `part` as this process's rows of a tensor that is sharded like `weight`."""
    part = part.detach()
    return DTensor.from_local(part, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride())
