"""The checks of dpo and kto before step 1, on the first real pairs or answers.

(1) The packed forward gives every answer the log-probability that the padded one gives, and the fused output head that of
the full logits. (2) Where the model starts as its own reference, the first loss is that of a zero margin: ln 2 for the sigmoid
loss of dpo, half of the weights for kto. If it is not, known causes are checked: dropout, stale log-probabilities, adapters,
weights and their formats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from packtrain.attention.backends import attention_of
from packtrain.errors import CheckFailed, Problem
from packtrain.model.load import base_model
from packtrain.model.spread import most_of_all
from packtrain.packing.collate import IGNORE
from packtrain.plan.memory import CHECKED_LOGITS, COMPARED_PAIRS
from packtrain.proof.isolation import evaluating, loss_tolerance_of, refusals_of_a_model, vocabulary_of
from packtrain.train.loader import MicroBatch
from packtrain.train.objectives.loss import HeldLoss, Logps


@torch.no_grad()
def check_pair_forward(loss: HeldLoss, batch: MicroBatch, attention: str) -> None:
    """Compares log-probabilities of the first answers as training computes them with those of a padded batch and the model's logits.

    Those of COMPARED_PAIRS pairs and at most CHECKED_LOGITS logits: of all tokens of short answers, of every n-th of long ones.
    `attention` is the model's original implementation. Raises CheckFailed if they differ.
    """
    model, base = loss.model, base_model(loss.model)
    inputs = loss.inputs(batch)
    call = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORE)
    sides = len(loss.answers)
    each = len(labels) // sides
    few = [side * each + row for side in range(sides) for row in range(min(each, 2 * COMPARED_PAIRS // sides))]
    columns = _spread(labels[few, 1:], CHECKED_LOGITS // (len(few) * vocabulary_of(base)))
    cut = {"logits_to_keep": columns} if "logits_to_keep" in signature(type(base).forward).parameters else {}
    with evaluating(model), loss.accelerator.autocast():
        layout = {"layout": inputs["layout"]} if "layout" in inputs else {}
        ours = model(**call, **layout, labels=labels, fused_lm_head=True).log_probs[few][:, columns].sum(dim=1).float()
        with (
            attention_of(base, attention),
            refusals_of_a_model(f"{type(base).__name__} cannot run padded pairs", fix="please report this model"),
        ):
            logits = model(**{name: rows[few] for name, rows in call.items()}, **cut, use_cache=False).logits
    logits = logits if logits.shape[1] == len(columns) else logits[:, columns]
    answers = labels[few][:, columns + 1]
    nll = F.cross_entropy(logits.flatten(0, 1).float(), answers.flatten(), reduction="none")
    theirs = -nll.view(answers.shape).sum(dim=1)
    off = ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-8)).item()
    if not off <= loss_tolerance_of(loss.compute_dtype):  # NaN fails too
        worst = int((ours - theirs).abs().argmax())
        raise CheckFailed(
            f"an answer of the first pairs has log-probability {ours[worst]:.6g}, but {theirs[worst]:.6g} from padded batches "
            f"and full logits of {type(base).__name__}",
            fix="its output head or attention is of a kind that packtrain does not know: please report this model",
        )


def _spread(targets: torch.Tensor, most: int) -> torch.Tensor:
    """int64 [n]: at most so many of the columns of `targets` [rows, T] in which a row has a label, from the first to the last."""
    columns = (targets != IGNORE).any(dim=0).nonzero()[:, 0]
    most = max(most, 2)
    if len(columns) <= most:
        return columns
    return columns[torch.linspace(0, len(columns) - 1, most, device=columns.device).round().long()]


@dataclass(frozen=True, slots=True)
class Start:
    """The `loss` of the first pairs, that of a zero margin, the rounding `tolerance`, and `problems` that explain more."""

    loss: float
    zero_margin: float
    tolerance: float
    problems: tuple[Problem, ...] = ()


def check_start(loss: HeldLoss, batch: MicroBatch) -> float:
    """The loss of the first pairs; raises CheckFailed unless it is that of a zero margin."""
    start = start_of(loss, batch)
    if start.problems:
        raise CheckFailed(list(start.problems))
    return start.loss


@torch.no_grad()
def start_of(loss: HeldLoss, batch: MicroBatch) -> Start:
    """The Start of a model that is its own reference. Called on all processes together."""
    with _training(loss.model):
        policy, reference = loss.policy_logps(batch), loss.reference_logps(batch)
        first = loss.alone(batch)
        expected = loss.alone(batch, reference=policy)
        rounding = _rounding(loss, batch, max(part.abs().max().item() for part in (*policy, *reference)))
        tolerance = max(1e-6, rounding * loss.beta) * max(1.0, abs(expected))
        zero_margin = loss.of_zero_margin(batch)
        zero_margin = expected if zero_margin is None else zero_margin
        fine = abs(first - expected) <= tolerance and abs(expected - zero_margin) <= 1e-6
        start = Start(first, zero_margin, tolerance)
        if not most_of_all(not fine, loss.device):
            return start
        causes = list(_causes(loss, batch, policy, reference, rounding))
    if fine:  # another process has the problem
        return start
    ours, theirs, answer = _furthest(loss, policy, reference)
    what = (
        f"the first loss is {first:.7g}, but {zero_margin:.7g} while the model is its own reference: {answer} of the first "
        f"micro-batch has log-probability {ours:.7g} by the model and {theirs:.7g} by the reference"
    )
    unknown = "" if causes else "nothing that is known to cause this was found: please report this model"
    return replace(start, problems=(Problem(what, "objective.reference", unknown), *causes))


def _rounding(loss: HeldLoss, batch: MicroBatch, longest: float) -> float:
    """Nats by which the two log-probabilities of an answer may differ by rounding alone; `longest` is the largest of any.

    Sums are made in float32. In 16 bits two calls of the same model on the same row show how much it rounds; precomputed ones
    come from the same row too, and get a hundredth of what another row would change. Only adapters that are merged into the
    reference's weights round otherwise, by some units in the last place a token (0.64 nats over 358 tokens of SmolLM2-135M
    in bfloat16, where that is 0.0078).
    """
    rounding = 4 * torch.finfo(torch.float32).eps * longest
    if loss.compute_dtype.itemsize > 2:
        return rounding
    with evaluating(loss.model):
        rounding += 4 * _apart(loss.policy_logps(batch), loss.policy_logps(batch))
    tokens = int(batch.inputs["completion_mask"].sum(dim=1).max())
    otherwise = 16 * torch.finfo(loss.compute_dtype).eps * math.sqrt(tokens)
    adapts = any("lora_B" in name and bool(_local(weight).any()) for name, weight in loss.model.named_parameters())
    if loss.trl.ref_model is not None and most_of_all(adapts, loss.device):
        return rounding + otherwise
    return rounding + (otherwise / 100 if _precomputed(batch) else 0)


def _causes(loss: HeldLoss, batch: MicroBatch, policy: Logps, kept: Logps, rounding: float) -> Iterator[Problem]:
    """The known causes of a difference between model and reference that apply here.

    `policy` and `kept` are the log-probabilities by the two in training mode. Called on all processes together.
    """
    model = cast(Any, loss.model)
    yield from _dropout("model", model, _apart(policy, loss.policy_logps(batch)), rounding)
    if _precomputed(batch):
        with evaluating(model):
            now = loss.policy_logps(batch)
        then, anew, answer = _furthest(loss, kept, now)
        if abs(then - anew) > rounding:
            yield Problem(
                f"the log-probabilities that were kept are stale: {answer} has {then:.6g}, computed anew {anew:.6g}",
                "objective.reference=precomputed",
                "take the folder `reference` of the data cache away: they are computed again",
            )
    elif loss.trl.ref_model is None:
        yield from _adapters(model)
    else:
        reference = cast(Any, loss.accelerator.unwrap_model(loss.trl.ref_model))
        yield from _dropout("reference", reference, _apart(kept, loss.reference_logps(batch)), rounding)
        yield from _weights(base_model(model), reference)


def _furthest(loss: HeldLoss, one: Logps, other: Logps) -> tuple[float, float, str]:
    """The two log-probabilities of the answer on which they differ most, and the name of that answer."""
    ours, theirs = (torch.stack(logps).float() for logps in (one, other))
    side, number = divmod(int((ours - theirs).abs().argmax()), ours.shape[1])
    return ours[side, number].item(), theirs[side, number].item(), f"{loss.answers[side]} {number + 1}"


def _apart(one: Logps, other: Logps) -> float:
    """The largest difference."""
    return max((ours.float() - theirs.float()).abs().max().item() for ours, theirs in zip(one, other, strict=True))


def _precomputed(batch: MicroBatch) -> bool:
    """Whether log-probabilities of the reference come with the batch."""
    return any(name.startswith("ref_") for name in batch.inputs)


def _dropout(side: str, model: nn.Module, moved: float, rounding: float) -> Iterator[Problem]:
    """A problem if a repeated call differs by `moved`, more than rounding. (TRL turns off dropout modules.)"""
    if moved > rounding:
        settings = base_model(model).config.to_dict()
        on = [f"model.config.{name}=0" for name, value in settings.items() if "drop" in name and value]
        fix = f"set {', '.join(on)}" if on else "take it out of the code of the model"
        yield Problem(f"dropout is on in the {side}: a second call differs by {moved:.3g}", "model.config", fix)


def _adapters(model: nn.Module) -> Iterator[Problem]:
    """The first adapter weight that differs from the reference: the model with adapters off, or with those named ref."""
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        other = weights.get(name.replace(".default.", ".ref."))
        # without adapters named ref the reference has them off, which is the same as long as lora_B is zero
        equal = _same(weight, other) if other is not None else "lora_B" not in name or not _local(weight).any()
        if ".default." in name and not equal:
            what = f"the adapters that training starts from are not those of the reference, first in {name}"
            yield Problem(
                what, "objective.reference", "leave it at auto: the model is then held to those it starts from"
            )
            return


def _weights(model: nn.Module, reference: nn.Module) -> Iterator[Problem]:
    """The first weight (adapters excluded) that differs in its number format or values."""
    theirs = dict(reference.named_parameters())
    for full_name, weight in model.named_parameters():
        name = full_name.replace(".base_layer", "")
        other = theirs.get(name)
        if "lora_" not in name and (other is None or weight.dtype != other.dtype or not _same(weight, other)):
            formats = ["no" if one is None else str(one.dtype).removeprefix("torch.") for one in (weight, other)]
            what = f"the weights differ, first in {name}: {formats[0]} in the model, {formats[1]} in the reference"
            yield Problem(what, "objective.reference", "load both from the same files, in the same model.dtype")
            return


def _local(weight: torch.Tensor) -> torch.Tensor:
    """This process's part of a sharded weight."""
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
