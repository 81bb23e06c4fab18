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
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from packtrain.config.keys import near
from packtrain.errors import Problem, UserError
from packtrain.redact import learn

PACKAGE = Path(__file__).resolve().parents[1]
SUFFIX = ".yaml"
_DEEPEST = 40  # levels; OmegaConf recurses several times as deep
_MOST = 10_000  # keys and entries, aliases written out
_MOST_BYTES = 2**20
_OF_YAML_1_1 = re.compile(r"[-+]?(0[0-7_]*[0-7]|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""Numbers that only YAML 1.1 takes for what they are: 010 (8) and 1:30 (90)."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file as it was read: its `values` without the `defaults` list, and the line (from 1) of each key ("data.train[1].path")."""

    path: Path
    defaults: Any
    values: DictConfig
    lines: dict[str, int]

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
    return next((path for one in _folders(beside) if os.path.isfile(path := one / group / f"{choice}{SUFFIX}")), None)


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
    if os.path.exists(path):
        raise UserError("this is no regular file", where=name, fix="Name a .yaml file.")
    raise UserError("no such config file", where=name, fix=_nearest(path, recipes))


def shown(path: Path) -> str:
    """`path` as messages show it: relative to the current folder where that is shorter."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


def read_config(path: Path) -> ConfigFile:
    """The file at `path`; raises UserError with all that keeps it from being read, and the lines."""
    lines: dict[str, int] = {}
    problems: list[Problem] = []
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            fix = "Name the .yaml file of a run; data belongs into files that it names."
            raise UserError(f"more than {_MOST_BYTES:,} bytes are no config", where=shown(path), fix=fix)
        text = content.decode("utf-8")
        learn(text)
        _check_size(text, path)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise UserError("a config is a mapping of groups, such as `optim: {…}`", where=f"{shown(path)}:1")
        for key, first, value in _nodes(root, ""):
            line = first.start_mark.line + 1
            if key.count(".") + key.count("[") > _DEEPEST:
                raise RecursionError
            if first is not value and first.tag == "tag:yaml.org,2002:null":
                fix = 'A name that YAML takes for null is quoted: "null".'
                problems.append(Problem("a key without a name (null)", f"{shown(path)}:{line}", fix))
            elif first is not value and key in lines and "<<" not in key:
                what = f"the key is written twice, on lines {lines[key]} and {line}"
                problems.append(Problem(what, f"{shown(path)}:{line}, {key}", "Keep one of them."))
            elif _is_of_yaml_1_1(value):
                number = yaml.SafeLoader("").construct_object(value)
                what, fix = (
                    f"YAML takes {value.value} for {number}",
                    f'Write {number}, or "{value.value}" if it is text.',
                )
                problems.append(Problem(what, f"{shown(path)}:{line}, {key}", fix))
            lines.setdefault(key, line)
            if len(lines) > _MOST:
                raise _too_many(path, line)
        if problems:
            raise UserError(problems)
        values = OmegaConf.load(io.StringIO(text))
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text: {error.reason} at byte {error.start}"
        raise UserError(what, where=shown(path), fix="Save it as UTF-8.") from error
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=shown(path)) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = f"not valid YAML: {getattr(error, 'problem', None) or error}"
        fix = "Check indentation, colons and quotes there and on the line above; YAML indents with spaces, not tabs."
        raise UserError(what, where=f"{shown(path)}:{mark.line + 1}" if mark else shown(path), fix=fix) from error
    except OmegaConfBaseException as error:
        where = f"{shown(path)}:{lines[error.full_key]}" if error.full_key in lines else shown(path)
        fix = "An interpolation is written ${group.key}, the text ${ as \\${."
        raise UserError(str(error).split("\n")[0], where=where, fix=fix) from error
    except RecursionError as error:
        what, fix = f"nested more than {_DEEPEST} levels deep", "Write it flatter, or name a file with the data."
        if re.search(r"&\w", text):
            what += ": perhaps an alias (*) stands inside its own anchor (&)"
            fix = "Write out what the alias stands for."
        raise UserError(what, where=shown(path), fix=fix) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # of PyYAML's tags
        line = next((f":{at}" for at, one in enumerate(text.split("\n"), 1) if "!!" in one), "")
        what = f"not valid YAML: a value is not what its tag (!!…) says: {error}"
        raise UserError(what, where=f"{shown(path)}{line}", fix="Take the tag away, or change the value.") from error
    assert isinstance(values, DictConfig)
    listed = values.pop("defaults", [])
    defaults = OmegaConf.to_container(listed) if OmegaConf.is_config(listed) else listed
    return ConfigFile(path, defaults, values, lines)


def _check_size(text: str, path: Path) -> None:
    """Raises UserError or RecursionError for a text with too many values, or nested too deeply, before anything is made of it."""
    depth = values = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        values += isinstance(event, (yaml.ScalarEvent, yaml.AliasEvent))
        if depth > _DEEPEST:
            raise RecursionError
        if values > 2 * _MOST:  # a key has a value
            raise _too_many(path, event.start_mark.line + 1)


def _too_many(path: Path, line: int) -> UserError:
    what = f"more than {_MOST} values: perhaps aliases (*) of anchors (&) that hold aliases"  # OmegaConf would take minutes
    return UserError(what, where=f"{shown(path)}:{line}", fix="Write less, or name a file with the data.")


def _is_of_yaml_1_1(node: yaml.Node) -> bool:
    """Whether a value is a number in a form that would surprise who wrote it."""
    number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    return number and _OF_YAML_1_1.fullmatch(node.value) is not None and node.value.strip("-+0") != ""


def _folders(beside: Path | None) -> list[Path]:
    return [*([beside] if beside else []), shipped("configs")]


def _nearest(path: Path, recipes: Path) -> str:
    own = {one.stem: f"recipes/{one.name}" for one in sorted(recipes.glob(f"*{SUFFIX}"))}
    known = {**own, **{one.stem: str(one) for one in path.parent.glob(f"*{SUFFIX}")}}
    if found := near(path.stem, known):
        return f"Did you mean {' or '.join(known[stem] for stem in found)}?"
    return f"Recipes that come with packtrain: {', '.join(own.values())}."


def _nodes(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """(path, key, value) of every key and entry below `node`; the key of an entry is its value."""
    inside: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        inside = [(f"{prefix}.{key.value}" if prefix else str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        inside = [(f"{prefix}[{at}]", value, value) for at, value in enumerate(node.value)]
    for path, first, value in inside:
        yield path, first, value
        yield from _nodes(value, path)
