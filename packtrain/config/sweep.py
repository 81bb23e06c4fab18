"""`-m key=a,b`: one list of overrides for each point of a sweep, in Hydra's multirun grammar.

Hydra's parser expands the values (`a,b`, `range(1,4)`, `choice(…)`, `glob(…)` over the choices of a group), and the last key
varies fastest, as in Hydra's own sweeper. A run folder belongs to one run, so every point gets one with its name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from packtrain.config.compose import load_config
from packtrain.config.overrides import COMMAND_LINE
from packtrain.config.schema import RunConfig
from packtrain.config.yaml_files import find_config, options
from packtrain.errors import UserError

_LONGEST_NAME = 150  # characters; file systems allow 255 bytes


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep: its `config`, and the overrides that the sweep chose for it, its run folder among them."""

    config: RunConfig
    chosen: tuple[str, ...] = ()


def load_points(
    config_path: str | None, overrides: list[str], first: Sequence[str] = ()
) -> tuple[list[Point], list[str]]:
    """The points of the sweep that `overrides` describe, and the overrides that all of them share.

    `first` are overrides that come before them in every point.

    Raises UserError where no override has several values, and with the problems of the first point that has any.
    """
    beside = find_config(config_path).parent if config_path is not None else None
    swept = {text: values for text in overrides if (values := _values(text, beside)) is not None}
    if not swept:
        fix = "Write key=a,b or key=range(1,4) for at least one key, or leave -m away."
        raise UserError("there is nothing to sweep: no key has several values", where=f"{COMMAND_LINE}, -m", fix=fix)
    shared = [text for text in overrides if text not in swept]
    choices = list(itertools.product(*swept.values()))
    configs = [load_config(config_path, [*first, *shared, *chosen]) for chosen in choices]
    folders = [config.trainer.output_dir for config in configs]
    if len(set(folders)) == len(folders):
        return [Point(config, chosen) for config, chosen in zip(configs, choices, strict=True)], shared
    points = []
    for config, chosen, name in zip(configs, choices, _names(choices), strict=True):
        folder = f"{config.trainer.output_dir}/{name}"
        own = replace(config, trainer=replace(config.trainer, output_dir=folder))
        points.append(Point(own, (*chosen, _override("trainer.output_dir", folder))))
    return points, shared


def _values(text: str, beside: Path | None) -> list[str] | None:
    """`key=value` for each value that an override sweeps over; None where it has one value, or cannot be read at all."""
    try:
        (parsed,) = OverridesParser.create(config_loader=_Groups(beside)).parse_overrides([text])  # type: ignore[arg-type]
    except (HydraException, RecursionError):
        return None  # load_config says what is wrong with it, together with everything else
    if not parsed.is_sweep_override():
        return None
    if not parsed.is_discrete_sweep():
        fix = "Name the values: key=a,b or key=range(1,4)."
        raise UserError("an interval has no values to try one by one", where=f"{COMMAND_LINE}, {text}", fix=fix)
    values = list(parsed.sweep_string_iterator())
    if not values:
        raise UserError("no value matches", where=f"{COMMAND_LINE}, {text}", fix="Look at the pattern.")
    return [f"{parsed.get_key_element()}={value}" for value in values]


@dataclass(frozen=True, slots=True)
class _Groups:
    """What Hydra's parser asks of a config loader for `glob(…)`: the choices of a group."""

    beside: Path | None

    def get_group_options(self, group: str, results_filter: Any = None) -> list[str]:
        return options(group, self.beside)


def _names(choices: list[tuple[str, ...]]) -> list[str]:
    """A folder name for each point, made of what was chosen for it."""
    names = [re.sub(r"[^\w.=-]+", "-", "_".join(one.lstrip("+") for one in chosen)) for chosen in choices]
    names = [name[:_LONGEST_NAME] for name in names]
    return names if len(set(names)) == len(names) else [f"{number}-{name}" for number, name in enumerate(names)]


def _override(key: str, value: str) -> str:
    """`key=value` in Hydra's grammar for any text."""
    if re.fullmatch(r"[\w./-]+", value, re.ASCII):
        return f"{key}={value}"
    # before a quote Hydra halves backslashes, elsewhere it keeps them
    quoted = re.sub(r'(\\*)"', lambda found: found[1] * 2 + '\\"', value)
    quoted = re.sub(r"\\+$", lambda found: found[0] * 2, quoted)
    quoted = re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", quoted)
    return f'{key}="{quoted}"'
