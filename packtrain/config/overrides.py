"""Parser of the command line's `key=value` arguments in Hydra's grammar, and their effect on values.

`key=value` sets, `~key` removes, and `group=choice` selects a file, as in Hydra. Unlike in Hydra, `+key` and `++key` set as well, since
every key of ours exists (schema.py).
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from packtrain.config.keys import advice_for, suggest
from packtrain.config.schema import groups
from packtrain.config.yaml_files import options
from packtrain.errors import Problem, UserError

COMMAND_LINE = "command line"
_NO_SWEEP = "sweeps over several values are not supported"
_SWEEP_FIX = "Start one run per value, or a Slurm job array (packtrain sbatch VERB CONFIG -m …); a list is [a,b]."
_KEY = re.compile(r"(\+{0,2}|~)[\w$-]+([./][\w$-]+)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Argument:
    """One parsed argument. `key` is "optim.learning_rate", or a group's name if `choice` says what it selects."""

    text: str
    key: str
    choice: str | None
    parsed: Override

    @property
    def where(self) -> str:
        """Its place in messages."""
        return f"{COMMAND_LINE}, {self.text}"


def parse(texts: list[str], beside: Path | None) -> tuple[list[Argument], list[Problem]]:
    """Return the usable arguments, and the problems of the others. `beside` is the folder of the user's YAML."""
    read = [_read(text, beside) for text in texts]
    return [item for item in read if isinstance(item, Argument)], [item for item in read if isinstance(item, Problem)]


def _read(text: str, beside: Path | None) -> Argument | Problem:
    """Return one argument, or its problem."""
    where = f"{COMMAND_LINE}, {text}"
    key, equals, value = text.partition("=")
    if text.startswith("-"):
        advice = advice_for(text.strip("-").partition("=")[0].replace("-", "_"))
        fix = "Config keys are written key=value, without dashes; -h lists them."
        what = "no such option"
        return Problem(what, where, f"{fix} {advice}" if advice.startswith("Did") else fix, code="no-such-flag")
    if not equals and not text.startswith("~"):
        return Problem("not of the form key=value", where, "Example: optim.learning_rate=1e-4.", code="not-key-value")
    if not _KEY.fullmatch(key):
        what = "no key has such a name"
        return Problem(what, where, "A key is GROUP.NAME; lists are set whole: data.train=[a,b].", code="not-a-key")
    try:
        parsed = OverridesParser.create().parse_override(text)
    except (HydraException, RecursionError, ValueError) as error:  # ValueError: a number of more than 4,300 digits
        reason = str(error).split("\n")[0]
        entries = ",".join(f"'{entry}'" for entry in re.split(r"\s*,\s*", value.strip("[] ")))
        quoted = f"{key}=[{entries}]" if value.startswith("[") and "'" not in value else assignment(key, value)
        fix = f'Quote the value, for the shell too: "{quoted}".'
        return Problem(f"cannot be read ({reason})", where, fix, code="unreadable-argument")
    if parsed.is_sweep_override():
        return Problem(_NO_SWEEP, where, _SWEEP_FIX, code="sweep-not-here")
    key, known = parsed.key_or_group, options(parsed.key_or_group, beside)
    chosen = None if parsed.is_delete() else parsed.value()
    if isinstance(chosen, (str, int, float)) and (key in groups() or known):
        choice = str(chosen)
        return Argument(text, key, choice, parsed) if choice in known else no_choice(key, choice, known, where)
    if key in groups() and not parsed.is_delete():
        fix = f"Write {key}.KEY=… for each key, or {key}=CHOICE."
        return Problem("a group takes the name of a choice", where, fix, code="group-needs-choice")
    return Argument(text, key, None, parsed)


def carry_out(argument: Argument, values: DictConfig) -> Problem | None:
    """Change `values` by the argument; return a problem if that is impossible."""
    key, parsed = argument.key, argument.parsed
    outer, _, leaf = key.rpartition(".")
    try:
        if parsed.is_delete():
            holder = OmegaConf.select(values, outer) if outer else values
            if not isinstance(holder, DictConfig) or leaf not in holder:
                return Problem(f"there is no {key} to take away", argument.where, code="nothing-to-remove")
            del holder[leaf]
        else:
            value = parsed.value()
            merge = isinstance(value, dict) and isinstance(OmegaConf.select(values, key), DictConfig)
            OmegaConf.update(values, key, value, merge=merge, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        what = str(error).split("\n")[0]
        return Problem(what, argument.where, "Set the whole key, or write it into the YAML file.", code="cannot-set")
    return None


def values_of_sweep(text: str, most: int) -> list[str] | None:
    """Return `key=value` for each value of a sweep, at most `most` + 1 of them.

    None if `text` has one value, or is unreadable (load_config reports that). Raises UserError for a sweep without values.
    """
    try:
        parsed = OverridesParser.create().parse_override(text)
    except (HydraException, RecursionError, ValueError):
        return None
    if not parsed.is_sweep_override():
        return None
    named = isinstance(parsed.value(), (ChoiceSweep, RangeSweep))
    values = list(itertools.islice(parsed.sweep_string_iterator(), most + 1)) if named else []
    if not values:
        fix = "Name the values: key=a,b or key=range(1,4), which is 1, 2 and 3."
        what = "this has no values to try one by one"
        raise UserError(what, where=f"{COMMAND_LINE}, {text}", fix=fix, code="empty-sweep")
    return [f"{parsed.get_key_element()}={value}" for value in values]


def assignment(key: str, value: str) -> str:
    """Return `key=value` in Hydra's grammar, with quotes where the text needs them."""
    if re.fullmatch(r"(?=.*[./_])[\w./-]*[A-Za-z]{2}[\w./-]*", value, re.ASCII):
        return f"{key}={value}"
    quoted = value.replace("${", "\\${").replace("'", "\\'")
    return f"{key}='{quoted}'"


def no_choice(group: str, choice: str, options: list[str], where: str) -> Problem:
    """Return the problem of a `choice` that `group` does not have."""
    if not options:
        what = f"there is no group {group!r} of choices"
        return Problem(what, where, f"The groups are {', '.join(groups())}.", code="no-such-group")
    fix = f"Choices: {', '.join(options)}. {suggest(choice, options)}".strip()
    return Problem(f"{group} has no choice {choice!r}", where, fix, code="no-such-choice")
