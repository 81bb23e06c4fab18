"""Composed values → dataclasses of a config, and faults against schema.py's types and bounds.

Interpolations see the defaults of schema.py too. An unresolvable value becomes a fault, so that it does not hide the
next. Types are strict: "yes" is not a number, and 1 is not a boolean. There are two exceptions, both for YAML 1.1: text such as
"2e-5" is a number where only a number can be meant, and an unquoted `no` (which YAML reads as false) is the choice "no".
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from typing import Any, Literal, get_args, get_origin

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from packtrain.config import Fault, is_list, is_mapping
from packtrain.config.keys import (
    OTHER_VALUES,
    Key,
    Kind,
    advice_for,
    choices,
    describe,
    keys_of,
    members,
    suggest,
    words,
)
from packtrain.config.schema import DataSource, RunConfig, groups
from packtrain.wording import shortened

_REFUSED = object()


def plain_values(composed: DictConfig) -> tuple[dict[str, object], list[Fault]]:
    """Return values as plain containers with resolved interpolations, and faults of unresolvable ones.

    The values are group → key → value. Keys and groups missing in `composed` get their defaults, in `composed` too.
    """
    faults: list[Fault] = []
    for name, cls in groups().items():
        if OmegaConf.is_missing(composed, name) or OmegaConf.is_interpolation(composed, name):
            continue
        if (node := composed.get(name)) is None:
            composed[name] = asdict(cls())
        elif isinstance(node, DictConfig):
            given = set(node.keys())
            for key, default in asdict(cls()).items():
                if key not in given:
                    node[key] = default
    return {str(name): _resolved(composed, name, str(name), faults) for name in composed}, faults


def build(values: Mapping[str, object]) -> tuple[RunConfig, list[Fault]]:
    """Return the config made from `values`, and the faults of the values.

    `values` are group → key → value. A wrong key gets its default there, so that the others can still be checked against each other.
    """
    faults: list[Fault] = []
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name not in groups():
            faults.append(Fault((name,), "there is no such key", advice_for(name), code="no-such-key"))
        elif value is not None and not is_mapping(value):
            fix = f"Write {name}: {{{next(iter(keys_of(groups()[name])))}: …}}, or name a file of the group under "
            fix += f"defaults: [{name}: CHOICE, _self_]."
            faults.append(Fault((name,), f"{_in_words(value)} where a group of keys belongs", fix, code="not-a-group"))
        elif value:
            made[name] = _build(groups()[name], f"{name}.", value, faults)
    return RunConfig(**made), faults


def _resolved(parent: DictConfig | ListConfig, key: Any, path: str, faults: list[Fault]) -> object:
    """Return `parent[key]` as plain containers. An unresolvable value is None there and becomes a fault."""
    try:
        value = parent[key]
    except (OmegaConfBaseException, RecursionError) as error:
        what, fix = str(error).split("\n")[0], "Give it a value, name keys by their full path (${group.key}), or write "
        if isinstance(error, RecursionError) or "recursi" in what.lower():
            what = "the interpolation goes round in a circle"
        faults.append(Fault((path,), what, f"{fix}${{oc.env:NAME,DEFAULT}}.", code="unresolved-value"))
        return None
    if isinstance(value, DictConfig):
        return {str(item): _resolved(value, item, f"{path}.{item}", faults) for item in value}
    if isinstance(value, ListConfig):
        return [_resolved(value, at, f"{path}[{at}]", faults) for at in range(len(value))]
    return value


def _build(cls: type, prefix: str, values: Mapping[str, object], faults: list[Fault]) -> object:
    known = keys_of(cls, prefix)
    made: dict[str, object] = {}
    for name, value in values.items():
        path, before = f"{prefix}{name}", len(faults)
        if name not in known and cls in groups().values():
            faults.append(Fault((path,), "there is no such key", advice_for(path), code="no-such-key"))
        elif name not in known:
            fix = suggest(name, known, f"A {words((cls,))} has {', '.join(known)}.")
            faults.append(Fault((path,), "there is no such key", fix, code="no-such-key"))
        else:
            taken = _as(value, members(known[name].type), path, faults)
            if taken is not _REFUSED and _in_bounds(taken, known[name]):
                made[name] = taken
            elif len(faults) == before:
                faults.append(_refused(value, known[name]))
    return cls(**made)


def _as(value: object, kinds: tuple[Kind, ...], path: str, faults: list[Fault]) -> object:
    """Return `value` as the first of `kinds` that it fits, else _REFUSED. `faults` grows if something inside it is wrong."""
    before = len(faults)
    for kind in kinds:
        if (taken := _as_kind(value, kind, path, faults)) is not _REFUSED or len(faults) > before:
            return taken
    if isinstance(value, str) and float in kinds and str not in kinds:  # "2e-5"
        with suppress(ValueError):
            return float(value)
    return _REFUSED


def _as_kind(value: object, kind: Kind, path: str, faults: list[Fault]) -> object:
    fits, outer = False, get_origin(kind)
    if kind in (bool, str, type(None)):
        fits = isinstance(value, kind) and not (isinstance(value, str) and "\0" in value)  # no path or name has a \0
    elif kind in (int, float):
        if isinstance(value, (int, kind)) and not isinstance(value, bool):
            fits = isinstance(value, float) or abs(value) < 2**63  # greater ones fit no counter, and no float at all
            value = kind(value) if fits else value
    elif is_dataclass(kind):
        return _build(typing.cast(type, kind), f"{path}.", value, faults) if is_mapping(value) else _REFUSED
    elif outer is Literal:
        value = "no" if value is False else value  # YAML 1.1
        fits = isinstance(value, str) and value in get_args(kind)
    elif outer is list and is_list(value):
        inside = members(get_args(kind)[0])
        value = [_as_entry(item, inside, f"{path}[{at}]", faults) for at, item in enumerate(value)]
        fits = _REFUSED not in value
    elif outer is dict and is_mapping(value):
        inside = members(get_args(kind)[1])
        if DataSource not in inside:
            fits, value = inside == (Any,) or all(isinstance(item, str) for item in value.values()), dict(value)
        elif keys_of(DataSource).keys().isdisjoint(value):  # else it is one source
            value = {name: _as_entry(item, inside, f"{path}.{name}", faults) for name, item in value.items()}
            fits = _REFUSED not in value.values()
    return value if fits else _REFUSED


def _as_entry(item: object, kinds: tuple[Kind, ...], path: str, faults: list[Fault]) -> object:
    """Return `item` like `_as`. A refused entry of a list or mapping becomes a fault."""
    before = len(faults)
    if (taken := _as(item, kinds, path, faults)) is _REFUSED and len(faults) == before:
        known = [name for part in kinds for name in choices(part)]
        fix = f"Allowed: {words(kinds)}. {suggest(str(item), known)}".strip()
        faults.append(Fault((path,), f"found {_in_words(item)}", fix, code="bad-value"))
    return taken


def _in_bounds(value: object, key: Key) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return True
    above = (key.minimum is None or value >= key.minimum) and (key.above is None or value > key.above)
    return math.isfinite(value) and above and value <= key.maximum and (key.below is None or value < key.below)


def _refused(value: object, key: Key) -> Fault:
    kinds, known = members(key.type), choices(key.type)
    fix = f"Allowed: {describe(key)}."
    if isinstance(value, (int, float)) and key.maximum < value < math.inf:
        fix = f"Allowed: at most {key.maximum:.0f}."
    elif isinstance(value, str) and (value in known or (list[str] in kinds and not known)):
        fix += f" Write [{value}]."
    elif isinstance(value, str) and value.lower() == "none" and type(None) in kinds:
        fix += " Write null for none."
    elif isinstance(value, (bool, str)) and (key.path, value) in OTHER_VALUES:
        fix += f" {OTHER_VALUES[key.path, value]}"
    elif isinstance(value, str):
        fix = f"{fix} {suggest(value, known)}".strip()
    elif str in kinds and isinstance(value, (bool, int, float)):
        fix += ' Quote it if it is text: in YAML "…", on the command line \'key="…"\'.'
    return Fault((key.path,), f"found {_in_words(value)}", fix, code="bad-value")


def _in_words(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    names: dict[type, str] = {str: "text", int: "whole number", float: "number", list: "list"}
    return f"the {names.get(type(value), 'mapping')} {shortened(value)}"
