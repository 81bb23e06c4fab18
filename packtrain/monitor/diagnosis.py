"""Why a run stands still: from what is known of every rank to one culprit, its likely cause, and what to do. Pure.

Ranks that train together all stop when one does, so the question is not who stands still but who does not wait for the
others. Every rank says itself whether it waits; inside a forward or backward pass, where a strategy may wait unseen, its
progress decides, then torch's flight recorder. In this order: a rank that is dead or stopped; one at its end too early; one
that does not wait, the least far of those; one without heartbeats; where all wait, those in another collective than the
others; else what lies between them. What cannot be told apart is told as what is known.
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
UNHEARD_S = 30
"""Seconds after which a rank counts as one without heartbeats; a busy machine makes beats late."""
_MOST_GROUPS = 3

Cause = Literal["memory", "died", "stopped", "ended", "data", "storage", "stuck", "collectives", "network"]

CAUSES: Mapping[Cause, tuple[str, str]] = {
    "memory": (
        "the system killed it for want of memory",
        "give the job more memory, or take less: fewer trainer.loader_workers, a sharded strategy, another model.dtype",
    ),
    "died": (
        "the process was killed, crashed outside Python, or ended itself (os._exit)",
        "look who did it: the end of the rank's log, dmesg (out of memory, a GPU's Xid error), and the scheduler's log "
        "(memory limit, time limit)",
    ),
    "stopped": (
        "the process is stopped (SIGSTOP, or a debugger)",
        "kill -CONT would have let it go on; see who stops processes there",
    ),
    "ended": (
        "it has come to its end while the others go on: it had fewer steps or batches than they have",
        "every process must see the same data and config; a loop of your own must have as many steps on each rank",
    ),
    "data": (
        "reading the data does not come back, or its loader processes give it nothing",
        "its stack shows which: look at the file system that the data and its cache (data.cache_dir) are on; try "
        "trainer.loader_workers=0; where it is as slow as that, raise topology.step_timeout",
    ),
    "storage": (
        "slow or stalled storage: the write has not come back",
        "look at the file system of trainer.output_dir (df, dd, the server's load); complete checkpoints are kept; where the "
        "storage is as slow as that, raise topology.checkpoint_timeout",
    ),
    "stuck": (
        "its process is there, and makes no progress",
        "its stack shows where it is; look at nvidia-smi, at dmesg (Xid errors, disks), and at what else runs on that "
        "machine; where it takes as long as that, raise topology.step_timeout",
    ),
    "collectives": (
        "different collective operations on different ranks: they will never meet",
        "a branch that not all ranks take (data, time, rank 0 alone) has led one of them elsewhere: the stacks show where",
    ),
    "network": (
        "none is behind, yet what they send does not arrive: a link, a network card or a GPU between them is stuck",
        "packtrain env CONFIG --cluster measures the links; NCCL_DEBUG=INFO tells which one is used, GLOO_SOCKET_IFNAME sets it",
    ),
}
"""What each cause is, and what to do about it."""
_OF_PHASE: Mapping[Phase, Cause] = {"data": "data", "prepare": "data", "checkpoint": "storage", "final": "storage"}


@dataclass(frozen=True, slots=True)
class RankState:
    """What is known of a rank. `heard_s` is since its last beat (None: there was none), `still_s` since it last
    reported progress, `stopped_s` since its process is stopped; `process` is what its launcher knows of that.

    Its `stack` (innermost call first), `pending` collective and the last that it has `finished` are what it answered when it
    was asked.
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
        """Gone without having said how."""
        return self.gone and not self.process.told and self.phase != "done"

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error of its own."""
        return self.process.told and 0 < (self.process.code or 0) <= 128 and not self.process.lost

    @property
    def at_its_end(self) -> bool:
        """Through with everything."""
        return (self.process.told and self.process.code == 0) or (self.phase == "done" and not self.dead)

    @property
    def waits_for_others(self) -> bool:
        """Whether it waits for other ranks, as it says itself or by torch's flight recorder, or has lost them."""
        return bool(self.waits or self.pending or self.process.lost)

    @property
    def unheard(self) -> bool:
        """Whether what it said last is too old to count."""
        return self.heard_s is not None and self.heard_s > UNHEARD_S

    @property
    def progress(self) -> tuple[int, ...]:
        """Grows as it comes along."""
        return progress_of(self.phase, self.step, self.micro)

    @property
    def place(self) -> str:
        """In words."""
        return place_of(self.phase, self.step, self.micro)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RankState:
        """The state whose `asdict` came as JSON. Raises TypeError or KeyError for anything else."""
        known = {**values, "process": ProcessState(**values["process"]), "stack": tuple(values["stack"])}
        for name in ("pending", "finished"):
            known[name] = values[name] and Collective(**values[name])
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a run stands still; `ranks` are the culprits, () where there are none but what lies between them."""

    cause: Cause
    ranks: tuple[int, ...]
    what: str
    others: tuple[str, ...] = ()
    stack: tuple[str, ...] = field(default=(), compare=False)

    @property
    def lines(self) -> list[str]:
        """For people."""
        why, advice = CAUSES[self.cause]
        said = [self.what, *(f"  {one}" for one in self.others), f"  likely cause: {why}"]
        if self.stack:
            said += ["  its Python stack, innermost call first:", *(f"    {one}" for one in self.stack[:FRAMES_SHOWN])]
        return [*said, f"  → {advice}"]


def live_of(states: Sequence[RankState]) -> list[RankState]:
    """The ranks that are neither gone nor at their end."""
    return [one for one in states if not (one.gone or one.at_its_end)]


def diagnose(states: Sequence[RankState]) -> Diagnosis | None:
    """The one diagnosis of a run that stands still or has lost ranks, from all of them; None where all have come to their end."""
    return _dead(states) or _stopped(states) or _ended(states) or _free(states) or _all_wait(states)


def _dead(states: Sequence[RankState]) -> Diagnosis | None:
    gone = [one for one in states if one.dead]
    if not gone:
        return None
    # where another one is gone, NCCL has a rank abort, and torchrun ends it
    culprits = [one for one in gone if one.process.code not in (-signal.SIGABRT, -signal.SIGTERM)] or gone
    codes = {one.process.code for one in culprits if one.process.code is not None}
    by = f" ({', '.join(_end_in_words(code) for code in sorted(codes, reverse=True))})" if codes else ""
    out_of_memory = codes <= {-signal.SIGKILL} and any(one.process.oom for one in culprits)
    what = f"ended without a word{by}, in {culprits[0].place}"
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
    ended = [one for one in states if one.at_its_end]
    # the main process alone writes the results
    waiting = [one for one in states if one.waits_for_others and one.phase != "final" and not one.at_its_end]
    if not ended or not waiting:
        return None
    return _named("ended", ended, f"{_verb(ended, 'is at its', 'are at their')} end, the others are not", states)


def _free(states: Sequence[RankState]) -> Diagnosis | None:
    """Ranks that wait for none of the others, the least far of them; else those that nothing is heard of any more."""
    live = live_of(states)
    free = [one for one in live if not one.waits_for_others] or [one for one in live if one.unheard]
    if not free:
        return None
    least = min(one.progress for one in free)
    culprits = [one for one in free if one.progress == least]
    first = culprits[0]
    if all(one.unheard for one in culprits):
        words = f"{_verb(culprits, 'has', 'have')} not been heard of for {first.heard_s:.0f} s, in {first.place}"
        return _named("stuck", culprits, words, states)
    place = "not come to the first line of packtrain" if first.heard_s is None else f"in {first.place}"
    words = f"{_verb(culprits, 'is', 'are')} behind: for {first.still_s:.0f} s {place}, no progress"
    return _named(_OF_PHASE.get(first.phase, "stuck"), culprits, words, states)


def _all_wait(states: Sequence[RankState]) -> Diagnosis | None:
    """Those of the smallest number of an operation, the fewest, or the least far, where not all wait in the same."""
    groups: dict[Any, list[RankState]] = defaultdict(list)
    for one in (live := live_of(states)):
        groups[one.pending or one.progress].append(one)
    if not groups:
        return None
    numbered_alike = len({one.pending.group for one in live if one.pending}) == 1

    def how_far(ours: Sequence[RankState]) -> tuple[Any, ...]:
        number = ours[0].pending.number if ours[0].pending else 0
        return (number, len(ours), ours[0].progress) if numbered_alike else (ours[0].progress, len(ours))

    culprits = min(groups.values(), key=how_far)
    waits = f"{_verb(culprits, 'waits', 'wait')}{f' in {culprits[0].pending}' if culprits[0].pending else ''}"
    others = [one for one in live if one not in culprits]
    if not others:
        found = _named("network", culprits, f"{waits}, in {culprits[0].place}, and none is behind", states)
    elif culprits[0].pending and all(one.finished == culprits[0].pending for one in others):
        found = _named("network", culprits, f"{waits}, which the others have passed, in {culprits[0].place}", states)
    else:
        return _named("collectives", culprits, f"{waits} where the others do not come, in {culprits[0].place}", states)
    return replace(found, ranks=())


def _named(cause: Cause, culprits: Sequence[RankState], what: str, states: Sequence[RankState]) -> Diagnosis:
    ranks = tuple(sorted(one.rank for one in culprits))
    others = waiting_words([one for one in states if one.rank not in ranks])
    return Diagnosis(cause, ranks, f"{_who(culprits)} {what}", others, culprits[0].stack)


def waiting_words(states: Sequence[RankState]) -> tuple[str, ...]:
    """What ranks do, those that do the same together."""
    groups: dict[str, list[RankState]] = defaultdict(list)
    for one in states:
        if not one.at_its_end and not one.dead:
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
