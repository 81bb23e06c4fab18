"""The checks of dpo and kto before step 1, on the first real pairs or answers.

(1) The packed forward gives every answer the log-probability that the padded one gives, and the fused output head that of
the full logits. (2) Where the model starts as its own reference, the first loss is that of a zero margin: ln 2 for the sigmoid
loss of dpo, half of the weights for kto, for other losses what TRL's code gives for the same log-probabilities on both sides.
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
from packtrain.packing.collate import IGNORE
from packtrain.plan.memory import CHECKED_LOGITS, COMPARED_PAIRS
from packtrain.proof.comparison import check_equal, evaluating, model_refusals, tolerance_of
from packtrain.proof.isolation import vocabulary_size
from packtrain.train.loader import MicroBatch, Steps
from packtrain.train.objectives.loss import AnswerLoss, ReferenceLoss


@torch.no_grad()
def check_answer_forward(loss: AnswerLoss, steps: Steps, first_step: int, attention: str) -> None:
    """Compares log-probabilities of the first answers as training computes them with those of a padded batch and the model's logits.

    Those of COMPARED_PAIRS pairs and at most CHECKED_LOGITS logits: of all tokens of short answers, of every n-th of long ones.
    `attention` is the model's original implementation. Raises CheckFailed if they differ.
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
    """The `loss` of the first pairs, that of a zero margin, the rounding `tolerance`, and a problem if they differ by more."""

    loss: float
    zero_margin: float
    tolerance: float
    problems: tuple[Problem, ...] = ()


def check_first_loss(loss: ReferenceLoss, batch: MicroBatch) -> float:
    """The loss of the first pairs; raises CheckFailed unless it is that of a zero margin."""
    first = measure_first_loss(loss, batch)
    if first.problems:
        raise CheckFailed(list(first.problems))
    return first.loss


@torch.no_grad()
def measure_first_loss(loss: ReferenceLoss, batch: MicroBatch) -> FirstLoss:
    """Measures the first loss of a model that is its own reference, as it trains. Called on all processes together."""
    model: Any = loss.model
    training = model.training
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        model.eval()  # dropout would make two calls differ
        zero_margin = loss.zero_margin_loss(batch)
        if zero_margin is None:
            zero_margin = loss.standalone_loss(batch, reference=loss.policy_logps(batch))
        model.train()
        policy, reference = loss.policy_logps(batch), loss.reference_logps(batch)
        first = loss.standalone_loss(batch)
    model.train(training)
    rounding = _rounding(loss, batch, max(part.abs().max().item() for part in (*policy, *reference)))
    tolerance = max(1e-6, rounding * loss.beta) * max(1.0, abs(zero_margin))
    if abs(first - zero_margin) <= tolerance:
        return FirstLoss(first, zero_margin, tolerance)
    ours, theirs = (torch.stack(logps).float() for logps in (policy, reference))
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
    """Nats by which the two log-probabilities of an answer may differ by rounding alone; `largest` is the largest of any.

    In 16 bits, two calls of the model on a row show its noise. Precomputed values come from the same row, and get 1/100 of the
    allowance for a different one. Only adapters merged into the reference's weights need all of it: some units in the last place
    for each token (0.64 nats over 358 tokens of SmolLM2-135M in bfloat16, where that is 0.0078).
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
