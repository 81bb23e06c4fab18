"""The command line's `key=value` arguments, in Hydra's grammar, made to fit a YAML that need not mention the key.

Hydra refuses `optim.learning_rate=1e-4` for a YAML without that key, and `strategy=ddp` for one whose defaults list does
not have that group. Every key of ours exists (schema.py), so the first becomes `++…` and the second `+…` where needed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from packtrain.config.keys import groups
from packtrain.config.suggest import advice_for, near
from packtrain.errors import Problem

COMMAND_LINE = "command line"
NO_HYDRA = "settings of Hydra itself have no effect here"
_KEY = re.compile(r"(\+{0,2}|~)[\w$-]+([./][\w$-]+)*(@[\w.:]*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Argument:
    """One parsed argument; `key` is "optim.learning_rate", or a group's name where `choice` says what it selects."""

    text: str
    key: str
    choice: str | None
    parsed: Override

    def for_hydra(self, listed: Collection[str]) -> str:
        """The argument as Hydra takes it, where the defaults list has the groups `listed`."""
        if self.choice is not None:
            bare = self.text.lstrip("+")
            return bare if self.key in listed else f"+{bare}"
        changed = self.parsed.is_add() or self.parsed.is_force_add() or self.parsed.is_delete()
        return self.text if changed else f"++{self.text}"


def parse(texts: list[str]) -> tuple[list[Argument], list[Problem]]:
    """The arguments that can be read, and what is wrong with the others."""
    parser = OverridesParser.create()
    arguments: list[Argument] = []
    problems: list[Problem] = []
    for text in texts:
        if problem := _misspelt(text):
            problems.append(problem)
            continue
        try:
            parsed = parser.parse_override(text)
        except (HydraException, RecursionError) as error:
            problems.append(_unreadable(text, error))
            continue
        argument = _argument(text, parsed)
        if problem := _unusable(argument):
            problems.append(problem)
        else:
            arguments.append(argument)
    return arguments, problems


def check_choice(argument: Argument, options: list[str]) -> list[Problem]:
    """What is wrong with an argument that selects a file of a group, of which there are `options`."""
    if argument.choice is None or argument.choice in options:
        return []
    return [no_choice(argument.key, argument.choice, options, f"{COMMAND_LINE}, {argument.text}")]


def no_choice(group: str, choice: str, options: list[str], where: str) -> Problem:
    """The problem of a `choice` that `group` does not have."""
    meant = near(choice, options, 1)
    hint = f" Did you mean {meant[0]}?" if meant else ""
    return Problem(f"{group} has no choice {choice!r}", where, f"Choices: {', '.join(options)}.{hint}")


def _argument(text: str, parsed: Override) -> Argument:
    key = parsed.key_or_group
    value = None if parsed.is_delete() else parsed.value()
    choice = str(value) if key in groups() and isinstance(value, (str, int, float)) else None
    return Argument(text, key, choice, parsed)


def _misspelt(text: str) -> Problem | None:
    """What is wrong with the form of an argument, up to its value."""
    where = f"{COMMAND_LINE}, {text}"
    key, equals, value = text.partition("=")
    if text in ("-m", "--multirun"):
        return _no_sweep(text)
    if text.startswith("-"):
        advice = advice_for(text.strip("-").partition("=")[0].replace("-", "_"))
        meant = f" {advice}" if advice.startswith("Did") else ""
        return Problem(
            "no such option", where, f"Config keys are written key=value, without dashes; -h lists them.{meant}"
        )
    if not equals and not text.startswith("~"):
        return Problem("not of the form key=value", where, "Example: optim.learning_rate=1e-4.")
    if key != key.strip():
        return Problem("white space around the key", where, f"Write {key.strip()}={value.strip()}.")
    if not _KEY.fullmatch(key):
        return Problem("no key has such a name", where, "A key is GROUP.NAME; lists are set whole: data.train=[a,b].")
    return None


def _unusable(argument: Argument) -> Problem | None:
    """What Hydra could do with an argument, but has no sense here."""
    where = f"{COMMAND_LINE}, {argument.text}"
    key, parsed = argument.key, argument.parsed
    if parsed.is_sweep_override():
        return _no_sweep(argument.text)
    if re.match(r"hydra\b", key):
        return Problem(NO_HYDRA, where, "Take it away.")
    if parsed.package is not None:
        return Problem("a choice always fills its own group", where, f"Write {key}=CHOICE, without the @.")
    if key in groups() and argument.choice is None and not parsed.is_delete():
        fix = f"Write {key}.KEY=… for each key, or {key}=CHOICE."
        return Problem("a group takes the name of a choice", where, fix)
    return None


def _unreadable(text: str, error: Exception) -> Problem:
    where = f"{COMMAND_LINE}, {text}"
    if isinstance(error, RecursionError):
        return Problem("nested too deeply", where, "Write it into a YAML file, with less nesting.")
    key, _, value = text.partition("=")
    said = str(error).split("\n")[0]
    quoted = value.replace("'", "\\'")
    return Problem(f"cannot be read ({said})", where, f"Quote the value, for the shell too: \"{key}='{quoted}'\".")


def _no_sweep(text: str) -> Problem:
    where = f"{COMMAND_LINE}, {text}"
    fix = "Start one run per value, or all as a Slurm job array: packtrain sbatch VERB CONFIG -m …; a list is [a,b], "
    fix += "a text with commas \"'a,b'\"."
    return Problem("sweeps over several values are not supported", where, fix)
