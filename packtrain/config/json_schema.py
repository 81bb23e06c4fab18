"""JSON Schema of a config file, from schema.py: `packtrain schema`, docs/packtrain.schema.json.

It is of draft 7, which editors understand best. They read YAML 1.2, where `yes` and 10_000 are text. packtrain reads YAML 1.1, so this
text counts as a boolean or a number. Names are those of packtrain and of installed packages: another one is an error. Only a user's own
file of a group may have any name.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from packtrain.config.keys import Key, Kind, describe, keys_of, members
from packtrain.config.schema import DataSource, Stage, WeightGroup, groups
from packtrain.config.yaml_files import SCHEMA_LINE, options
from packtrain.errors import boundary

Schema = dict[str, Any]
_TYPES: dict[Kind, str] = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}
_INTERPOLATION = r"\$\{"
_AS_TEXT: dict[Kind, str] = {  # what only YAML 1.1 reads as a value of the type, or validate.py does
    bool: "^([Yy]es|YES|[Nn]o|NO|[Oo]n|ON|[Oo]ff|OFF)$",
    int: r"^\+?\d+(_\d+)+$",
    float: r"^\+?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?$",
}


def write_schema(output: Path | None) -> None:
    """Print the schema, or write it to `output`."""
    text = json.dumps(schema(), indent=1, ensure_ascii=False)
    if output is None:
        print(text)
        return
    with boundary("cannot be written", str(output), "Name another file.", code="cannot-write"):
        output.write_text(f"{text}\n", encoding="utf-8")


def schema() -> Schema:
    """Return the schema of a config file."""
    chosen = {name: _choice(name) for name in groups()}
    entry = {"type": ["object", "string", "null"], "pattern": "^[^$]+$", "minProperties": 1, "maxProperties": 1}
    entry |= {"properties": chosen, "patternProperties": {f"^/{name}$": chosen[name] for name in chosen}}
    entry |= {"additionalProperties": False}
    first = "Files of configs/ by group, and YAML files beside this one, in their order; _self_ is this file."
    properties = {"defaults": {"description": first, "type": "array", "items": entry}}
    for name, cls in groups().items():  # text is a choice: `optim: sgd`
        own = _mapping(cls, f"{name}.") | {"type": ["object", "string", "null"], "examples": options(name)}
        properties[name] = {"description": cls.__doc__, **own}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": SCHEMA_LINE.partition("=")[2].strip(),
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "definitions": {cls.__name__: _mapping(cls) for cls in (DataSource, Stage, WeightGroup)},
    }


def _choice(group: str) -> Schema:
    return {"type": ["string", "integer", "null"], "pattern": "^[^$]+$", "examples": options(group)}


def _mapping(cls: type, prefix: str = "") -> Schema:
    own = sorted(keys_of(cls, prefix).values(), key=lambda key: key.advanced)
    properties = {key.path.removeprefix(prefix): _key(key) for key in own}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _key(key: Key) -> Schema:
    kinds, bounds = members(key.type), {"minimum": key.minimum, "exclusiveMinimum": key.above}
    bounds |= {"maximum": key.maximum, "exclusiveMaximum": key.below}
    bounds = {name: value for name, value in bounds.items() if value is not None and {int, float} & {*kinds}}
    marked = {"x-advanced": True} if key.advanced else {}
    doc = f"{key.doc} Default: {json.dumps(key.default)}."
    return {"description": doc, "default": key.default, **marked, **_value(kinds, describe(key), bounds)}


def _value(kinds: tuple[Kind, ...], allowed: str = "", bounds: Schema | None = None) -> Schema:
    """Return the schema of a value of one of `kinds`. `allowed` says in words what it takes."""
    plain = {"type": [_TYPES[kind] for kind in kinds if kind in _TYPES], **(bounds or {})}
    if str not in kinds:
        plain["type"].append("string")
        plain["pattern"] = "|".join([_INTERPOLATION, *(_AS_TEXT[kind] for kind in kinds if kind in _AS_TEXT)])
        plain |= {"patternErrorMessage": f"Allowed: {allowed}."} if allowed else {}
    parts = [_part(kind) for kind in kinds if kind not in _TYPES]
    return {"anyOf": [*parts, plain]} if parts else plain


def _part(kind: Kind) -> Schema:
    inside = get_args(kind)
    if get_origin(kind) is Literal:
        return {"enum": [*inside, *([False] if "no" in inside else [])]}  # YAML 1.1 reads `no` as false
    if get_origin(kind) is list:
        return {"type": "array", "items": _value(members(inside[0]))}
    if get_origin(kind) is not dict:
        return {"$ref": f"#/definitions/{kind.__name__}"}
    entry = members(inside[1])
    if entry == (Any,):
        return {"type": "object"}
    names = {"propertyNames": {"not": {"enum": [*keys_of(DataSource)]}}} if DataSource in entry else {}
    return {"type": "object", **names, "additionalProperties": _value(entry)}
