"""The dataclasses of schema.py seen as a flat list of keys: what validation, suggestions and the reference go through."""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from packtrain.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Key:
    """One config key: `path` is "optim.learning_rate"; bounds are `>= minimum` and `> above`."""

    path: str
    type: Any
    default: Any
    doc: str
    minimum: float | None
    above: float | None


@cache
def keys_of(cls: type, prefix: str = "") -> dict[str, Key]:
    """The keys of one dataclass by name, in the order they are declared."""
    hints = typing.get_type_hints(cls)
    return {one.name: _key(one, hints[one.name], f"{prefix}{one.name}") for one in fields(cls)}


@cache
def groups() -> dict[str, type]:
    """Every group's dataclass by the group's name."""
    return dict(typing.get_type_hints(RunConfig))


@cache
def keys() -> dict[str, Key]:
    """Every key by its path."""
    return {key.path: key for name, cls in groups().items() for key in keys_of(cls, f"{name}.").values()}


def members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def choices(kind: Any) -> tuple[str, ...]:
    """The values of a Literal, wherever it is inside `kind`; () where there is none."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(value for part in get_args(kind) for value in choices(part))


def describe(key: Key) -> str:
    """What a key takes, in words: "whole number ≥ 1, or null"."""
    bounds = f" ≥ {key.minimum:g}" if key.minimum is not None else f" > {key.above:g}" if key.above is not None else ""
    optional = ", or null" if type(None) in members(key.type) else ""
    return words(members(key.type)) + bounds + optional


def words(kinds: tuple[Any, ...]) -> str:
    """Types in words: "number or text"."""
    return " or ".join(_words(kind) for kind in kinds if kind is not type(None))


def _key(one: Field[Any], kind: Any, path: str) -> Key:
    default = one.default_factory() if one.default_factory is not MISSING else one.default
    meta = one.metadata
    return Key(path, kind, default, meta["doc"], meta["minimum"], meta["above"])


def _words(kind: Any) -> str:
    simple = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    if kind in simple:
        return simple[kind]
    if is_dataclass(kind):
        return "source"
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is list:
        return f"list of {words(members(get_args(kind)[0]))}"
    return "mapping to text" if get_args(kind)[1] is str else "mapping"
