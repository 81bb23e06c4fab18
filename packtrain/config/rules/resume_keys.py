"""Which keys may differ between a checkpoint and the run that goes on from it: freely, by trainer.resume_despite, or not at all.

A key is decisive unless it is listed here: one that is forgotten is refused, and no run takes another course without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from packtrain.config.keys import FOREIGN, Fault, keys, suggest
from packtrain.config.schema import Trainer

KEPT = ("model", "data", "packing", "objective", "optim", "batch", "trainer", "peft", "strategy")
"""The groups that a checkpoint records, by key; and then what became of them: the facts that are no keys."""
_FREE = re.compile(
    r"model\.(?!config\.|dtype|weights).*|data\.(?!train$|shuffle$).*|packing\.(mode|share_prefix)"
    r"|batch\.(examples|tokens)_per_device|trainer\.(?!seed|mixed_precision|max_steps).*|peft\.merge"
    r"|strategy\.name|optim\.epsilon|[^.]+"  # a removed key (the config is refused for it); versions, processes, and the like
)
_FIXED = re.compile(
    r"checkpoint\.format|model|peft\.(kind|r|target_modules|modules_to_save)|optim\.name|objective\.kind"
)
_FACTS = ("model", "model.weights")


def is_free(name: str) -> bool:
    """Whether a run may go on with another value without being asked: the documents and the losses stay the same."""
    return name not in _FACTS and _FREE.fullmatch(name) is not None


def is_fixed(name: str) -> bool:
    """Whether no run can go on with another value: the saved weights or optimizer states would not fit."""
    return _FIXED.fullmatch(name) is not None


def resume_rules(trainer: Trainer) -> Iterator[Fault]:
    """What is wrong with trainer.resume_despite."""
    where, known = ("trainer.resume_despite",), [*keys(), *_FACTS]
    for name in trainer.resume_despite:
        if is_fixed(name):
            what = f"{name} cannot change: what the checkpoint holds would not fit"
            yield Fault(where, what, "Start over with trainer.resume=never.")
        elif name not in known and not name.startswith("model.config."):
            leaf = name.rpartition(".")[2]
            fix = suggest(name, known, "Name keys as the refusal does.")
            fix = f"Did you mean {FOREIGN[leaf]}?" if leaf in FOREIGN else fix
            yield Fault(where, f"there is no key {name!r}", fix)
