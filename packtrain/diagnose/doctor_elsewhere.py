"""What the other machines of a run say of their ranks when packtrain doctor asks, through the run folder (launch/telling.py).

A machine that does not answer in ANSWER_S is silent: what it told before is shown with its age and takes no part in the
diagnosis. The age is between two files that the same disk has dated; where machines date them, it is as wrong as their clocks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packtrain.launch.telling import pointer_of, put_question
from packtrain.monitor.old.rank_state import RankState
from packtrain.wording import ranks_in_words

ANSWER_S = 15

Pointer = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Machine:
    """What is known of the ranks of another machine: `states` as it told of them `ago_s` ago, None where that is its
    answer. `why` it is silent, and whether it was `asked`."""

    host: str
    ranks: range
    states: Sequence[RankState] = ()
    ago_s: float | None = None
    why: str = ""
    asked: bool = True

    @property
    def silent(self) -> bool:
        """Whether nothing is known of how its ranks are now."""
        return bool(self.why)

    def __str__(self) -> str:
        return f"{self.host} ({ranks_in_words(self.ranks)})"


def pointers_in(logs: Path) -> dict[int, Pointer]:
    """What each machine left in logs/, by its number; of an earlier launch on more machines only those that take part again."""
    files = {file.stem.rpartition("-")[2]: file for file in logs.glob("heartbeats-*.json")}
    found = {int(number): read_json(file) for number, file in sorted(files.items()) if number.isdigit()}
    machines = found.get(0, {}).get("machines", len(found))
    return {node: one for node, one in found.items() if node < machines or 0 not in found}


class Inquiry:
    """A question to the machines whose pointers are `live`; with `stacks` their ranks are asked what they are doing."""

    def __init__(self, logs: Path, live: Mapping[int, Pointer], *, stacks: bool) -> None:
        self._logs, self._before, self._now, self._stacks = logs, live, dict(live), stacks
        self._asked = [node for node, one in live.items() if one.get("answers")]
        self._put: Path | None = None
        with suppress(OSError):
            self._put = put_question(logs, self._asked, stacks=stacks) if self._asked else None
        self._begun = time.monotonic()

    def over(self) -> bool:
        """Whether all have answered, or had the time to."""
        self._now = {node: read_json(pointer_of(self._logs, node)) or one for node, one in self._now.items()}
        waits = any(not self._fresh(node) for node in self._asked) and not self.ended()
        return self._put is None or not waits or time.monotonic() > self._begun + ANSWER_S

    def ended(self) -> bool:
        """Whether a machine's launcher has ended meanwhile."""
        return any(not one.get("folder") for one in self._now.values())

    def machines(self) -> list[Machine]:
        """What has come of it."""
        return [self._machine(node, one) for node, one in self._now.items()]

    def _fresh(self, node: int) -> bool:
        told, before = self._now[node].get("told"), self._before[node].get("told")
        return told is not None and told != before and (told["asked"] or not self._stacks)

    def _machine(self, node: int, one: Pointer) -> Machine:
        host, ranks, states = one["host"], range(*one["ranks"]), _states(one)
        if self._fresh(node) and len(states) == len(ranks):
            return Machine(host, ranks, states)
        if not one.get("answers"):
            return Machine(host, ranks, why="is not asked from here: start packtrain doctor there", asked=False)
        ago = self._age(node) if states else None
        if self._put is None:
            return Machine(
                host, ranks, states, ago, f"cannot be asked: {self._logs}/ is not writable here", asked=False
            )
        return Machine(host, ranks, states, ago, "does not answer: machine or launcher gone?")

    def _age(self, node: int) -> float | None:
        try:
            asked = self._put.stat().st_mtime + time.monotonic() - self._begun if self._put else time.time()
            return max(0.0, asked - pointer_of(self._logs, node).stat().st_mtime)
        except OSError:
            return None


def _states(one: Pointer) -> list[RankState]:
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        return [RankState.from_json(state) for state in one["told"]["ranks"]]
    return []


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} where there is none."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
