"""The YAML files of a config: where they are, what they hold, and on which line.

Choices are looked for in the folder of the user's YAML, then in packtrain's own configs/. The folders that travel with
packtrain are beside the package in a source checkout; the wheel holds them inside it, under `_shipped/`.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf, grammar_parser
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from packtrain.config.keys import near
from packtrain.errors import Problem, UserError

PACKAGE = Path(__file__).resolve().parents[1]
SUFFIX = ".yaml"
_DEEPEST = 40  # levels; OmegaConf recurses several times as deep
_MOST = 20_000  # keys and entries, aliases written out: OmegaConf takes seconds for as many


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file as it was read: its `values` without the `defaults` list, and the line (from 1) of each key ("data.train[1].path").

    `anywhere` where its first line is Hydra's `# @package _global_`: its keys are not those of the group it is a choice of.
    """

    path: Path
    defaults: Any
    values: DictConfig
    lines: dict[str, int]
    anywhere: bool

    def place(self, key: str) -> str:
        """Where a key is written, as messages show it."""
        return f"{shown(self.path)}:{self.lines[key]}" if key in self.lines else shown(self.path)


def shipped(folder: Literal["configs", "recipes", "slurm"]) -> Path:
    """The absolute path of one of packtrain's own folders."""
    inside = PACKAGE / "_shipped" / folder
    return inside if inside.is_dir() else PACKAGE.parent / folder


def options(group: str, beside: Path | None = None) -> list[str]:
    """The choices of a group, sorted: names of files in the folder GROUP of configs/, and of the one `beside` the user's."""
    return sorted({file.stem for folder in _folders(beside) for file in (folder / group).glob(f"*{SUFFIX}")})


def find_choice(group: str, choice: str, beside: Path | None = None) -> Path | None:
    """The file of a choice ("" is the group of files that lie in no folder); the user's own comes before ours."""
    return next((path for one in _folders(beside) if (path := one / group / f"{choice}{SUFFIX}").is_file()), None)


def find_config(name: str) -> Path:
    """The absolute path of the user's YAML: a file, else one of the recipes that packtrain brings.

    Raises UserError where there is none, with the nearest names.
    """
    path = Path(os.path.expanduser(name))
    recipes = shipped("recipes")
    own = recipes / (path.relative_to("recipes") if path.parts[:1] == ("recipes",) else path)
    for candidate in (path, own):
        if os.path.isfile(candidate):
            if candidate.suffix != SUFFIX:
                raise UserError("a config file ends with .yaml", where=name, fix=f"Rename it to {path.stem}{SUFFIX}.")
            return candidate.absolute()
    if os.path.isdir(path):
        raise UserError("this is a folder", where=name, fix="Name a .yaml file in it.")
    raise UserError("no such config file", where=name, fix=_nearest(path, recipes))


def shown(path: Path) -> str:
    """`path` as messages show it: relative to the current folder where that is shorter."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


def read_config(path: Path) -> ConfigFile:
    """The file at `path`.

    Raises UserError with all that keeps it from being read: not UTF-8, broken syntax or interpolation, no mapping, keys
    written twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        lines, problems = _entries(root, shown(path)) if root is not None else ({}, [])
        if not problems and root is not None and not isinstance(root, yaml.MappingNode):
            problems = [Problem("a config is a mapping of groups, such as `optim: {…}`", f"{shown(path)}:1")]
        if problems:
            raise UserError(problems)
        values = OmegaConf.load(io.StringIO(text))
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text: {error.reason} at byte {error.start}"
        raise UserError(what, where=shown(path), fix="Save it as UTF-8.") from error
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=shown(path)) from error
    except yaml.YAMLError as error:
        raise UserError(_syntax_problem(path, error)) from error
    except OmegaConfBaseException as error:
        raise UserError(str(error).split("\n")[0], where=shown(path)) from error
    except RecursionError as error:
        raise UserError(_too_deep(shown(path))) from error
    assert isinstance(values, DictConfig)
    listed = values.pop("defaults", [])
    defaults = OmegaConf.to_container(listed) if OmegaConf.is_config(listed) else listed
    return ConfigFile(path, defaults, values, lines, re.match(r"#\s*@package\s+_global_\b", text) is not None)


def _folders(beside: Path | None) -> list[Path]:
    return [*([beside] if beside else []), shipped("configs")]


def _nearest(path: Path, recipes: Path) -> str:
    folder = path.parent
    beside = {one.stem: str(folder / one.name) for one in folder.glob(f"*{SUFFIX}")} if os.path.isdir(folder) else {}
    own = {one.stem: f"recipes/{one.name}" for one in sorted(recipes.glob(f"*{SUFFIX}"))}
    found = dict.fromkeys(names[stem] for names in (beside, own) for stem in near(path.stem, names))
    if found:
        return f"Did you mean {' or '.join(found)}?"
    if not os.path.isdir(folder):
        return f"The folder {folder} does not exist."
    return f"Recipes that come with packtrain: {', '.join(own.values())}." if own else "Check the path."


def _syntax_problem(path: Path, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).split("\n")[0]
    fix = "Check indentation, colons and quotes there and on the line above; YAML indents with spaces, not tabs."
    return Problem(f"not valid YAML: {what}", f"{shown(path)}:{mark.line + 1}" if mark else shown(path), fix)


def _too_deep(where: str) -> Problem:
    what = f"nested without end, or more than {_DEEPEST} levels deep: perhaps an alias (*) stands inside its own anchor (&)"
    return Problem(what, where, "Write out what the alias stands for.")


def _entries(root: yaml.Node, file: str) -> tuple[dict[str, int], list[Problem]]:
    """The line of every key, and what is wrong with the file beside its syntax."""
    lines: dict[str, int] = {}
    problems: list[Problem] = []
    for path, key, value in _walk(root, ""):
        line = (key or value).start_mark.line + 1
        where = f"{file}:{line}"
        if path.count(".") + path.count("[") > _DEEPEST:
            return lines, [_too_deep(where)]
        if len(lines) > _MOST:
            what = f"more than {_MOST} values: perhaps aliases (*) of anchors (&) that hold aliases"
            return lines, [Problem(what, where, "Write less, or name a file with the data.")]
        if key is not None and key.tag == "tag:yaml.org,2002:null":
            fix = 'A name that YAML takes for null is quoted: "null".'
            problems.append(Problem("a key without a name (null)", where, fix))
        elif path in lines and key is not None and key.value != "<<":
            what = f"the key is written twice, on lines {lines[path]} and {line}"
            problems.append(Problem(what, f"{where}, {path}", "Keep one of them."))
        if isinstance(value, yaml.ScalarNode) and "${" in value.value and (said := _unparsable(value.value)):
            fix = "Write ${group.key}, or \\${ for the text ${."
            problems.append(Problem(f"broken interpolation: {said}", f"{file}:{value.start_mark.line + 1}", fix))
        lines.setdefault(path, line)
    return lines, problems


def _walk(node: yaml.Node, prefix: str) -> Iterator[tuple[str, yaml.Node | None, yaml.Node]]:
    """Every (path, key, value) below `node`; entries of lists have no key."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}.{key.value}" if prefix else str(key.value)
            yield path, key, value
            yield from _walk(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for at, value in enumerate(node.value):
            yield f"{prefix}[{at}]", None, value
            yield from _walk(value, f"{prefix}[{at}]")


def _unparsable(text: str) -> str:
    try:
        grammar_parser.parse(text)
    except GrammarParseError as error:
        return str(error).split("\n")[0]
    return ""
