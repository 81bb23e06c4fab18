"""Rules about weights: PEFT's arguments and groups of weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

from packtrain.config.fault import Fault, Option
from packtrain.config.keys import suggest
from packtrain.config.schema import RunConfig
from packtrain.wording import shortened


def _is_pattern(value: object) -> bool:
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except re.error:
        return False


def _is_counts(value: object) -> bool:
    return isinstance(value, dict) and all(_is_pattern(at) and type(to) is int and to > 0 for at, to in value.items())


_SWITCH = Option(False, "true or false", lambda value: isinstance(value, bool))
_COUNTS = Option({}, "mapping of regular expressions to whole numbers ≥ 1", _is_counts)
_NAMES = Option(
    None,
    "list of names, or a regular expression",
    lambda value: all(map(_is_pattern, value)) if isinstance(value, list) else _is_pattern(value),
)
_STARTS = (
    "true|gaussian. pissa and olora change the base model's weights, but final/ and a reference need the original ones; "
    "corda, eva and lora_ga need data of their own"
)
_NUMBERS = Option(
    None, "list of numbers of layers", lambda value: isinstance(value, list) and {*map(type, value)} == {int}
)
PEFT_OPTIONS = {
    **dict.fromkeys(("use_dora", "use_rslora"), _SWITCH),
    "init_lora_weights": Option(True, _STARTS, lambda value: value is True or value == "gaussian"),
    "layers_to_transform": _NUMBERS,
    **dict.fromkeys(("layers_pattern", "exclude_modules"), _NAMES),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), _COUNTS),
}
"""The entries of peft.options, with names and defaults of PEFT's LoraConfig."""


def check_options(where: str, given: Mapping[str, Any], known: Mapping[str, Option]) -> Iterator[Fault]:
    """Yield faults in the values of `known` arguments."""
    for name in given.keys() & known.keys():
        if given[name] != known[name].default and not known[name].accepts(given[name]):
            yield Fault((f"{where}.{name}",), f"found {shortened(given[name])}", f"Allowed: {known[name].allowed}.")


def check_fitting(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    """Yield faults of peft and of optim.groups."""
    yield from _peft(config, given)
    yield from _groups(config)


def _peft(config: RunConfig, given: Set[str]) -> Iterator[Fault]:
    for key in sorted(given) if config.peft.kind == "none" else ():
        if key.startswith("peft."):
            what = "it does nothing without adapters (peft.kind is none)"
            yield Fault((key,), what, "Choose peft=lora, or remove the key.", because="peft.kind")
    targets, options = config.peft.target_modules, config.peft.options
    if isinstance(targets, str) and not _is_pattern(targets):
        what, fix = "it is no regular expression", "A text is a pattern for whole names; write several names as a list."
        yield Fault(("peft.target_modules",), what, fix)
    for name in options.keys() - PEFT_OPTIONS.keys():
        fix = suggest(name, PEFT_OPTIONS, f"It has {', '.join(PEFT_OPTIONS)}.")
        yield Fault((f"peft.options.{name}",), "adapters have no such option, or packtrain has not tried it", fix)
    yield from check_options("peft.options", options, PEFT_OPTIONS)
    if "layers_to_transform" in options and isinstance(targets, str):
        what = "PEFT counts layers only where target_modules is a list of names"
        fix = "Set peft.target_modules to a list, such as [q_proj, v_proj], or name the layers in the pattern."
        yield Fault(("peft.options.layers_to_transform", "peft.target_modules"), what, fix)


def _groups(config: RunConfig) -> Iterator[Fault]:
    for at, group in enumerate(config.optim.groups):
        where = (f"optim.groups[{at}].match",)
        if not group.match or not _is_pattern(group.match):
            yield Fault(where, f"{group.match!r} is no regular expression", r"Write a part of names, as in layers\.0\.")
