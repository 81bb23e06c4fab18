"""The form of a check: a name, a verdict, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]
GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Check:
    """`found` in words; `fix` is a command or a config key, "" where all is well."""

    name: str
    status: Status
    found: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        """Plain containers."""
        return asdict(self)


def passed(name: str, found: str) -> Check:
    """All is well."""
    return Check(name, "ok", found)


def first_or(name: str, checks: Iterable[Check], otherwise: str) -> Iterator[Check]:
    """The checks, or one that says `otherwise` where none of them found anything wrong."""
    found = list(checks)
    yield from found or [passed(name, otherwise)]


def size(number: int | None) -> str:
    """Bytes in words."""
    if number is None:
        return "not known"
    if 0 < number < MIB:
        return f"{number / 1024:.0f} KiB"
    if number < GIB:
        return f"{number / MIB:.0f} MiB"
    return f"{number / GIB:.1f} GiB" if number < 100 * GIB else f"{number / GIB:.0f} GiB"
