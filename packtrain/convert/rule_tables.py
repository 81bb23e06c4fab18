"""The tables of the trainers (tables/*.yaml): which rule each of their keys has. Those of one trainer stand over those of all."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import yaml

from packtrain.convert import counterparts, foreign_data
from packtrain.convert.counterparts import Rule

OriginName = Literal["axolotl", "llamafactory", "ms-swift", "trl"]


@dataclass(frozen=True, slots=True)
class Table:
    """The keys that tell a trainer's configs (`marks`), its `defaults` where they are not ours, the names of what makes a `step`, and the
    rules by pattern of keys, the first that fits."""

    marks: frozenset[str]
    defaults: Mapping[str, Any]
    step: Mapping[str, str]
    rules: Mapping[str, Rule]

    def rule(self, key: str) -> Rule:
        """The rule of a key."""
        fitting = (rule for pattern, rule in self.rules.items() if re.fullmatch(pattern, key))
        return next(
            fitting, partial(counterparts.switch, {}, "packtrain convert does not know this key", "no counterpart")
        )


@cache
def table(name: OriginName) -> Table:
    """The table of a trainer."""
    folder = Path(__file__).with_name("tables")
    own, of_all = (yaml.safe_load((folder / f"{part}.yaml").read_text(encoding="utf-8")) for part in (name, "common"))
    rules = {**dict(_rules(own)), **{keys: rule for keys, rule in _rules(of_all) if keys not in dict(_rules(own))}}
    return Table(frozenset(own["marks"].split()), own["defaults"], own["step"], rules)


def _rules(content: Mapping[str, Any]) -> list[tuple[str, Rule]]:
    """The rules of a table, by patterns of keys."""
    each: dict[str, Callable[[Any], Rule]] = {
        "rules": _by_name,
        "switches": lambda ours: partial(
            counterparts.switch, {path: ours[path] for path in ours if path != "why"}, ours.get("why", ""), "converted"
        ),
        "choices": lambda choice: partial(counterparts.chosen, choice),
    }
    lists: dict[str, Callable[[str], Rule]] = {
        "parts": lambda path: partial(counterparts.part, path, ""),
        "not needed": lambda why: partial(counterparts.listed, why),
        "no counterpart": lambda why: partial(counterparts.switch, {}, why, "no counterpart"),
        "refused": lambda what: partial(counterparts.refused, what),
    }
    same = [(how, ours, key) for how, rows in content["same"].items() for ours in rows for key in rows[ours].split()]
    rules: list[tuple[str, Rule]] = [
        (key, partial(counterparts.same, ours.replace("*", key), how)) for how, ours, key in same
    ]
    rules += [(keys, make(row)) for title, make in each.items() for keys, row in content.get(title, {}).items()]
    for title, make in lists.items():
        rules += [(key, make(why)) for why, keys in content.get(title, {}).items() for key in keys.split()]
    return rules


def _by_name(text: str) -> Rule:
    name, *arguments = text.split(" ", 2)
    return partial(getattr(counterparts, name, None) or getattr(foreign_data, name), *arguments)
