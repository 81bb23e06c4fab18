"""The watchdog of a run: receives the heartbeats of all ranks of all machines, and finds when, and why, they stand still.

There is one, in the process that serves the control channel, which calls `look` once a second. A rank has until the deadline
of its phase (TimeLimits); the others, which say that they wait, have no part in it. After a minute without progress a notice
names the rank that the others wait for. Shortly before the deadline all ranks are asked for their stacks and pending
collectives, and one diagnosis comes of it. Late beats alone are no stall: a rank without heartbeats has the whole
deadline from its last beat on.
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
"""In logs/, after the run: where the ranks were last, and their exit codes."""
LOOK_S = 1.0
STOPPED_S = 5
"""Seconds after which a stopped process (SIGSTOP) counts as one."""
NOTICE_S = 60
"""Seconds of standstill, and _TIMES usual steps, after which it is said who keeps the others waiting."""
ANSWER_S = 3
"""What ranks have to answer by themselves, before their launchers have faulthandler dump their stacks."""
_SOON_S = 5
"""Less is no standstill; and for whoever asks doctor, who has a reason to, it is one."""
_TIMES = 3
_TO_ASK_S = 10
_FRESH_S = 30
_ENDED_S = 30
_LATE_S = 10  # a beat that is so late may be followed by any news
_OF_A_BEAT = ("pid", "phase", "step", "micro", "waits", "usual_s")
_LONGEST_LOOK_S = 3  # what lies longer between two looks is no standstill of the ranks: this process was suspended


@dataclass(slots=True)
class _Rank:
    """What was heard of a rank, and when; `message` is its last beat, `since` when it last reported progress."""

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

    def answers(self, text: str, collectives: Mapping[str, Any] | None = None) -> None:
        """Keeps stacks and collectives; none where it has moved on."""
        last = collectives or {}
        self.text, self.stack = text, main_stack(text)
        self.pending, self.finished = (one and Collective(**one) for one in (last.get("pending"), last.get("finished")))


def stacks_of(logs: Path, rank: int) -> Path:
    """Where the stacks of a rank are that it was asked for."""
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
        """Why all ranks are to end themselves, where no launcher of ours would end them."""
        stacks = [stacks_of(logs, rank) for rank in self._ranks]
        for of_an_earlier_run in (logs / DIAGNOSIS, logs / RANKS, *stacks):
            with suppress(OSError):
                of_an_earlier_run.unlink()

    def _now(self) -> float:
        """Seconds, without those in which this process was suspended."""
        return time.monotonic() - self._suspended_s

    # -- what is heard

    def attach(self, server: Server) -> None:
        """Has `server` answer beats and doctor's questions."""
        server.serve("beat", self.hear)
        server.serve("ranks", self.show)

    def hear(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Takes a beat (Heartbeat.message); says whether stacks are wanted, and why the rank is to end where it is."""
        with self._lock:
            one = self._ranks.get(message["rank"])
            if one is None:
                return {"ask": False, "end": f"there is no rank {message['rank']} in this run"}
            one.heard, one.host = self._now(), one.host or message["host"]
            if message["changes"] != one.message.get("changes"):
                one.since = one.heard
                one.answers("")  # it is not there any more
            if "stacks" in message:
                one.answers(message["stacks"], message["collectives"])
            if "ended" in message:
                one.process = ProcessState(message["pid"], "gone", message["ended"], told=True, lost=message["lost"])
            one.message = message
            return {"ask": self._is_asked(one), "end": self.end or None}

    def processes(self, node: int, states: Mapping[int, ProcessState]) -> None:
        """Takes what the launcher of machine `node` knows of its ranks' processes; called once a second for each."""
        with self._lock:
            self._launchers[node] = self._now()
            for rank, state in states.items():
                one = self._ranks.get(rank)
                if one is not None and not one.process.told:  # what it has told itself says more
                    one.process = state
                    one.stopped = (one.stopped or self._now()) if state.state == "stopped" else None

    def stacks(self, node: int, texts: Mapping[int, str]) -> None:
        """Takes stacks that the launcher of machine `node` has had dumped."""
        with self._lock:
            for rank, text in texts.items():
                if rank in self._ranks and not self._ranks[rank].text:
                    self._ranks[rank].answers(text)

    def wanted_stacks(self, node: int) -> list[int]:
        """The ranks of machine `node` that were asked for their stacks and do not answer: their launcher is to dump them."""
        if self._asked is None or self._now() - self._asked < ANSWER_S:
            return []
        ours = [(rank, one) for rank, one in self._ranks.items() if one.node == node]
        return [rank for rank, one in ours if self._is_asked(one) and one.process.state != "gone"]

    def _is_asked(self, one: _Rank) -> bool:
        return not one.text and self._asked is not None and self._now() - self._asked < self._to_answer_s()

    def _to_answer_s(self) -> float:
        """The time of ranks to answer by themselves, and then of their launchers to do it for them."""
        return ANSWER_S + 2 * max(LOOK_S, len(self._ranks) / 200) + 2

    # -- what is known

    def states(self) -> list[RankState]:
        """What is known of every rank."""
        with self._lock:
            return [self._state(rank, one, self._now()) for rank, one in sorted(self._ranks.items())]

    def _state(self, rank: int, one: _Rank, now: float) -> RankState:
        told = {name: one.message[name] for name in _OF_A_BEAT} if one.message else {"pid": one.process.pid}
        heard_s = None if one.heard is None else round(max(now - one.heard, 0.0), 1)
        still_s = heard_s if heard_s and heard_s > _LATE_S else max(now - one.since, 0.0)
        return RankState(
            rank,
            one.host,
            **told,
            heard_s=heard_s,
            still_s=round(still_s, 1),
            stopped_s=now - one.stopped if one.stopped else 0.0,
            process=one.process,
            stack=one.stack,
            pending=one.pending,
            finished=one.finished,
        )

    def trains(self) -> bool:
        """Whether any rank has come through what is before training."""
        return any(one.phase not in BEFORE_TRAINING for one in self.states())

    def waiting(self, but: Collection[int] = ()) -> tuple[str, ...]:
        """What the ranks do, in words, `but` some."""
        return waiting_words([one for one in self.states() if one.rank not in but])

    # -- what is concluded

    def look(self) -> Diagnosis | None:
        """Why the run has to be ended, where it stands still: called once a second.

        None once a rank has ended with an error, or without a word: that is why then (`aftermath`).
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
            {"stopped": STOPPED_S, "ended": _ENDED_S}.get(found.cause, float("inf")),
        )
        notice_s = _notice_s(live, NOTICE_S)
        if still_s >= limit_s - _TO_ASK_S or abs(still_s - notice_s) <= _TO_ASK_S:
            self._ask(live, _FRESH_S)
        if still_s >= limit_s and self._have_answered(live):
            return self._conclude(diagnose(self.states()))
        # not of ranks that all compute, as they may in a first step
        if still_s >= notice_s and self._have_answered(live) and any(one.waits_for_others for one in live):
            mark = (found.ranks, *(one.progress for one in culprits))
            if mark != self._noticed:
                print(f"{found.what}; the run ends for it at {limit_s:.0f} s", file=sys.stderr, flush=True)
            self._noticed = mark
        return None

    def _standstill(self, states: Sequence[RankState]) -> tuple[Diagnosis | None, float]:
        """Why none goes on of those that do not wait, and for how many seconds; (None, 0) where one does."""
        live = live_of(states)
        broken = any(one.dead or one.process.state == "stopped" for one in states)
        if not broken and not (live and all(one.waits or one.still_s >= _SOON_S for one in live)):
            return None, 0
        found = diagnose(states)
        culprits = [one for one in live if found and one.rank in found.ranks] or live
        return found, min((one.stopped_s or one.still_s for one in culprits), default=0)

    def aftermath(self) -> Diagnosis | None:
        """Why a run is over in which ranks are gone; None where that is not known, or they have said so themselves."""
        found = None if self._found else diagnose(self.states())
        if found is not None and found.cause in ("memory", "died", "ended"):
            self._conclude(found)
        return self._found

    def _ask(self, states: Sequence[RankState], fresh_s: float) -> None:
        """Asks for stacks and collectives, where that was not done in the last `fresh_s` seconds."""
        with self._lock:
            if self._asked is None or self._now() - self._asked > fresh_s:
                self._asked = self._now()
                for one in states:
                    self._ranks[one.rank].answers("")

    def _have_answered(self, states: Sequence[RankState]) -> bool:
        """Whether all have, or had the time to."""
        silent = [one for one in states if not self._ranks[one.rank].text and one.process.state != "stopped"]
        return not silent or (self._asked is not None and self._now() - self._asked > self._to_answer_s())

    def _conclude(self, found: Diagnosis | None) -> Diagnosis | None:
        """Leaves the diagnosis and the stacks in logs/, and returns it."""
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
        """Leaves a diagnosis in logs/, where packtrain doctor finds it."""
        in_time(lambda: (self._logs / DIAGNOSIS).write_text(diagnosis + "\n", encoding="utf-8"), 0)

    # -- what is shown

    def show(self, wish: Mapping[str, Any]) -> dict[str, Any]:
        """The state of every rank, for packtrain doctor; with `stacks`, or where they stand still, they are asked first.

        The diagnosis comes sooner than by `look`.
        """
        states = self.states()
        live, (found, still_s) = live_of(states), self._standstill(states)
        stalled = found and (found.cause in ("memory", "died", "stopped") or still_s >= _notice_s(live, _SOON_S))
        if wish.get("stacks") or stalled:
            self._ask(live, self._to_answer_s())
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
        """Leaves in logs/ where the ranks were last, for those who look later."""
        in_time(lambda: write_json(self._logs / RANKS, self.to_json(self._found)), None)


def _notice_s(live: Sequence[RankState], least_s: float) -> float:
    """How long a standstill is worth a word: `least_s`, and some usual steps; NOTICE_S where no step is known yet."""
    usual_s = max((one.usual_s for one in live), default=0)
    return max(least_s if usual_s else NOTICE_S, _TIMES * usual_s)
