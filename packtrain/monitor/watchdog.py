"""The watchdog of a run: receives the heartbeats of all ranks of all machines, and finds when, and why, they stand still.

There is one, in the process that serves the control channel, which calls `look` once a second. A rank may be without progress
until the deadline of its phase (TimeLimits); ranks that report that they wait for others are exempt. After a minute without
progress a notice names the rank that the others wait for. Shortly before the deadline all ranks are asked for their stacks and
pending collectives, and one diagnosis is made of the answers. Late beats alone are no stall: a rank without heartbeats has the
whole deadline from its last beat on.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from packtrain.monitor.channel import Server
from packtrain.monitor.diagnosis import Diagnosis, RankState, diagnose, live_of, waiting_words
from packtrain.monitor.heartbeat import BEFORE_TRAINING, TimeLimits
from packtrain.monitor.processes import UNKNOWN, ProcessState
from packtrain.monitor.stacks import Collective, main_stack
from packtrain.run_folder import in_time, write_json

DIAGNOSIS = "diagnosis.txt"
RANKS = "ranks.json"
"""In logs/, after the run: the last state of every rank, with its exit code."""
LOOK_S = 1.0
STOPPED_S = 5
"""Seconds that a process may be stopped (SIGSTOP) before the run is ended."""
NOTICE_S = 60
"""Seconds of standstill, and _USUAL_STEPS usual steps, after which a notice names the rank that keeps the others waiting."""
STACK_ANSWER_S = 3
"""Seconds for ranks to send their stacks themselves, before their launchers have faulthandler dump them."""
_DOCTOR_STALL_S = 5
"""Shorter pauses are ignored; packtrain doctor reports a stall from here on, earlier than the notice."""
_USUAL_STEPS = 3
_ASK_AHEAD_S = 10  # before a deadline or a notice, so that the stacks are there in time
_ASK_AGAIN_S = 30
_ENDED_LIMIT_S = 30
_LATE_BEAT_S = 10  # past this delay the standstill is measured from the last beat: what came after is unknown
_BEAT_FIELDS = ("pid", "phase", "step", "micro", "waits", "usual_s")
_LONGEST_LOOK_S = (
    3  # a longer pause between two looks means that this process was suspended, not that ranks stood still
)


@dataclass(slots=True)
class _Rank:
    """The reports of a rank; `message` is its last beat, `heard` the time of it, `since` when it last reported progress."""

    host: str
    node: int
    since: float
    message: Mapping[str, Any] = field(default_factory=dict)
    heard: float | None = None
    process: ProcessState = UNKNOWN
    stopped: float | None = None
    text: str = ""
    stack: tuple[str, ...] = ()
    pending: Collective | None = None
    finished: Collective | None = None

    def keep_answer(self, text: str, collectives: Mapping[str, Any] | None = None) -> None:
        """Keeps stacks and collectives; an empty text discards those that are out of date."""
        last = collectives or {}
        self.text, self.stack = text, main_stack(text)
        self.pending, self.finished = (one and Collective(**one) for one in (last.get("pending"), last.get("finished")))


def stacks_of(logs: Path, rank: int) -> Path:
    """The file of a rank's stacks."""
    return logs / f"stacks-rank-{rank:05d}.txt"


class Watchdog:
    """Watches a run on `machines` (host name and ranks of each); writes into `logs`. Its methods may be called by any thread."""

    def __init__(self, machines: Sequence[tuple[str, Collection[int]]], limits: TimeLimits, logs: Path) -> None:
        now = time.monotonic()
        self._machines, self._limits, self._logs = machines, limits, logs
        self._suspended_s, self._looked = 0.0, now
        self._ranks = {rank: _Rank(host, node, now) for node, (host, ranks) in enumerate(machines) for rank in ranks}
        self._launchers: dict[int, float] = {}  # by machine: when it was last heard
        self._lock = threading.Lock()
        self._asked: float | None = None  # when all were last asked for stacks and collectives
        self._noticed: tuple[Any, ...] = ()
        self._found: Diagnosis | None = None
        self.end: str = ""
        """The reason why all ranks are to end themselves; set only if no launcher of packtrain would end them."""
        stacks = [stacks_of(logs, rank) for rank in self._ranks]
        for of_an_earlier_run in (logs / DIAGNOSIS, logs / RANKS, *stacks):
            with suppress(OSError):
                of_an_earlier_run.unlink()

    def _now(self) -> float:
        """A clock in seconds that does not count the time in which this process was suspended."""
        return time.monotonic() - self._suspended_s

    # -- reports

    def attach(self, server: Server) -> None:
        """Registers the handlers for beats and for packtrain doctor."""
        server.serve("beat", self.hear)
        server.serve("ranks", self.show)

    def hear(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Takes a beat (Heartbeat.message); answers whether stacks are wanted (`ask`), and why the rank is to `end`, if it is."""
        with self._lock:
            one = self._ranks.get(message["rank"])
            if one is None:
                return {"ask": False, "end": f"there is no rank {message['rank']} in this run"}
            one.heard, one.host = self._now(), one.host or message["host"]
            if message["changes"] != one.message.get("changes"):
                one.since = one.heard
                one.keep_answer("")  # the rank moved on: its stack is out of date
            if "stacks" in message:
                one.keep_answer(message["stacks"], message["collectives"])
            if "ended" in message:
                one.process = ProcessState(
                    message["pid"], "gone", message["ended"], reported=True, lost=message["lost"]
                )
            one.message = message
            return {"ask": self._is_asked(one), "end": self.end or None}

    def processes(self, node: int, states: Mapping[int, ProcessState]) -> None:
        """Takes the states of the processes of machine `node` from its launcher; called once a second for each machine."""
        with self._lock:
            self._launchers[node] = self._now()
            for rank, state in states.items():
                one = self._ranks.get(rank)
                if one is not None and not one.process.reported:  # the rank's own report says more
                    one.process = state
                    one.stopped = (one.stopped or self._now()) if state.state == "stopped" else None

    def stacks(self, node: int, texts: Mapping[int, str]) -> None:
        """Takes stacks that the launcher of machine `node` had faulthandler dump."""
        with self._lock:
            for rank, text in texts.items():
                if rank in self._ranks and not self._ranks[rank].text:
                    self._ranks[rank].keep_answer(text)

    def wanted_stacks(self, node: int) -> list[int]:
        """The ranks of machine `node` that were asked for their stacks and did not answer: their launcher is to dump them."""
        if self._asked is None or self._now() - self._asked < STACK_ANSWER_S:
            return []
        ours = [(rank, one) for rank, one in self._ranks.items() if one.node == node]
        return [rank for rank, one in ours if self._is_asked(one) and one.process.state != "gone"]

    def _is_asked(self, one: _Rank) -> bool:
        return not one.text and self._asked is not None and self._now() - self._asked < self._answer_limit_s()

    def _answer_limit_s(self) -> float:
        """Seconds for ranks to answer themselves, and then for their launchers to dump the stacks of the others."""
        return STACK_ANSWER_S + 2 * max(LOOK_S, len(self._ranks) / 200) + 2

    # -- states

    def states(self) -> list[RankState]:
        """The states of all ranks."""
        with self._lock:
            return [self._state(rank, one, self._now()) for rank, one in sorted(self._ranks.items())]

    def _state(self, rank: int, one: _Rank, now: float) -> RankState:
        reported: dict[str, Any] = (
            {name: one.message[name] for name in _BEAT_FIELDS} if one.message else {"pid": one.process.pid}
        )
        heard_s = None if one.heard is None else round(max(now - one.heard, 0.0), 1)
        still_s = heard_s if heard_s and heard_s > _LATE_BEAT_S else max(now - one.since, 0.0)
        return RankState(
            rank,
            one.host,
            **reported,
            heard_s=heard_s,
            still_s=round(still_s, 1),
            stopped_s=now - one.stopped if one.stopped else 0.0,
            process=one.process,
            stack=one.stack,
            pending=one.pending,
            finished=one.finished,
        )

    def trains(self) -> bool:
        """Whether any rank has begun to train."""
        return any(one.phase not in BEFORE_TRAINING for one in self.states())

    def waiting(self, but: Collection[int] = ()) -> tuple[str, ...]:
        """What the ranks do, in words, except those in `but`."""
        return waiting_words([one for one in self.states() if one.rank not in but])

    # -- conclusions

    def diagnose(self) -> Diagnosis | None:
        """The diagnosis for which the run has to be ended, None while it goes on; called once a second.

        None also once a rank has ended with an error or died: the end of the run then has that cause (`aftermath`).
        """
        gap, self._looked = time.monotonic() - self._looked, time.monotonic()
        self._suspended_s += gap if gap > _LONGEST_LOOK_S else 0
        states = self.states()
        if self._found or any(one.dead or one.failed or one.process.lost for one in states):
            return self._found
        live = live_of(states)
        found, still_s = self._standstill(states)
        if found is None:
            return None
        culprits = [one for one in live if one.rank in found.ranks] or live
        limit_s = min(
            max(self._limits.deadline_s(one.phase) for one in culprits),
            {"stopped": STOPPED_S, "ended": _ENDED_LIMIT_S}.get(found.cause, float("inf")),
        )
        notice_s = _notice_s(live, NOTICE_S)
        notice_is_near = notice_s - _ASK_AHEAD_S <= still_s <= notice_s + _ASK_AHEAD_S
        if notice_is_near or still_s >= limit_s - _ASK_AHEAD_S:
            self._ask(live, _ASK_AGAIN_S)
        if still_s >= limit_s and self._have_answered(live):
            return self._conclude(diagnose(self.states()))
        # no notice while all ranks compute, as in a slow first step: nobody waits for anybody
        waits = found.cause == "storage" or any(one.waits_for_others for one in live)
        if still_s >= notice_s and self._have_answered(live) and waits:
            mark = (found.ranks, *(one.progress for one in culprits))
            if mark != self._noticed:
                print(f"{found.what}; the run is ended for it at {limit_s:.0f} s", file=sys.stderr, flush=True)
            self._noticed = mark
        return None

    def _standstill(self, states: Sequence[RankState]) -> tuple[Diagnosis | None, float]:
        """Why no rank makes progress, and for how many seconds; (None, 0) if a rank that does not wait makes some."""
        live = live_of(states)
        broken = any(one.dead or one.process.state == "stopped" for one in states)
        if not broken and not (live and all(one.waits or one.still_s >= _DOCTOR_STALL_S for one in live)):
            return None, 0
        found = diagnose(states)
        culprits = [one for one in live if found and one.rank in found.ranks] or live
        return found, min((one.stopped_s or one.still_s for one in culprits), default=0)

    def aftermath(self) -> Diagnosis | None:
        """Why ranks of a run died; None if that is not known, or if they reported their errors themselves."""
        found = None if self._found else diagnose(self.states())
        if found is not None and found.cause in ("memory", "died", "ended"):
            self._conclude(found)
        return self._found

    def _ask(self, states: Sequence[RankState], fresh_s: float) -> None:
        """Asks for stacks and collectives, unless that was done in the last `fresh_s` seconds."""
        with self._lock:
            if self._asked is None or self._now() - self._asked > fresh_s:
                self._asked = self._now()
                for one in states:
                    self._ranks[one.rank].keep_answer("")

    def _have_answered(self, states: Sequence[RankState]) -> bool:
        """Whether all ranks answered, or had the time to."""
        silent = [one for one in states if not self._ranks[one.rank].text and one.process.state != "stopped"]
        return not silent or (self._asked is not None and self._now() - self._asked > self._answer_limit_s())

    def _conclude(self, found: Diagnosis | None) -> Diagnosis | None:
        """Writes the diagnosis and the stacks to logs/; returns the diagnosis."""
        self._found = found
        if found is not None:
            self._keep_stacks()
            self.keep("\n".join(found.lines))
        return found

    def _keep_stacks(self) -> None:
        with self._lock:
            pending = {rank: f"-- pending: {one.pending}\n" for rank, one in self._ranks.items() if one.pending}
            texts = {rank: f"{one.text}\n{pending.get(rank, '')}" for rank, one in self._ranks.items() if one.text}
        in_time(lambda: [stacks_of(self._logs, rank).write_text(text) for rank, text in texts.items()], [])

    def keep(self, diagnosis: str) -> None:
        """Writes a diagnosis to logs/, where packtrain doctor finds it."""
        in_time(lambda: (self._logs / DIAGNOSIS).write_text(diagnosis + "\n", encoding="utf-8"), 0)

    # -- for packtrain doctor

    def show(self, wish: Mapping[str, Any]) -> dict[str, Any]:
        """The state of every rank; with `stacks`, or if the ranks stand still, it asks them for stacks first.

        It reports a stall sooner than `look` does.
        """
        states = self.states()
        live, (found, still_s) = live_of(states), self._standstill(states)
        stalled = found and (
            found.cause in ("memory", "died", "stopped") or still_s >= _notice_s(live, _DOCTOR_STALL_S)
        )
        if wish.get("stacks") or stalled:
            self._ask(live, self._answer_limit_s())
            while not self._have_answered(live):
                time.sleep(0.1)
        found = self._found or (diagnose(self.states()) if stalled else None)
        if wish.get("stacks"):
            self._keep_stacks()
        return self.to_json(found)

    def to_json(self, found: Diagnosis | None = None) -> dict[str, Any]:
        """Plain containers: `ranks` (RankState), `machines` (host, ranks, seconds since its launcher was heard) and `diagnosis`."""
        heard = {node: round(self._now() - at, 1) for node, at in self._launchers.items()}
        machines = [
            {"host": host, "ranks": list(ranks), "heard_s": heard.get(node)}
            for node, (host, ranks) in enumerate(self._machines)
        ]
        diagnosis = found and {"cause": found.cause, "ranks": list(found.ranks), "lines": found.lines}
        return {"ranks": [asdict(one) for one in self.states()], "machines": machines, "diagnosis": diagnosis}

    def close(self) -> None:
        """Writes the last states of the ranks to logs/, for packtrain doctor after the run."""
        in_time(lambda: write_json(self._logs / RANKS, self.to_json(self._found)), None)


def _notice_s(live: Sequence[RankState], least_s: float) -> float:
    """Seconds of standstill worth reporting: `least_s` and some usual steps; at least NOTICE_S while no step is known."""
    usual_s = max((one.usual_s for one in live), default=0)
    return max(least_s if usual_s else NOTICE_S, _USUAL_STEPS * usual_s)
