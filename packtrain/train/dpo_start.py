"""What is checked of preference training before step 1, on the first real pairs.

(1) The packed forward says of every answer what the padded one says, and the fused output head what the full logits say.
(2) Where the model starts as its own reference, the loss is that of a zero margin: ln 2 for the sigmoid loss. It is not when
dropout is on, or the reference has another precision or tokenizer, is out of date, or has the wrong adapter.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch

from packtrain.attention.backends import attention_of
from packtrain.attention.isolation import evaluating, loss_tolerance_of, refusals_of_a_model
from packtrain.errors import CheckFailed
from packtrain.packing.collate import IGNORE
from packtrain.train.dpo import PackedDPOTrainer
from packtrain.train.loader import MicroBatch, PairSteps
from packtrain.train.model import base_model


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


@torch.no_grad()
def check_start(trainer: PackedDPOTrainer) -> float:
    """The loss of the first pairs, which must be that of a zero margin; raises CheckFailed where it is not."""
    batch = _first(trainer)
    with evaluating(trainer.model):
        policy = trainer.policy_logps(batch)
        reference = trainer.reference_logps(batch)
        found = trainer.loss_alone(batch)
        expected = trainer.loss_alone(batch, reference=policy)
    longest = max(part.abs().max().item() for part in (*policy, *reference))
    rounding = torch.finfo(trainer.precision).eps * longest * trainer.beta
    tolerance = max(1e-6, 4 * rounding) * max(1.0, abs(expected))
    zero_margin = math.log(2) if trainer.loss_types == ["sigmoid"] and trainer.all_loss_weights == [1.0] else expected
    if abs(found - expected) <= tolerance and abs(expected - zero_margin) <= 1e-6:
        return found
    apart = [(ours - theirs).abs().max().item() for ours, theirs in zip(policy, reference, strict=True)]
    side = "chosen" if apart[0] >= apart[1] else "rejected"
    raise CheckFailed(
        f"the first loss is {found:.7g}, but {zero_margin:.7g} while the model is its own reference: of the {side} answers they "
        f"differ by up to {max(apart):.3g} in log-probability",
        where="objective.reference",
        fix="the reference is not the model that training starts from: another precision, tokenizer or adapter, or "
        "log-probabilities of other weights (take the reference folder of the data cache away)",
    )


def _first(trainer: PackedDPOTrainer) -> MicroBatch:
    """The first micro-batch of the run with a pair in it; the first pair where this process has none."""
    steps = cast(PairSteps, trainer.steps)
    batches: list[Any] = [batch for batch in steps[trainer.course.first_step % max(len(steps), 1)] if batch.examples]
    return batches[0] if batches else steps.collate([0])
