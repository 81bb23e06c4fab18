"""What Hydra says when it cannot compose, as problems with a place and a remedy."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from hydra.errors import HydraException, MissingConfigException

from packtrain.config.keys import groups
from packtrain.config.overrides import COMMAND_LINE, Argument, no_choice
from packtrain.config.yamlfile import SUFFIX, check_text, key_lines, shown
from packtrain.errors import Problem


def missing_file(error: MissingConfigException, file: Path | None) -> Problem:
    """The problem of a defaults list that names a file which is not there."""
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    where = line_of_default(file, group, choice)
    if group and error.options:
        return no_choice(group, choice, sorted(error.options), where)
    hint = f"The groups are {', '.join(groups())}." if group else f"There is no {choice}{SUFFIX} beside this file."
    return Problem(f"the defaults list names {error.missing_cfg_file!r}, which does not exist", where, hint)


def line_of_default(file: Path | None, group: str, choice: str) -> str:
    if file is None:
        return COMMAND_LINE
    names = {f"defaults[{at}]{dot}" for at in range(100) for dot in ("", f".{group}")}
    text = file.read_text(encoding="utf-8").splitlines()
    for one in key_lines(file):
        if one.path == group and re.search(rf":\s*['\"]?{re.escape(choice)}\b", text[one.line - 1]):
            return f"{shown(file)}:{one.line}"
        if one.path in names and re.search(rf"\b{re.escape(choice)}\b", text[one.line - 1]):
            return f"{shown(file)}:{one.line}, defaults"
    return f"{shown(file)}, defaults"


def broken_file(error: yaml.YAMLError) -> list[Problem]:
    """The problems of a file that the user's YAML names under defaults."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return [Problem(f"not valid YAML: {error}")]
    what = f"not valid YAML: {getattr(error, 'problem', None) or error}"
    return check_text(Path(mark.name)) or [Problem(what, f"{shown(Path(mark.name))}:{mark.line + 1}")]


def refused(error: Exception, arguments: list[Argument], file: Path | None) -> tuple[Problem, Argument | None]:
    """What Hydra said, at the argument that it named (which is returned too), else at the file."""
    said = str(error).strip() or str(error.__cause__ or type(error).__name__)
    said = said.split("\n")[0]
    named = [
        argument
        for argument in arguments
        if f"'{argument.key}'" in said or f"'{argument.text.lstrip('+~')}'" in said or argument.text in said
    ]
    for argument in sorted(named, key=lambda one: one.text[:1] not in "+~"):  # plain ones are made to fit
        where = f"{COMMAND_LINE}, {argument.text}"
        plain = argument.text.lstrip("+~")
        if argument.parsed.is_delete():
            differs = "The value of" in said  # ~key=value takes away only that value
            return Problem(said if differs else f"there is no {argument.key} to take away", where), argument
        return Problem(said, where, f"Write {plain} (or ++{plain}) to replace a value."), argument
    if file is None:
        return Problem(said, COMMAND_LINE), None
    of_defaults = isinstance(error, HydraException) or "default" in said.lower()
    if of_defaults and (lines := [one.line for one in key_lines(file) if one.path == "defaults"]):
        return Problem(said, f"{shown(file)}:{lines[0]}, defaults", "Write defaults: [GROUP: CHOICE, …, _self_]."), None
    return Problem(said, shown(file)), None
