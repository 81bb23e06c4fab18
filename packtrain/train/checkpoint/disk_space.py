"""Room on the disk of the run folder: what a run will write, and whether it fits."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

from packtrain.config.schema import Optim
from packtrain.model.load import base_model
from packtrain.model.spread import elements
from packtrain.plan.memory import optimizer_bytes
from packtrain.plan.origin import listed, written_into
from packtrain.wording import size

_BESIDE = 2**20  # config, states of chance and of the run


def weights_bytes(model: nn.Module) -> int:
    """Bytes of the weights that are saved of `model`: all, or adapters and what is trained beside them."""
    whole = base_model(model) is model
    return sum(elements(weight) * weight.itemsize for weight in model.parameters() if whole or weight.requires_grad)


def checkpoint_bytes(model: nn.Module, optim: Optim, strategy: str, checkpoints: Path) -> int:
    """Bytes of a checkpoint: of the newest one that is there, else by the sizes of the weights."""
    for newest in reversed(listed(checkpoints).values()):
        if files := written_into(newest):
            return sum(number for number, _ in files.values())
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    states = optimizer_bytes(optim, strategy, sum(map(elements, trained)), trained[0].itemsize if trained else 0)
    return weights_bytes(model) + states + _BESIDE


def lack_of_space(folder: Path, needed: int) -> str:
    """What is wrong with the room for `needed` bytes on the disk of `folder`, "" if nothing is known to be."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return f"it takes {size(needed)}, and the disk has {size(free)} left" if free < needed else ""


def remark_before_training(
    model: nn.Module, optim: Optim, strategy: str, checkpoints: Path, keep: int | None, number: int
) -> str:
    """A warning if the disk has no room for final/ and the most checkpoints that are there at a time, of `number`; else ""."""
    final, there = weights_bytes(model), len(listed(checkpoints))
    most = number if keep is None else min(number, keep + 1)  # an old one goes when the new one is complete
    each = checkpoint_bytes(model, optim, strategy, checkpoints) if most else 0
    lack = lack_of_space(checkpoints, final + max(most - there, min(most, 1)) * each)
    if not lack:
        return ""
    parts = [f"{most} checkpoints of {size(each)}"] if most else []
    return f"no room for {' and '.join([*parts, f'final/ of {size(final)}'])}: {lack} (trainer.output_dir, keep_checkpoints)"
