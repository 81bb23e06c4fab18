"""A fault in the values of config keys, and options passed on to another library."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault `what` in the values of `keys` (paths such as "optim.learning_rate"), its `fix` and `code` (errors.py).

    If the first of `keys` only has nothing to act on, `because` is the key that causes this: see compose.py.
    """

    keys: tuple[str, ...]
    what: str
    fix: str
    because: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class Option:
    """An argument of another library: its `default`, its `allowed` values in words, and their test."""

    default: Any
    allowed: str
    accepts: Callable[[Any], bool]


def is_number(value: object) -> bool:
    """Return whether `value` is a finite number and no boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
