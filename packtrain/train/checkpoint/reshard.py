"""Load any checkpoint (contents.py) into this run's model and optimizer, under any strategy.

Each process takes its share of one whole weight after the other. torch's optimizers, also over sharded weights, are given a state dict.
The optimizer's settings and its learning rate are this run's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

from packtrain.train.checkpoint.contents import CheckpointContents
from packtrain.train.optim.float32_step import MASTER, ROUNDINGS, loses_updates

Names = Mapping[torch.Tensor, str]
"""Names of the trained weights of this process's model."""


def put_weights(contents: CheckpointContents, names: Names) -> None:
    """Copy the weights, each into its format. Not for ZeRO-3: its engine holds the weights."""
    with torch.no_grad():
        for weight, name in names.items():
            weight.copy_(_share(contents.weight(name), weight))


def put_into_torch(contents: CheckpointContents, optimizer: torch.optim.Optimizer, names: Names) -> None:
    """Fill the states of `optimizer`, and its masters if it keeps any."""
    masters = getattr(optimizer, "masters", False)
    whole = optimizer.state_dict()
    numbers = [number for group in whole["param_groups"] for number in group["params"]]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    whole["state"] = {}
    for number, weight in zip(numbers, weights, strict=True):
        if not (states := contents.states(names[weight])):
            continue
        own = {key: _share(value, weight) for key, value in states_for(optimizer, states).items()}
        if masters and loses_updates(weight):
            own = {key: value.float() if isinstance(value, torch.Tensor) else value for key, value in own.items()}
            own[MASTER] = _share(exact_weight(contents, names[weight]), weight)
        whole["state"][number] = own | {key: states[key] for key in (ROUNDINGS,) if key in states}
    optimizer.load_state_dict(whole)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of a new optimizer's groups: learning rate, weight decay and others."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in optimizer.param_groups
    ]


def go_on(optimizer: torch.optim.Optimizer, schedule: LambdaLR, settings: list[dict[str, Any]], steps: int) -> None:
    """Replace the checkpoint's settings by `settings`. Move a new `schedule` to its place after `steps`."""
    bases = [own["initial_lr"] for own in settings]
    rates = [base * share(steps) for base, share in zip(bases, schedule.lr_lambdas, strict=True)]
    for group, own, rate in zip(optimizer.param_groups, settings, rates, strict=True):
        group.update(own, lr=rate)
    schedule.base_lrs, schedule.last_epoch, schedule._step_count, schedule._last_lr = bases, steps, steps + 1, rates


def exact_weight(contents: CheckpointContents, name: str) -> torch.Tensor:
    """Return the weight in float32: its master, if it has one."""
    master = contents.states(name).get(MASTER)
    return contents.weight(name).float() if master is None else master


def states_for(optimizer: Any, states: dict[str, Any]) -> dict[str, Any]:
    """Return the states for `optimizer`, without masters. DeepSpeed's own optimizers count steps in plain numbers, torch's in tensors."""
    kept = {key: value for key, value in states.items() if key not in (MASTER, ROUNDINGS) and value is not None}
    if "step" in kept:
        step = int(kept["step"])
        plain = type(optimizer).__module__.startswith("deepspeed")
        kept["step"] = step if plain else torch.tensor(float(step))
    return kept


def _share(value: Any, weight: torch.Tensor) -> Any:
    """Return this process's share of a whole tensor like `weight`, on its device. Other values come back unchanged."""
    if not isinstance(value, torch.Tensor) or value.shape != weight.shape:
        return value
    value = value.to(weight.device)
    if isinstance(weight, DTensor):
        return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)
    return value
