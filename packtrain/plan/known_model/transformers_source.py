"""What the source of transformers says of a model type: the keys of its config with their defaults, and what its layers are called.

The package is not imported, which would take seconds: its files are found by the tables of its Auto classes, and read as text.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_OF_EVERY_CONFIG = ("_name_or_path", "output_attentions", "per_layer_config")
"""What the base class of all configs makes beside its fields."""
_FOR_CAUSAL_LM, _FOR_SCORES = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
_PAIR = re.compile(r'"([\w.-]+)"\s*[,:]\s*"(\w+)"')
_CLASS = re.compile(r"^ *class (\w+)", re.MULTILINE)
_ASSIGNED = re.compile(r"\bself\.(\w+)(?:: [^=\n]+)? = ")
_NAMED_ELSEWHERE = re.compile(r"AutoModel\w*\.from_config\(|ModuleDict\(|add_module\(")
"""What makes layers whose names are not in the file: a config inside the config, or data."""


@cache
def model_types() -> Mapping[str, str]:
    """The model types that transformers knows, each with the class of its config."""
    return {kind: name for kind, name in _config_tables() if name.endswith("Config")}


def is_trained(model_type: str, *, scores: bool = False) -> bool:
    """Whether transformers has a causal language model of the type, with `scores` a classifier."""
    types, table = model_types(), _model_table(_FOR_SCORES if scores else _FOR_CAUSAL_LM)
    return any(kind in table for kind, config in types.items() if config == types[model_type])


@cache
def defaults_of(model_type: str) -> Mapping[str, Any]:
    """Every key that the config of a model type takes, with its default (None where that is computed); {} if they are not found."""
    classes = _config_classes(_file_with(model_type, model_types(), "configuration"))
    merged: dict[str, Any] = {}
    todo = [model_types().get(model_type, "")]
    while todo:
        if (made := classes.get(todo.pop())) is None:
            return {}
        merged = {**_set_in_methods(made), **_declared(made), **merged}
        todo += [base for base in map(ast.unparse, made.bases) if base != "PreTrainedConfig"]
    renamed = ("rope_parameters",) if "rope_scaling" in merged else ()
    common = _declared(_config_classes(_source("configuration_utils"))["PreTrainedConfig"])
    return {**dict.fromkeys([*_OF_EVERY_CONFIG, *renamed]), **common, **merged}


@cache
def layer_names(model_type: str, *, scores: bool = False) -> frozenset[str]:
    """The names of layers that a model of this type may have, and of other attributes; empty where they are not found.

    A part of a layer's dotted name is a number or among them. With `scores` those of a reward model too.
    """
    names = {"score"} if scores else set[str]()  # the head of the classifiers that are in no model's own file
    for table in (_FOR_CAUSAL_LM, _FOR_SCORES)[: 1 + scores]:
        types = _model_table(table)
        _, *parts = _CLASS.split(_file_with(model_type, types, "modeling"))
        classes = dict(zip(parts[::2], parts[1::2], strict=True))
        todo, seen = [types.get(model_type, "")], set[str]()
        while todo:
            text = classes.get(todo.pop())
            if text is None or _NAMED_ELSEWHERE.search(text):
                return frozenset()
            names.update(_ASSIGNED.findall(text))
            used = (set(re.findall(r"\w+", text)) & classes.keys()) - seen
            seen |= used
            todo += used
    return frozenset(names)


def _declared(made: ast.ClassDef) -> dict[str, Any]:
    """The fields of a config class, and the other names that it has for them: either name of a pair is taken."""
    found: dict[str, Any] = {}
    for node in made.body:
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            found[ast.unparse(node.target)] = _literal(node.value)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "attribute_map":
            pairs = _literal(node.value) or {}
            found = {**dict.fromkeys([*pairs, *pairs.values()]), **found}
    return found


def _set_in_methods(made: ast.ClassDef) -> dict[str, None]:
    """The attributes that the methods of a config class set."""
    stored = [one for one in ast.walk(made) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)]
    return {one.attr: None for one in stored if ast.unparse(one.value) == "self"}


def _literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


@cache
def _config_classes(text: str) -> Mapping[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}


@cache
def _config_tables() -> list[tuple[str, str]]:
    """Pairs of a model type and the class of its config, or the folder of its files where that has another name."""
    texts = [_source(f"models/auto/{file}") for file in ("auto_mappings", "configuration_auto")]
    return [pair for text in texts for pair in _PAIR.findall(text)]


@cache
def _model_table(name: str) -> Mapping[str, str]:
    """The model types of a table of Auto classes, each with the class of its model."""
    text = _source("models/auto/modeling_auto")
    found = re.search(rf"^{name} = OrderedDict\((.*?)^\)", text, re.MULTILINE | re.DOTALL)
    return dict(_PAIR.findall(found[1])) if found else {}


def _file_with(model_type: str, classes: Mapping[str, str], what: str) -> str:
    """The text of the file (`what`_*.py) with the class of a model type, which may be that of another type; "" if there is none."""
    name = classes.get(model_type)
    folders = {kind: folder for kind, folder in _config_tables() if folder.islower()}
    for kind in [model_type, *(other for other, its in classes.items() if its == name)] if name else ():
        folder = folders.get(kind, kind.replace("-", "_"))
        for file in sorted(_root().glob(f"models/{folder}/{what}_*.py")):
            if f"class {name}(" in (text := file.read_text(encoding="utf-8")):
                return text
    return ""


def _source(module: str) -> str:
    return (_root() / f"{module}.py").read_text(encoding="utf-8")


@cache
def _root() -> Path:
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.origin is not None  # packtrain needs it
    return Path(found.origin).parent
