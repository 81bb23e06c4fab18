"""Heartbeat of every rank: its phase, step and micro-batch, and whether it waits for others.

`enter` sets the phase, `waiting` encloses everything that waits for other ranks (collectives, barriers, the store, joining), and
`progress` reports that a long operation advances. Each only assigns a few values. A thread sends them to the watchdog once a
second (`connect`), with stacks and pending collectives if the watchdog asks for them.
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

from packtrain.monitor import processes
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
    "optimizer": "the optimizer update",
    "step end": "logging",
    "checkpoint": "the checkpoint",
    "eval": "the evaluation",
    "final": "writing the results",
    "done": "its end",
}
"""All phases in the order of a run. Every step passes the phases from `data` to `eval`."""
PHASES = tuple(IN_WORDS)
BEFORE_TRAINING = PHASES[: PHASES.index("data")]
LONG = ("prepare", "load", "proof", "final")
"""Phases that may take hours. No rank waits in a collective in them, so they have no limit as long as they make progress."""
_CHECKPOINT_STEPS = 3  # a checkpoint may take as long as this many steps
_MIN_CPU = 0.05  # of a core: a process that uses this much is computing
_BEATS_A_SECOND = 200  # of all ranks together
_DIAGNOSE_AHEAD_S = 5


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits in seconds: collectives of a step (`step_s`), ranks that join (`join_s`).

    They come from topology.step_timeout and topology.join_timeout, and set how long a rank may be in a phase without progress.
    """

    step_s: float = 600
    join_s: float = 300

    def collective_s(self, phase: Phase) -> float:
        """Return the limit in seconds of a collective operation that begins in `phase`."""
        return self.step_s * (_CHECKPOINT_STEPS if phase in ("checkpoint", *LONG) else 1)

    def deadline_s(self, phase: Phase) -> float:
        """Return how many seconds a rank may stand still in `phase`."""
        if phase in ("start", "join"):  # joining has its own, shorter timeout and a clearer error
            return 2 * self.join_s + 60
        limit_s = self.collective_s(phase)
        # a little less than the timeout of collectives, so that the diagnosis comes before the waiting ranks fail
        return min(0.9 * limit_s, max(limit_s - _DIAGNOSE_AHEAD_S, limit_s / 2))


def progress_of(phase: Phase, step: int, micro: int) -> tuple[int, ...]:
    """Return progress as a sortable tuple. The rank with the smallest one keeps the others waiting."""
    order = PHASES.index(phase)
    if phase in BEFORE_TRAINING:
        return (0, order)
    if phase in ("final", "done"):
        return (2, order)
    forward_order = PHASES.index("forward")  # both passes of a micro-batch come before the next one's
    return (1, step, forward_order if phase == "backward" else order, micro, order)


def place_of(phase: Phase, step: int, micro: int) -> str:
    """Describe a place: "the forward pass of step 12 (micro-batch 3)"."""
    words = IN_WORDS[phase]
    if phase in BEFORE_TRAINING or phase in ("final", "done"):
        return words
    preposition = "after" if phase in ("checkpoint", "eval", "step end") else "of"
    return f"{words} {preposition} step {step}{f' (micro-batch {micro})' if micro > 1 else ''}"


class _State(NamedTuple):
    phase: Phase = "start"
    step: int = 0
    micro: int = 0
    waits: str = ""
    changes: int = 0


class Heartbeat:
    """One rank's thread-safe heartbeat. `usual_s` is the time of an ordinary step in seconds, 0 if not yet known."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.usual_s = rank, 0.0
        self._state, self._worked = _State(), 0
        self._clocks = time.monotonic(), time.process_time()  # at the last beat
        self._over = threading.Event()

    @property
    def phase(self) -> Phase:
        return self._state.phase

    def enter(self, phase: Phase, *, step: int | None = None, micro: int = 0) -> float:
        """Enter `phase` of `step` (None: the current step); return time.monotonic()."""
        self._change(phase=phase, step=self._state.step if step is None else step, micro=micro)
        return time.monotonic()

    def progress(self) -> None:
        """Report progress within the phase: the time without progress starts again at 0."""
        self._change()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Mark the block as waiting for other ranks. `what` is in words that follow "waits for"."""
        before = self._state.waits
        self._change(waits=what)
        try:
            yield
        finally:
            self._change(waits=before)

    def _change(self, **values: Any) -> None:
        self._state = self._state._replace(changes=self._state.changes + 1, **values)

    def message(self, *, asked: bool = False) -> dict[str, Any]:
        """Return the body of a beat, with stacks and collectives if `asked`.

        `changes` grows with every report of the rank; while it does not, the rank stands still. In a LONG phase CPU time
        counts as progress, too: libraries that work there cannot call `progress`.
        """
        state, (before, used) = self._state, self._clocks
        self._clocks = now, seconds = time.monotonic(), time.process_time()
        if state.phase in LONG and not state.waits and seconds - used >= _MIN_CPU * (now - before) > 0:
            self._worked += 1
        body = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **state._asdict(),
            "changes": state.changes + self._worked,
            "usual_s": round(self.usual_s, 3),
        }
        if asked:
            body |= {"stacks": "", "collectives": {}}
            with suppress(Exception):  # a failed diagnostic must not end the run
                body["stacks"] = processes.own_stacks()
                body["collectives"] = processes.own_collectives()
        return body

    def connect(
        self,
        client: Client,
        ranks: int,
        *,
        on_end: Callable[[str], None] = lambda reason: None,
        on_silence: Callable[[float, NoAnswer], None] = lambda silent_s, error: None,
    ) -> None:
        """Send beats to the watchdog from now on. More `ranks` send them less often, to bound its load.

        `on_end` is called with the reason when the watchdog orders the rank to end. `on_silence` is called when it does not answer, with
        the seconds since its last answer.
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
                    if isinstance(error, NoAnswer):  # else refused: the watchdog is shutting down
                        on_silence(time.monotonic() - answered, error)

        interval_s = max(1.0, ranks / _BEATS_A_SECOND)
        threading.Thread(target=send, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        self._over.set()


@functools.cache
def own_heartbeat() -> Heartbeat:
    """Return this process's heartbeat; call it before heavy imports. It sends beats if packtrain's launcher has set a channel."""
    heartbeat = Heartbeat(int(os.environ.get("RANK", "0")))
    processes.write_stacks_on_signal()
    if ADDRESS in os.environ:
        address, _, port = os.environ[ADDRESS].rpartition(":")
        client = Client(address, int(port), secret=os.environ.get(SECRET, ""))
        heartbeat.connect(client, int(os.environ.get("WORLD_SIZE", "1")))
    return heartbeat


def waiting(what: str) -> AbstractContextManager[None]:
    """Wrap code that waits for other ranks: `with waiting("…")`. The watchdog then does not blame this rank."""
    return own_heartbeat().waiting(what)


def progress() -> None:
    """Report progress. Long operations call it regularly, so that they do not count as standing still."""
    own_heartbeat().progress()
