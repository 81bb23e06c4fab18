"""What `trainer.mixed_precision` comes to: the format that layers compute in over the weights as they are. Pure.

A run decides when the model is loaded (model/precision.py), a plan by the GPUs that it knows of.
"""

from __future__ import annotations

from collections.abc import Callable

from packtrain.config.schema import RunConfig

FAST_ENOUGH = 1.5
"""How many times as fast as float32 a CPU must multiply in bfloat16 for `fast`: the rest of a step gains less."""


def decide(
    asked: str, *, weights: str, adapters: bool, gpu: bool, has_bf16: bool, speed: Callable[[], float]
) -> tuple[str, str]:
    """("no" or "bf16", why) for `weights` in this format, with `adapters` (which are float32) or without.

    `has_bf16` is whether the GPU has bfloat16; `speed` measures a CPU's in bfloat16 over that in float32.
    """
    if asked in ("no", "bf16"):
        return asked, "asked for"
    if weights == "float16":
        return "no", "the weights are float16"
    if weights == "bfloat16" and not adapters:
        return "no", "the weights are bfloat16 already"
    if gpu:
        return ("bf16", "the GPU has bfloat16") if has_bf16 else ("no", "the GPU has no bfloat16")
    if asked == "auto":
        return "no", "on a CPU; trainer.mixed_precision=fast measures whether bfloat16 is faster"
    ratio = speed()
    how = f"this CPU multiplies {ratio:.1f} times as fast in bfloat16"
    return ("bf16", how) if ratio >= FAST_ENOUGH else ("no", f"{how}, {FAST_ENOUGH:g} are asked for")


def planned(config: RunConfig, weights: str, *, gpu: bool) -> tuple[str, str]:
    """What a plan counts with, and on what it depends; `weights` is their format, `gpu` whether the plan is for GPUs."""
    asked, adapters = config.trainer.mixed_precision, config.peft.kind != "none"
    value, why = decide(asked, weights=weights, adapters=adapters, gpu=gpu, has_bf16=True, speed=lambda: 0.0)
    if asked == "fast" and why.startswith("this CPU"):
        return "no", f"unless the start finds bfloat16 {FAST_ENOUGH:g} times as fast on the CPU"
    return value, why.replace("the GPU has bfloat16", "on GPUs that have it; on a CPU no")


def sentence(config: RunConfig, *, gpu: bool) -> str:
    """What the layers compute in, in words."""
    weights = config.model.dtype
    value, why = planned(config, "float32" if weights == "auto" else weights, gpu=gpu)
    over = f"{weights} weights" if weights != "auto" else "weights as in the model's files"
    computed = "computed in bfloat16" if value == "bf16" else "no mixed precision"
    return f"{over}, {computed} ({why}{'; if they are float32' if weights == 'auto' and value == 'bf16' else ''})"
