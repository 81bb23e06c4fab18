"""Group weights by their share of the learning rate (optim.groups).

A group whose share is 0 is frozen before anything is made from the model: no gradient, no state, no exchange.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from packtrain.config.keys import suggest
from packtrain.config.schema import Optim, WeightGroup
from packtrain.errors import Problem, UserError
from packtrain.model.spread import layers_of

AVERAGE = "average"
"""Extra state of a weight beside its optimizer's: its average over the steps (trainer.ema)."""


def freeze(model: nn.Module, groups: Sequence[WeightGroup]) -> None:
    """Freeze the weights whose learning rate is 0. Raises UserError for a group without trained weights, and if none is left."""
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    owners = {name: _group_of(name, groups) for name in names}
    problems = []
    for at, group in enumerate(groups):
        if group not in owners.values():
            earlier = any(re.search(group.match, name) for name in names)
            what = f"{group.match!r} matches {'what earlier groups have' if earlier else 'no trained weight'}"
            parts = {part for name in names for part in name.split(".")}
            fix = "move it before them" if earlier else suggest(group.match, parts, f"names are such as {names[-1]}")
            problems.append(Problem(what, f"optim.groups[{at}].match", fix))
    if not problems and all(group is not None and group.lr_scale == 0 for group in owners.values()):
        problems = [Problem("no weight is left to train", "optim.groups", "give one of them a learning rate")]
    if problems:
        raise UserError(problems)
    for name, weight in model.named_parameters():
        if (group := owners.get(name)) is not None and group.lr_scale == 0:
            weight.requires_grad_(False)


def group_weights(model: nn.Module, optim: Optim, decayed: Collection[str]) -> list[dict[str, Any]]:
    """Return torch's parameter groups of the trained weights; weights named in `decayed` have weight decay. Groups with the run's own learning
    rate, which is logged, come first. With an optimizer of packtrain's own a group has only matrices of layers (`muon`) or none."""
    inside = {id(weight) for layer in layers_of(model) for weight in layer.parameters() if weight.ndim == 2}
    groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            group = _group_of(name, optim.groups) or WeightGroup()
            own = optim.weight_decay if name in decayed else 0.0
            decay = own if group.weight_decay is None else group.weight_decay
            muon = bool(optim.spec.own) and id(weight) in inside
            groups.setdefault((group.lr_scale, decay, muon), []).append(weight)
    ordered = sorted(groups.items(), key=lambda item: item[0][0] != 1)
    return [
        {"params": weights, "lr": scale * optim.learning_rate, "weight_decay": decay}
        | ({"muon": muon} if optim.spec.own else {})
        for (scale, decay, muon), weights in ordered
    ]


def _group_of(name: str, groups: Sequence[WeightGroup]) -> WeightGroup | None:
    return next((group for group in groups if re.search(group.match, name)), None)
