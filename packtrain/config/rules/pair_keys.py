"""What is certain to go wrong with preference pairs, whatever is trained on them (packtrain dpo, packtrain reward)."""

from __future__ import annotations

from collections.abc import Iterator, Set

from packtrain.config.keys import Fault
from packtrain.config.schema import RunConfig


def pair_rules(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    """Faults on a run with preference pairs; `given` are the keys that the user set."""
    data, packing = config.data, config.packing
    if "data.loss_on" in given:
        of_what = "are scored" if config.objective.traits.scores else "are trained"
        yield Fault(("data.loss_on",), f"of preference pairs the answers {of_what}", "Take the key away.")
    if data.format not in ("auto", "preference", "ranked"):
        what = f"rows of {data.format} hold no preference pairs"
        yield Fault(("data.format",), what, "Choose auto, preference or ranked, or use packtrain sft.")
    if data.overlong == "split":
        what = "a preference pair cannot be split: the later parts would have no prompt"
        yield Fault(("data.overlong",), what, "Choose truncate, keep_end, drop or error.")
    if packing.share_prefix and packing.mode == "padding":
        what = "padded batches have a prompt for every answer"
        fix = "Choose packing.mode=packed or padding_free."
        yield Fault(("packing.share_prefix", "packing.mode"), what, fix, because="packing.mode")
