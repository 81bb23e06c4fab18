"""Checks of losses of answers before step 1, on the first real pairs or answers.

(1) Answers have the same log-probabilities from packed rows and the fused output head as from padded batches and full logits.
(2) If the model starts as its own reference, the first loss has a known value: ln 2 for the sigmoid loss of dpo, half of the mean weight for
kto. For other losses it is computed from the model's log-probabilities on both sides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F

from packtrain.attention.backends import attention_of
from packtrain.errors import CheckFailed, Problem
from packtrain.model.load import base_model
from packtrain.objectives.answers import Targets
from packtrain.objectives.spec import CHECKED_LOGITS, COMPARED_PAIRS
from packtrain.packing.collate import IGNORE
from packtrain.proof.comparison import check_equal, evaluating, model_refusals, tolerance_of
from packtrain.proof.isolation import vocabulary_size
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.objectives.loss import AnswerLoss, ReferenceLoss


@torch.no_grad()
def check_answer_forward(loss: AnswerLoss, steps: Steps, first_step: int, attention: str) -> None:
    """Compare log-probabilities of the first answers with a padded batch and full logits.

    It compares at most COMPARED_PAIRS pairs (or twice as many answers), and for long answers only every n-th token: at most CHECKED_LOGITS
    logits. `attention` is the model's original implementation. Raises CheckFailed if they differ.
    """
    model, base = loss.model, base_model(loss.model)
    numbers, sides = steps.first_examples(first_step), len(loss.answers)
    few = numbers[: 2 * COMPARED_PAIRS // sides]
    batch = loss.inputs(steps.collate(numbers))
    padded = loss.inputs(replace(steps, layout="padding").collate(few))
    ids, counts, slots = padded["input_ids"], padded["target_counts"], padded["input_ids"].shape[1]
    columns = (padded["target_places"] % slots).unique()
    max_columns = max(2, CHECKED_LOGITS // (len(ids) * vocabulary_size(base)))
    columns = columns[:: max(1, math.ceil(len(columns) / max_columns))]
    keep = {"logits_to_keep": columns} if "logits_to_keep" in signature(type(base).forward).parameters else {}
    with evaluating(model), loss.accelerator.autocast():
        log_probs = loss.targets_of(loss.score_tokens(model, batch), batch)
        with (
            attention_of(base, attention),
            model_refusals(f"{type(base).__name__} cannot run padded pairs", fix="please report this model"),
        ):
            logits = model(input_ids=ids, attention_mask=padded["attention_mask"], **keep, use_cache=False).logits
    logits = logits if logits.shape[1] == len(columns) else logits[:, columns]
    labels = padded["shift_labels"][:, columns]
    nll = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="none")
    theirs = -nll.view(labels.shape).sum(dim=1)
    own = log_probs.split(batch["target_counts"].tolist())
    ours = torch.cat([part for side in range(sides) for part in own[side * len(numbers) :][: len(few)]])
    compared = torch.isin(padded["target_places"] % slots, columns)
    ours = Targets(torch.where(compared, ours, 0).float(), counts).logps

    what = (
        "an answer of the first pairs has log-probability {candidate:.6g}, but {definition:.6g} from padded batches and full "
        f"logits of {type(base).__name__}"
    )
    fix = "its output head or attention is of a kind that packtrain does not know: please report this model"
    check_equal(ours, theirs, tolerance_of(loss.compute_dtype).loss, what, fix=fix)


@dataclass(frozen=True, slots=True)
class FirstLoss:
    """First loss, the loss at a zero margin, their tolerance, a problem if they differ."""

    loss: float
    zero_margin: float
    tolerance: float
    problems: tuple[Problem, ...] = ()


def check_first_loss(loss: ReferenceLoss, batch: MicroBatch) -> float:
    """Return the loss of the first pairs or answers. Raises CheckFailed unless it is the one of a zero margin."""
    first = measure_first_loss(loss, batch)
    if first.problems:
        raise CheckFailed(list(first.problems))
    return first.loss


@torch.no_grad()
def measure_first_loss(loss: ReferenceLoss, batch: MicroBatch) -> FirstLoss:
    """Measure the first loss of a model that is its own reference. Called on all processes together."""
    model: Any = loss.model
    training = model.training
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        model.eval()  # the value to expect has no dropout
        zero_margin = loss.zero_margin_loss(batch)
        if zero_margin is None:
            zero_margin = loss.standalone_loss(batch, reference=loss.policy_logps(batch))
        model.train()  # dropout that training would have shows as a wrong first loss
        policy, reference = loss.policy_logps(batch), loss.reference_logps(batch)
        first = loss.standalone_loss(batch)
    model.train(training)
    rounding = _rounding(loss, batch, max(part.abs().max().item() for part in (*policy, *reference)))
    tolerance = max(1e-6, rounding * loss.beta) * max(1.0, abs(zero_margin))
    if abs(first - zero_margin) <= tolerance:
        return FirstLoss(first, zero_margin, tolerance)
    ours, theirs = (torch.stack(logps).float() for logps in (policy, reference))  # [answers of an example, examples]
    side, number = divmod(int((ours - theirs).abs().argmax()), ours.shape[1])
    what = (
        f"the first loss is {first:.7g}, but {zero_margin:.7g} while the model is its own reference: {loss.answers[side]} "
        f"{number + 1} of the first micro-batch has log-probability {ours[side, number]:.7g} by the model and "
        f"{theirs[side, number]:.7g} by the reference"
    )
    settings = base_model(model).config.to_dict()
    dropout = [f"model.config.{name}=0" for name, value in settings.items() if "drop" in name and value]
    fix = f"set {', '.join(dropout)}" if dropout else "look for dropout in the model's code"
    if _precomputed(batch):
        fix += "; remove the folder `reference` of the data cache, whose log-probabilities may be stale"
    else:
        fix += "; give both sides the same weights and adapters in the same model.dtype (objective.reference=auto does)"
    return FirstLoss(first, zero_margin, tolerance, (Problem(what, "objective.reference", fix),))


def _rounding(loss: ReferenceLoss, batch: MicroBatch, largest: float) -> float:
    """Return the tolerance in nats between the two log-probabilities of an answer.

    `largest` is the largest absolute log-probability. In 16 bits, two calls of the model on one row show its noise. A reference whose weights
    have the adapters merged in also rounds each token differently: it gets an allowance of 16 units in the last place times √tokens (measured:
    0.64 nats over 358 tokens of SmolLM2-135M in bfloat16, whose unit is 0.0078). Precomputed values come from the same rows: 1/100 of it.
    """
    rounding = 4 * torch.finfo(torch.float32).eps * largest
    if loss.compute_dtype.itemsize > 2:
        return rounding
    with evaluating(loss.model):
        once, again = (torch.stack(loss.policy_logps(batch)).float() for _ in range(2))
    rounding += 4 * (once - again).abs().max().item()
    tokens = int(batch.inputs["target_counts"].max())
    allowance = 16 * torch.finfo(loss.compute_dtype).eps * math.sqrt(tokens)
    if loss.reference is not None and any("lora_B" in name for name, _ in loss.model.named_parameters()):
        return rounding + allowance
    return rounding + (allowance / 100 if _precomputed(batch) else 0)


def _precomputed(batch: MicroBatch) -> bool:
    """Whether log-probabilities of the reference come with the batch."""
    return any(name.startswith("ref_") for name in batch.inputs)
