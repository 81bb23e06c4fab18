"""The config of a run: its keys, composition, checks and rules.

This file declares faults in values, and options that are passed on to other libraries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault `what` in the values of `keys`, with its `fix` and `code` (errors.py).

    Keys are paths such as "optim.learning_rate". If the first one only has nothing to act on, `because` is the key that causes
    this: see compose.py.
    """

    keys: tuple[str, ...]
    what: str
    fix: str
    because: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class Option:
    """An argument of another library: its `default`, its `allowed` values in words, and their test."""

    default: object
    allowed: str
    accepts: Callable[[object], bool]


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite number and no boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether it is a mapping, as YAML and JSON have them."""
    return isinstance(value, Mapping)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Return whether it is a list."""
    return isinstance(value, list)
