"""The weights of final/ in the format of trainer.save_dtype, from float32 masters where there are some, and what rounding them costs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from packtrain.attention.backends import SEGMENTED, attending_by
from packtrain.config.schema import SaveDtype
from packtrain.model.load import base_model
from packtrain.model.spread import most_of_all
from packtrain.train.optim.float32_step import MASTER, round_to
from packtrain.train.optim.lost_updates import optimizer_inside

_COMPARED_STEPS = 8
"""Steps of the evaluation set that are enough to compare two sets of weights on."""
Exact = Callable[[torch.Tensor], torch.Tensor | None]
"""The whole float32 tensor that the optimizer keeps of a trained weight, None if it keeps none. Called by all processes together."""


def format_of(save_dtype: SaveDtype, loaded: torch.dtype) -> torch.dtype:
    """The format of the saved weights; `loaded` is that of the model."""
    return {"auto": loaded, "float32": torch.float32, "bfloat16": torch.bfloat16}[save_dtype]


def exact_weights(optimizer: Any, *, deepspeed: bool) -> Exact:
    """What `optimizer`, the trainer's, keeps of its weights."""
    if deepspeed:
        from deepspeed.utils import safe_get_full_fp32_param

        return lambda weight: safe_get_full_fp32_param(weight) if weight.requires_grad else None
    states = optimizer_inside(optimizer).state

    def exact(weight: torch.Tensor) -> torch.Tensor | None:
        master = states[weight].get(MASTER) if weight in states else None
        return master.full_tensor() if isinstance(master, DTensor) else master

    return exact


def in_format(
    whole: dict[str, torch.Tensor], model: nn.Module, exact: Exact, dtype: torch.dtype, seed: int | None
) -> dict[str, torch.Tensor]:
    """The state dict `whole` of `model` with its weights in `dtype` on the CPU, made of what is `exact`; {} where `whole` is.

    With a `seed` they are rounded by chance. Called by all processes, with {} on all but one; tied weights stay one tensor.
    """
    made: dict[int, torch.Tensor | None] = {}
    saved = dict(whole)
    for name, weight in model.named_parameters(remove_duplicate=False):
        if id(weight) not in made:
            kept = exact(weight)
            one = whole.get(name) if kept is None else kept
            made[id(weight)] = None if name not in whole or one is None else rounded(one, dtype, name, seed).cpu()
        if (found := made[id(weight)]) is not None and name in whole:
            saved[name] = found
    return saved


def rounded(exact: torch.Tensor, dtype: torch.dtype, name: str, seed: int | None) -> torch.Tensor:
    """The weight of that `name` in `dtype`, by chance with a `seed`."""
    chance = None
    if seed is not None and exact.dtype == torch.float32:
        drawn = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest(), "big")
        chance = torch.Generator(exact.device).manual_seed(drawn)
    return round_to(exact.detach(), dtype, chance)


@contextmanager
def merged_in(model: Any, dtype: torch.dtype, seed: int | None) -> Iterator[Any]:
    """Inside the block the adapted `model`, its adapters merged, has its weights in `dtype`, on the CPU if that is not its own.

    They are merged in float32 for `dtype` float32. Afterwards the merged model is as it was before, but for rounding.
    """
    own, device = base_model(model).dtype, base_model(model).device
    if dtype == own:
        yield model.merge_and_unload()
        return
    if dtype == torch.float32:
        _move(model, lambda _, weight: weight.cpu().float())
    whole = model.merge_and_unload()
    _move(whole, lambda name, weight: rounded(weight, dtype, name, seed).cpu())
    yield whole
    _move(whole, lambda _, weight: weight.to(device, own))


def _move(model: nn.Module, where: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    for name, weight in model.named_parameters():
        weight.data = where(name, weight.data)


def name_format(folder: Path, dtype: torch.dtype) -> None:
    """Has config.json of a saved model name the format of its weights, which from_pretrained loads them in."""
    path = folder / "config.json"

    def named(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        name = str(dtype).removeprefix("torch.")
        return {key: name if key in ("dtype", "torch_dtype") else named(one) for key, one in value.items()}

    path.write_text(json.dumps(named(json.loads(path.read_text())), indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class RoundingCost:
    """Held-out losses, computed in float32 on some of the held-out documents, of the `exact` weights and of the `saved` ones."""

    exact: float
    saved: float

    def sentence(self) -> str:
        """The cost in words."""
        said = f"rounded to bfloat16 for final/, the weights have held-out loss {self.saved:.4f} in place of {self.exact:.4f}"
        kept = (
            ": trainer.save_dtype=float32 keeps what was learned (docs/precision.md)" if self.saved > self.exact else ""
        )
        return f"{said} (both computed in float32){kept}"


@torch.no_grad()
def rounding_cost(trainer: Any, dtype: torch.dtype, seed: int | None) -> RoundingCost | None:
    """What it costs that final/ has its weights in `dtype`; None if nothing is rounded, or it cannot be measured.

    It is measured where each process has all weights, there are held-out documents, and the devices have memory for float32
    weights once more. Under autocast, training itself computes with rounded weights. Called by all processes, after saving.
    """
    settings, model = trainer.settings, trainer.model
    measurable = settings.evaluation is not None and settings.autocast is None and not settings.sharded
    if dtype != torch.bfloat16 or base_model(model) is not model or not measurable:
        return None
    exact = exact_weights(trainer.optimizer, deepspeed=trainer.is_deepspeed_enabled)
    weights = dict(model.named_parameters())
    known = {name: weight.data for name, weight in weights.items()}
    kept = {name: exact(weight) for name, weight in weights.items()}
    if all(one is None for one in kept.values()) and base_model(model).dtype == dtype:
        return None

    def loss_of(choose: Callable[[str], torch.Tensor]) -> float | None:
        lacks_memory = False
        try:
            for name, weight in weights.items():
                weight.data = choose(name).float()
        except torch.OutOfMemoryError:
            lacks_memory = True
        return None if most_of_all(lacks_memory, trainer.args.device) else _loss(trainer)

    def precise(name: str) -> torch.Tensor:
        found = kept[name]
        return known[name] if found is None else found

    def saved(name: str) -> torch.Tensor:
        return known[name] if known[name].dtype == dtype else rounded(precise(name), dtype, name, seed)

    try:
        losses = loss_of(precise), loss_of(saved)
    finally:
        for name, weight in weights.items():
            weight.data = known[name]
    return None if losses[0] is None or losses[1] is None else RoundingCost(losses[0], losses[1])


def _loss(trainer: Any) -> float:
    """The loss on the first steps of the evaluation set; flash kernels do not compute in float32."""
    flash = trainer.settings.backend == "flash"
    model, trainer.most_evaluated = trainer.model, _COMPARED_STEPS
    model.eval()
    try:
        with attending_by(base_model(model), SEGMENTED) if flash else nullcontext():
            return trainer.evaluated()["loss"]
    finally:
        model.train()
        trainer.most_evaluated = None
