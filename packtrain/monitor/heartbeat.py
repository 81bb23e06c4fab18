"""What every rank reports while it works: its phase, step and micro-batch, and whether it waits for the others.

`enter` says where the rank is, `waiting` stands around everything that waits for other ranks (collectives, barriers, the
store, joining), `progress` says that something long goes on. Each is an assignment of a few values; a small thread sends them
to the watchdog once a second (`connect`), and answers with stacks and pending collectives when it is asked to.
"""

from __future__ import annotations

import functools
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from packtrain.monitor import stacks
from packtrain.monitor.channel import ADDRESS, SECRET, Client, NoAnswer

Phase = str
IN_WORDS: Mapping[Phase, str] = {
    "start": "starting",
    "join": "joining the other processes",
    "prepare": "preparing the data",
    "load": "loading the model",
    "proof": "the checks before training",
    "data": "loading data",
    "counts": "exchanging the counts",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "step end": "logging",
    "checkpoint": "the checkpoint",
    "eval": "the evaluation",
    "final": "writing the results",
    "done": "its end",
}
"""All phases, in the order in which a rank comes through them; those from `data` to `eval` once a step."""
PHASES = tuple(IN_WORDS)
BEFORE_TRAINING = PHASES[: PHASES.index("data")]
LONG = ("prepare", "load", "proof", "final")
"""Phases that may take hours, in which no collective waits for a rank: they have no limit while they make progress."""
_COMPUTES = 0.05  # of a core
_BEATS_A_SECOND = 200  # of all ranks together
_TO_ASK_S = 5


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds that a collective operation of a step may take, and one of a checkpoint; and that all wait for each other at
    the start. By them each phase has a deadline: how long a rank may be in it without progress."""

    step_s: float = 600
    checkpoint_s: float = 1800
    join_s: float = 300

    def of(self, phase: Phase) -> float:
        """That of a collective operation which begins in `phase`."""
        return self.checkpoint_s if phase in ("checkpoint", "final") else self.step_s

    def deadline_s(self, phase: Phase) -> float:
        """How long a rank may stand still in `phase`."""
        if phase in ("start", "join"):  # who waits there gives up by itself, and has better words
            return 2 * self.join_s + 60
        limit_s = max(self.step_s, self.checkpoint_s) if phase in LONG else self.of(phase)
        # a little less than the collectives of the others have, so that the reason is told before they end
        return min(0.9 * limit_s, max(limit_s - _TO_ASK_S, limit_s / 2))


def progress_of(phase: Phase, step: int, micro: int) -> tuple[int, ...]:
    """Grows as a rank comes along: the one whose is least has kept the others waiting."""
    order = PHASES.index(phase)
    if phase in BEFORE_TRAINING:
        return (0, order)
    if phase in ("final", "done"):
        return (2, order)
    passes = PHASES.index("forward")  # forward and backward of a micro-batch come before those of the next
    return (1, step, passes if phase == "backward" else order, micro, order)


def place_of(phase: Phase, step: int, micro: int) -> str:
    """In words: "the forward pass of step 12 (micro-batch 3)"."""
    words = IN_WORDS[phase]
    if phase in BEFORE_TRAINING or phase in ("final", "done"):
        return words
    of = "after" if phase in ("checkpoint", "eval", "step end") else "of"
    return f"{words} {of} step {step}{f' (micro-batch {micro})' if micro > 1 else ''}"


class _State(NamedTuple):
    phase: Phase
    step: int
    micro: int
    waits: str
    changes: int


class Heartbeat:
    """That of a rank. Its methods may be called by any thread of it."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.usual_s = rank, 0.0
        """`usual_s`: seconds of a step that is nothing special, 0 where that is not known yet."""
        self._state = _State("start", 0, 0, "", 0)
        self._worked, self._looked = 0, (time.monotonic(), time.process_time())
        self._over = threading.Event()

    @property
    def phase(self) -> Phase:
        """That in which the rank is."""
        return self._state.phase

    def enter(self, phase: Phase, *, step: int | None = None, micro: int = 0) -> float:
        """Now in `phase`, of the step before unless told; returns time.monotonic()."""
        state = self._state
        self._state = _State(phase, state.step if step is None else step, micro, state.waits, state.changes + 1)
        return time.monotonic()

    def progress(self) -> None:
        """Still in the same phase, and at work: how long it has stood still counts anew."""
        self._state = self._state._replace(changes=self._state.changes + 1)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Inside the block the rank waits for others: for `what`, in words that follow "waits for"."""
        before = self._state.waits
        self._state = self._state._replace(waits=what, changes=self._state.changes + 1)
        try:
            yield
        finally:
            self._state = self._state._replace(waits=before, changes=self._state.changes + 1)

    def message(self, *, asked: bool = False) -> dict[str, Any]:
        """The body of a beat; with stacks and collectives where they are `asked` for.

        `changes` grows with all that the rank reports; where it does not, the rank stands still.
        """
        state = self._state
        self._note_work(state)
        said = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **state._asdict(),
            "changes": state.changes + self._worked,
            "usual_s": round(self.usual_s, 3),
        }
        if asked:
            said["stacks"], said["collectives"] = "", {}
            with suppress(Exception):  # nothing that is only told may end a run
                said["stacks"] = stacks.own()
                said["collectives"] = stacks.own_collectives()
        return said

    def _note_work(self, state: _State) -> None:
        """In a LONG phase computing counts as progress: not everything there is a loop of ours that could say so."""
        (before, used), self._looked = self._looked, (time.monotonic(), time.process_time())
        now, seconds = self._looked
        if state.phase in LONG and not state.waits and seconds - used >= _COMPUTES * (now - before) > 0:
            self._worked += 1

    def connect(
        self,
        client: Client,
        ranks: int,
        *,
        on_end: Callable[[str], None] = lambda reason: None,
        on_silence: Callable[[float, NoAnswer], None] = lambda silent_s, error: None,
    ) -> None:
        """Sends beats to the watchdog from now on, so often that those of `ranks` are no load for it.

        `on_end` is called where it orders the rank to end, with the reason; `on_silence` where it does not answer, with the
        seconds since it last did.
        """

        def send() -> None:
            asked, answered = False, time.monotonic()
            pause_s = random.random() * (interval_s - 1)  # not all at once
            while not self._over.wait(0 if asked else pause_s):
                pause_s = interval_s
                try:
                    answer = client.call("beat", self.message(asked=asked))
                    asked, answered = answer["ask"], time.monotonic()
                    if answer["end"]:
                        on_end(answer["end"])
                except OSError as error:
                    asked = False
                    if isinstance(error, NoAnswer):  # else refused: it is about to end
                        on_silence(time.monotonic() - answered, error)

        interval_s = max(1.0, ranks / _BEATS_A_SECOND)
        threading.Thread(target=send, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """No more beats."""
        self._over.set()


@functools.cache
def own_heartbeat() -> Heartbeat:
    """The heartbeat of this process; make it before anything heavy is imported. It beats where our launcher has set a channel."""
    heartbeat = Heartbeat(int(os.environ.get("RANK", "0")))
    stacks.listen()
    if ADDRESS in os.environ:
        address, _, port = os.environ[ADDRESS].rpartition(":")
        client = Client(address, int(port), secret=os.environ.get(SECRET, ""))
        heartbeat.connect(client, int(os.environ.get("WORLD_SIZE", "1")))
    return heartbeat


def waiting(what: str) -> AbstractContextManager[None]:
    """`with waiting("…")` around whatever waits for other ranks: this rank then is not the one that keeps them waiting."""
    return own_heartbeat().waiting(what)


def progress() -> None:
    """Called now and again in what takes long, so that it does not count as standing still."""
    own_heartbeat().progress()
