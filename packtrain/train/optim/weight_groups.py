"""Weights that are trained: frozen ones, and groups with a learning rate of their own.

A group of optim.groups whose share of the learning rate is 0 is frozen before anything is made from the model: no gradient, no state, no
exchange. Weights that text does not reach (vision towers, indexers that only choose keys) are frozen too: they get no gradient, and DDP
fails in its second step. A backward pass over one token finds them. If it misses some weights, a second pass over a long document
follows: some weights matter only from a certain length on. With model.towers=trained, a document with a picture follows.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypedDict

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel

from packtrain.config.keys import suggest
from packtrain.config.schema import Optim, WeightGroup
from packtrain.errors import Problem, UserError
from packtrain.model.forward import Batch, outputs_of_tokens
from packtrain.model.load import base_model
from packtrain.model.spread import Ranks, elements, layers_of, placement_of
from packtrain.packing.segments import Segments
from packtrain.proof.comparison import evaluating
from packtrain.proof.isolation import logits_of, random_ids, training_mode_without_dropout
from packtrain.wording import in_millions

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of weights without weight decay, in lower case, as in transformers' Trainer."""


class ParameterGroup(TypedDict, total=False):
    """A parameter group of torch."""

    params: list[torch.Tensor]
    lr: float
    weight_decay: float
    muon: bool


def freeze(model: nn.Module, groups: Sequence[WeightGroup]) -> None:
    """Freeze the weights whose learning rate is 0. Raises UserError for a group without trained weights, and if none is left."""
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    owners = {name: _group_of(name, groups) for name in names}
    problems = []
    for at, group in enumerate(groups):
        if group not in owners.values():
            earlier = any(re.search(group.match, name) for name in names)
            what = f"{group.match!r} matches {'what earlier groups have' if earlier else 'no trained weight'}"
            code = "group-shadowed" if earlier else "group-without-weights"
            parts = {part for name in names for part in name.split(".")}
            fix = "move it before them" if earlier else suggest(group.match, parts, f"names are such as {names[-1]}")
            problems.append(Problem(what, f"optim.groups[{at}].match", fix, code=code))
    if not problems and all(group is not None and group.lr_scale == 0 for group in owners.values()):
        fix = "give one of them a learning rate"
        problems = [Problem("no weight is left to train", "optim.groups", fix, code="nothing-to-train")]
    if problems:
        raise UserError(problems)
    for name, weight in model.named_parameters():
        if (group := owners.get(name)) is not None and group.lr_scale == 0:
            weight.requires_grad_(False)


def group_weights(model: nn.Module, optim: Optim) -> list[ParameterGroup]:
    """Return torch's parameter groups of the trained weights.

    Groups with the run's own learning rate, which is logged, come first. Weights with weight decay come before others. A group of an
    optimizer `by_matrices` has only matrices of layers (`muon`) or none.
    """
    inside = {id(weight) for layer in layers_of(model) for weight in layer.parameters() if weight.ndim == 2}
    norms = {id(weight) for one in model.modules() if isinstance(one, nn.LayerNorm) for weight in one.parameters()}
    groups: dict[tuple[float, bool, float, bool], list[torch.Tensor]] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            group = _group_of(name, optim.groups) or WeightGroup()
            spared = id(weight) in norms or _NOT_DECAYED.search(name.lower()) is not None
            own = 0.0 if spared else optim.weight_decay
            decay = own if group.weight_decay is None else group.weight_decay
            muon = optim.spec.by_matrices and id(weight) in inside
            groups.setdefault((group.lr_scale, spared, decay, muon), []).append(weight)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0] != 1, item[0][1]))
    made = list[ParameterGroup]()
    for (scale, _, decay, muon), weights in ordered:
        group = ParameterGroup(params=weights, lr=scale * optim.learning_rate, weight_decay=decay)
        made.append({**group, "muon": muon} if optim.spec.by_matrices else group)
    return made


class MuonAndAdamW(Optimizer):
    """torch's Muon for groups with `muon`, and AdamW for the others. Muon's updates are as large as AdamW's (arXiv 2502.16982)."""

    def __init__(self, params: list[dict[str, object]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr})
        muons, others = ([group for group in self.param_groups if group["muon"] is muon] for muon in (True, False))
        # both fill in their settings
        self._parts = list[tuple[bool, Optimizer]]()
        if muons:
            self._parts.append((True, Muon(muons, adjust_lr_fn="match_rms_adamw")))
        if others:
            self._parts.append((False, AdamW(others, betas=betas, eps=eps)))

    def step(self, closure: object = None) -> None:
        """Update all weights that have a gradient. Groups and states belong to this optimizer, also after a load."""
        for muon, part in self._parts:
            part.state, part.param_groups = self.state, [group for group in self.param_groups if group["muon"] is muon]
            part.step()


def _group_of(name: str, groups: Sequence[WeightGroup]) -> WeightGroup | None:
    return next((group for group in groups if re.search(group.match, name)), None)


def freeze_unreached(
    model: PreTrainedModel, longest: int, autocast: torch.dtype | None, seen: Batch | None = None
) -> tuple[str, bool]:
    """Freeze trained weights without a gradient from any document of up to `longest` tokens.

    `seen`: a batch with a picture, which may reach more of them. All ranks find the same weights. Return the frozen ones in words, and whether others get a gradient in some batches only. Raises UserError
    if no weight is left.
    """
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    missed = never = weights.keys() - _reached(base_model(model), weights, 1, autocast)
    if missed:
        never = missed - _reached(base_model(model), weights, min(longest, 2048), autocast)  # more is slow on a CPU
    if seen is not None:  # every micro-batch has a picture then
        never = never - _reached(base_model(model), weights, seen, autocast)
        missed = never
    places = {name: [*accumulate(name.split("."), "{}.{}".format)] for name in weights}
    reached = {place for name in weights.keys() - never for place in places[name]}
    lists = {place for place, one in model.named_modules() if isinstance(one, nn.ModuleList | nn.ModuleDict)} & reached
    # experts and layers that were left out by chance: others of their list are reached
    never -= {name for name in never if any(a in lists and b not in reached for a, b in pairwise(places[name]))}
    if len(never) == len(weights):
        what = f"no trained weight of {type(base_model(model)).__name__} gets a gradient from text"
        fix = "Train layers of the language model."
        raise UserError(what, where="peft.target_modules, optim.groups", fix=fix, code="no-gradient-from-text")
    for name in never:
        weights[name].requires_grad_(False)
    outermost = {next(place for place in places[name] if place not in reached) for name in never}
    patterns = {re.sub(r"\.\d+(?=\.|$)", ".*", place.removeprefix("base_model.model.")) for place in outermost}
    number = in_millions(sum(elements(weights[name]) for name in never))
    words = f"{number} parameters that get no gradient from text: {', '.join(sorted(patterns))}"
    return words if never else "", missed != never


def reduce_unreached(model: PreTrainedModel, ranks: Ranks, at_times: bool) -> None:
    """Make ranks reduce the same weights if batches reach some only `at_times`.

    Otherwise a rank adds up gradients of different weights, or fails. Raises UserError for a strategy that cannot do it.
    """
    if not at_times or ranks.world_size == 1:
        return
    if not placement_of(ranks.spec).reduces_unreached(model, ranks.spec):
        what = "it cannot train a model whose batches reach different weights, such as experts"
        fix = "take strategy=ddp, or zero3"
        raise UserError(what, where=f"strategy.name ({ranks.strategy})", fix=fix, code="gradients-differ-by-rank")


def _reached(
    base: PreTrainedModel, weights: dict[str, nn.Parameter], given: int | Batch, autocast: torch.dtype | None
) -> set[str]:
    """Return the names of `weights` with a gradient from a batch.

    `given`: the batch, or the length of a random document.
    """
    found = set[int]()
    if isinstance(given, int):
        ids = torch.from_numpy(random_ids(base, Segments((given,)))[:1])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch: Batch = {**given}

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
