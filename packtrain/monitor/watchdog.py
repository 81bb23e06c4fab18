"""The watchdog of a run: receives the heartbeats of all ranks of all machines, and finds when, and why, they stand still.

There is one, in the process that serves the control channel, which calls `look` once a second. A rank has until the deadline
of its phase (TimeLimits); the others, which say that they wait, have no part in it. After a
minute without progress a notice names the rank that the others wait for. Shortly before the deadline all ranks are asked for their stacks and pending
collectives, and one diagnosis comes of it. Late beats alone are no stall: a rank without heartbeats has the whole
deadline from its last beat on.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packtrain.monitor.channel import Server
from packtrain.monitor.diagnosis import Diagnosis, RankState, aftermath, diagnose, never_meet, waiting_words
from packtrain.monitor.heartbeat import BEFORE_TRAINING, PHASES, TimeLimits, place_of
from packtrain.monitor.processes import ProcessState
from packtrain.monitor.stacks import Collective, Frame, dumps_in, main_stack
from packtrain.run_folder import in_time, write_json

DIAGNOSIS = "diagnosis.txt"
RANKS = "ranks.json"
"""In logs/, after the run: where the ranks were last, and their exit codes."""
LOOK_S = 1.0
STOPPED_S = 5
"""Seconds after which a stopped process (SIGSTOP) counts as one."""
NOTICE_S = 60
"""Seconds of standstill after which it is said who keeps the others waiting, and that different collectives are surely so."""
ANSWER_S = 3
"""What ranks have to answer by themselves, before their launchers have faulthandler dump their stacks."""
_TO_ASK_S = 10
_FRESH_S = 30  # what was answered earlier is asked for again
_JUST_S = 5
_ENDED_S = 30
_LATE_S = 10  # a beat that is so late may be followed by any news
_LONGEST_LOOK_S = 3  # what lies longer between two looks is no standstill of the ranks: this process was suspended
_TIMES = 3  # usual steps, which may be long
_SUSPICIOUS_S, _SUSPICIOUS_STEPS = 5, 5
_SOONER_S = 45


@dataclass(slots=True)
class _Rank:
    """What was heard of a rank, and when (time.monotonic); `message` is its last beat."""

    host: str
    node: int
    begun: float
    message: Mapping[str, Any] = field(default_factory=dict)
    heard: float | None = None
    process: ProcessState | None = None
    stopped: float | None = None
    gone: float | None = None
    asked: float | None = None
    told: bool = False  # that it is to end
    text: str = ""
    stack: tuple[Frame, ...] = ()
    collectives: Mapping[str, Any] = field(default_factory=dict)

    def answers(self, text: str, collectives: Mapping[str, Any] | None = None) -> None:
        """Keeps stacks and collectives; none where it has moved on."""
        self.text, self.stack, self.collectives = text, main_stack(text), collectives or {}


def stacks_of(logs: Path, rank: int) -> Path:
    """Where the stacks of a rank are that it was asked for."""
    return logs / f"stacks-rank-{rank:05d}.txt"


class Watchdog:
    """Watches a run on `machines` (host name and ranks of each); writes into `logs`. Its methods may be called by any thread.

    `ends`: whether to end a run that stands still; a run of one process is only reported on.
    """

    def __init__(
        self, machines: Sequence[tuple[str, Collection[int]]], limits: TimeLimits, logs: Path, *, ends: bool = True
    ) -> None:
        now = time.monotonic()
        self._limits, self._logs, self._ends = limits, logs, ends
        self._ranks = {rank: _Rank(host, node, now) for node, (host, ranks) in enumerate(machines) for rank in ranks}
        self._hosts = [host for host, _ in machines]
        self._launchers: dict[int, float] = {}  # by machine: when it was last heard
        self._lock = threading.Lock()
        self._looked, self._noticed = now, ()
        self._found: Diagnosis | None = None
        self.end: str = ""
        """Why all ranks are to end themselves, where no launcher of ours would end them."""
        self._begun = {rank: _size(logs / f"rank-{rank:05d}.log") for rank in self._ranks}  # logs of earlier runs
        for old in (
            logs / DIAGNOSIS,
            logs / RANKS,
            *(stacks_of(logs, rank) for rank in self._ranks),
            *dumps_in(logs).values(),
        ):
            with suppress(OSError):
                old.unlink()

    # -- what is heard

    def attach(self, server: Server) -> None:
        """Has `server` answer beats and doctor's questions."""
        server.serve("beat", self.hear)
        server.serve("ranks", self.show)

    def hear(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Takes a beat (Heartbeat.message); says whether stacks are wanted, and whether the rank is to end."""
        with self._lock:
            one = self._ranks.get(int(message["rank"]))
            if one is None or message["phase"] not in PHASES:
                return {"end": f"there is no rank {message['rank']} in this run"}
            before = one.message
            one.heard = time.monotonic()
            one.host = str(message["host"]) if not one.host else one.host
            if "stacks" in message:
                one.answers(str(message["stacks"]), message["collectives"])
            elif (before and (before["phase"], before["step"]) != (message["phase"], message["step"])) or before.get(
                "for_s", 0
            ) > message["for_s"]:
                one.answers("")  # it is not there any more
                one.asked = None
            if "ended" in message:
                one.process = ProcessState(message["pid"], "gone", message["ended"], told=True, lost=message["lost"])
                one.gone = one.gone or one.heard
            one.message = {key: value for key, value in message.items() if key not in ("stacks", "collectives")}
            ask = one.asked is not None and not one.text
            one.told = bool(self.end)
        return {"ask": ask, "end": self.end or None}

    def processes(self, node: int, states: Mapping[int, ProcessState]) -> None:
        """Takes what the launcher of machine `node` knows of its ranks' processes; called once a second for each."""
        now = time.monotonic()
        with self._lock:
            self._launchers[node] = now
            for rank, state in states.items():
                if (one := self._ranks.get(rank)) is not None:
                    one.process = state
                    one.stopped = (one.stopped or now) if state.state == "stopped" else None
                    one.gone = (one.gone or now) if state.state == "gone" else None

                    if state.crash and not one.text:
                        one.answers(state.crash)

    def stacks(self, node: int, texts: Mapping[int, str]) -> None:
        """Takes stacks that the launcher of machine `node` has had dumped."""
        with self._lock:
            for rank, text in texts.items():
                if rank in self._ranks and not self._ranks[rank].text:
                    self._ranks[rank].answers(text)

    def wanted_stacks(self, node: int) -> list[int]:
        """The ranks of machine `node` that were asked for their stacks and do not answer: their launcher is to dump them."""
        now = time.monotonic()
        return [
            rank
            for rank, one in self._ranks.items()
            if one.node == node and one.asked and now - one.asked > ANSWER_S and not one.text and one.gone is None
        ]

    # -- what is known

    def states(self) -> list[RankState]:
        """What is known of every rank."""
        now = time.monotonic()
        with self._lock:
            return [self._state(rank, one, now) for rank, one in sorted(self._ranks.items())]

    def _state(self, rank: int, one: _Rank, now: float) -> RankState:
        said, stopped_s = one.message, now - one.stopped if one.stopped else 0.0
        if one.heard is None:
            pid, still_s = one.process.pid if one.process else 0, now - one.begun
            return RankState(rank, one.host, pid, still_s=still_s, stopped_s=stopped_s, process=one.process)
        silent = now - one.heard
        pending = [Collective(**each) for each in one.collectives.get("pending", ())]
        return RankState(
            rank,
            one.host,
            said["pid"],
            said["phase"],
            said["step"],
            said["micro"],
            said["waits"],
            heard_s=round(silent, 1),
            still_s=round(silent if silent > _LATE_S else said["for_s"] + silent, 1),
            usual_s=said["usual_s"],
            stopped_s=stopped_s,
            process=one.process,
            stack=one.stack,
            pending=pending[0] if pending else None,
            passed=tuple(Collective(**each) for each in one.collectives.get("passed", ())),
            answered="pending" in one.collectives,
        )

    def all_know(self) -> bool:
        """Whether all ranks that are left have been told to `end`."""
        return all(one.told or one.gone for one in self._ranks.values())

    def trains(self) -> bool:
        """Whether any rank has come through what is before training."""
        return any(one.phase not in BEFORE_TRAINING for one in self.states())

    def place(self, rank: int) -> str:
        """Where a rank was last, in words: "in the forward pass of step 4"; "" where nothing was heard of it."""
        said = self._ranks[rank].message if rank in self._ranks else {}
        return f"in {place_of(said['phase'], said['step'], said['micro'])}" if said else ""

    def waiting(self, but: Collection[int] = ()) -> tuple[str, ...]:
        """What the ranks do, in words, `but` some."""
        return waiting_words([one for one in self.states() if one.rank not in but])

    # -- what is concluded

    def look(self) -> Diagnosis | None:
        """Why the run has to be ended, where it stands still: called once a second.

        None once a rank has ended with an error, or without a word: that is why then (`aftermath`).
        """
        self._leave_out_suspension()
        states = self.states()
        live = [one for one in states if not (one.at_its_end or one.gone)]
        if self._found or not self._ends:
            return self._found
        if any(one.dead or one.lost_others or one.failed for one in states):
            return None
        if any(one.stopped_s for one in live):
            self._ask(live)
        if any(one.stopped_s >= min(STOPPED_S, self._limits.deadline_s("data")) for one in live):
            return self._conclude(diagnose(states))
        return self._judge(states, live)

    def aftermath(self) -> Diagnosis | None:
        """Why a run is over in which ranks are gone; None where that is not known, or they have said so themselves."""
        return self._found or self._conclude(aftermath(self.states()))

    def _judge(self, states: Sequence[RankState], live: Sequence[RankState]) -> Diagnosis | None:
        found = diagnose(states) if live and all(one.waits or one.still_s >= _JUST_S for one in live) else None
        if found is None:
            self._noticed = ()
            return None
        culprits = [one for one in live if one.rank in found.ranks] or live
        still, limit = min(one.still_s for one in culprits), self._limit_s(found, culprits, live)
        notice = max([NOTICE_S, *(_TIMES * one.usual_s for one in live)])
        if still >= limit - _TO_ASK_S or notice - _TO_ASK_S <= still < notice + _TO_ASK_S:
            self._ask(live)
        if still >= limit and self._have_answered(live):
            return self._conclude(diagnose(self.states()))
        if still >= notice and self._have_answered(live):
            self._notice(found, live, limit)
        return None

    def _limit_s(self, found: Diagnosis, culprits: Sequence[RankState], live: Sequence[RankState]) -> float:
        """How long the run may stand still for this."""
        deadline = max(self._limits.deadline_s(one.phase) for one in culprits)
        if found.cause == "ended":
            return min(deadline, _ENDED_S)
        return min(deadline, NOTICE_S) if found.cause == "collectives" and never_meet(live) else deadline

    def _notice(self, found: Diagnosis, live: Sequence[RankState], limit: float) -> None:
        """Says once, of a standstill, who keeps the others waiting."""
        mark = (found.ranks, tuple(one.progress for one in live if one.rank in found.ranks))
        joining = any(one.phase in ("start", "join") for one in live)  # joining itself reports whom it waits for
        if joining or mark == self._noticed or not any(one.waits_for_others for one in live):
            return
        self._noticed = mark
        print(f"{found.what}; the run ends for it at {limit:.0f} s", file=sys.stderr, flush=True)

    def _ask(self, states: Sequence[RankState]) -> None:
        now = time.monotonic()
        with self._lock:
            for one in states:
                rank = self._ranks[one.rank]
                if rank.asked is None or now - rank.asked > _FRESH_S:
                    rank.asked = now
                    rank.answers("")

    def _have_answered(self, states: Sequence[RankState]) -> bool:
        """Whether all have, or had the time to, by themselves and by their launchers."""
        now, late = time.monotonic(), ANSWER_S + 2 * max(LOOK_S, len(self._ranks) / 200) + 2
        asked = [self._ranks[one.rank] for one in states]
        return all(one.text or (one.asked and now - one.asked > late) for one in asked)

    def _conclude(self, found: Diagnosis | None) -> Diagnosis | None:
        """Leaves the diagnosis and the stacks in logs/, and returns it."""
        if found is None:
            return None
        self._found = found
        with self._lock:
            texts = {rank: _whole_text(one) for rank, one in self._ranks.items() if one.text or one.collectives}
        in_time(lambda: [stacks_of(self._logs, rank).write_text(text) for rank, text in texts.items()], [])
        self.keep("\n".join(found.lines))
        return found

    def keep(self, diagnosis: str) -> None:
        """Leaves a diagnosis in logs/, where packtrain doctor finds it."""
        in_time(lambda: (self._logs / DIAGNOSIS).write_text(diagnosis + "\n", encoding="utf-8"), 0)

    def _leave_out_suspension(self) -> None:
        now = time.monotonic()
        gap, self._looked = now - self._looked, now
        if gap > _LONGEST_LOOK_S:
            with self._lock:
                for one in self._ranks.values():
                    one.begun += gap
                    one.heard = None if one.heard is None else min(one.heard + gap, now)
                    one.stopped, one.asked = None, one.asked and one.asked + gap

    # -- what is shown

    def show(self, wish: Mapping[str, Any]) -> dict[str, Any]:
        """The state of every rank, for packtrain doctor; with `stacks`, or where they stand still, they are asked first."""
        live = [one for one in self.states() if not (one.at_its_end or one.gone)]
        stalled = self._stands_still(self.states(), live)
        if wish.get("stacks") or stalled:
            self._ask(live)
            end = time.monotonic() + ANSWER_S + 4
            while not self._have_answered(live) and time.monotonic() < end:
                time.sleep(0.1)
        found = self._found or (diagnose(self.states()) if stalled else None)
        with self._lock:
            texts = (
                {rank: _whole_text(one) for rank, one in self._ranks.items() if one.text} if wish.get("stacks") else {}
            )
            if self._found is None:
                for one in self._ranks.values():
                    one.asked = None
        in_time(lambda: [stacks_of(self._logs, rank).write_text(text) for rank, text in texts.items()], [])
        return self.to_json(found)

    def _stands_still(self, states: Sequence[RankState], live: Sequence[RankState]) -> bool:
        """Sooner than for `look`: who asks has a reason to."""
        if any(one.dead or one.stopped_s or (one.process and one.process.state == "stopped") for one in states):
            return True
        return bool(live) and all(one.still_s >= self._suspicious_s(one) for one in live)

    def _suspicious_s(self, one: RankState) -> float:
        if one.phase in BEFORE_TRAINING or one.usual_s == 0:
            return min(self._limits.deadline_s(one.phase) / 5, _SOONER_S)
        return max(_SUSPICIOUS_S, _SUSPICIOUS_STEPS * one.usual_s)

    def to_json(self, found: Diagnosis | None = None) -> dict[str, Any]:
        """Plain containers: `ranks` (RankState), `machines` (host, ranks, seconds since its launcher was heard) and `diagnosis`."""
        now = time.monotonic()
        found = found or self._found
        machines = [
            {
                "host": host,
                "ranks": [rank for rank, one in self._ranks.items() if one.node == node],
                "heard_s": round(now - self._launchers[node], 1) if node in self._launchers else None,
            }
            for node, host in enumerate(self._hosts)
        ]
        diagnosis = found and {"cause": found.cause, "ranks": list(found.ranks), "lines": found.lines}
        ranks = [one.to_json() for one in self.states()]
        return {"ranks": ranks, "machines": machines, "diagnosis": diagnosis, "logs": self._begun}

    def close(self) -> None:
        """Leaves in logs/ where the ranks were last, for those who look later."""
        in_time(lambda: write_json(self._logs / RANKS, self.to_json()), None)


def _whole_text(one: _Rank) -> str:
    pending = [f"-- pending: {Collective(**each)}" for each in one.collectives.get("pending", ())]
    return "\n".join([one.text, *pending]) + "\n"


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0
