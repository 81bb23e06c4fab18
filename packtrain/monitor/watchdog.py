"""Watchdog of a run: it names the culprit of a standstill, its cause, and advice.

It collects heartbeats, and from them finds when ranks stand still.
When one rank stops, all the others soon wait for it. So the culprit is a rank that stands still WITHOUT waiting for others.
Every rank reports whether it waits. Inside a forward or backward pass, where a strategy may wait unreported, its progress
decides, then torch's flight recorder. Causes are tried in this order: a dead or stopped rank; one that finished too early; one
that does not wait, the least advanced first; one without heartbeats; if all wait, the ranks in another collective than the
others; else the network between them. If no cause can be singled out, the facts are reported (`diagnose`, a pure function).

The process that serves the control channel has the only watchdog, and calls `diagnose` once a second. A rank may be without progress
until the deadline of its phase (TimeLimits); ranks that report that they wait for others are exempt. Shortly before the deadline
all ranks are asked for their stacks and pending collectives, and their answers lead to one diagnosis. Late beats alone are no
stall: a rank without heartbeats has the whole deadline from its last beat on.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from packtrain.errors import Json
from packtrain.monitor.channel import Server
from packtrain.monitor.heartbeat import (
    BEFORE_TRAINING,
    UNKNOWN,
    Collective,
    Phase,
    ProcessState,
    TimeLimits,
    main_stack,
    place_of,
    progress_of,
)
from packtrain.run_folder import write_json
from packtrain.system import in_time
from packtrain.wording import ranks_in_words

FRAMES_SHOWN = 10
SILENT_S = 30
"""Seconds without a beat that make a rank silent. Less may only be a busy machine."""
_MAX_GROUPS = 3

Cause = Literal["memory", "died", "stopped", "ended", "data", "storage", "stuck", "collectives", "network"]

CAUSES: Mapping[Cause, tuple[str, str]] = {
    "memory": (
        "the system killed it because memory ran out",
        "give the job more memory, or take less: a sharded strategy, another model.dtype",
    ),
    "died": (
        "the process was killed, crashed outside Python, or ended itself (os._exit)",
        "find out what ended it: the end of the rank's log, dmesg (out of memory, a GPU's Xid error), and the scheduler's log "
        "(memory limit, time limit)",
    ),
    "stopped": (
        "the process is stopped (SIGSTOP, or a debugger)",
        "kill -CONT would have resumed it; find out what stops processes there",
    ),
    "ended": (
        "it finished while the others go on: it had fewer steps or batches than they have",
        "every process must see the same data and config; a loop of your own must have as many steps on each rank",
    ),
    "data": (
        "reading the data does not return, or its loader processes deliver nothing",
        "its stack shows which: look at the file system that the data and its cache (data.cache_dir) are on; if "
        "reading is always this slow, raise topology.step_timeout",
    ),
    "storage": (
        "slow or stalled storage: the write has not returned",
        "look at the file system of trainer.output_dir (df, dd, the server's load); complete checkpoints are kept; if the "
        "storage is always this slow, raise topology.step_timeout",
    ),
    "stuck": (
        "its process runs, but makes no progress",
        "its stack shows where it is; look at nvidia-smi, dmesg (Xid errors, disks), and other programs on that "
        "machine; if it always takes this long, raise topology.step_timeout",
    ),
    "collectives": (
        "different ranks are in different collective operations, which will never complete",
        "code that only some ranks run (depending on data, time or rank) led to a different operation: the stacks show where",
    ),
    "network": (
        "no rank is behind, but messages between them do not arrive: a link, a network card or a GPU is stuck",
        "packtrain env CONFIG --cluster measures the links; NCCL_DEBUG=INFO tells which one is used, GLOO_SOCKET_IFNAME sets it",
    ),
}
"""Each cause in words, and advice about it."""
_PHASE_CAUSES: Mapping[Phase, Cause] = {"data": "data", "prepare": "data", "checkpoint": "storage", "final": "storage"}


@dataclass(frozen=True, slots=True)
class RankState:
    """The known facts about a rank. Times are in seconds.

    `heard_s` counts from its last beat (None before the first), `still_s` from its last progress report, `stopped_s` from the stop of its
    process. `process` is the launcher's view of the process. The rank answers a request with its `stack` (innermost call first), its
    `pending` collective and the last one that it `finished`.
    """

    rank: int
    host: str
    pid: int = 0
    phase: Phase = "start"
    step: int = 0
    micro: int = 0
    waits: str = ""
    heard_s: float | None = None
    still_s: float = 0.0
    usual_s: float = 0.0
    stopped_s: float = 0.0
    process: ProcessState = UNKNOWN
    stack: tuple[str, ...] = ()
    pending: Collective | None = None
    finished: Collective | None = None

    @property
    def gone(self) -> bool:
        return self.process.state == "gone"

    @property
    def dead(self) -> bool:
        """Whether its process ended without reporting an exit code."""
        return self.gone and not self.process.reported and self.phase != "done"

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error of its own."""
        return self.process.reported and 0 < (self.process.code or 0) <= 128 and not self.process.lost

    @property
    def has_finished(self) -> bool:
        return (self.process.reported and self.process.code == 0) or (self.phase == "done" and not self.dead)

    @property
    def waits_for_others(self) -> bool:
        """Whether it waits for other ranks, or has lost them. Its own report or torch's flight recorder says so."""
        return bool(self.waits or self.pending or self.process.lost)

    @property
    def is_silent(self) -> bool:
        """Whether its last beat is too old to count."""
        return self.heard_s is not None and self.heard_s > SILENT_S

    @property
    def progress(self) -> tuple[int, ...]:
        return progress_of(self.phase, self.step, self.micro)

    @property
    def place(self) -> str:
        return place_of(self.phase, self.step, self.micro)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a run stands still. `ranks` are the culprits; () blames the network between them."""

    cause: Cause
    ranks: tuple[int, ...]
    what: str
    others: tuple[str, ...] = ()
    stack: tuple[str, ...] = field(default=(), compare=False)

    @property
    def lines(self) -> list[str]:
        why, advice = CAUSES[self.cause]
        lines = [self.what, *(f"  {words}" for words in self.others), f"  likely cause: {why}"]
        if self.stack:
            lines.append("  its Python stack, innermost call first:")
            lines += [f"    {call}" for call in self.stack[:FRAMES_SHOWN]]
        return [*lines, f"  → {advice}"]


def live_among(states: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that have neither ended nor finished."""
    return [state for state in states if not (state.gone or state.has_finished)]


def diagnose(states: Sequence[RankState]) -> Diagnosis | None:
    """Return the one diagnosis of a run that stands still or has lost ranks. None if all have finished."""
    if dead := [state for state in states if state.dead]:
        return _diagnose_dead(dead, states)
    if stopped := [state for state in states if state.process.state == "stopped"]:
        return _blame("stopped", stopped, f"{_verb(stopped, 'is', 'are')} stopped, in {stopped[0].place}", states)
    ended = [state for state in states if state.has_finished]
    # only the main process writes the results
    if ended and any(state.waits_for_others and state.phase != "final" and not state.has_finished for state in states):
        return _blame("ended", ended, f"{_verb(ended, 'has', 'have')} finished, the others have not", states)
    live = live_among(states)
    if free := [state for state in live if not state.waits_for_others] or [state for state in live if state.is_silent]:
        return _diagnose_not_waiting(free, states)
    return _diagnose_waiting(live, states) if live else None


def _diagnose_dead(dead: Sequence[RankState], states: Sequence[RankState]) -> Diagnosis:
    # after one death NCCL aborts the other ranks (SIGABRT) and torchrun terminates them (SIGTERM): effects, not causes
    culprits = [state for state in dead if state.process.code not in (-signal.SIGABRT, -signal.SIGTERM)] or dead
    codes = {state.process.code for state in culprits if state.process.code is not None}
    names = {-number: number.name for number in signal.Signals}
    ends = [f"exit code {code}" if code >= 0 else names.get(code, f"signal {-code}") for code in sorted(codes)[::-1]]
    by = f" ({', '.join(ends)})" if ends else ""
    out_of_memory = codes <= {-signal.SIGKILL} and any(state.process.oom for state in culprits)
    what = f"ended without an error message{by}, in {culprits[0].place}"
    return _blame("memory" if out_of_memory else "died", culprits, what, states)


def _diagnose_not_waiting(free: Sequence[RankState], states: Sequence[RankState]) -> Diagnosis:
    """Blame the least advanced of `free`: ranks that do not wait, or send no heartbeats."""
    least = min(state.progress for state in free)
    culprits = [state for state in free if state.progress == least]
    first = culprits[0]
    if all(state.is_silent for state in culprits):
        what = f"{_verb(culprits, 'has', 'have')} sent no heartbeat for {first.heard_s:.0f} s, in {first.place}"
        return _blame("stuck", culprits, what, states)
    place = f"in {first.place}" if first.heard_s is not None else "packtrain has not started there"
    behind = f"{_verb(culprits, 'is', 'are')} behind" if len(states) > 1 else "is stalled"
    what = f"{behind}: no progress for {first.still_s:.0f} s, {place}"
    return _blame(_PHASE_CAUSES.get(first.phase, "stuck"), culprits, what, states)


def _diagnose_waiting(live: Sequence[RankState], states: Sequence[RankState]) -> Diagnosis:
    """Blame the least advanced group of ranks that wait in the same collective or place.

    Collective numbers decide if all collectives belong to one process group, then progress, then the smaller group.
    """
    groups: dict[Collective | tuple[int, ...], list[RankState]] = defaultdict(list)
    for state in sorted(live, key=lambda state: state.pending is None):
        where = state.pending or state.progress
        if not (state.pending or state.finished):  # its answer is lost, which is no sign that it waits elsewhere
            where = next((key for key, group in groups.items() if group[0].progress == state.progress), where)
        groups[where].append(state)
    numbered = len({state.pending.group for state in live if state.pending}) == 1

    def order(group: Sequence[RankState]) -> tuple[int, tuple[int, ...], int]:
        pending = group[0].pending
        return (pending.number if numbered and pending else 0), group[0].progress, len(group)

    culprits = min(groups.values(), key=order)
    pending, place = culprits[0].pending, culprits[0].place
    waits = _verb(culprits, "waits", "wait") + (f" in {pending}" if pending else "")
    others = [state for state in live if state not in culprits]
    if others and not (pending and all(state.finished == pending for state in others)):
        return _blame("collectives", culprits, f"{waits}, which the others do not enter, in {place}", states)
    completed = f", which the others have completed, in {place}" if others else f", in {place}, and no rank is behind"
    return replace(_blame("network", culprits, f"{waits}{completed}", states), ranks=())


def _blame(cause: Cause, culprits: Sequence[RankState], what: str, states: Sequence[RankState]) -> Diagnosis:
    ranks = tuple(sorted(state.rank for state in culprits))
    others = describe_waits([state for state in states if state.rank not in ranks])
    pid = f" (process {culprits[0].pid})" if len(culprits) == 1 and culprits[0].pid else ""
    return Diagnosis(cause, ranks, f"{_name(culprits)}{pid} {what}", others, culprits[0].stack)


def describe_waits(states: Sequence[RankState]) -> tuple[str, ...]:
    """Describe what ranks do. Ranks that do the same share a line."""
    groups: dict[str, list[RankState]] = defaultdict(list)
    for state in states:
        if not state.has_finished and not state.dead:
            what = f"in {state.pending}, " if state.pending else f"for {state.waits}, " if state.waits else ""
            groups[f"{what}in {state.place}"].append(state)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    words = []
    for what, group in ordered[:_MAX_GROUPS]:
        verb = _verb(group, "waits", "wait") if group[0].waits_for_others else _verb(group, "is", "are")
        words.append(f"{_name(group)} {verb} {what}")
    if rest := sum(len(group) for _, group in ordered[_MAX_GROUPS:]):
        words.append(f"and {rest} more elsewhere")
    return tuple(words)


def _name(states: Sequence[RankState]) -> str:
    """ "ranks 1 and 2 on n2 and n3"."""
    hosts = list(dict.fromkeys(state.host for state in states))
    more = f" and {len(hosts) - 3} more machines" if len(hosts) > 3 else ""
    return f"{ranks_in_words(state.rank for state in states)} on {' and '.join(hosts[:3])}{more}"


def _verb(states: Sequence[RankState], singular: str, plural: str) -> str:
    return plural if len(states) > 1 else singular


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

    def keep_answer(self, text: str, collectives: Json | None = None) -> None:
        """Keep stacks and collectives. An empty text discards outdated ones."""
        last = {name: value and Collective(**value) for name, value in (collectives or {}).items()}
        known: Json = {"pending": None, "finished": None, **last}
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

    def receive_beat(self, beat: Json) -> Json:
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

    def answer_doctor(self, request: Json) -> Json:
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

    def to_json(self, diagnosis: Diagnosis | None = None) -> Json:
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
