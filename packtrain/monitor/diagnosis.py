"""Why a run stands still: from the states of all ranks to the ranks that cause it, the likely cause, and what to do. Pure.

When one rank stops, all the others soon wait for it, so the culprit is a rank that stands still WITHOUT waiting for others.
Every rank reports whether it waits; inside a forward or backward pass, where a strategy may wait unreported, its progress
decides, then torch's flight recorder. Causes are tried in this order: a dead or stopped rank; one that finished too early; one
that does not wait, the least advanced first; one without heartbeats; if all wait, the ranks in another collective than the
others; else the network between them. If no cause can be singled out, the facts are reported.
"""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from packtrain.monitor.heartbeat import Phase, place_of, progress_of
from packtrain.monitor.processes import UNKNOWN, ProcessState
from packtrain.monitor.stacks import Collective
from packtrain.wording import ranks_in_words

FRAMES_SHOWN = 10
SILENT_S = 30
"""Seconds without a beat after which a rank counts as silent; less may only be a busy machine."""
_MOST_GROUPS = 3

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
        "storage is always this slow, raise topology.checkpoint_timeout",
    ),
    "stuck": (
        "its process runs, but makes no progress",
        "its stack shows where it is; look at nvidia-smi, at dmesg (Xid errors, disks), and at what else runs on that "
        "machine; if it always takes this long, raise topology.step_timeout",
    ),
    "collectives": (
        "different ranks are in different collective operations, which will never complete",
        "a branch that not all ranks take (data, time, rank 0 alone) has led to another operation: the stacks show where",
    ),
    "network": (
        "no rank is behind, but messages between them do not arrive: a link, a network card or a GPU is stuck",
        "packtrain env CONFIG --cluster measures the links; NCCL_DEBUG=INFO tells which one is used, GLOO_SOCKET_IFNAME sets it",
    ),
}
"""What each cause is, and what to do about it."""
_OF_PHASE: Mapping[Phase, Cause] = {"data": "data", "prepare": "data", "checkpoint": "storage", "final": "storage"}


@dataclass(frozen=True, slots=True)
class RankState:
    """What is known of a rank: seconds since its last beat (`heard_s`, None before the first), since it last reported progress
    (`still_s`) and since its process was stopped (`stopped_s`); `process` is the launcher's view of the process.

    Its `stack` (innermost call first), its `pending` collective and the last one that it `finished` are the rank's answer to a
    request for them.
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
        """Whether its process has ended."""
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
        """Whether it finished successfully."""
        return (self.process.reported and self.process.code == 0) or (self.phase == "done" and not self.dead)

    @property
    def waits_for_others(self) -> bool:
        """Whether it waits for other ranks, by its own report or torch's flight recorder, or has lost them."""
        return bool(self.waits or self.pending or self.process.lost)

    @property
    def is_silent(self) -> bool:
        """Whether its last beat is too old to count."""
        return self.heard_s is not None and self.heard_s > SILENT_S

    @property
    def progress(self) -> tuple[int, ...]:
        """Progress as a sortable tuple; larger is further."""
        return progress_of(self.phase, self.step, self.micro)

    @property
    def place(self) -> str:
        """Phase, step and micro-batch in words."""
        return place_of(self.phase, self.step, self.micro)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a run stands still; `ranks` are the culprits, () if the network between them is."""

    cause: Cause
    ranks: tuple[int, ...]
    what: str
    others: tuple[str, ...] = ()
    stack: tuple[str, ...] = field(default=(), compare=False)

    @property
    def lines(self) -> list[str]:
        """The diagnosis as printed."""
        why, advice = CAUSES[self.cause]
        lines = [self.what, *(f"  {one}" for one in self.others), f"  likely cause: {why}"]
        if self.stack:
            lines += ["  its Python stack, innermost call first:", *(f"    {one}" for one in self.stack[:FRAMES_SHOWN])]
        return [*lines, f"  → {advice}"]


def live_of(states: Sequence[RankState]) -> list[RankState]:
    """The ranks that have neither ended nor finished."""
    return [one for one in states if not (one.gone or one.has_finished)]


def diagnose(states: Sequence[RankState]) -> Diagnosis | None:
    """The one diagnosis of a run that stands still or has lost ranks, from the states of all; None if all have finished."""
    return _dead(states) or _stopped(states) or _ended(states) or _not_waiting(states) or _all_wait(states)


def _dead(states: Sequence[RankState]) -> Diagnosis | None:
    gone = [one for one in states if one.dead]
    if not gone:
        return None
    # after one death NCCL aborts the other ranks (SIGABRT) and torchrun terminates them (SIGTERM): effects, not causes
    culprits = [one for one in gone if one.process.code not in (-signal.SIGABRT, -signal.SIGTERM)] or gone
    codes = {one.process.code for one in culprits if one.process.code is not None}
    by = f" ({', '.join(_end_in_words(code) for code in sorted(codes, reverse=True))})" if codes else ""
    out_of_memory = codes <= {-signal.SIGKILL} and any(one.process.oom for one in culprits)
    what = f"ended without an error message{by}, in {culprits[0].place}"
    return _named("memory" if out_of_memory else "died", culprits, what, states)


def _end_in_words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return next((one.name for one in signal.Signals if one == -code), f"signal {-code}")


def _stopped(states: Sequence[RankState]) -> Diagnosis | None:
    stopped = [one for one in states if one.process.state == "stopped"]
    if not stopped:
        return None
    return _named("stopped", stopped, f"{_verb(stopped, 'is', 'are')} stopped, in {stopped[0].place}", states)


def _ended(states: Sequence[RankState]) -> Diagnosis | None:
    ended = [one for one in states if one.has_finished]
    # the main process alone writes the results
    waiting = [one for one in states if one.waits_for_others and one.phase != "final" and not one.has_finished]
    if not ended or not waiting:
        return None
    return _named("ended", ended, f"{_verb(ended, 'has', 'have')} finished, the others have not", states)


def _not_waiting(states: Sequence[RankState]) -> Diagnosis | None:
    """The least advanced ranks among those that wait for no other; if all wait, among those without heartbeats."""
    live = live_of(states)
    free = [one for one in live if not one.waits_for_others] or [one for one in live if one.is_silent]
    if not free:
        return None
    least = min(one.progress for one in free)
    culprits = [one for one in free if one.progress == least]
    first = culprits[0]
    if all(one.is_silent for one in culprits):
        words = f"{_verb(culprits, 'has', 'have')} sent no heartbeat for {first.heard_s:.0f} s, in {first.place}"
        return _named("stuck", culprits, words, states)
    place = "not at the first line of packtrain" if first.heard_s is None else f"in {first.place}"
    behind = f"{_verb(culprits, 'is', 'are')} behind" if len(states) > 1 else "stands still"
    words = f"{behind}: for {first.still_s:.0f} s {place}, no progress"
    return _named(_OF_PHASE.get(first.phase, "stuck"), culprits, words, states)


def _all_wait(states: Sequence[RankState]) -> Diagnosis | None:
    """Groups ranks by the collective (or place) in which they wait; the culprits are the least advanced group, by the number of
    the collective if all are of one process group; of equal groups the smaller one."""
    groups: dict[Any, list[RankState]] = defaultdict(list)
    for one in sorted(live := live_of(states), key=lambda one: one.pending is None):
        where = one.pending or one.progress
        if not (one.pending or one.finished):  # its answer is lost, which is no sign that it waits elsewhere
            where = next((known for known, ours in groups.items() if ours[0].progress == one.progress), where)
        groups[where].append(one)
    if not groups:
        return None
    one_group = len({one.pending.group for one in live if one.pending}) == 1

    def how_far(ours: Sequence[RankState]) -> tuple[int, int, tuple[int, ...]] | tuple[tuple[int, ...], int]:
        number = ours[0].pending.number if ours[0].pending else 0
        return (number, len(ours), ours[0].progress) if one_group else (ours[0].progress, len(ours))

    culprits = min(groups.values(), key=how_far)
    pending, place = culprits[0].pending, culprits[0].place
    waits = _verb(culprits, "waits", "wait") + (f" in {pending}" if pending else "")
    others = [one for one in live if one not in culprits]
    if not others:
        found = _named("network", culprits, f"{waits}, in {place}, and no rank is behind", states)
    elif pending and all(one.finished == pending for one in others):
        found = _named("network", culprits, f"{waits}, which the others have completed, in {place}", states)
    else:
        return _named("collectives", culprits, f"{waits}, which the others do not enter, in {place}", states)
    return replace(found, ranks=())


def _named(cause: Cause, culprits: Sequence[RankState], what: str, states: Sequence[RankState]) -> Diagnosis:
    ranks = tuple(sorted(one.rank for one in culprits))
    others = waiting_words([one for one in states if one.rank not in ranks])
    return Diagnosis(cause, ranks, f"{_who(culprits)} {what}", others, culprits[0].stack)


def waiting_words(states: Sequence[RankState]) -> tuple[str, ...]:
    """What ranks do, in words; ranks that do the same share a line."""
    groups: dict[str, list[RankState]] = defaultdict(list)
    for one in states:
        if not one.has_finished and not one.dead:
            what = f"in {one.pending}, " if one.pending else f"for {one.waits}, " if one.waits else ""
            groups[f"{what}in {one.place}"].append(one)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    words = []
    for what, ours in ordered[:_MOST_GROUPS]:
        verb = _verb(ours, "waits", "wait") if ours[0].waits_for_others else _verb(ours, "is", "are")
        words.append(f"{_who(ours, with_process=False)} {verb} {what}")
    if rest := sum(len(ours) for _, ours in ordered[_MOST_GROUPS:]):
        words.append(f"{rest} more wait elsewhere")
    return tuple(words)


def _who(states: Sequence[RankState], *, with_process: bool = True) -> str:
    """ "rank 1 on n2 (process 77)"."""
    hosts = Counter(one.host for one in states)
    on = " and ".join(list(hosts)[:3]) + (f" and {len(hosts) - 3} more machines" if len(hosts) > 3 else "")
    pid = f" (process {states[0].pid})" if with_process and len(states) == 1 and states[0].pid else ""
    return f"{ranks_in_words(one.rank for one in states)} on {on}{pid}"


def _verb(states: Sequence[RankState], of_one: str, of_many: str) -> str:
    return of_many if len(states) > 1 else of_one
