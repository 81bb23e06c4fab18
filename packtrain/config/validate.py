"""Composed values → the groups of a config, and everything about them that the types and bounds of schema.py forbid.

Interpolations see the defaults of schema.py too; what cannot be resolved becomes a fault, so that one broken value does not
hide the next.

Strict on purpose: "yes" is no number and 1 is no truth value. Two conveniences only, both for YAML 1.1: text such as
"2e-5" is a number where only a number can be meant, and an unquoted `no` (which YAML reads as false) is the choice "no".
The walk is our own rather than pydantic's: its errors for `float | str | DataSource | list[…]` come once per branch, and
every message would be rewritten here anyway.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from typing import Any, Literal, get_args, get_origin

from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from packtrain.config.keys import Fault, Key, advice_for, choices, describe, keys_of, members, suggest, words
from packtrain.config.removed_keys import REMOVED, without_old_defaults
from packtrain.config.schema import groups
from packtrain.wording import shortened

_REFUSED = object()


def plain_values(composed: DictConfig) -> tuple[dict[str, Any], list[Fault]]:
    """The values (group → key → value) as plain containers with every interpolation resolved, and what cannot be resolved.

    Keys and groups that `composed` does not have get their defaults, in it too.
    """
    faults: list[Fault] = []
    for name, cls in groups().items():
        node = composed._get_node(name)
        if node is None or (isinstance(node, DictConfig) and node._is_none()):
            composed[name] = asdict(cls())
        elif isinstance(node, DictConfig) and not (node._is_interpolation() or node._is_missing()):
            given = set(node.keys())
            for key, default in asdict(cls()).items():
                if key not in given:
                    node[key] = default
    return {str(name): _resolved(composed, name, str(name), faults) for name in composed}, faults


def build(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """The groups' dataclasses that `values` (group → key → value) describe, and what is wrong with the values.

    A key that is wrong has its default there, so that the others can still be checked against each other.
    """
    faults: list[Fault] = []
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name not in groups():
            faults.append(_unknown(name))
        elif value is not None and not isinstance(value, Mapping):
            faults.append(Fault((name,), f"{_found(value)} where a group of keys belongs", _group_fix(name)))
        elif value:
            made[name] = _build(groups()[name], f"{name}.", value, faults)
    return made, faults


def _resolved(parent: DictConfig | ListConfig, key: Any, path: str, faults: list[Fault]) -> Any:
    """`parent[key]` as plain containers; what cannot be resolved is None there and becomes a fault."""
    try:
        value = parent[key]
    except (OmegaConfBaseException, RecursionError) as error:
        faults.append(_unresolved(error, path))
        return None
    if isinstance(value, DictConfig):
        return {str(one): _resolved(value, one, f"{path}.{one}", faults) for one in value}
    if isinstance(value, ListConfig):
        return [_resolved(value, at, f"{path}[{at}]", faults) for at in range(len(value))]
    return value


def _unresolved(error: Exception, path: str) -> Fault:
    said = str(error).split("\n")[0]
    if isinstance(error, RecursionError) or "recursi" in said.lower():
        return Fault((path,), "the interpolation goes round in a circle", "Give one of its keys a value.")
    fix = "Give it a value, name keys by their full path (${group.key}), or write ${oc.env:NAME,DEFAULT}."
    return Fault((path,), said, fix)


def _build(cls: type, prefix: str, values: Mapping[str, Any], faults: list[Fault]) -> Any:
    known = keys_of(cls, prefix)
    made: dict[str, Any] = {}
    for name, value in without_old_defaults(prefix.rstrip("."), values).items():
        if name not in known:
            faults.append(_unknown(f"{prefix}{name}", None if cls in groups().values() else known))
            continue
        before = len(faults)
        taken = _accept(value, known[name], known[name].path, faults)
        if taken is not _REFUSED:
            made[name] = taken
        elif len(faults) == before:
            faults.append(_refused(value, known[name]))
    return cls(**made)


def _accept(value: Any, key: Key, path: str, faults: list[Fault]) -> Any:
    """`value` as the key's type, or _REFUSED; `faults` grows where something inside a list or mapping is wrong."""
    kinds = members(key.type)
    taken = _as_any(value, kinds, path, faults)
    if taken is _REFUSED and isinstance(value, str) and float in kinds and str not in kinds:
        with suppress(ValueError):
            taken = float(value)
    if isinstance(taken, (int, float)) and not isinstance(taken, bool) and not _in_bounds(taken, key):
        return _REFUSED
    return taken


def _as_any(value: Any, kinds: tuple[Any, ...], path: str, faults: list[Fault]) -> Any:
    for kind in kinds:
        taken = _as(value, kind, path, faults)
        if taken is not _REFUSED:
            return taken
    return _REFUSED


def _as(value: Any, kind: Any, path: str, faults: list[Fault]) -> Any:
    if kind is type(None):
        return None if value is None else _REFUSED
    if kind in (bool, str):
        fits = isinstance(value, kind) and not (isinstance(value, str) and "\0" in value)  # no path or name has a \0
        return value if fits else _REFUSED
    if kind in (int, float):
        number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        small = not isinstance(value, int) or abs(value) < 2**63  # greater ones fit no counter, and no float at all
        return kind(value) if number and small else _REFUSED
    if is_dataclass(kind):
        return _build(typing.cast(type, kind), f"{path}.", value, faults) if isinstance(value, Mapping) else _REFUSED
    if get_origin(kind) is Literal:
        value = "no" if value is False else value
        return value if isinstance(value, str) and value in get_args(kind) else _REFUSED
    if get_origin(kind) is list and isinstance(value, list):
        inside = members(get_args(kind)[0])
        return _as_list(value, inside, path, faults)
    if get_origin(kind) is dict and isinstance(value, Mapping):
        only = get_args(kind)[1]
        fits = only is Any or all(isinstance(one, only) for one in value.values())
        return dict(value) if fits else _REFUSED
    return _REFUSED


def _as_list(values: list[Any], kinds: tuple[Any, ...], path: str, faults: list[Fault]) -> Any:
    taken = []
    for at, value in enumerate(values):
        before = len(faults)
        taken.append(_as_any(value, kinds, f"{path}[{at}]", faults))
        if taken[-1] is _REFUSED and len(faults) == before:
            hint = suggest(value, [one for kind in kinds for one in choices(kind)]) if isinstance(value, str) else ""
            fix = f"Allowed: {words(kinds)}. {hint}".strip()
            faults.append(Fault((f"{path}[{at}]",), f"found {_found(value)}", fix))
    return _REFUSED if _REFUSED in taken else taken


def _in_bounds(value: float, key: Key) -> bool:
    if not math.isfinite(value):
        return False
    above = (key.minimum is None or value >= key.minimum) and (key.above is None or value > key.above)
    return above and value <= key.maximum and (key.below is None or value < key.below)


def _unknown(path: str, known: Mapping[str, Key] | None = None) -> Fault:
    """The fault of a key that does not exist; `known` are those of a source, which is no group."""
    if known is None:
        return Fault((path,), "this key was removed" if path in REMOVED else "there is no such key", advice_for(path))
    fix = suggest(path.rpartition(".")[2], known, f"A source has {', '.join(known)}.")
    return Fault((path,), "there is no such key", fix)


def _refused(value: Any, key: Key) -> Fault:
    if isinstance(value, (int, float)) and key.maximum < value < math.inf:
        return Fault((key.path,), f"found {_found(value)}", f"Allowed: at most {key.maximum:.0f}.")
    fix = f"Allowed: {describe(key)}."
    known = choices(key.type)
    hint = suggest(value, known) if isinstance(value, str) else ""
    if str(value).lower() == "off" and "no" in known:  # in a YAML file `off` is false, and so is `no`
        hint = "Did you mean no?"
    if value in known:
        fix += f" Write [{value}]."
    elif hint:
        fix += f" {hint}"
    elif isinstance(value, str) and list[str] in members(key.type):
        fix += f" Write [{value}]."
    elif str(value).lower() == "none" and type(None) in members(key.type):
        fix += " Write null for none."
    elif str in members(key.type) and isinstance(value, (bool, int, float)):
        fix += ' Quote it if it is text: in YAML "…", on the command line \'key="…"\'.'
    return Fault((key.path,), f"found {_found(value)}", fix)


def _found(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    names = {str: "text", int: "whole number", float: "number", list: "list"}
    return f"the {names.get(type(value), 'mapping')} {shortened(value)}"


def _group_fix(name: str) -> str:
    first = next(iter(keys_of(groups()[name])))
    return f"Write {name}: {{{first}: …}}, or name a file of the group under defaults: [{name}: CHOICE, _self_]."
