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
from packtrain.config.suggest import near
from packtrain.errors import Problem

COMMAND_LINE = "command line"
NO_HYDRA = "settings of Hydra itself have no effect here"


@dataclass(frozen=True, slots=True)
class Argument:
    """One parsed argument; `key` is "optim.learning_rate", or a group's name where `choice` says what it selects."""

    text: str
    key: str
    choice: str | None
    parsed: Override

    def for_hydra(self, listed: Collection[str]) -> str:
        """The argument as Hydra takes it, where the defaults list has the groups `listed`."""
        if self.parsed.is_add() or self.parsed.is_force_add() or self.parsed.is_delete():
            return self.text
        if self.choice is None:
            return self.text if self.key in groups() else f"++{self.text}"
        return self.text if self.key in listed else f"+{self.text}"


def parse(texts: list[str]) -> tuple[list[Argument], list[Problem]]:
    """The arguments that can be read, and what is wrong with the others."""
    parser = OverridesParser.create()
    arguments: list[Argument] = []
    problems: list[Problem] = []
    for text in texts:
        if text in ("-m", "--multirun"):
            problems.append(_no_sweep(text))
            continue
        try:
            parsed = parser.parse_override(text)
        except HydraException as error:
            problems.append(_unreadable(text, error))
            continue
        if parsed.is_sweep_override():
            problems.append(_no_sweep(text))
        elif re.match(r"hydra\b", parsed.key_or_group):
            problems.append(Problem(NO_HYDRA, f"{COMMAND_LINE}, {text}", "Take it away."))
        else:
            arguments.append(_argument(text, parsed))
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


def _unreadable(text: str, error: HydraException) -> Problem:
    where = f"{COMMAND_LINE}, {text}"
    if text.startswith("-"):
        return Problem("no such option", where, "Config keys are written key=value, without dashes; -h lists them.")
    if "=" not in text:
        return Problem("not of the form key=value", where, "Example: optim.learning_rate=1e-4.")
    key, _, value = text.partition("=")
    if key != key.strip():
        return Problem("white space around the key", where, f"Write {key.strip()}={value.strip()}.")
    said = str(error).split("\n")[0]
    quoted = value.replace("'", "\\'")
    return Problem(f"cannot be read ({said})", where, f"Quote the value, for the shell too: \"{key}='{quoted}'\".")


def _no_sweep(text: str) -> Problem:
    where = f"{COMMAND_LINE}, {text}"
    return Problem("sweeps over several values are not supported", where, "Start one run per value; a list is [a,b].")
