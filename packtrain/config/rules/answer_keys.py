"""What is certain to go wrong with objectives that train or score answers: of pairs (dpo, reward) or with labels (kto)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set

from packtrain.config.keys import Fault
from packtrain.config.schema import LABELLED, RunConfig

_OF_PAIRS = ("preference", "ranked")


def answer_rules(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    """Faults on a run of packtrain dpo, kto or reward; `given` are the keys that the user set."""
    data, traits = config.data, config.objective.traits
    what = "preference pairs" if traits.pairs else "answers with labels"
    if "data.loss_on" in given:
        of_them = f"of {what} the answers are {'scored' if traits.scores else 'trained'}"
        yield Fault(("data.loss_on",), of_them, "Take the key away.")
    formats = ("auto", *_OF_PAIRS) if traits.pairs else ("auto", *LABELLED, *_OF_PAIRS)
    if data.format not in formats:
        lack = "no preference pairs" if traits.pairs else "no answer that could be desirable or not"
        fix = f"Choose {', '.join(formats[:-1])} or {formats[-1]}"
        fix += ", or use packtrain sft." if traits.pairs else "."
        yield Fault(("data.format",), f"rows of {data.format} hold {lack}", fix)
    if data.overlong == "split":
        cannot = "a preference pair" if traits.pairs else "an answer with a label"
        fix = f"Choose truncate, {'keep_end, ' if traits.pairs else ''}drop or error."
        yield Fault(("data.overlong",), f"{cannot} cannot be split: the later parts would have no prompt", fix)
    if config.packing.share_prefix and config.packing.mode == "padding" and traits.pairs:
        what, fix = "padded batches have a prompt for every answer", "Choose packing.mode=packed or padding_free."
        yield Fault(("packing.share_prefix", "packing.mode"), what, fix, because="packing.mode")
    if config.objective.reference == "adapters_off" and config.peft.kind == "none" and traits.reference:
        fix = "Choose peft=lora, or objective.reference=model."
        yield Fault(("objective.reference",), "there are no adapters to switch off", fix)


def kto_rules(config: RunConfig) -> Iterator[Fault]:
    """Faults on a run of packtrain kto alone."""
    objective = config.objective
    if config.batch.examples_per_step == 1 and objective.kto_loss == "kto":
        what = "the KL estimate of a step is made of two answers or more"
        fix = "Set it to 2 or more (e.g. 32), or objective.kto_loss=apo_zero_unpaired."
        yield Fault(("batch.examples_per_step",), what, fix)
    weights = (objective.desirable_weight, objective.undesirable_weight)
    if not any(weights) or not all(map(math.isfinite, weights)):
        what = "both weights are 0: that trains nothing" if not any(weights) else "a weight is not a finite number"
        yield Fault(("objective.desirable_weight", "objective.undesirable_weight"), what, "Set one above 0.")
