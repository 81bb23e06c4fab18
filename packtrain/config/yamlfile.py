"""A YAML file as text: finding it, the line of every key in it, and keys that are written twice.

Hydra reads the values; this reads the same files again as PyYAML nodes, which know their lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from omegaconf import grammar_parser
from omegaconf.errors import GrammarParseError

from packtrain.config.shipped import shipped
from packtrain.config.suggest import near
from packtrain.errors import Problem, UserError

SUFFIX = ".yaml"
DEEPEST = 40  # levels; Hydra and OmegaConf recurse several times as deep
MOST = 20_000  # keys and entries, aliases written out: Hydra takes seconds for as many


@dataclass(frozen=True, slots=True)
class KeyLine:
    """`path` ("data.train[1].path") is written on `line` (from 1) of a file."""

    path: str
    line: int


def find_config(name: str) -> Path:
    """The absolute path of the user's YAML: a file, else one of the recipes that packtrain brings.

    Raises UserError where there is none, with the nearest names.
    """
    path = Path(os.path.expanduser(name))
    recipes = shipped("recipes")
    own = recipes / (path.relative_to("recipes") if path.parts[:1] == ("recipes",) else path)
    for candidate in (path, own):
        if os.path.isfile(candidate):
            if candidate.name == f"_self_{SUFFIX}":
                raise UserError("_self_ stands for the file itself in defaults lists", where=name, fix="Rename it.")
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


def check_text(path: Path) -> list[Problem]:
    """What keeps `path` from being read: not UTF-8, broken syntax or interpolation, no mapping, keys written twice."""
    try:
        return _check_text(path)
    except RecursionError:
        return [_too_deep(shown(path))]


def choices_as_text(path: Path) -> dict[str, str]:
    """The keys at the top of a file that `check_text` has no complaint about whose value is text: `optim: sgd`."""
    root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    return {str(key.value): value.value for key, value in pairs if isinstance(value, yaml.ScalarNode)}


def _check_text(path: Path) -> list[Problem]:
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        return [Problem(f"not UTF-8 text: {error.reason} at byte {error.start}", shown(path), "Save it as UTF-8.")]
    except OSError as error:
        return [Problem(f"cannot be read: {error.strerror}", shown(path))]
    except yaml.YAMLError as error:
        return [_syntax_problem(path, error)]
    if root is None:
        return []
    for count, one in enumerate(_walk(root, "")):
        if one.path.count(".") + one.path.count("[") > DEEPEST:
            return [_too_deep(f"{shown(path)}:{one.line}")]
        if count > MOST:
            what = f"more than {MOST} values: perhaps aliases (*) of anchors (&) that hold aliases"
            return [Problem(what, f"{shown(path)}:{one.line}", "Write less, or name a file with the data.")]
    if not isinstance(root, yaml.MappingNode):
        return [Problem("a config is a mapping of groups, such as `optim: {…}`", f"{shown(path)}:1")]
    repeated = [
        Problem(
            f"the key is written twice, on lines {first} and {again}",
            f"{shown(path)}:{again}, {key}",
            "Keep one of them.",
        )
        for key, first, again in _repeated(root, "")
    ]
    nameless = [
        Problem(
            "a key without a name (null)", f"{shown(path)}:{line}", 'A name that YAML takes for null is quoted: "null".'
        )
        for line in _nameless(root)
    ]
    return [*repeated, *nameless] + [
        Problem(
            f"broken interpolation: {said}", f"{shown(path)}:{line}", "Write ${group.key}, or \\${ for the text ${."
        )
        for line, said in _broken_interpolations(root)
    ]


def key_lines(path: Path) -> list[KeyLine]:
    """The line of every key of a file that `check_text` has no complaint about."""
    root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    return [] if root is None else list(_walk(root, ""))


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
    what = (
        f"nested without end, or more than {DEEPEST} levels deep: perhaps an alias (*) stands inside its own anchor (&)"
    )
    return Problem(what, where, "Write out what the alias stands for.")


def _walk(node: yaml.Node, prefix: str) -> Iterator[KeyLine]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}.{key.value}" if prefix else str(key.value)
            yield KeyLine(path, key.start_mark.line + 1)
            yield from _walk(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for at, value in enumerate(node.value):
            yield KeyLine(f"{prefix}[{at}]", value.start_mark.line + 1)
            yield from _walk(value, f"{prefix}[{at}]")


def _nameless(node: yaml.Node) -> Iterator[int]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:null":
                yield key.start_mark.line + 1
            yield from _nameless(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _nameless(value)


def _repeated(node: yaml.Node, prefix: str) -> Iterator[tuple[str, int, int]]:
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            path = f"{prefix}.{key.value}" if prefix else str(key.value)
            line = key.start_mark.line + 1
            if path in first and key.value != "<<":
                yield path, first[path], line
            first.setdefault(path, line)
            yield from _repeated(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for at, value in enumerate(node.value):
            yield from _repeated(value, f"{prefix}[{at}]")


def _broken_interpolations(node: yaml.Node) -> Iterator[tuple[int, str]]:
    if isinstance(node, yaml.ScalarNode) and "${" in node.value:
        try:
            grammar_parser.parse(node.value)
        except GrammarParseError as error:
            yield node.start_mark.line + 1, str(error).split("\n")[0]
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _broken_interpolations(value)
    elif isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            yield from _broken_interpolations(value)
