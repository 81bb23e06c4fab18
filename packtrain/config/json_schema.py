"""JSON Schema of a config file, from schema.py: `packtrain schema`, docs/packtrain.schema.json.

Editors read YAML 1.2, where `yes` and 10_000 are text. packtrain reads YAML 1.1, where they are a boolean and a number. So the
schema also allows text that YAML 1.1 reads as one of them.
"""

from __future__ import annotations

import json
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from packtrain.config.keys import Key, Kind, describe, keys_of, members
from packtrain.config.schema import DataSource, Stage, WeightGroup, groups
from packtrain.config.yaml_files import SCHEMA_LINE, options

Schema = dict[str, Any]
_TYPES: dict[Kind, str] = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}
_AS_TEXT = {bool: "^([Yy]es|[Nn]o|[Oo]n|[Oo]ff)$", int: r"^\d+(_\d+)+$", float: r"^\d[\d_]*\.?\d*([eE][-+]?\d+)?$"}


def schema_text() -> str:
    """Return the schema as JSON."""
    text: Schema = {"type": ["string", "integer", "null"], "pattern": "^[^$]+$"}
    chosen = {name: {**text, "examples": options(name)} for name in groups()}
    entry = {**text, **_closed(chosen, "string", "null"), "minProperties": 1, "maxProperties": 1}
    entry["patternProperties"] = {f"^/{name}$": chosen[name] for name in chosen}
    what = "Files of configs/ by group, or YAML files beside this one, in order; _self_ is this file."
    own: Schema = {"defaults": {"description": what, "type": "array", "items": entry}}
    for name, cls in groups().items():  # a group may also be text, the name of a choice: `optim: sgd`
        own[name] = {"description": cls.__doc__, "examples": options(name), **_closed(_keys(cls), "string", "null")}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "$id": SCHEMA_LINE.partition("=")[2].strip()}
    entries = {cls.__name__: _closed(_keys(cls)) for cls in (DataSource, Stage, WeightGroup)}
    return json.dumps({**head, **_closed(own), "definitions": entries}, indent=1)


def _closed(properties: Schema, *others: str) -> Schema:
    return {"type": ["object", *others], "properties": properties, "additionalProperties": False}


def _keys(cls: type) -> Schema:
    return {name: _key(key) for name, key in sorted(keys_of(cls).items(), key=lambda item: item[1].advanced)}


def _key(key: Key) -> Schema:
    kinds, doc = members(key.type), f"{key.doc} Default: {json.dumps(key.default)}."
    names = ("minimum", "exclusiveMinimum", "exclusiveMaximum", "maximum") if {int, float} & {*kinds} else ()
    ends = zip(names, (key.minimum, key.above, key.below, key.maximum), strict=False)
    bounds = {name: end for name, end in ends if end is not None}
    value = _value(kinds, bounds, describe(key))
    return {"description": doc, "default": key.default, "x-advanced": key.advanced, **value}


def _value(kinds: tuple[Kind, ...], bounds: Schema, allowed: str) -> Schema:
    plain = {"type": [_TYPES[kind] for kind in kinds if kind in _TYPES], **bounds}
    if str not in kinds:
        pattern = "|".join([r"\$\{", *(_AS_TEXT[kind] for kind in kinds if kind in _AS_TEXT)])
        plain |= {"type": [*plain["type"], "string"], "pattern": pattern, "patternErrorMessage": f"Allowed: {allowed}."}
    parts = [_part(kind, allowed) for kind in kinds if kind not in _TYPES]
    return {"anyOf": [*parts, plain]} if parts else plain


def _part(kind: Kind, allowed: str) -> Schema:
    if get_origin(kind) is None:
        return {"$ref": f"#/definitions/{kind.__name__}"}
    inside, entry = get_args(kind), members(get_args(kind)[-1])
    if get_origin(kind) is Literal:
        return {"enum": [*inside, *([False] if "no" in inside else [])]}  # YAML 1.1 reads `no` as false
    if get_origin(kind) is list:
        return {"type": "array", "items": _value(entry, {}, allowed)}
    names = {"propertyNames": {"not": {"enum": [*keys_of(DataSource)]}}} if DataSource in entry else {}
    return {"type": "object", **names, "additionalProperties": entry == (Any,) or _value(entry, {}, allowed)}
