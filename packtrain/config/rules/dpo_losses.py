"""What is certain to go wrong with the objective of preference training: settings that TRL refuses or gets wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from packtrain.config.keys import Fault
from packtrain.config.objective import LossType, Objective
from packtrain.wording import counted


def dpo_rules(objective: Objective) -> Iterator[Fault]:
    """Faults on a run of packtrain dpo."""
    losses = objective.losses
    if not losses:
        yield Fault(("objective.loss_type",), "there is no loss", "Name at least one.")
    yield from _weights(objective, losses)
    if "exo_pair" in losses and objective.label_smoothing == 0:
        what = "the loss exo_pair needs label smoothing"
        yield Fault(("objective.label_smoothing",), what, "Its paper recommends 1e-3.")
    smoothed = sorted({"exo_pair", "robust", "aot", "aot_unpaired"} & set(losses))
    if objective.label_smoothing > 0 and not smoothed:
        what = f"TRL's {', '.join(losses)} takes no label smoothing"
        yield Fault(("objective.label_smoothing",), what, "Take it away, or choose the loss robust.")
    diverging = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
    if objective.f_divergence_type != "reverse_kl" and (others := sorted(set(losses) - diverging)):
        what = f"{', '.join(others)} is not defined for {objective.f_divergence_type}"
        yield Fault(("objective.f_divergence_type", "objective.loss_type"), what, "Use reverse_kl.")
    if objective.use_weighting and (sorting := objective.sorting_losses):
        what = f"{', '.join(sorting)} sorts pairs, which would get the weights of others"
        yield Fault(("objective.use_weighting", "objective.loss_type"), what, "Take it away.")
    if objective.use_weighting and "sft" in losses:
        what = "sft is a mean over tokens, of which TRL cannot weigh the pairs"
        yield Fault(("objective.use_weighting", "objective.loss_type"), what, "Take it away, or leave sft out.")


def _weights(objective: Objective, losses: Sequence[LossType]) -> Iterator[Fault]:
    weights = objective.loss_weights
    if weights is None:
        return
    if len(weights) != len(losses):
        what = f"{counted(len(weights), 'weights')} for {counted(len(losses), 'losses')}"
        yield Fault(("objective.loss_weights", "objective.loss_type"), what, "Give one for each, in their order.")
    elif weights and not (all(0 <= weight < math.inf for weight in weights) and any(weights)):
        found = ", ".join(f"{weight:g}" for weight in weights)
        what = f"found {found}: that trains nothing, or away from the preferences"
        yield Fault(("objective.loss_weights",), what, "Give numbers from 0 on, one of them above.")
