"""Watchdog of a run: it collects heartbeats, and finds when and why ranks stand still.

The process that serves the control channel has the only watchdog, and calls `diagnose` once a second. A rank may be without progress
until the deadline of its phase (TimeLimits); ranks that report that they wait for others are exempt. Shortly before the deadline
all ranks are asked for their stacks and pending collectives, and their answers lead to one diagnosis. Late beats alone are no
stall: a rank without heartbeats has the whole deadline from its last beat on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from packtrain.monitor.channel import Server
from packtrain.monitor.diagnosis import Diagnosis, RankState, describe_waits, diagnose, live_among
from packtrain.monitor.heartbeat import BEFORE_TRAINING, TimeLimits
from packtrain.monitor.processes import Collective, ProcessState, main_stack
from packtrain.run_folder import write_json
from packtrain.system import in_time

DIAGNOSIS = "diagnosis.txt"
RANKS = "ranks.json"
"""In logs/, after the run: the last state of every rank, with its exit code."""
POLL_S = 1.0
STOPPED_S = 5
"""Seconds that a process may be stopped (SIGSTOP) before the run is ended."""
_ANSWER_S = 7  # for ranks to send their stacks
_STALL_S, _USUAL_STEPS = 5, 3  # shorter pauses are ignored; packtrain doctor reports longer ones
_FIRST_STALL_S = 60  # the same while no step is known
_ASK_AHEAD_S = 10  # before a deadline, so that the stacks are there in time
_ASK_AGAIN_S = 30
_ENDED_LIMIT_S = 30
_LATE_BEAT_S = 10  # after a longer silence, a stall counts from the last beat on: progress since then is unknown
_BEAT_FIELDS = ("pid", "phase", "step", "micro", "waits", "usual_s")
_LONGEST_PAUSE_S = 3  # a longer one between two rounds: this process was suspended, and ranks did not stand still


@dataclass(slots=True)
class _Rank:
    """The watchdog's record of a rank of machine `node`.

    Times: last report (`heard`), last progress (`since`), stop. `changes` counts progress reports; `text` is the dump of its stacks."""

    node: int
    state: RankState
    since: float
    heard: float | None = None
    stopped: float | None = None
    changes: int | None = None
    text: str = ""

    def keep_answer(self, text: str, collectives: Mapping[str, Any] | None = None) -> None:
        """Keep stacks and collectives. An empty text discards outdated ones."""
        last = {name: value and Collective(**value) for name, value in (collectives or {}).items()}
        known: dict[str, Any] = {"pending": None, "finished": None, **last}
        self.text, self.state = text, replace(self.state, stack=main_stack(text), **known)

    def state_at(self, now: float) -> RankState:
        heard_s = None if self.heard is None else round(max(now - self.heard, 0.0), 1)
        still_s = heard_s if heard_s and heard_s > _LATE_BEAT_S else max(now - self.since, 0.0)
        stopped_s = now - self.stopped if self.stopped else 0.0
        return replace(self.state, heard_s=heard_s, still_s=round(still_s, 1), stopped_s=stopped_s)


def stacks_of(logs: Path, rank: int) -> Path:
    return logs / f"stacks-rank-{rank:05d}.txt"


class Watchdog:
    """Watchdog over `machines` (host name and ranks of each). It writes into `logs`; any thread may call its methods.

    `end_reason` says why all ranks must end themselves. It is set only if no launcher of packtrain would end them.
    """

    def __init__(self, machines: Sequence[tuple[str, Collection[int]]], limits: TimeLimits, logs: Path) -> None:
        self._machines, self._limits, self._logs = machines, limits, logs
        self._checked_at = now = time.monotonic()
        self._ranks = {
            rank: _Rank(node, RankState(rank, host), now)
            for node, (host, ranks) in enumerate(machines)
            for rank in ranks
        }
        self._launchers: dict[int, float] = {}  # by machine: when it was last heard
        self._lock = threading.Lock()
        self._asked = -1e9  # when all were last asked for stacks and collectives
        self._answer_limit_s = _ANSWER_S + len(self._ranks) / 100
        self._diagnosis: Diagnosis | None = None
        self.end_reason = ""
        stacks = [stacks_of(logs, rank) for rank in self._ranks]
        for earlier in (logs / DIAGNOSIS, logs / RANKS, *stacks):
            with suppress(OSError):
                earlier.unlink()

    def attach(self, server: Server) -> None:
        """Register the handlers for beats and for packtrain doctor."""
        server.serve("beat", self.receive_beat)
        server.serve("ranks", self.answer_doctor)

    def receive_beat(self, beat: Mapping[str, Any]) -> dict[str, Any]:
        """Receive a beat (Heartbeat.message). Returns whether stacks are wanted (`ask`), and the reason to `end`, if any."""
        with self._lock:
            rank = self._ranks.get(beat["rank"])
            if rank is None:
                return {"ask": False, "end": f"there is no rank {beat['rank']} in this run"}
            rank.heard = time.monotonic()
            reported = {name: beat[name] for name in _BEAT_FIELDS}
            rank.state = replace(rank.state, host=rank.state.host or beat["host"], **reported)
            if beat["changes"] != rank.changes:
                rank.since, rank.changes = rank.heard, beat["changes"]
                rank.keep_answer("")  # the rank moved on: its stack is out of date
            if "stacks" in beat:
                rank.keep_answer(beat["stacks"], beat["collectives"])
            if "ended" in beat:
                ended = ProcessState(beat["pid"], "gone", beat["ended"], reported=True, lost=beat["lost"])
                rank.state = replace(rank.state, process=ended)
            asked = not rank.text and time.monotonic() - self._asked < self._answer_limit_s
            return {"ask": asked, "end": self.end_reason or None}

    def receive_processes(self, node: int, states: Mapping[int, ProcessState]) -> None:
        """Take the process states of machine `node` from its launcher. Called once a second for each machine."""
        with self._lock:
            self._launchers[node] = time.monotonic()
            for number, process in states.items():
                rank = self._ranks.get(number)
                if rank is not None and not rank.state.process.reported:  # the rank's own report says more
                    rank.state = replace(rank.state, process=process, pid=rank.state.pid or process.pid)
                    rank.stopped = (rank.stopped or time.monotonic()) if process.state == "stopped" else None

    def receive_stacks(self, texts: Mapping[int, str]) -> None:
        """Take stacks that ranks left as they crashed."""
        with self._lock:
            for number, text in texts.items():
                if number in self._ranks and not self._ranks[number].text:
                    self._ranks[number].keep_answer(text)

    def states(self) -> list[RankState]:
        with self._lock:
            return [rank.state_at(time.monotonic()) for _, rank in sorted(self._ranks.items())]

    def has_begun_training(self) -> bool:
        """Return whether any rank has begun to train."""
        return any(state.phase not in BEFORE_TRAINING for state in self.states())

    def describe_waits(self, but: Collection[int] = ()) -> tuple[str, ...]:
        """Describe what the ranks do, except those in `but`."""
        return describe_waits([state for state in self.states() if state.rank not in but])

    def diagnose(self) -> Diagnosis | None:
        """Return the diagnosis that must end the run, None while it goes on. Called once a second.

        None also once a rank has ended with an error or died: the end of the run then has that cause (`diagnose_deaths`).
        """
        pause_s, self._checked_at = time.monotonic() - self._checked_at, time.monotonic()
        if pause_s > _LONGEST_PAUSE_S:
            with self._lock:
                for rank in self._ranks.values():
                    rank.since, rank.heard = self._checked_at, rank.heard and self._checked_at
        states = self.states()
        if self._diagnosis or any(state.dead or state.failed or state.process.lost for state in states):
            return self._diagnosis
        diagnosis, still_s, culprits = self._find_standstill(states)
        if diagnosis is None:
            return None
        deadline_s = max(self._limits.deadline_s(state.phase) for state in culprits)
        limit_s = min(deadline_s, {"stopped": STOPPED_S, "ended": _ENDED_LIMIT_S}.get(diagnosis.cause, deadline_s))
        if still_s < limit_s - _ASK_AHEAD_S:
            return None
        live = live_among(states)
        self._ask(live, _ASK_AGAIN_S)
        if still_s < limit_s or not self._have_answered(live):
            return None
        return self._conclude(diagnose(self.states()))

    def _find_standstill(self, states: Sequence[RankState]) -> tuple[Diagnosis | None, float, Sequence[RankState]]:
        """Return why no rank makes progress, the seconds since then, and the culprits.

        (None, 0, ()) if a rank that does not wait makes progress."""
        live = live_among(states)
        broken = any(state.dead or state.process.state == "stopped" for state in states)
        if not broken and not (live and all(state.waits or state.still_s >= _STALL_S for state in live)):
            return None, 0, ()
        diagnosis = diagnose(states)
        culprits = [state for state in live if diagnosis and state.rank in diagnosis.ranks] or live
        return diagnosis, min((state.stopped_s or state.still_s for state in culprits), default=0), culprits

    def diagnose_deaths(self) -> Diagnosis | None:
        """Return why ranks died. None if that is unknown, or if they reported their errors themselves."""
        diagnosis = None if self._diagnosis else diagnose(self.states())
        if diagnosis is not None and diagnosis.cause in ("memory", "died", "ended"):
            self._conclude(diagnosis)
        return self._diagnosis

    def _ask(self, states: Sequence[RankState], fresh_s: float) -> None:
        """Ask for stacks and collectives, unless that was done in the last `fresh_s` seconds."""
        with self._lock:
            if time.monotonic() - self._asked > fresh_s:
                self._asked = time.monotonic()
                for state in states:
                    self._ranks[state.rank].keep_answer("")

    def _have_answered(self, states: Sequence[RankState]) -> bool:
        """Return whether all ranks answered, or had the time to."""
        silent = [state for state in states if not self._ranks[state.rank].text and state.process.state != "stopped"]
        return not silent or time.monotonic() - self._asked > self._answer_limit_s

    def _conclude(self, diagnosis: Diagnosis | None) -> Diagnosis | None:
        """Write the diagnosis and the stacks to logs/; return the diagnosis."""
        self._diagnosis = diagnosis
        if diagnosis is not None:
            self._write_stacks()
            self.write_diagnosis("\n".join(diagnosis.lines))
        return diagnosis

    def _write_stacks(self) -> None:
        texts = {
            rank: f"{known.text}\n" + (f"-- pending: {known.state.pending}\n" if known.state.pending else "")
            for rank, known in self._ranks.items()
            if known.text
        }
        in_time(lambda: [stacks_of(self._logs, rank).write_text(text) for rank, text in texts.items()], [])

    def write_diagnosis(self, diagnosis: str) -> None:
        """Write a diagnosis to logs/ for packtrain doctor."""
        in_time(lambda: (self._logs / DIAGNOSIS).write_text(diagnosis + "\n", encoding="utf-8"), 0)

    def answer_doctor(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of every rank. With `stacks`, or in a stall, ask the ranks for stacks first.

        It reports a stall sooner than `diagnose` does.
        """
        states = self.states()
        live, (diagnosis, still_s, _) = live_among(states), self._find_standstill(states)
        ended = diagnosis and diagnosis.cause in ("memory", "died", "stopped")
        usual_s = max((state.usual_s for state in live), default=0)
        least_s = max(_STALL_S, _USUAL_STEPS * usual_s) if usual_s else _FIRST_STALL_S
        stalled = diagnosis and (ended or still_s >= least_s)
        if request.get("stacks") or stalled:
            self._ask(live, self._answer_limit_s)
            while not self._have_answered(live):
                time.sleep(0.1)
        if request.get("stacks"):
            self._write_stacks()
        return self.to_json(self._diagnosis or (diagnose(self.states()) if stalled else None))

    def to_json(self, diagnosis: Diagnosis | None = None) -> dict[str, Any]:
        """Return the states as plain containers. `ranks`: RankState; `machines`: host, ranks, age of the last report in s; `diagnosis`."""
        heard = {node: round(time.monotonic() - at, 1) for node, at in self._launchers.items()}
        machines = [
            {"host": host, "ranks": list(ranks), "heard_s": heard.get(node)}
            for node, (host, ranks) in enumerate(self._machines)
        ]
        fields = diagnosis and {"cause": diagnosis.cause, "ranks": list(diagnosis.ranks), "lines": diagnosis.lines}
        return {"ranks": [asdict(state) for state in self.states()], "machines": machines, "diagnosis": fields}

    def close(self) -> None:
        """Write the last states of the ranks to logs/, for packtrain doctor after the run."""
        in_time(lambda: write_json(self._logs / RANKS, self.to_json(self._diagnosis)), None)
