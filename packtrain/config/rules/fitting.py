"""Arguments for PEFT and for transformers' schedules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from packtrain.config import is_list, is_mapping
from packtrain.config.fault import Fault, Option, is_number
from packtrain.config.keys import suggest
from packtrain.wording import shortened


def is_pattern(value: object) -> bool:
    """Return whether it is the text of a regular expression."""
    try:
        return isinstance(value, str) and bool(re.compile(value))
    except re.error:
        return False


def _is_counts(value: object) -> bool:
    return is_mapping(value) and all(is_pattern(at) and type(to) is int and to > 0 for at, to in value.items())


_SWITCH = Option(False, "true or false", lambda value: isinstance(value, bool))
_COUNTS = Option({}, "mapping of regular expressions to whole numbers ≥ 1", _is_counts)
_NAMES = Option(
    None,
    "list of names, or a regular expression",
    lambda value: all(map(is_pattern, value)) if is_list(value) else is_pattern(value),
)
_STARTS = (
    "true|gaussian. pissa and olora change the base model's weights, but final/ and a reference need the original ones; "
    "corda, eva and lora_ga need data of their own"
)
_NUMBERS = Option(None, "list of numbers of layers", lambda value: is_list(value) and {*map(type, value)} == {int})
PEFT_OPTIONS = {
    **dict.fromkeys(("use_dora", "use_rslora"), _SWITCH),
    "init_lora_weights": Option(True, _STARTS, lambda value: value is True or value == "gaussian"),
    "layers_to_transform": _NUMBERS,
    **dict.fromkeys(("layers_pattern", "exclude_modules"), _NAMES),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), _COUNTS),
}
"""The entries of peft.options, with names and defaults of PEFT's LoraConfig."""


def _whole(least: int) -> Option:
    return Option(least, f"whole number ≥ {least}", lambda value: type(value) is int and value >= least)


_POSITIVE = Option(1, "number > 0", lambda value: is_number(value) and value > 0)
_SHARE = Option(0, "number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1)
_FORM = Option("linear", "linear|cosine|1-sqrt", lambda value: value in ("linear", "cosine", "1-sqrt"))
SCHEDULE_OPTIONS: dict[str, dict[str, Option]] = {
    "cosine": {"num_cycles": _POSITIVE},
    "cosine_with_restarts": {"num_cycles": _POSITIVE},
    "cosine_with_min_lr": {"num_cycles": _POSITIVE, "min_lr": _SHARE, "min_lr_rate": _SHARE},
    "polynomial": {"lr_end": _SHARE, "power": _POSITIVE},
    "inverse_sqrt": {"timescale": _whole(1)},
    "warmup_stable_decay": {
        "num_decay_steps": _whole(1),
        "num_stable_steps": _whole(0),
        "num_cycles": _POSITIVE,
        **dict.fromkeys(("warmup_type", "decay_type"), _FORM),
        "min_lr_ratio": _SHARE,
    },
}
"""The entries of optim.schedule_options by schedule: arguments of transformers' schedules beside the step counts."""


def check_options(
    where: str,
    given: Mapping[str, object],
    known: Mapping[str, Option],
    unknown: str,
    elsewhere: Mapping[str, str] = {},
) -> Iterator[Fault]:
    """Yield faults of the arguments `given` at the key `where`. `unknown` says that there is none of a name.

    `elsewhere`: name of an argument that has another place → advice.
    """
    for name, value in given.items():
        if name not in known:
            fix = elsewhere.get(name) or suggest(name, known, f"It has {', '.join(known)}." if known else "Remove it.")
            yield Fault((f"{where}.{name}",), unknown, fix, code="no-such-option")
            continue
        default = known[name].default  # which need not be an allowed value, as null; true is not 1
        if (type(value), value) != (type(default), default) and not known[name].accepts(value):
            what = f"found {shortened(value)}"
            yield Fault((f"{where}.{name}",), what, f"Allowed: {known[name].allowed}.", code="bad-value")
