"""The command line's `key=value` arguments, in Hydra's grammar: read, and carried out on the values that the files gave.

As in Hydra, `key=value` sets, `~key` takes away, and `group=choice` selects a file. Unlike there, a key or group need not be
mentioned in any file, since every key of ours exists (schema.py): so `+key` and `++key` set, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from packtrain.config.keys import advice_for, suggest
from packtrain.config.schema import groups
from packtrain.config.yaml_files import options
from packtrain.errors import Problem

COMMAND_LINE = "command line"
_KEY = re.compile(r"(\+{0,2}|~)[\w$-]+([./][\w$-]+)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Argument:
    """One parsed argument; `key` is "optim.learning_rate", or a group's name where `choice` says what it selects."""

    text: str
    key: str
    choice: str | None
    parsed: Override

    @property
    def where(self) -> str:
        """Its place in messages."""
        return f"{COMMAND_LINE}, {self.text}"


def parse(texts: list[str], beside: Path | None) -> tuple[list[Argument], list[Problem]]:
    """The arguments that can be used, and what is wrong with the others; `beside` is the folder of the user's YAML."""
    parser = OverridesParser.create()
    arguments: list[Argument] = []
    problems: list[Problem] = []
    for text in texts:
        if problem := _misspelt(text):
            problems.append(problem)
            continue
        try:
            parsed = parser.parse_override(text)
        except (HydraException, RecursionError, ValueError) as error:  # ValueError: a number of more than 4,300 digits
            key, _, value = text.partition("=")
            quoted = value.replace("'", "\\'")
            what, fix = str(error).split("\n")[0], f"Quote the value, for the shell too: \"{key}='{quoted}'\"."
            problems.append(Problem(f"cannot be read ({what})", f"{COMMAND_LINE}, {text}", fix))
            continue
        argument = _argument(text, parsed, beside)
        if problem := _unusable(argument, beside):
            problems.append(problem)
        else:
            arguments.append(argument)
    return arguments, problems


def carry_out(argument: Argument, values: DictConfig) -> Problem | None:
    """Changes `values` as the argument says; returns what is wrong where that cannot be done."""
    key, parsed = argument.key, argument.parsed
    outer, _, leaf = key.rpartition(".")
    try:
        if parsed.is_delete():
            holder = OmegaConf.select(values, outer) if outer else values
            if not isinstance(holder, DictConfig) or leaf not in holder:
                return Problem(f"there is no {key} to take away", argument.where)
            del holder[leaf]
        else:
            OmegaConf.update(values, key, parsed.value(), merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        return Problem(str(error).split("\n")[0], argument.where, "Set the whole key, or write it into the YAML file.")
    return None


def no_choice(group: str, choice: str, options: list[str], where: str) -> Problem:
    """The problem of a `choice` that `group` does not have."""
    if not options:
        return Problem(f"there is no group {group!r} of choices", where, f"The groups are {', '.join(groups())}.")
    fix = f"Choices: {', '.join(options)}. {suggest(choice, options)}".strip()
    return Problem(f"{group} has no choice {choice!r}", where, fix)


def _argument(text: str, parsed: Override, beside: Path | None) -> Argument:
    key = parsed.key_or_group
    value = None if parsed.is_delete() else parsed.value()
    selects = isinstance(value, (str, int, float)) and (key in groups() or bool(options(key, beside)))
    return Argument(text, key, str(value) if selects else None, parsed)


def _misspelt(text: str) -> Problem | None:
    """What is wrong with the form of an argument, up to its value."""
    where = f"{COMMAND_LINE}, {text}"
    key, equals, _ = text.partition("=")
    if text in ("-m", "--multirun"):
        return _no_sweep(text)
    if text.startswith("-"):
        advice = advice_for(text.strip("-").partition("=")[0].replace("-", "_"))
        fix = "Config keys are written key=value, without dashes; -h lists them."
        return Problem("no such option", where, f"{fix} {advice}" if advice.startswith("Did") else fix)
    if not equals and not text.startswith("~"):
        return Problem("not of the form key=value", where, "Example: optim.learning_rate=1e-4.")
    if not _KEY.fullmatch(key):
        return Problem("no key has such a name", where, "A key is GROUP.NAME; lists are set whole: data.train=[a,b].")
    return None


def _unusable(argument: Argument, beside: Path | None) -> Problem | None:
    """What can be read, but has no sense here."""
    key, choice, parsed = argument.key, argument.choice, argument.parsed
    if parsed.is_sweep_override():
        return _no_sweep(argument.text)
    if choice is not None and choice not in (known := options(key, beside)):
        return no_choice(key, choice, known, argument.where)
    if key in groups() and choice is None and not parsed.is_delete():
        fix = f"Write {key}.KEY=… for each key, or {key}=CHOICE."
        return Problem("a group takes the name of a choice", argument.where, fix)
    return None


def _no_sweep(text: str) -> Problem:
    fix = "Start one run per value, or all as a Slurm job array: packtrain sbatch VERB CONFIG -m …; a list is [a,b], "
    fix += "a text with commas \"'a,b'\"."
    return Problem("sweeps over several values are not supported", f"{COMMAND_LINE}, {text}", fix)
