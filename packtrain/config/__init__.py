"""The config of a run: its keys, composition, checks and rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard


def is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether it is a mapping, as YAML and JSON have them."""
    return isinstance(value, Mapping)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Return whether it is a list."""
    return isinstance(value, list)
