"""What the launcher of a machine tells of its ranks in logs/, where packtrain doctor finds it from any other machine.

Heartbeats are in each machine's memory; logs/heartbeats-NNNNN.json says where, and beside it what was last told of them. It is
renewed while the ranks stand still, and whenever somebody asks: a question is put into logs/question, at which every launcher
looks each LOOK_S seconds. An answer is new where its mark is another one than before, so that no clock of any machine matters.

Both files are there from the start, for what comes into a folder later may stay unseen on a network file system for a minute.
All reading and writing is done by a thread: a disk that stalls must not stall the watchdog.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packtrain.run_folder import write_json

LOOK_S = 3
STILL_S = 10
"""Seconds after which ranks that stand still are told of without being asked about; and not before a usual step is over."""
_RENEWED_S, _SELDOM_S = 5, 30
_PART_S = 3
_QUESTION = "question"


@dataclass(frozen=True, slots=True)
class Question:
    """Asked of the machines `nodes`: what their ranks do, with `stacks` in any case, else only where they stand still."""

    mark: str
    nodes: Collection[int]
    stacks: bool


def pointer_of(logs: Path, node: int) -> Path:
    """What tells others (packtrain doctor) where the heartbeats of machine `node` are while it runs, and what it told of them."""
    return logs / f"heartbeats-{node:05d}.json"


def put_question(logs: Path, nodes: Collection[int], *, stacks: bool) -> Path:
    """Asks the machines `nodes` and returns the file of the question. Raises OSError where it cannot be written."""
    file = logs / _QUESTION
    # in its place: a file system over a network sees the content of an old name sooner than a new name
    file.write_text(json.dumps(asdict(Question(os.urandom(8).hex(), list(nodes), stacks))))
    return file


class Teller:
    """A launcher's end: the pointer of machine `node`, which says `about` while the run goes on.

    `due`, `question` and `tell` are for the watchdog; none of them waits for a disk.
    """

    def __init__(self, logs: Path, node: int, about: Mapping[str, Any]) -> None:
        self._pointer, self._asked, self._node, self._about = pointer_of(logs, node), logs / _QUESTION, node, about
        self._heard: Question | None = None  # last
        self._answered = ""  # its mark
        self._told, self._number, self._stands, self._told_still = 0.0, 0, False, False
        self._next: Mapping[str, Any] | None = None
        self._news, self._over = threading.Event(), False
        self._thread: threading.Thread | None = None

    @property
    def question(self) -> Question | None:
        """That this machine has not answered yet."""
        heard = self._heard
        return heard if heard and heard.mark != self._answered and self._node in heard.nodes else None

    def start(self, *, answers: bool) -> None:
        """Writes the pointer; from now on questions are heard, if there is somebody who `answers` them."""
        if answers:
            with suppress(OSError):
                self._asked.touch()
            self._look()
            self._answered = self._heard.mark if self._heard else ""  # an old one
        with suppress(OSError):
            write_json(self._pointer, {**self._about, "answers": answers})
        if answers:
            self._thread = threading.Thread(target=self._serve, name="telling", daemon=True)
            self._thread.start()

    def close(self, last: Mapping[str, Any]) -> None:
        """The pointer says `last` from now on."""
        self._over = True
        self._news.set()
        if self._thread:
            self._thread.join(_PART_S)
        with suppress(OSError):
            write_json(self._pointer, last)

    def due(self, still_s: float, usual_s: float) -> bool:
        """Whether to tell of ranks that have stood still for so long, whose step usually takes `usual_s`."""
        self._stands = still_s >= max(STILL_S, usual_s)
        if self.question or (self._told_still and not self._stands):
            return True
        return self._stands and time.monotonic() - self._told >= min(_SELDOM_S, max(_RENEWED_S, still_s / 10))

    def tell(self, states: list[dict[str, Any]], question: Question | None, *, asked: bool) -> None:
        """What is known of the ranks (RankState.to_json), which answers the `question`, and whether they were `asked` for it."""
        self._told, self._told_still = time.monotonic(), self._stands
        self._answered = question.mark if question else self._answered
        self._number += 1
        mark = f"{os.getpid()}-{self._number}"
        self._next = {**self._about, "answers": True, "told": {"mark": mark, "asked": asked, "ranks": states}}
        self._news.set()

    def _serve(self) -> None:
        while not self._over:
            self._news.wait(LOOK_S)
            self._news.clear()
            told, self._next = self._next, None
            if told is not None and not self._over:
                self._write(told)
            self._look()

    def _look(self) -> None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            asked = json.loads(self._asked.read_text())
            self._heard = Question(str(asked["mark"]), frozenset(asked["nodes"]), bool(asked["stacks"]))

    def _write(self, content: Mapping[str, Any]) -> None:
        aside = self._pointer.with_name(f".{self._pointer.name}.told")
        with suppress(OSError):  # and never makes the folder, which may just be being moved
            aside.write_text(json.dumps(content))
            os.replace(aside, self._pointer)
