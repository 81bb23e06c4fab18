"""A fault in a config before anyone has looked up where its keys were written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """`what` is wrong with the values of `keys` (paths such as "optim.learning_rate"), and how to `fix` it."""

    keys: tuple[str, ...]
    what: str
    fix: str
