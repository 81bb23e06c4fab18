"""Load any checkpoint (contents.py) into this run's model and optimizer, under any strategy.

Each process takes its share of one whole weight after the other. torch's optimizers, also over FSDP2's weights, are
given a state dict. DeepSpeed's engine is given the state that it would have saved itself with this rank and this number of processes.
The optimizer's settings and its learning rate are this run's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR

from packtrain.train.checkpoint.contents import CheckpointContents
from packtrain.train.optim.float32_step import MASTER, ROUNDINGS, loses_updates

Names = Mapping[torch.Tensor, str]
"""Names of the trained weights of this process's model."""

_FLATS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""Attributes with the float32 weights: of ZeRO-3, of ZeRO-1 and ZeRO-2, and of ZeRO-1 over bfloat16 weights."""


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
        own = {key: _share(value, weight) for key, value in _states(states, optimizer).items()}
        if masters and loses_updates(weight):
            own = {key: value.float() if isinstance(value, torch.Tensor) else value for key, value in own.items()}
            own[MASTER] = _share(_exact(contents, names[weight]), weight)
        whole["state"][number] = own | {key: states[key] for key in (ROUNDINGS,) if key in states}
    optimizer.load_state_dict(whole)


def put_into_zero(contents: CheckpointContents, zero: Any, names: Names) -> None:
    """Fill `zero`, DeepSpeed's optimizer: float32 weights and states, and the model's weights."""
    partitioned = hasattr(zero, _FLATS[0])
    flats, places = _flats_and_places(zero, names)
    filled: list[dict[str, Any]] = [{} for _ in flats]
    for weight, group, at, start, count in places:
        name, flat = names[weight], flats[group]
        for key, value in {"": _exact(contents, name), **_states(contents.states(name), zero.optimizer)}.items():
            if isinstance(value, torch.Tensor) and value.dim():
                part = filled[group].setdefault(key, torch.zeros_like(flat, requires_grad=False))
                part[at : at + count] = value.reshape(-1)[start : start + count]
            else:
                filled[group].setdefault(key, value)
    own = zero.state_dict()
    exact = [state.pop("", flat) for state, flat in zip(filled, flats, strict=True)]
    own["fp32_flat_groups" if partitioned else "single_partition_of_fp32_groups"] = exact
    states = {group: state for group, state in enumerate(filled) if state}
    own["optimizer_state_dict" if partitioned else "base_optimizer_state"]["state"] = states
    rank = torch.distributed.get_rank()
    if partitioned:
        zero.checkpoint_event_prologue()
    zero.load_state_dict({rank: own}, load_optimizer_states=True, load_from_fp32_weights=True)
    if partitioned:
        zero.checkpoint_event_epilogue()
    else:
        put_weights(contents, names)


def masters_in(zero: Any, names: Names) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yield each weight, this process's part of its float32 master, and the part's start.

    The start is a flat index in the weight. The part is DeepSpeed's own tensor, so changes take effect."""
    flats, places = _flats_and_places(zero, names)
    for weight, group, at, start, count in places:
        yield weight, flats[group].detach()[at : at + count], start


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


def _flats_and_places(zero: Any, names: Names) -> tuple[list[torch.Tensor], list[_Place]]:
    """Return the flat float32 weights of each group, and the place of each weight."""
    flats = next(getattr(zero, name) for name in _FLATS if hasattr(zero, name))
    return flats, (_by_partition if hasattr(zero, _FLATS[0]) else _by_fragment)(zero, names)


_Place = tuple[torch.Tensor, int, int, int, int]
"""A weight and the place of this process's part: optimizer group, start in its flat tensor, start in the weight, count."""


def _by_fragment(zero: Any, names: Names) -> list[_Place]:
    """Return the places under ZeRO-1 and ZeRO-2, which cut a group as a whole."""
    places = []
    for weight in names:
        if (mapping := getattr(weight, "_hp_mapping", None)) is not None:
            at, part = mapping.hp_fragment_address.start, mapping.lp_fragment_address
            places.append((weight, mapping.param_group_index, at, part.start, part.numel))
    return places


def _by_partition(zero: Any, names: Names) -> list[_Place]:
    """Return the places under ZeRO-3, which cuts each weight and pads its last part."""
    places = []
    for weight in names:
        group, at, size = zero.grad_position[zero.get_param_id(weight)]
        start = torch.distributed.get_rank() * size
        places.append((weight, group, at, start, max(0, min(size, cast(Any, weight).ds_numel - start))))
    return places


def _exact(contents: CheckpointContents, name: str) -> torch.Tensor:
    """Return the weight in float32: its master, if it has one."""
    master = contents.states(name).get(MASTER)
    return contents.weight(name).float() if master is None else master


def _states(states: dict[str, Any], optimizer: Any) -> dict[str, Any]:
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
