"""What is certain to go wrong with answers that have labels (packtrain kto)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set

from packtrain.config.keys import Fault
from packtrain.config.schema import LABELLED, RunConfig


def kto_rules(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    """Faults on a run of packtrain kto; `given` are the keys that the user set."""
    objective, data = config.objective, config.data
    if "data.loss_on" in given:
        yield Fault(("data.loss_on",), "of answers with labels the answers are trained", "Take the key away.")
    if data.format not in ("auto", *LABELLED, "preference", "ranked"):
        what = f"rows of {data.format} have no answer that could be desirable or not"
        fix = f"Choose auto, {', '.join(LABELLED)}, preference or ranked."
        yield Fault(("data.format",), what, fix)
    if data.overlong == "split":
        what = "an answer with a label cannot be split: the later parts would have no prompt"
        yield Fault(("data.overlong",), what, "Choose truncate, drop or error.")
    if config.batch.examples_per_step == 1 and objective.kto_loss == "kto":
        what = "the KL estimate of a step is made of two answers or more"
        fix = "Set it to 2 or more (e.g. 32), or objective.kto_loss=apo_zero_unpaired."
        yield Fault(("batch.examples_per_step",), what, fix)
    weights = (objective.desirable_weight, objective.undesirable_weight)
    if not any(weights) or not all(map(math.isfinite, weights)):
        what = "both weights are 0: that trains nothing" if not any(weights) else "a weight is not a finite number"
        yield Fault(("objective.desirable_weight", "objective.undesirable_weight"), what, "Set one above 0.")
    if objective.reference == "adapters_off" and config.peft.kind == "none":
        what = "there are no adapters to switch off"
        yield Fault(("objective.reference",), what, "Choose peft=lora, or objective.reference=model.")
