"""The composed config as plain containers: interpolations filled in, groups given as text read, what is open named.

Interpolations see the defaults of schema.py too, which Hydra does not know; what cannot be resolved becomes a finding,
so that one broken value does not hide the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from packtrain.config.findings import Finding
from packtrain.config.keys import groups
from packtrain.config.overrides import no_choice
from packtrain.config.schema import RunConfig
from packtrain.config.shipped import find_choice, options


def plain_values(composed: DictConfig, beside: Path | None) -> tuple[dict[str, Any], list[Finding]]:
    """What the user set, as plain containers with every interpolation resolved, and what cannot be resolved.

    A group that is given as text is the choice of that name, from the folder `beside` or from ours.
    """
    findings = list(_unfilled(composed))
    merged = OmegaConf.merge(_defaults_beside(composed), composed)
    values: dict[str, Any] = {}
    for group in composed:
        name = str(group)
        value = _resolved(merged, name, name, findings) if name in groups() else None
        if isinstance(value, str):
            value = _choice(name, value, beside, findings)
        elif isinstance(value, dict) and isinstance(node := composed._get_node(group), DictConfig):
            own = {str(key) for key in node} if not node._is_interpolation() else value.keys()
            value = {key: one for key, one in value.items() if key in own}
        values[name] = value
    return values, findings


def _unfilled(composed: DictConfig) -> Iterator[Finding]:
    """The groups and keys that are left as ???; a default would hide them. What is inside a value, `_resolved` meets."""
    for group in composed:
        node = composed._get_node(group)
        if OmegaConf.is_missing(composed, group):
            yield _unfilled_at(str(group))
        elif isinstance(node, DictConfig) and not node._is_interpolation() and not node._is_none():
            yield from (_unfilled_at(f"{group}.{key}") for key in node if OmegaConf.is_missing(node, key))


def _unfilled_at(path: str) -> Finding:
    return Finding((path,), "found ???, a value that is still to be filled in", "Give it a value, or take it away.")


def _defaults_beside(composed: DictConfig) -> dict[str, Any]:
    """The defaults of all keys that `composed` does not set: a list, say, cannot be merged over the mapping it replaces."""
    nodes = {str(group): composed._get_node(group) for group in composed}
    defaults: dict[str, Any] = {}
    for group, own in asdict(RunConfig()).items():
        node = nodes.get(group)
        if isinstance(node, DictConfig) and not node._is_interpolation() and not node._is_none():
            defaults[group] = {key: value for key, value in own.items() if key not in node}
        elif not isinstance(node, ListConfig):
            defaults[group] = own
    return defaults


def _choice(group: str, choice: str, beside: Path | None, findings: list[Finding]) -> dict[str, Any]:
    if path := find_choice(group, choice, beside):
        return OmegaConf.to_container(OmegaConf.load(path), resolve=True) or {}  # type: ignore[return-value]
    wrong = no_choice(group, choice, options(group, beside), "")
    findings.append(Finding((group,), wrong.what, wrong.fix))
    return {}


def _resolved(parent: DictConfig | ListConfig, key: Any, path: str, findings: list[Finding]) -> Any:
    """`parent[key]` as plain containers; what cannot be resolved is None there and becomes a finding."""
    try:
        value = parent[key]
    except (OmegaConfBaseException, RecursionError) as error:
        findings.append(_unresolved(error, path))
        return None
    if isinstance(value, DictConfig):
        return {str(one): _resolved(value, one, f"{path}.{one}", findings) for one in value}
    if isinstance(value, ListConfig):
        return [_resolved(value, at, f"{path}[{at}]", findings) for at in range(len(value))]
    return value


def _unresolved(error: Exception, path: str) -> Finding:
    if isinstance(error, MissingMandatoryValue):
        return _unfilled_at(path)
    said = str(error).split("\n")[0]
    if variable := re.search(r"Environment variable '(.*?)' not found", said):
        name = variable[1]
        return Finding(
            (path,), f"the environment variable {name} is not set", f"Set it, or write ${{oc.env:{name},DEFAULT}}."
        )
    if missing := re.search(r"Interpolation key '(.*?)' not found", said):
        return Finding(
            (path,), f"there is no {missing[1]!r} to interpolate", "Name a key by its full path: ${group.key}."
        )
    if isinstance(error, RecursionError) or "recursi" in said.lower():
        return Finding((path,), "the interpolation goes round in a circle", "Give one of its keys a value.")
    return Finding((path,), said, "Give it a value.")
