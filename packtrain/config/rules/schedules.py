"""Learning-rate schedules and the options that transformers' functions take, with their bounds: what lies outside trains something
that nobody means, or ends in an error of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from packtrain.config.keys import Fault, suggest
from packtrain.config.schema import Optim
from packtrain.wording import shortened

SCHEDULE_OPTIONS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "constant_with_warmup": (),
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        *("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    ),
}
"""Arguments of transformers' schedules beside the step counts."""
_SHAPES = ("linear", "cosine", "1-sqrt")
_RATIO = "number from 0 to 1", lambda value, _: 0 <= value <= 1
_RATE = "number from 0 to optim.learning_rate", lambda value, optim: 0 <= value <= optim.learning_rate
_POSITIVE = "number > 0", lambda value, _: value > 0
_COUNT = "whole number ≥ 1", lambda value, _: type(value) is int and value >= 1
_SHAPE = " or ".join(_SHAPES), lambda value, _: value in _SHAPES
_BOUNDS: dict[str, tuple[str, Callable[[Any, Optim], bool]]] = {
    **dict.fromkeys(("min_lr_rate", "min_lr_ratio"), _RATIO),
    **dict.fromkeys(("min_lr", "lr_end"), _RATE),
    **dict.fromkeys(("num_cycles", "power"), _POSITIVE),
    **dict.fromkeys(("num_decay_steps", "timescale"), _COUNT),
    **dict.fromkeys(("warmup_type", "decay_type"), _SHAPE),
    "num_stable_steps": ("whole number ≥ 0", lambda value, _: type(value) is int and value >= 0),
}


def schedule_rules(optim: Optim) -> Iterator[Fault]:
    """Everything that is impossible in optim.schedule with its options."""
    known = SCHEDULE_OPTIONS[optim.schedule]
    for name, value in optim.schedule_options.items():
        if name not in known:
            hint = suggest(name, known, f"It takes {', '.join(known) or 'no options'}.")
            what = f"the schedule {optim.schedule} has no such option"
            yield Fault((f"optim.schedule_options.{name}",), what, hint)
        elif not _allows(name, value, optim):
            allowed = _bounds(name, optim)[0]
            yield Fault((f"optim.schedule_options.{name}",), f"found {shortened(value)}", f"Allowed: {allowed}.")
    rates = {"min_lr", "min_lr_rate"} & set(optim.schedule_options)
    if optim.schedule == "cosine_with_min_lr" and len(rates) != 1:
        what = "the schedule cosine_with_min_lr needs its lowest learning rate, once"
        fix = "Set {min_lr_rate: 0.1} (of the peak) or {min_lr: 2e-6}."
        yield Fault(("optim.schedule_options", "optim.schedule"), what, fix)
    if optim.schedule == "warmup_stable_decay" and "num_decay_steps" not in optim.schedule_options:
        what = "the schedule warmup_stable_decay needs the length of its decay"
        yield Fault(("optim.schedule_options", "optim.schedule"), what, "Set {num_decay_steps: 100}.")
    if optim.schedule == "constant" and optim.warmup_steps:
        what = "the schedule constant has no warm-up"
        yield Fault(("optim.warmup_steps", "optim.schedule"), what, "Choose optim.schedule=constant_with_warmup.")


def _bounds(name: str, optim: Optim) -> tuple[str, Callable[[Any, Optim], bool]]:
    """What an option may be, in words and as a test; restarts are whole cycles."""
    return _COUNT if name == "num_cycles" and optim.schedule == "cosine_with_restarts" else _BOUNDS[name]


def _allows(name: str, value: object, optim: Optim) -> bool:
    number = type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    return (number or name.endswith("_type")) and _bounds(name, optim)[1](value, optim)
