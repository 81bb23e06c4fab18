"""What is checked of preference training before step 1, on the first real pairs.

(1) The packed forward gives every answer the log-probability that the padded one gives, and the fused output head that of
the full logits. (2) Where the model starts as its own reference, the first loss is that of a zero margin: ln 2 for the sigmoid
loss. It is not when dropout is on (TRL turns off modules, not what attention drops), or when the reference has another
precision or tokenizer, other weights, the wrong adapter, or was precomputed from something else. Which of these it is, is
found out on the two as they are, by a few more forward passes of one micro-batch in a run that ends anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from packtrain.attention.backends import attention_of
from packtrain.config.schema import Model
from packtrain.data.tokens.tokenizer import plain_tokenizer
from packtrain.errors import CheckFailed, Problem, UserError
from packtrain.model.load import base_model, load_tokenizer
from packtrain.model.spread import most_of_all
from packtrain.packing.collate import IGNORE
from packtrain.proof.isolation import evaluating, loss_tolerance_of, refusals_of_a_model
from packtrain.train.loader import MicroBatch, PairSteps

if TYPE_CHECKING:
    from packtrain.train.dpo import PackedDPOTrainer

Logps = tuple[torch.Tensor, torch.Tensor]
"""float32 [pairs] of chosen and of rejected answers."""
_SIDES = ("chosen", "rejected")
_NO_SETTING = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "architectures", "use_cache")


@torch.no_grad()
def check_pair_forward(trainer: PackedDPOTrainer, attention: str) -> None:
    """Compares the answers' log-probabilities as training computes them with those of padded batches and full logits.

    `attention` is the implementation that the model came with. Raises CheckFailed where they differ.
    """
    model, base = trainer.model, base_model(trainer.model)
    inputs = trainer._prepare_inputs(_first(trainer).inputs)
    call = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORE)
    with evaluating(model), trainer.accelerator.autocast():
        layout = {"layout": inputs["layout"]} if "layout" in inputs else {}
        ours = model(**call, **layout, labels=labels, fused_lm_head=True).log_probs.sum(dim=1).float()
        with (
            attention_of(base, attention),
            refusals_of_a_model(f"{type(base).__name__} cannot run padded pairs", fix="please report this model"),
        ):
            logits = model(**call, use_cache=False).logits[:, :-1].float()
    target = labels[:, 1:]
    theirs = logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0].masked_fill(target == IGNORE, 0)
    theirs = theirs.sum(dim=1)
    off = ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-8)).item()
    if not off <= loss_tolerance_of(trainer.compute_dtype):  # NaN fails too
        worst = int((ours - theirs).abs().argmax())
        raise CheckFailed(
            f"an answer of the first pairs has log-probability {ours[worst]:.6g}, but {theirs[worst]:.6g} from padded batches "
            f"and full logits of {type(base).__name__}",
            fix="its output head or attention is of a kind that packtrain dpo does not know: please report this model",
        )


@dataclass(frozen=True, slots=True)
class Start:
    """The `loss` of the first pairs, that of a zero margin, by how much rounding may part them, and, where they are further
    apart, by how much the two sides are, and why."""

    loss: float
    zero_margin: float
    tolerance: float
    problems: tuple[Problem, ...] = ()


def check_start(trainer: PackedDPOTrainer) -> float:
    """The loss of the first pairs, which must be that of a zero margin; raises CheckFailed where it is not."""
    start = start_of(trainer)
    if start.problems:
        raise CheckFailed(list(start.problems))
    return start.loss


@torch.no_grad()
def start_of(trainer: PackedDPOTrainer) -> Start:
    """Where a model that is its own reference starts. Called on all processes together."""
    batch = _first(trainer)
    with _training(trainer.model):
        policy, reference = trainer.policy_logps(batch), trainer.reference_logps(batch)
        found = trainer.loss_alone(batch)
        expected = trainer.loss_alone(batch, reference=policy)
        rounding = _rounding(trainer, batch, max(part.abs().max().item() for part in (*policy, *reference)))
        tolerance = max(1e-6, rounding * trainer.beta) * max(1.0, abs(expected))
        plain = trainer.all_loss_weights == [1.0] and not trainer.use_weighting
        zero_margin = math.log(2) if trainer.loss_types == ["sigmoid"] and plain else expected
        fine = abs(found - expected) <= tolerance and abs(expected - zero_margin) <= 1e-6
        start = Start(found, zero_margin, tolerance)
        if not most_of_all(not fine, trainer.args.device):
            return start
        causes = list(_causes(trainer, batch, policy, reference, rounding))
    if fine:  # but not on another process
        return start
    return replace(start, problems=(_what_differs(start, policy, reference, known=bool(causes)), *causes))


def _rounding(trainer: PackedDPOTrainer, batch: MicroBatch, longest: float) -> float:
    """Nats by which rounding alone may part the two log-probabilities of an answer, the largest of which is `longest`.

    Sums are made in float32. In 16 bits an answer gets another value in another row or with its adapters merged, by some
    units in the last place a token (0.64 nats over 358 tokens of SmolLM2-135M in bfloat16, where that is 0.0078); in the same
    row by the same weights, only what one call of the model differs from the next.
    """
    rounding = 4 * torch.finfo(torch.float32).eps * longest
    if trainer.compute_dtype.itemsize > 2:
        return rounding
    if "ref_chosen_logps" in batch.inputs or (trainer.ref_model is not None and hasattr(trainer.model, "peft_config")):
        tokens = int(batch.inputs["completion_mask"].sum(dim=1).max())
        return rounding + 16 * torch.finfo(trainer.compute_dtype).eps * math.sqrt(tokens)
    with evaluating(trainer.model):
        return rounding + 4 * _apart(trainer.policy_logps(batch), trainer.policy_logps(batch))[0]


def _what_differs(start: Start, policy: Logps, reference: Logps, *, known: bool) -> Problem:
    off, side, worst = _apart(policy, reference)
    values = ", ".join(
        f"{policy[at][worst]:.7g} and {reference[at][worst]:.7g} of the {name}"
        for at, name in enumerate(("chosen answer", "rejected one"))
    )
    return Problem(
        f"the first loss is {start.loss:.7g}, but {start.zero_margin:.7g} while the model is its own reference: of the "
        f"{_SIDES[side]} answers they differ by up to {off:.3g} in log-probability (of pair {worst + 1} of the first "
        f"micro-batch model and reference say {values})",
        "objective.reference",
        ""
        if known
        else "neither dropout, kept log-probabilities, number formats, tokenizers, adapters, settings nor weights differ "
        "between the two: please report this model",
    )


def _causes(
    trainer: PackedDPOTrainer, batch: MicroBatch, policy: Logps, kept: Logps, tolerance: float
) -> Iterator[Problem]:
    """What differs between the model and its reference, of what is known to happen; less than `tolerance` is rounding.

    `policy` and `kept` are the log-probabilities by the two in training mode. Called on all processes together.
    """
    model, base = trainer.model, base_model(trainer.model)
    yield from _dropout("model", model, _apart(policy, trainer.policy_logps(batch))[0], tolerance)
    if "ref_chosen_logps" in batch.inputs:
        with evaluating(model):
            now = trainer.policy_logps(batch)
        off, side, worst = _apart(now, kept)
        if off > tolerance:
            yield Problem(
                f"the log-probabilities that were kept are stale: pair {worst + 1} has {kept[side][worst]:.6g} for its "
                f"{_SIDES[side]} answer, computed anew {now[side][worst]:.6g}",
                "objective.reference=precomputed",
                "take the folder `reference` of the data cache away: they are computed again",
            )
        yield from _adapters(model, alone=False)
    elif trainer.ref_model is None:
        yield from _adapters(model, alone=True)
    else:
        reference = cast(Any, trainer.accelerator.unwrap_model(trainer.ref_model))
        yield from _dropout("reference", reference, _apart(kept, trainer.reference_logps(batch))[0], tolerance)
        yield from _tokenizers(trainer, reference)
        yield from _adapters(model, alone=False)
        ours, theirs = base.config.to_dict(), reference.config.to_dict()
        names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        if other := [
            f"{one} {ours.get(one)!r}, the reference {theirs.get(one)!r}" for one in names if one not in _NO_SETTING
        ]:
            what = f"the settings differ: the model has {'; '.join(other[:3])}"
            yield Problem(what, "model.config", "load both with the same settings")
        yield from _weights_differ(base, reference)


def _apart(one: Logps, other: Logps) -> tuple[float, int, int]:
    """By how much two differ at most, on which side (0: chosen, 1: rejected), and for which pair."""
    off = [(ours.float() - theirs.float()).abs() for ours, theirs in zip(one, other, strict=True)]
    side = int(off[1].max() > off[0].max())
    return off[side].max().item(), side, int(off[side].argmax())


def _dropout(side: str, model: nn.Module, moved: float, tolerance: float) -> Iterator[Problem]:
    """Whether the same call gives something else, `moved` by so much, a second time."""
    if moved > tolerance:
        named = next(_dropping(model), "none that has a name: a hook or code of the model's own")
        setting = named.partition("=")[0].rpartition(".")[2]
        known = hasattr(base_model(model).config, setting)
        fix = f"set model.config.{setting}=0" if known else "take it out of the model"
        yield Problem(
            f"dropout is on in the {side} ({named}): a second call differs by {moved:.3g}", "model.config", fix
        )


def _dropping(model: nn.Module) -> Iterator[str]:
    """Modules in training mode that drop something, as `name=probability`."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items() if module.training else ():
            if attribute == "p" and isinstance(module, nn.modules.dropout._DropoutNd) and value > 0:
                yield f"{name}={value:g}"
            elif ("drop" in attribute or "jitter" in attribute) and isinstance(value, float) and value > 0:
                yield f"{name}.{attribute}={value:g}"


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
    parts = dict(model.named_parameters()) if alone else {}
    for name, weight in parts.items():
        if ".default." not in name or weight.is_meta:
            continue
        if "ref" in model.peft_config:
            other = parts.get(name.replace(".default.", ".ref."))
            if other is not None and not _same(weight, other):
                what = f"the adapters of the reference are not those that training starts from ({name})"
                yield Problem(what, "objective.reference", "name the adapters of model.path, or leave it at auto")
                return
        elif "lora_B" in name and _local(weight).any():
            what = f"the adapters are not new, but the reference is the model without them ({name} is not zero)"
            yield Problem(what, "objective.reference", "leave it at auto: the model is then held to those adapters")
            return


def _weights_differ(model: nn.Module, reference: nn.Module) -> Iterator[Problem]:
    """The first weight that is not the same in both, adapters left out: in its number format, or in its values."""
    ours, theirs = (
        {name.replace(".base_layer", ""): weight for name, weight in one.named_parameters() if "lora_" not in name}
        for one in (model, reference)
    )
    for name, weight in ours.items():
        if name in theirs and weight.dtype != theirs[name].dtype:
            formats = [str(one.dtype).removeprefix("torch.") for one in (weight, theirs[name])]
            what = f"the model has {formats[0]} weights, the reference {formats[1]} ({name})"
            yield Problem(what, "model.dtype", "load both in the same format")
            return
        if name not in theirs or not _same(weight, theirs[name]):
            fix = "the reference is not what training starts from: name the same files"
            yield Problem(f"the weights differ, first in {name}", "objective.reference", fix)
            return


def _local(weight: torch.Tensor) -> torch.Tensor:
    """The part of a spread weight that is here."""
    weight = getattr(weight, "ds_tensor", weight)
    return weight.to_local() if isinstance(weight, DTensor) else weight.detach()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    here, there = _local(one), _local(other)
    return here.shape == there.shape and torch.equal(here, there.to(here.device))


@contextmanager
def _training(model: Any) -> Iterator[None]:
    """The model as it trains inside the block, with the random state restored afterwards."""
    training, devices = model.training, [model.device] if model.device.type == "cuda" else []
    model.train()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        model.train(training)


def _first(trainer: PackedDPOTrainer) -> MicroBatch:
    """The first micro-batch of the run with a pair in it; the first pair where this process has none."""
    steps = cast(PairSteps, trainer.steps)
    batches: list[Any] = [batch for batch in steps[trainer.settings.first_step % max(len(steps), 1)] if batch.examples]
    return batches[0] if batches else steps.collate([0])
