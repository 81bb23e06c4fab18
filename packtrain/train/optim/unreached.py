"""Trained weights that no output for text depends on: towers of pictures, indexers that only choose keys, adapters that are read past.

They get no gradient, and DDP fails in its second step. A backward pass over one token finds them; only where it misses some is there a
second one over a long document, since some weights matter from a length on. ZeRO-3, which has no backward pass before its optimizer, reads
them off the graph of the forward pass.
"""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Any

import torch
from torch import nn

from packtrain.errors import UserError
from packtrain.model.heads.score import outputs_of_tokens
from packtrain.model.load import base_model
from packtrain.model.spread import Ranks, elements
from packtrain.packing.segments import Segments
from packtrain.proof.comparison import evaluating
from packtrain.proof.isolation import logits_of, random_ids, training_mode_without_dropout
from packtrain.wording import in_millions

_MOST = 2048
"""Tokens of the long document, which no parts of known models go beyond; more take long on a CPU."""


def freeze_unreached(model: Any, longest: int, ranks: Ranks, autocast: torch.dtype | None) -> tuple[str, bool]:
    """Freeze trained weights that documents of up to `longest` tokens never reach, alike on all ranks.

    Returns what is frozen, in words, and whether other weights get a gradient in some batches only. Raises UserError if none is left.
    """
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    reached = partial(_reached, base_model(model), weights, autocast, by_graph=ranks.gathers_by_engine)
    missed = never = weights.keys() - reached(1)
    if missed:
        never = missed - reached(min(longest, _MOST))
        never -= _left_out(model, never, weights.keys() - never)
    if len(never) == len(weights):
        what = f"no trained weight of {type(base_model(model)).__name__} gets a gradient from text"
        raise UserError(what, where="peft.target_modules, optim.groups", fix="Train layers of the language model.")
    for name in never:
        weights[name].requires_grad_(False)
    inside = {part for name in weights.keys() - never for part in _prefixes(name)}
    outermost = {next(part for part in [*_prefixes(name), name] if part not in inside) for name in never}
    patterns = {re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix("base_model.model.")) for name in outermost}
    number = in_millions(sum(elements(weights[name]) for name in never))
    words = f"{number} parameters that get no gradient from text: {', '.join(sorted(patterns))}"
    return words if never else "", missed != never


def _prefixes(name: str) -> list[str]:
    return [name[: at.start()] for at in re.finditer(r"\.", name)]


def _left_out(model: nn.Module, unreached: set[str], reached: set[str]) -> set[str]:
    """The `unreached` weights of experts or layers that were not chosen this time: others of their list are `reached`."""
    found = set[str]()
    for place, several in model.named_modules():
        if isinstance(several, nn.ModuleList | nn.ModuleDict):
            parts = {f"{place}.{part}." for part, _ in several.named_children()}
            used = {part for part in parts if any(name.startswith(part) for name in reached)}
            found |= {name for name in unreached if used and name.startswith((*(parts - used),))}
    return found


def _reached(
    base: Any, weights: dict[str, Any], autocast: torch.dtype | None, tokens: int, *, by_graph: bool
) -> set[str]:
    """The names of the `weights` that outputs of a document of so many tokens depend on; they keep no gradients."""
    ids, found = torch.from_numpy(random_ids(base, Segments((tokens,)))[:1]), set[int]()
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def note(weight: torch.Tensor) -> None:
        found.add(id(weight))
        weight.grad = None  # at once: the device may not hold all of them

    hooks = [weight.register_post_accumulate_grad_hook(note) for weight in weights.values()]
    with outputs_of_tokens(base), evaluating(base, autocast), torch.compiler.set_stance("force_eager"):
        training_mode_without_dropout(base)  # gemma3n reads past a layer only then
        if "logits_to_keep" in inspect.signature(base.forward).parameters:
            batch["logits_to_keep"] = 1
        outputs = logits_of(base, batch)
        if by_graph:
            found |= _leaves(outputs)
        elif outputs.requires_grad:
            outputs.sum().backward()
    for weight, hook in zip(weights.values(), hooks, strict=True):
        hook.remove()
        if weight.grad is not None:  # a shard, whose gradient comes past the hook
            note(weight)
    return {name for name, weight in weights.items() if id(weight) in found}


def _leaves(outputs: torch.Tensor) -> set[int]:
    """The ids of the tensors that `outputs` are computed from."""
    todo, nodes, leaves = [outputs.grad_fn], set[Any](), set[int]()
    while todo:
        if (node := todo.pop()) is not None and node not in nodes:
            nodes.add(node)
            leaves.add(id(getattr(node, "variable", None)))
            todo += [before for before, _ in node.next_functions]
    return leaves
