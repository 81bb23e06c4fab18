"""The tables of the trainers (tables/*.yaml): which rule each of their keys has. Those of one trainer stand over those of all."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    rules: list[tuple[str, Rule]] = []
    for keys, text in content.get("rules", {}).items():
        name, *arguments = text.split(" ", 2)
        function = getattr(counterparts, name, None) or getattr(foreign_data, name)
        rules.append((keys, partial(function, *arguments, *([""] if name == "part" and len(arguments) == 1 else []))))
    for keys, text in content.get("same", {}).items():
        path, how = f"{text} text".split()[:2]
        rules.append((keys, partial(counterparts.same, path, how)))
    for keys, ours in content.get("switches", {}).items():
        values = {path: item for path, item in ours.items() if path != "why"}
        rules.append((keys, partial(counterparts.switch, values, ours.get("why", ""), "converted")))
    rules += [(keys, partial(counterparts.chosen, choice)) for keys, choice in content.get("choices", {}).items()]
    lists = {
        "parts": lambda path: partial(counterparts.part, path, ""),
        "not needed": lambda why: partial(counterparts.listed, why),
        "no counterpart": lambda why: partial(counterparts.switch, {}, why, "no counterpart"),
        "refused": lambda what: partial(counterparts.refused, what),
    }
    for title, make in lists.items():
        rules += [(key, make(why)) for why, keys in content.get(title, {}).items() for key in keys.split()]
    return rules
