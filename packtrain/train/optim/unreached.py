"""Freeze trained weights that text does not reach: vision towers, indexers that only choose keys.

These weights get no gradient, and DDP fails in its second step. A backward pass over one token finds them. If it misses some weights, a
second pass over a long document follows: some weights matter only from a certain length on.
"""

from __future__ import annotations

import inspect
import re
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from packtrain.errors import UserError
from packtrain.model.heads import outputs_of_tokens
from packtrain.model.load import base_model
from packtrain.model.spread import Ranks, elements, placement_of
from packtrain.packing.segments import Segments
from packtrain.proof.comparison import evaluating
from packtrain.proof.isolation import logits_of, random_ids, training_mode_without_dropout
from packtrain.wording import in_millions


def freeze_unreached(model: Any, longest: int, autocast: torch.dtype | None) -> tuple[str, bool]:
    """Freeze trained weights that no document of up to `longest` tokens reaches.

    All ranks find the same weights. Return the frozen ones in words, and whether others get a gradient in some batches only. Raises UserError
    if no weight is left.
    """
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    missed = never = weights.keys() - _reached(base_model(model), weights, 1, autocast)
    if missed:
        never = missed - _reached(base_model(model), weights, min(longest, 2048), autocast)  # more is slow on a CPU
    places = {name: [*accumulate(name.split("."), "{}.{}".format)] for name in weights}
    reached = {place for name in weights.keys() - never for place in places[name]}
    lists = {place for place, one in model.named_modules() if isinstance(one, nn.ModuleList | nn.ModuleDict)} & reached
    # experts and layers that were left out by chance: others of their list are reached
    never -= {name for name in never if any(a in lists and b not in reached for a, b in pairwise(places[name]))}
    if len(never) == len(weights):
        what = f"no trained weight of {type(base_model(model)).__name__} gets a gradient from text"
        raise UserError(what, where="peft.target_modules, optim.groups", fix="Train layers of the language model.")
    for name in never:
        weights[name].requires_grad_(False)
    outermost = {next(place for place in places[name] if place not in reached) for name in never}
    patterns = {re.sub(r"\.\d+(?=\.|$)", ".*", place.removeprefix("base_model.model.")) for place in outermost}
    number = in_millions(sum(elements(weights[name]) for name in never))
    words = f"{number} parameters that get no gradient from text: {', '.join(sorted(patterns))}"
    return words if never else "", missed != never


def reduce_unreached(model: Any, ranks: Ranks, at_times: bool) -> None:
    """Make ranks reduce the same weights if batches reach some only `at_times`.

    Otherwise a rank adds up gradients of different weights, or fails. Raises UserError for a strategy that cannot do it.
    """
    if not at_times or ranks.world_size == 1:
        return
    if not placement_of(ranks.spec).reduces_unreached(model, ranks.spec):
        what = "it cannot train a model whose batches reach different weights, such as experts"
        raise UserError(what, where=f"strategy.name ({ranks.strategy})", fix="take strategy=ddp, or zero3")


def _reached(base: Any, weights: dict[str, Any], tokens: int, autocast: torch.dtype | None) -> set[str]:
    """Return the names of the `weights` that the outputs of one document depend on."""
    ids, found = torch.from_numpy(random_ids(base, Segments((tokens,)))[:1]), set[int]()
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def note(weight: torch.Tensor) -> None:
        found.add(id(weight))
        weight.grad = None  # at once: the device may not hold all gradients, and ZeRO-3 takes the weight away

    buffers = [(buffer, buffer.clone()) for buffer in base.buffers()]
    hooks = [weight.register_post_accumulate_grad_hook(note) for weight in weights.values()]
    with outputs_of_tokens(base), evaluating(base, autocast), torch.compiler.set_stance("force_eager"):
        training_mode_without_dropout(base)  # only then gemma3n reads past a layer
        if "logits_to_keep" in inspect.signature(base.forward).parameters:
            batch["logits_to_keep"] = 1
        if (outputs := logits_of(base, batch)).requires_grad:
            outputs.sum().backward()
    for buffer, before in buffers:  # some count the passes of training
        buffer.data.copy_(before)
    for weight, hook in zip(weights.values(), hooks, strict=True):
        hook.remove()
        if weight.grad is not None:  # the gradient of a shard comes without the hook
            note(weight)
    return {name for name, weight in weights.items() if id(weight) in found}
