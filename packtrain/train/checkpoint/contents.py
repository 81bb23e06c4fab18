"""Contents of a checkpoint by weight, loaded into this run under any strategy.

A strategy's reader is in its folder. Files are mapped into memory, so that a process holds little more than the tensors that it asks for.
DeepSpeed's universal checkpoints offer the same for Adam only, as a second copy on disk. Each process takes its share of one whole weight
after the other. The optimizer's settings and its learning rate are this run's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from packtrain.train.optim.float32_step import MASTER, ROUNDINGS, loses_updates

States = dict[str, torch.Tensor | float]
"""States of a weight in an optimizer, by name."""
Names = Mapping[torch.Tensor, str]
"""Names of the trained weights of this process's model."""


class CheckpointContents(Protocol):
    """Reader of a checkpoint, by the names of `named_parameters()`. All tensors are whole and on the CPU."""

    @property
    def order(self) -> list[str] | None:
        """The weight names in the order of the optimizer's numbers. None: its states go by name."""
        ...

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight or a buffer, in its own format or in float32."""
        ...

    def states(self, name: str) -> States:
        """Return the optimizer's states of a weight; {} if it never had a gradient.

        They are tensors of the weight's shape or plain values (for AdamW `exp_avg`, `exp_avg_sq`, `step`), and include MASTER.
        """
        ...


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
        own = {key: _share(value, weight) for key, value in states_of(contents, names[weight]).items()}
        if masters and loses_updates(weight):
            own = {key: value.float() if isinstance(value, torch.Tensor) else value for key, value in own.items()}
            own[MASTER] = _share(exact_weight(contents, names[weight]), weight)
        whole["state"][number] = own | {key: states[key] for key in (ROUNDINGS,) if key in states}
    optimizer.load_state_dict(whole)


def exact_weight(contents: CheckpointContents, name: str) -> torch.Tensor:
    """Return the weight in float32: its master, if it has one."""
    master = contents.states(name).get(MASTER)
    return master if isinstance(master, torch.Tensor) else contents.weight(name).float()


def states_of(contents: CheckpointContents, name: str) -> States:
    """Return the states of a weight for any optimizer of torch, without masters."""
    states = contents.states(name)
    kept = {key: value for key, value in states.items() if key not in (MASTER, ROUNDINGS) and value is not None}
    return kept | ({"step": torch.tensor(float(kept["step"]))} if "step" in kept else {})


def _share(value: Any, weight: torch.Tensor) -> Any:
    """Return this process's share of a whole tensor like `weight`, on its device. Other values come back unchanged."""
    if not isinstance(value, torch.Tensor) or value.shape != weight.shape:
        return value
    value = value.to(weight.device)
    if isinstance(weight, DTensor):
        return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)
    return value
