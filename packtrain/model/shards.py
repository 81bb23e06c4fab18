"""What a model that no process has whole leaves on disk: shards for going on, whole weights for use.

Of FSDP2, which transformers' trainer takes for a model that cannot be resumed: torch's distributed checkpoints of weights
and optimizer, which another number of processes loads as well. DeepSpeed's engine has files of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

FOLDER = "shards"
_OPTIONS = StateDictOptions(ignore_frozen_params=True)


def save_shards(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Writes the trained weights and the optimizer's state; every process its share."""
    weights, states = get_state_dict(model, optimizer, options=_OPTIONS)
    with _own_errors():
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=checkpoint / FOLDER)


def load_shards(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Puts what `save_shards` wrote back in place."""
    weights, states = get_state_dict(model, optimizer, options=_OPTIONS)
    with _own_errors():
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=checkpoint / FOLDER)
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options)


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Puts the weights alone back in place."""
    weights = get_model_state_dict(model, options=_OPTIONS)
    with _own_errors():
        dcp.load({"model": weights}, checkpoint_id=checkpoint / FOLDER)
    set_model_state_dict(model, weights, options=StateDictOptions(strict=False))


def whole_weights(model: nn.Module, *, keep: bool, trained_only: bool) -> dict[str, Any]:
    """The state dict of a model under FSDP2, one weight after the other gathered from all processes, on the CPU.

    Only where `keep` they are kept: one process then has one whole copy, and no device has more than a weight. Called by
    all processes.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    whole: dict[str, Any] = {}
    gathered: dict[int, str] = {}
    for name, value in model.state_dict().items():
        weight = weights.get(name)
        if trained_only and (weight is None or not weight.requires_grad):
            continue
        first = gathered.setdefault(id(weight), name) if weight is not None else name
        if first != name:  # tied: the same tensor, by which it is known to be
            if keep:
                whole[name] = whole[first]
            continue
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if keep:
            whole[name] = full.detach().cpu()
    return whole


@contextmanager
def _own_errors() -> Iterator[None]:
    """Inside the block what failed on a process (a full disk) is raised on all: torch's own error for it is no Exception, and
    would end them without a word."""
    try:
        yield
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise first from error
