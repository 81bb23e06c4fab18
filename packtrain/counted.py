"""Numbers of things in words."""

from __future__ import annotations


def counted(number: float, things: str) -> str:
    """ "1 document", "1,000 documents", "2.5 pairs"; `things` is the plural."""
    one = things.removesuffix("s") if not things.endswith("es") or things in _WITH_E else things.removesuffix("es")
    return f"{number:,} {one if number == 1 else things}"


_WITH_E = ("examples", "machines", "files", "times", "nodes")
