"""Puts what any checkpoint holds (contents.py) into the model and the optimizer of this run, whatever strategy spreads them.

Each process takes its share of one whole weight after the other. torch's optimizers, those over FSDP2's weights among them, are
given a state dict; DeepSpeed's engine is given what it would have saved itself as this process of this many. The optimizer's
settings and its learning rate are this run's.
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
"""The trained weights of this process's model, and their names."""

_FLATS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""The float32 weights of ZeRO-3, of ZeRO-1 and ZeRO-2, and of ZeRO-1 over bfloat16 ones."""


def put_weights(contents: CheckpointContents, names: Names) -> None:
    """Copies the weights, each into its format; not under ZeRO-3, whose engine has them."""
    with torch.no_grad():
        for weight, name in names.items():
            weight.copy_(_share(contents.weight(name), weight))


def put_into_torch(contents: CheckpointContents, optimizer: torch.optim.Optimizer, names: Names) -> None:
    """Fills the states of `optimizer`; weights that it keeps masters of get them."""
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
    """Fills `zero`, the optimizer of DeepSpeed's engine: the float32 weights, the states, and under ZeRO-3 the weights."""
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
    """Of DeepSpeed's optimizer: each weight of which this process has a part, that part of its float32 master in place, and the flat
    index of the first number."""
    flats, places = _flats_and_places(zero, names)
    for weight, group, at, start, count in places:
        yield weight, flats[group].detach()[at : at + count], start


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each group of a new optimizer: learning rate, weight decay and all else but its weights."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in optimizer.param_groups
    ]


def go_on(optimizer: torch.optim.Optimizer, schedule: LambdaLR, settings: list[dict[str, Any]], steps: int) -> None:
    """Puts `settings` in place of what a checkpoint has brought, and a new `schedule` where it is after `steps`."""
    bases = [own["initial_lr"] for own in settings]
    rates = [base * share(steps) for base, share in zip(bases, schedule.lr_lambdas, strict=True)]
    for group, own, rate in zip(optimizer.param_groups, settings, rates, strict=True):
        group.update(own, lr=rate)
    schedule.base_lrs, schedule.last_epoch, schedule._step_count, schedule._last_lr = bases, steps, steps + 1, rates


def _flats_and_places(zero: Any, names: Names) -> tuple[list[torch.Tensor], list[_Place]]:
    """The flat float32 weights of each group, and where the parts of the weights are in them."""
    flats = next(getattr(zero, name) for name in _FLATS if hasattr(zero, name))
    return flats, (_by_partition if hasattr(zero, _FLATS[0]) else _by_fragment)(zero, names)


_Place = tuple[torch.Tensor, int, int, int, int]
"""A weight, and where this process's part of it is: group of the optimizer, place in its flat tensor, first number, numbers."""


def _by_fragment(zero: Any, names: Names) -> list[_Place]:
    """Of ZeRO-1 and ZeRO-2, which cut a group as a whole."""
    places = []
    for weight in names:
        if (mapping := getattr(weight, "_hp_mapping", None)) is not None:
            at, part = mapping.hp_fragment_address.start, mapping.lp_fragment_address
            places.append((weight, mapping.param_group_index, at, part.start, part.numel))
    return places


def _by_partition(zero: Any, names: Names) -> list[_Place]:
    """Of ZeRO-3, which cuts each weight; the last part is padded."""
    places = []
    for weight in names:
        group, at, size = zero.grad_position[zero.get_param_id(weight)]
        start = torch.distributed.get_rank() * size
        places.append((weight, group, at, start, max(0, min(size, cast(Any, weight).ds_numel - start))))
    return places


def _exact(contents: CheckpointContents, name: str) -> torch.Tensor:
    """The weight in float32: its master, where there is one."""
    master = contents.states(name).get(MASTER)
    return contents.weight(name).float() if master is None else master


def _states(states: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """What `optimizer` keeps by numbers, but for masters; DeepSpeed's own counts steps in plain numbers, torch's in tensors."""
    kept = {key: value for key, value in states.items() if key not in (MASTER, ROUNDINGS) and value is not None}
    if "step" in kept:
        step = int(kept["step"])
        plain = type(optimizer).__module__.startswith("deepspeed")
        kept["step"] = step if plain else torch.tensor(float(step))
    return kept


def _share(value: Any, weight: torch.Tensor) -> Any:
    """This process's share of a whole tensor that goes with `weight`, on its device; other values as they are."""
    if not isinstance(value, torch.Tensor) or value.shape != weight.shape:
        return value
    value = value.to(weight.device)
    if isinstance(weight, DTensor):
        return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)
    return value
