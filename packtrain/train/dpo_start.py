"""What is checked of preference training before step 1, on the first real pairs.

(1) The packed forward says of every answer what the padded one says, and the fused output head what the full logits say.
(2) Where the model starts as its own reference, the loss of training is that of a zero margin: ln 2 for the sigmoid loss. It
is not when dropout is on (TRL turns off what is a module of its own, not what attention drops), or when the reference has
another precision or tokenizer, is out of date, or has the wrong adapter. Which it is, is looked for (dpo_causes.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from packtrain.attention.backends import attention_of
from packtrain.errors import CheckFailed, Problem
from packtrain.model.load import base_model
from packtrain.model.spread import most_of_all
from packtrain.packing.collate import IGNORE
from packtrain.proof.isolation import evaluating, loss_tolerance_of, refusals_of_a_model
from packtrain.train.dpo import PackedDPOTrainer
from packtrain.train.dpo_causes import Logps, apart, causes
from packtrain.train.loader import MicroBatch, PairSteps


@torch.no_grad()
def check_pair_forward(trainer: PackedDPOTrainer, attention: str) -> None:
    """Compares the answers' log-probabilities as training makes them with those of padded batches and full logits.

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
    if not off <= loss_tolerance_of(trainer.precision):  # NaN fails too
        worst = int((ours - theirs).abs().argmax())
        raise CheckFailed(
            f"an answer of the first pairs has log-probability {ours[worst]:.6g}, but {theirs[worst]:.6g} from padded batches "
            f"and full logits of {type(base).__name__}",
            fix="its output head or attention is of a kind that packtrain dpo does not know: please report this model",
        )


@dataclass(frozen=True, slots=True)
class Start:
    """The `loss` of the first pairs, that of a zero margin, by how much rounding may part them, and what is wrong where it is
    more: how far apart the two sides are, then why."""

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
        policy = trainer.policy_logps(batch)
        reference = trainer.reference_logps(batch)
        found = trainer.loss_alone(batch)
        expected = trainer.loss_alone(batch, reference=policy)
        rounding = _rounding(trainer, batch, max(part.abs().max().item() for part in (*policy, *reference)))
        tolerance = max(1e-6, rounding * trainer.beta) * max(1.0, abs(expected))
        plain = trainer.all_loss_weights == [1.0] and not trainer.use_weighting
        sigmoid = trainer.loss_types == ["sigmoid"] and plain
        zero_margin = math.log(2) if sigmoid else expected
        fine = abs(found - expected) <= tolerance and abs(expected - zero_margin) <= 1e-6
        start = Start(found, zero_margin, tolerance)
        if not most_of_all(not fine, trainer.args.device):
            return start
        reasons = causes(trainer, batch, policy, reference, rounding)
    if fine:  # but not elsewhere
        return start
    difference = _difference(found, zero_margin, policy, reference, known=bool(reasons))
    return replace(start, problems=(difference, *reasons))


def _rounding(trainer: PackedDPOTrainer, batch: MicroBatch, longest: float) -> float:
    """Nats by which rounding alone may part what the two sides say of an answer, `longest` the largest that was said.

    Sums are made in float32. In 16 bits an answer says something else in another row or with its adapters merged, by some
    units in the last place a token (0.64 nats over 358 tokens of SmolLM2-135M in bfloat16, where that is 0.0078); in the same
    row by the same weights, only what a call of the model differs from the next.
    """
    rounding = 4 * torch.finfo(torch.float32).eps * longest
    if trainer.precision.itemsize > 2:
        return rounding
    if "ref_chosen_logps" in batch.inputs or (trainer.ref_model is not None and hasattr(trainer.model, "peft_config")):
        tokens = int(batch.inputs["completion_mask"].sum(dim=1).max())
        return rounding + 16 * torch.finfo(trainer.precision).eps * math.sqrt(tokens)
    with evaluating(trainer.model):
        return rounding + 4 * max(apart(trainer.policy_logps(batch), trainer.policy_logps(batch)))


def _difference(found: float, zero_margin: float, policy: Logps, reference: Logps, *, known: bool) -> Problem:
    off = apart(policy, reference)
    side = off.index(max(off))
    worst = int((policy[side] - reference[side]).abs().argmax())
    said = ", ".join(
        f"{policy[at][worst]:.7g} and {reference[at][worst]:.7g} of the {name}"
        for at, name in enumerate(("chosen answer", "rejected one"))
    )
    return Problem(
        f"the first loss is {found:.7g}, but {zero_margin:.7g} while the model is its own reference: of the "
        f"{('chosen', 'rejected')[side]} answers they differ by up to {max(off):.3g} in log-probability (of pair "
        f"{worst + 1} of the first micro-batch model and reference say {said})",
        "objective.reference",
        ""
        if known
        else "neither dropout, kept log-probabilities, number formats, tokenizers, adapters, settings nor weights "
        "differ between the two: please report this model",
    )


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
