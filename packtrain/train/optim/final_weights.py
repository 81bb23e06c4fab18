"""Weights of final/ in the format of optim.bf16_rounding, from float32 masters if there are any."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from packtrain.config.schema import Rounding
from packtrain.model.adapters import untie_if_adapted
from packtrain.model.load import base_model
from packtrain.train.optim.dither import Dither, dithered

Exact = Callable[[torch.Tensor], torch.Tensor | None]
"""Returns the optimizer's whole float32 tensor of a trained weight; None if it keeps none. All processes call it together."""


def format_of(rounding: Rounding, loaded: torch.dtype) -> torch.dtype:
    """Return the format of the saved weights; `loaded` is the model's format."""
    return {"never": torch.float32, "undithered": torch.float32, "final": torch.bfloat16}.get(rounding, loaded)


def format_in_final(name: str, weight: torch.Tensor, dtype: torch.dtype, *, adapted: bool) -> torch.dtype | None:
    """Return the format of a weight in final/; None if it is not saved.

    Whole models have `dtype`. An `adapted` model saves its adapters in float32, and the layers of peft.modules_to_save in `dtype`.
    """
    if not adapted:
        return dtype
    if not weight.requires_grad:
        return None
    return dtype if ".modules_to_save." in name else torch.float32


def in_format(
    whole: dict[str, torch.Tensor],
    model: nn.Module,
    exact: Exact,
    dtype: torch.dtype,
    dither: Dither,
) -> dict[str, torch.Tensor]:
    """Return the state dict `whole` with weights in `dtype` on the CPU, from `exact` tensors.

    Adapters stay float32. All processes call it, with {} on all but one, which return {}. Tied weights stay one tensor.
    """
    made: dict[int, torch.Tensor | None] = {}
    final, adapted = dict(whole), base_model(model) is not model
    for name, weight in model.named_parameters(remove_duplicate=False):
        if (own := format_in_final(name, weight, dtype, adapted=adapted)) is None:
            continue
        if id(weight) not in made:
            kept = exact(weight)
            value = whole[name] if kept is None and name in whole else kept
            made[id(weight)] = rounded(name, value, own, dither) if value is not None and name in whole else None
        if (converted := made[id(weight)]) is not None and name in whole:
            final[name] = converted
    return final


def rounded(name: str, whole: torch.Tensor, dtype: torch.dtype, dither: Dither) -> torch.Tensor:
    """Return a `whole` weight in `dtype` on the CPU. A float32 weight goes through `dither.in_format`."""
    whole = whole.detach()
    return (dither.in_format(name, whole, dtype) if whole.dtype == torch.float32 else whole).to(dtype).cpu()


@contextmanager
def merged_in(model: Any, trained: dict[str, torch.Tensor], dtype: torch.dtype) -> Iterator[PreTrainedModel]:
    """Merge the adapters `trained` (as saved) into `model`, with weights in `dtype` inside the block.

    If `dtype` is not the model's format, the weights are on the CPU, and merged in float32 for `dtype` float32. In bfloat16 sums are rounded by
    chance (dither.py), so that small ones are not lost. Afterwards the merged model is back in its format and on its device.
    """
    own, device = base_model(model).dtype, base_model(model).device
    if dtype == torch.float32 != own:
        _move(model, lambda name, weight: weight.cpu().float())
    set_peft_model_state_dict(model, trained)
    untie_if_adapted(model)
    if dtype == own == torch.bfloat16:
        _add_adapters(model)
    whole = model.merge_and_unload()
    if dtype == own:
        yield whole
        return
    by_chance = dtype == torch.bfloat16
    _move(whole, lambda name, weight: (dithered(weight, 0, name) if by_chance else weight).to(dtype).cpu())
    yield whole
    _move(whole, lambda name, weight: weight.to(device, own))


@torch.no_grad()
def _add_adapters(model: nn.Module) -> None:
    """Add the adapters to their bfloat16 layers in float32, then zero them. peft adds adapters of experts in one tensor."""
    layers: list[tuple[str, Any]] = [one for one in model.named_modules() if isinstance(one[1], LoraLayer)]
    for name, layer in layers:
        for adapter in layer.active_adapters if hasattr(layer.get_base_layer(), "weight") else ():
            weight = layer.get_base_layer().weight
            weight.data = dithered(weight.float() + layer.get_delta_weight(adapter).float(), 0, name).to(weight.dtype)
            for second in (layer.lora_B, layer.lora_embedding_B):
                if adapter in second:
                    getattr(second[adapter], "weight", second[adapter]).zero_()


def _move(model: nn.Module, where: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    for name, weight in model.named_parameters():
        weight.data = where(name, weight.data)


def name_format(folder: Path, dtype: torch.dtype) -> None:
    """Write the format of a saved model's weights into its config.json. from_pretrained loads them in it."""
    path = folder / "config.json"

    def named(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        name = str(dtype).removeprefix("torch.")
        return {key: name if key in ("dtype", "torch_dtype") else named(inner) for key, inner in value.items()}

    path.write_text(json.dumps(named(json.loads(path.read_text())), indent=2) + "\n")
