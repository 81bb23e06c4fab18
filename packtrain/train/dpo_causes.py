"""Why a model that is its own reference says something else than it: what differs between the two, by name.

The first loss of preference optimisation shows THAT they differ. Here what can be the reason is looked at, one after the
other, on the two as they are: calls that do not repeat themselves (dropout), log-probabilities that were kept, number formats,
tokenizers, adapters, settings and weights. It costs a few forward passes of one micro-batch, on runs that end anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import torch
from torch import nn

from packtrain.config.schema import Model
from packtrain.data.tokens.tokenizer import plain_tokenizer
from packtrain.errors import Problem, UserError
from packtrain.model.load import base_model, load_tokenizer
from packtrain.proof.isolation import evaluating
from packtrain.train.dpo import PackedDPOTrainer
from packtrain.train.loader import MicroBatch

Logps = tuple[torch.Tensor, torch.Tensor]
"""float32 [pairs] of chosen and of rejected answers."""
_NO_SETTING = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "architectures", "use_cache")


def causes(trainer: PackedDPOTrainer, batch: MicroBatch, policy: Logps, kept: Logps, tolerance: float) -> list[Problem]:
    """What differs between the model and its reference; nothing where it is none of what is known.

    `policy` and `kept` are what the two said of `batch`, the model in training mode; less than `tolerance` is rounding.
    Called on all processes together where weights are spread.
    """
    known = "ref_chosen_logps" in batch.inputs
    reference = (
        None if known or trainer.ref_model is None else cast(Any, trainer.accelerator.unwrap_model(trainer.ref_model))
    )
    found = [*_noise("model", trainer.model, max(apart(policy, trainer.policy_logps(batch))), tolerance)]
    if known:
        with evaluating(trainer.model):
            found += _stale(trainer.policy_logps(batch), kept, tolerance)
    elif reference is not None:
        found += _noise("reference", reference, max(apart(kept, trainer.reference_logps(batch))), tolerance)
        found += [*_formats(trainer.model, reference), *_tokenizers(trainer, reference)]
    found += _adapters(trainer.model, alone=reference is None and not known)
    if reference is not None:
        found += _settings_and_weights(base_model(trainer.model), reference)
    return found


def apart(one: Logps, other: Logps) -> list[float]:
    """By how much two differ at most: chosen, rejected."""
    return [(ours.float() - theirs.float()).abs().max().item() for ours, theirs in zip(one, other, strict=True)]


def _noise(side: str, model: nn.Module, moved: float, tolerance: float) -> Iterator[Problem]:
    """Whether the same call gives something else, `moved` by so much, a second time."""
    if moved > tolerance:
        named = next(_dropout_of(model), "none that has a name: a hook or code of the model's own")
        setting = named.partition("=")[0].rpartition(".")[2]
        fix = (
            f"set model.config.{setting}=0"
            if hasattr(base_model(model).config, setting)
            else "take it out of the model"
        )
        yield Problem(
            f"dropout is on in the {side} ({named}): a second call differs by {moved:.3g}", "model.config", fix
        )


def _dropout_of(model: nn.Module) -> Iterator[str]:
    """Modules in training mode that drop something, as `name=probability`."""
    for name, module in model.named_modules():
        if not module.training:
            continue
        for attribute, value in vars(module).items():
            if attribute == "p" and isinstance(module, nn.modules.dropout._DropoutNd) and value > 0:
                yield f"{name}={value:g}"
            elif ("drop" in attribute or "jitter" in attribute) and isinstance(value, float) and value > 0:
                yield f"{name}.{attribute}={value:g}"


def _stale(now: Logps, kept: Logps, tolerance: float) -> Iterator[Problem]:
    off = apart(now, kept)
    if max(off) > tolerance:
        side = off.index(max(off))
        worst = int((now[side] - kept[side]).abs().argmax())
        yield Problem(
            f"the log-probabilities that were kept are stale: pair {worst + 1} has {kept[side][worst]:.6g} for its "
            f"{('chosen', 'rejected')[side]} answer, computed anew {now[side][worst]:.6g}",
            "objective.reference=precomputed",
            "take the folder `reference` of the data cache away: they are computed again",
        )


def _formats(model: nn.Module, reference: nn.Module) -> Iterator[Problem]:
    theirs = _weights(reference)
    for name, weight in _weights(base_model(model)).items():
        if name in theirs and weight.dtype != theirs[name].dtype:
            ours, other = (str(one.dtype).removeprefix("torch.") for one in (weight, theirs[name]))
            what = f"the model has {ours} weights, the reference {other} ({name})"
            yield Problem(what, "model.dtype", "load both in the same format")
            return


def _tokenizers(trainer: PackedDPOTrainer, reference: Any) -> Iterator[Problem]:
    path, own = (getattr(one.config, "_name_or_path", "") for one in (reference, base_model(trainer.model)))
    if not path or path == own:
        return
    with suppress(UserError):
        theirs = plain_tokenizer(load_tokenizer(Model(path=path)))
        ours = plain_tokenizer(cast(Any, trainer.processing_class))
        if theirs.content != ours.content:
            yield Problem(
                f"the reference has another tokenizer ({path}: {theirs.vocabulary} tokens, digest {theirs.content[:8]}) than "
                f"the data was made with ({ours.vocabulary} tokens, digest {ours.content[:8]})",
                "model.tokenizer",
                "hold the model to a reference with its own tokenizer",
            )


def _adapters(model: Any, *, alone: bool) -> Iterator[Problem]:
    """What is wrong with adapters; `alone`: the reference is the model with them off, or with those named ref."""
    if not hasattr(model, "peft_config"):
        return
    if (active := list(model.active_adapters)) != ["default"]:
        what = f"the wrong adapter is active: {', '.join(active) or 'none'} in place of default"
        yield Problem(what, "peft", "train the adapter that the run was given")
    if not alone:
        return
    parts = dict(model.named_parameters())
    for name, weight in parts.items():
        if ".default." not in name or weight.is_meta:
            continue
        other = parts.get(name.replace(".default.", ".ref."))
        if "ref" in model.peft_config and other is not None and not _same(weight, other):
            what = f"the adapters of the reference are not those that training starts from ({name})"
            yield Problem(what, "objective.reference", "name the adapters of model.path, or leave it at auto")
            return
        if "ref" not in model.peft_config and "lora_B" in name and _local(weight).any():
            what = f"the adapters are not new, but the reference is the model without them ({name} is not zero)"
            yield Problem(what, "objective.reference", "leave it at auto: the model is then held to those adapters")
            return


def _settings_and_weights(model: Any, reference: Any) -> Iterator[Problem]:
    ours, theirs = model.config.to_dict(), reference.config.to_dict()
    if other := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        other = [name for name in other if name not in _NO_SETTING]
    if other:
        shown = "; ".join(f"{name} {ours.get(name)!r}, the reference {theirs.get(name)!r}" for name in other[:3])
        yield Problem(f"the settings differ: the model has {shown}", "model.config", "load both with the same settings")
    known = _weights(reference)
    for name, weight in _weights(model).items():
        if name not in known or (weight.dtype == known[name].dtype and not _same(weight, known[name])):
            what = f"the weights differ, first in {name}"
            fix = "the reference is not what training starts from: name the same files"
            yield Problem(what, "objective.reference", fix)
            return


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a model by its own names, those of adapters left out."""
    return {name.replace(".base_layer", ""): weight for name, weight in model.named_parameters() if "lora_" not in name}


def _local(weight: torch.Tensor) -> torch.Tensor:
    """The part of a spread weight that is here."""
    from torch.distributed.tensor import DTensor

    weight = getattr(weight, "ds_tensor", weight)
    return weight.to_local() if isinstance(weight, DTensor) else weight.detach()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    here, there = _local(one), _local(other)
    return here.shape == there.shape and torch.equal(here, there.to(here.device))
