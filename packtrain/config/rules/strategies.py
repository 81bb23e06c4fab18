"""What cannot be done under a strategy, beside the rules of config/rules.py. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from packtrain.config.findings import Finding
from packtrain.config.schema import RunConfig

SHARDED_WEIGHTS = ("zero3", "zero3_offload", "fsdp2")
"""Strategies under which no process has the whole model: every process has to call it the same number of times."""

_ADAMW = ("adamw_torch", "adamw_torch_fused")


def check_strategy(config: RunConfig) -> Iterator[Finding]:
    """The impossible combinations of strategy.name with other keys."""
    name, optimizer = config.strategy.name, config.optim.name
    if name == "zero3_offload" and optimizer not in _ADAMW:
        what = f"DeepSpeed's optimizer on the host is AdamW, and would take the place of {optimizer} without a word"
        yield Finding(("optim.name", "strategy.name"), what, "Choose optim=adamw, or strategy=zero3.")
    elif name != "ddp" and optimizer not in (*_ADAMW, "sgd"):
        what = f"{optimizer} keeps a state for a whole weight, and {name} gives it parts of weights: the training would be another"
        yield Finding(("optim.name", "strategy.name"), what, "Choose optim=adamw or optim=sgd, or strategy=ddp.")
    if name != "ddp" and config.model.dtype == "float16":
        what = f"float16 weights cannot be spread by {name}"
        yield Finding(
            ("model.dtype", "strategy.name"), what, "Set model.dtype to float32 or bfloat16, or strategy=ddp."
        )
    if name in SHARDED_WEIGHTS and config.model.attention == "per_document":
        what = f"per_document calls the model once per document, and under {name} all processes must call it together"
        yield Finding(
            ("model.attention", "strategy.name"),
            what,
            "Choose strategy=zero2, or packing.mode=padding with model.attention=auto.",
        )
