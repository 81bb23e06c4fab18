"""`-m key=a,b`: one list of overrides for each point of a sweep, in Hydra's multirun grammar.

Hydra's parser expands the values (`a,b`, `range(1,4)`, `choice(…)`), and the last key varies fastest, as in Hydra's own
sweeper. A run folder belongs to one run, so every point gets one with its name.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, RangeSweep
from hydra.errors import HydraException

from packtrain.config.compose import load_config
from packtrain.config.overrides import COMMAND_LINE
from packtrain.config.schema import RunConfig
from packtrain.errors import UserError

MOST_POINTS = 1000
_LONGEST_NAME = 150  # characters; file systems allow 255 bytes


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep: its `config`, and the overrides that the sweep chose for it, its run folder among them."""

    config: RunConfig
    chosen: tuple[str, ...] = ()


def load_points(
    config_path: str | None,
    overrides: list[str],
    first: Sequence[str] = (),
    say: Callable[[str], object] = lambda line: None,
) -> tuple[list[Point], list[str]]:
    """The points of the sweep that `overrides` describe, and the overrides that all of them share.

    `first` are overrides that come before them in every point. `say` is given each line of load_config once.

    Raises UserError where no override has several values, and with the problems of the first point that has any.
    """
    swept = {text: values for text in overrides if (values := _values(text)) is not None}
    if not swept:
        fix = "Write key=a,b or key=range(1,4) for at least one key, or leave -m away."
        raise UserError("there is nothing to sweep: no key has several values", where=f"{COMMAND_LINE}, -m", fix=fix)
    shared = [text for text in overrides if text not in swept]
    if math.prod(map(len, swept.values())) > MOST_POINTS:
        what, fix = (
            f"more than {MOST_POINTS:,} runs",
            "Sweep over fewer values; Slurm's own limit mostly is 1,000 (MaxArraySize).",
        )
        raise UserError(what, where=f"{COMMAND_LINE}, -m", fix=fix)
    choices = list(itertools.product(*swept.values()))
    said: dict[str, None] = {}  # in order
    configs = [load_config(config_path, [*first, *shared, *chosen], said.setdefault) for chosen in choices]
    for line in said:
        say(line)
    folders = [config.trainer.output_dir for config in configs]
    if len(set(folders)) == len(folders):
        return [Point(config, chosen) for config, chosen in zip(configs, choices, strict=True)], shared
    points = []
    for config, chosen, name in zip(configs, choices, _names(choices), strict=True):
        folder = f"{config.trainer.output_dir}/{name}"
        own = replace(config, trainer=replace(config.trainer, output_dir=folder))
        points.append(Point(own, (*chosen, _override("trainer.output_dir", folder))))
    return points, shared


def _values(text: str) -> list[str] | None:
    """`key=value` for each value that an override sweeps over; None where it has one value, or cannot be read at all."""
    try:
        parsed = OverridesParser.create().parse_override(text)
    except (HydraException, RecursionError, ValueError):
        return None  # load_config says what is wrong with it, together with everything else
    if not parsed.is_sweep_override():
        return None
    if not isinstance(parsed.value(), (ChoiceSweep, RangeSweep)):
        fix = "Name the values: key=a,b or key=range(1,4)."
        raise UserError("this has no values to try one by one", where=f"{COMMAND_LINE}, {text}", fix=fix)
    values = list(itertools.islice(parsed.sweep_string_iterator(), MOST_POINTS + 1))
    if not values:
        raise UserError("there are no values", where=f"{COMMAND_LINE}, {text}", fix="range(1,4) is 1, 2 and 3.")
    return [f"{parsed.get_key_element()}={value}" for value in values]


def _names(choices: list[tuple[str, ...]]) -> list[str]:
    """A folder name for each point, made of what was chosen for it."""
    names = [re.sub(r"[^\w.=-]+", "-", "_".join(one.lstrip("+") for one in chosen)) for chosen in choices]
    names = [name[:_LONGEST_NAME] for name in names]
    return names if len(set(names)) == len(names) else [f"{number}-{name}" for number, name in enumerate(names)]


def _override(key: str, value: str) -> str:
    """`key=value` in Hydra's grammar for any text."""
    if re.fullmatch(r"[\w./-]+", value, re.ASCII):
        return f"{key}={value}"
    quoted = value.replace("'", "\\'")
    return f"{key}='{quoted}'"
