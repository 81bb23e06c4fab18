"""YAML files of a config: their places, their contents, and the lines of their keys.

Choices are searched in the folder of the user's YAML, then in packtrain's own configs/. In a source checkout, the folders that travel
with packtrain are beside the package; in the wheel they are inside it, under `_shipped/`.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from packtrain.config.keys import near
from packtrain.errors import UserError
from packtrain.wording import learn

PACKAGE = Path(__file__).resolve().parents[1]
SUFFIX = ".yaml"
_MOST, _DEEPEST = 10_000, 40  # values and levels, aliases written out; OmegaConf recurses several times as deep
_MISREAD_NUMBER = re.compile(r"[-+]?(0[0-7_]*[1-7][0-7_]*|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""Numbers that YAML 1.1 reads differently: 010 (8) and 1:30 (90)."""
SCHEMA_LINE = "# yaml-language-server: $schema=https://packtrain.github.io/packtrain/packtrain.schema.json"
"""First line of a config: an editor then completes and checks keys."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file as read: its `values` without `defaults`. `lines` has the line (from 1) of each key, such as "data.train[1].path"."""

    path: Path
    defaults: object
    values: DictConfig
    lines: dict[str, int]

    def place(self, key: str) -> str:
        """Return the place of a key for messages: file and line."""
        return f"{shown(self.path)}:{self.lines[key]}" if key in self.lines else shown(self.path)


def shipped(folder: Literal["configs", "recipes", "slurm", "deploy"]) -> Path:
    """Return the absolute path of one of packtrain's own folders."""
    inside = PACKAGE / "_shipped" / folder
    return inside if inside.is_dir() else PACKAGE.parent / folder


def _folders(beside: Path | None) -> list[Path]:
    """Return the folders of choices, the user's own first."""
    return [*([beside] if beside else []), shipped("configs")]


def options(group: str, beside: Path | None = None) -> list[str]:
    """Return the sorted choices of a group: file names in GROUP of configs/ and `beside`."""
    return sorted({file.stem for folder in _folders(beside) for file in (folder / group).glob(f"*{SUFFIX}")})


def find_choice(group: str, choice: str, beside: Path | None = None) -> Path | None:
    """Return the file of a choice, None if there is none. "" is the group of files that are in no folder."""
    files = (folder / group / f"{choice}{SUFFIX}" for folder in _folders(beside))
    return next((file for file in files if os.path.isfile(file)), None)


def find_config(name: str) -> Path:
    """Return the absolute path of the user's YAML or of one of packtrain's recipes.
    Raises UserError with the nearest names if there is none."""
    path, recipes = Path(os.path.expanduser(name)), shipped("recipes")
    for candidate in (path, recipes / (path.relative_to("recipes") if path.parts[:1] == ("recipes",) else path)):
        if os.path.isfile(candidate):
            if candidate.suffix != SUFFIX:
                fix = f"Rename it to {path.stem}{SUFFIX}. Data comes after a recipe: recipes/smollm2-sft.yaml data.train={name}."
                raise UserError("a config file ends with .yaml", where=name, fix=fix, code="config-not-yaml")
            return candidate.absolute()
    if os.path.exists(path):
        raise UserError("this is a folder or no regular file", where=name, fix="Name a .yaml file.", code="not-a-file")
    ours = {item.stem: f"recipes/{item.name}" for item in sorted(recipes.glob(f"*{SUFFIX}"))}
    known = {**ours, **{item.stem: str(item) for item in path.parent.glob(f"*{SUFFIX}")}}
    meant = " or ".join(known[stem] for stem in near(path.stem, known))
    fix = f"Did you mean {meant}?" if meant else f"Recipes that come with packtrain: {', '.join(ours.values())}."
    raise UserError("no such config file", where=name, fix=fix, code="no-such-config")


def shown(path: Path) -> str:
    """Return `path` for messages, relative to the current folder if that is shorter."""
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)


def read_config(path: Path) -> ConfigFile:
    """Read the file at `path`. Raises UserError with the reason and the line if it cannot be read."""
    lines: dict[str, int] = {}
    try:
        text = path.read_text(encoding="utf-8")
        learn(text)
        root = yaml.SafeLoader(text).get_single_node()
        if root is not None and not isinstance(root, yaml.MappingNode):
            what = "a config is a mapping of groups, such as `optim: {…}`"
            raise UserError(what, where=f"{shown(path)}:1", code="not-a-mapping")
        for key, first, value in _nodes(root, ""):
            where = f"{shown(path)}:{first.start_mark.line + 1}, {key}"
            if len(lines) > _MOST or key.count(".") + key.count("[") > _DEEPEST:
                what = f"more than {_MOST} values or {_DEEPEST} levels, with aliases (*) written out"
                raise UserError(what, where=where, fix="Write less, or name a file with the data.", code="too-large")
            if value.tag.endswith((":int", ":float")) and _MISREAD_NUMBER.fullmatch(value.value):
                what = f"YAML takes {value.value} for another number (octal or base 60)"
                fix = "Write the number in full digits, or in quotes if it is text."
                raise UserError(what, where=where, fix=fix, code="ambiguous-number")
            lines.setdefault(key, first.start_mark.line + 1)
        values = cast(DictConfig, OmegaConf.load(io.StringIO(text)))
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text: {error.reason} at byte {error.start}"
        raise UserError(what, where=shown(path), fix="Save it as UTF-8.", code="not-utf8") from error
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=shown(path), code="unreadable-config") from error
    except OmegaConfBaseException as error:
        where = f"{shown(path)}:{lines[error.full_key]}" if error.full_key in lines else shown(path)
        fix = "An interpolation is written ${group.key}, the text ${ as \\${."
        raise UserError(str(error).split("\n")[0], where=where, fix=fix, code="bad-interpolation") from error
    except RecursionError as error:
        raise UserError("nested too deeply", where=shown(path), fix="Write it flatter.", code="too-deep") from error
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, ValueError) as error:  # a bad tag raises the others
        mark = getattr(error, "problem_mark", None)
        what = f"not valid YAML: {getattr(error, 'problem', None) or error}"
        fix = "Check indentation, colons, quotes and tags (!!) there and above; YAML indents with spaces, not tabs."
        where = f"{shown(path)}:{mark.line + 1}" if mark else shown(path)
        raise UserError(what, where=where, fix=fix, code="not-yaml") from error
    defaults = values.pop("defaults", [])
    defaults = OmegaConf.to_container(defaults) if OmegaConf.is_config(defaults) else defaults
    return ConfigFile(path, defaults, values, lines)


def _nodes(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield (path, key, value) of every key and list entry below `node`. A list entry is its own key."""
    inside: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        inside = [(f"{prefix}.{key.value}" if prefix else str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        inside = [(f"{prefix}[{at}]", value, value) for at, value in enumerate(node.value)]
    for path, first, value in inside:
        yield path, first, value
        yield from _nodes(value, path)
