"""Checkpoints of fsdp2, in the format of torch.distributed.checkpoint. Any number of processes can load them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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

SHARDS = "shards"
"""The folder of a checkpoint with weights and optimizer states."""
_OPTIONS = StateDictOptions(ignore_frozen_params=True)


class Shards:
    """Reader of a checkpoint of fsdp2."""

    order = None

    def __init__(self, checkpoint: Path) -> None:
        self._folder = checkpoint / SHARDS
        self._kept = dict(dcp.FileSystemReader(self._folder).read_metadata().state_dict_metadata)

    def weight(self, name: str) -> torch.Tensor:
        """See CheckpointContents."""
        return self._read([f"model.{name}"])[0]

    def states(self, name: str) -> dict[str, Any]:
        """See CheckpointContents."""
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


def whole_weights(model: nn.Module, *, trained_only: bool) -> dict[str, Any]:
    """Gather the state dict of a sharded model. All ranks call it; the main process gets it on the CPU, others get {}."""
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
