"""Diagnosis of a run that stands still: the culprit ranks, the likely cause, and advice. Pure.

When one rank stops, all the others soon wait for it. So the culprit is a rank that stands still WITHOUT waiting for others.
Every rank reports whether it waits. Inside a forward or backward pass, where a strategy may wait unreported, its progress
decides, then torch's flight recorder. Causes are tried in this order: a dead or stopped rank; one that finished too early; one
that does not wait, the least advanced first; one without heartbeats; if all wait, the ranks in another collective than the
others; else the network between them. If no cause can be singled out, the facts are reported.
"""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from packtrain.monitor.heartbeat import Phase, place_of, progress_of
from packtrain.monitor.processes import UNKNOWN, Collective, ProcessState
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
        "its stack shows where it is; look at nvidia-smi, at dmesg (Xid errors, disks), and at what else runs on that "
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
    groups: dict[Any, list[RankState]] = defaultdict(list)
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
