"""Why a run stands still: from what is known of every rank to one culprit, its likely cause, and what to do. Pure.

Ranks that train together all stop when one does, so the question is not who stands still but who does not wait for the
others. Every rank says itself whether it waits; inside a forward or backward pass, where a strategy may wait unseen, its
progress decides, then torch's flight recorder. In this order: a rank that is dead or stopped; one at its end too early; one
that does not wait, the least far of those; one without heartbeats; where all wait, those in another collective than the
others; else what lies between them. What cannot be told apart is told as what is known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from packtrain.monitor.heartbeat import WRITING, Phase, place_of, progress_of
from packtrain.monitor.processes import ProcessState
from packtrain.monitor.stacks import Collective, Frame
from packtrain.wording import ranks_in_words

FRAMES_SHOWN = 10
UNHEARD_S = 30
"""Seconds after which a rank counts as one without heartbeats; a busy machine makes beats late."""
ABORTED = -6
"""Exit of a process that ended itself by SIGABRT."""
_MOST_GROUPS = 3
_SIGNAL_NAMES = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}

Cause = Literal[
    "memory",
    "killed",
    "left",
    "stopped",
    "ended",
    "start",
    "data",
    "storage",
    "stuck",
    "unheard",
    "collectives",
    "network",
]

CAUSES: Mapping[Cause, tuple[str, str]] = {
    "memory": (
        "the system killed it for want of memory",
        "give the job more memory, or take less: fewer trainer.loader_workers, a sharded strategy, another model.dtype",
    ),
    "killed": (
        "the process was killed or crashed outside Python",
        "look who did it: dmesg (out of memory, a GPU's Xid error) and the scheduler's log (memory limit, time limit), and "
        "the rank's log for a crash",
    ),
    "left": (
        "it ended itself before the run was over: os._exit or sys.exit, in a callback, a library, or your own code",
        "the end of the rank's log may say more; see what ends processes with that code",
    ),
    "stopped": (
        "the process is stopped (SIGSTOP, or a debugger)",
        "kill -CONT would have let it go on; see who stops processes there",
    ),
    "ended": (
        "it has come to its end while the others go on: it had fewer steps or batches than they have",
        "every process must see the same data and config; a loop of your own must have as many steps on each rank",
    ),
    "start": (
        "Python, torch or a package does not come off the disk that it is on, or a library waits as it is imported",
        "look at that file system (ls and dd there, and dmesg), and at the rank's log",
    ),
    "data": (
        "reading the data does not come back, or its loader processes give it nothing",
        "its stack shows which: look at the file system that the data and its cache (data.cache_dir) are on (ls and dd "
        "there, and dmesg), who holds a lock there (fuser FILE); try trainer.loader_workers=0; where it is as slow as that, "
        "raise topology.step_timeout",
    ),
    "storage": (
        "slow or stalled storage: the write has not come back",
        "look at the file system of trainer.output_dir (df, dd, the server's load); complete checkpoints are kept; where the "
        "storage is as slow as that, raise topology.checkpoint_timeout",
    ),
    "stuck": (
        "it is alive, and makes no progress",
        "its stack shows where it is; on a GPU look at nvidia-smi, and at dmesg for Xid errors; see what else runs on that "
        "machine; where it takes as long as that, raise topology.step_timeout",
    ),
    "unheard": (
        "its process is there, and even its heartbeat has stopped: something in C holds Python's lock, such as a driver",
        "its stack shows where it is; look at nvidia-smi, and at dmesg for Xid errors on that machine",
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


@dataclass(frozen=True, slots=True)
class RankState:
    """What is known of a rank. `heard_s` is since its last beat (None: there was none), `still_s` since it last
    reported progress, `stopped_s` since its process is stopped; `process` is what its launcher knows of that, None for nothing.

    `stack` (innermost first), `pending` and the last collectives that it has `passed` are what it answered when it was asked,
    `answered` whether it did.
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
    process: ProcessState | None = None
    stack: tuple[Frame, ...] = ()
    pending: Collective | None = None
    passed: tuple[Collective, ...] = ()
    answered: bool = False

    @property
    def gone(self) -> bool:
        """Whether its process has ended."""
        return self.process is not None and self.process.state == "gone"

    @property
    def dead(self) -> bool:
        """Gone without having said how."""
        return self.gone and self.process is not None and not self.process.told and self.phase != "done"

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error of its own."""
        process = self.process
        return process is not None and process.told and 0 < (process.code or 0) <= 128 and not process.lost

    @property
    def at_its_end(self) -> bool:
        """Through with everything."""
        told = self.process is not None and self.process.told and self.process.code == 0
        return told or (self.phase == "done" and not self.dead)

    @property
    def lost_others(self) -> bool:
        """Whether it ended only because others were gone."""
        return self.process is not None and bool(self.process.lost)

    @property
    def waits_for_others(self) -> bool:
        """Whether it waits for other ranks, as it says itself or by torch's flight recorder."""
        return bool(self.waits or self.pending or self.lost_others)

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

    def to_json(self) -> dict[str, Any]:
        """Plain containers, for doctor."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RankState:
        """What `to_json` wrote. Raises TypeError, KeyError or ValueError for anything else."""
        process, pending = values["process"], values["pending"]
        return cls(
            **{
                **values,
                "process": process and ProcessState(**process),
                "pending": pending and Collective(**pending),
                "passed": tuple(Collective(**one) for one in values["passed"]),
                "stack": tuple(Frame(**one) for one in values["stack"]),
            }
        )


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a run stands still; `ranks` are the culprits, () where there are none but what lies between them."""

    cause: Cause
    ranks: tuple[int, ...]
    what: str
    others: tuple[str, ...] = ()
    stack: tuple[Frame, ...] = field(default=(), compare=False)

    @property
    def lines(self) -> list[str]:
        """For people."""
        why, advice = CAUSES[self.cause]
        said = [self.what, *(f"  {one}" for one in self.others), f"  likely cause: {why}"]
        if self.stack:
            said += ["  its Python stack, innermost call first:", *(f"    {one}" for one in self.stack[:FRAMES_SHOWN])]
        return [*said, f"  → {advice}"]


def diagnose(states: Sequence[RankState]) -> Diagnosis | None:
    """The one diagnosis of a run that stands still, from all of its ranks; None where all have come to their end."""
    if all(one.at_its_end for one in states):
        return None
    live = [one for one in states if not (one.at_its_end or one.lost_others)]
    found = _dead(states) or _stopped(states) or _ended(states)
    return found or (_free(states, live) or _apart(live) or _between(live) if live else None)


def aftermath(states: Sequence[RankState]) -> Diagnosis | None:
    """Why a run is over in which ranks are gone: by those that ended without a word, or too early. None where none did."""
    return _dead(states) or _ended(states)


def _dead(states: Sequence[RankState]) -> Diagnosis | None:
    gone = [one for one in states if one.dead]
    if not gone:
        return None
    first = [one for one in gone if _code(one) != ABORTED] or gone  # NCCL has a rank abort where another one is gone
    codes = {code for one in first if (code := _code(one)) is not None}
    by = ", ".join(_end_in_words(number) for number in sorted(codes, reverse=True))
    out_of_memory = codes <= {-9} and any(one.process.oom for one in first if one.process)
    what = f"{_who(first)} ended without a word{f' ({by})' if by else ''}, {_place(first)}"
    after = [one for one in gone if one not in first]
    aborted = [f"{_who(after, with_process=False)} aborted after it (SIGABRT)"] if after else []
    left: Cause = "left" if codes and min(codes) >= 0 else "killed"
    cause = "memory" if out_of_memory else left
    rest = [one for one in states if not one.dead]
    return Diagnosis(cause, _ranks(first), what, (*waiting_words(rest), *aborted), first[0].stack)


def _code(one: RankState) -> int | None:
    return one.process.code if one.process else None


def _end_in_words(number: int) -> str:
    return f"exit code {number}" if number >= 0 else _SIGNAL_NAMES.get(-number, f"signal {-number}")


def _stopped(states: Sequence[RankState]) -> Diagnosis | None:
    stopped = [one for one in states if one.process is not None and one.process.state == "stopped"]
    if not stopped:
        return None
    rest = [one for one in states if one not in stopped]
    what = f"{_who(stopped)} {_is(stopped)} stopped, {_place(stopped)}"
    return Diagnosis("stopped", _ranks(stopped), what, waiting_words(rest), stopped[0].stack)


def _ended(states: Sequence[RankState]) -> Diagnosis | None:
    ended = [one for one in states if one.at_its_end]
    rest = [one for one in states if not one.at_its_end]
    # the main process alone writes the results
    if not ended or not any(one.waits_for_others and one.phase != "final" for one in rest):
        return None
    what = f"{_who(ended)} {_is(ended)} at {'their' if len(ended) > 1 else 'its'} end, the others are not"
    return Diagnosis("ended", _ranks(ended), what, waiting_words(rest))


def _free(states: Sequence[RankState], live: Sequence[RankState]) -> Diagnosis | None:
    """Ranks that wait for none of the others, the least far of them; else those that nothing is heard of any more."""
    free = [one for one in live if not one.waits_for_others] or [
        one for one in live if one.unheard and not one.answered
    ]
    if not free:
        return None
    least = min(one.progress for one in free)
    culprits = [one for one in free if one.progress == least]
    first = culprits[0]
    rest = [one for one in states if one not in culprits]
    if all(one.unheard and not one.answered for one in culprits):
        what = f"nothing has been heard of {_who(culprits)} for {first.heard_s:.0f} s, {_place(culprits)}"
        return Diagnosis("unheard", _ranks(culprits), what, waiting_words(rest), first.stack)
    place = "not come to the first line of packtrain" if first.heard_s is None else _place(culprits)
    what = f"{_who(culprits)} {_is(culprits)} behind: for {first.still_s:.0f} s {place}, no progress"
    return Diagnosis(_cause(first.phase), _ranks(culprits), what, waiting_words(rest), first.stack)


def _cause(phase: Phase) -> Cause:
    if phase in WRITING:
        return "storage"
    if phase in ("data", "prepare"):
        return "data"
    return "start" if phase == "start" else "stuck"


def _apart(live: Sequence[RankState]) -> Diagnosis | None:
    """All wait, but not in the same operation: those of the smallest number (or the least far) are named."""
    groups: dict[Any, list[RankState]] = defaultdict(list)
    for one in live:
        groups[one.pending or one.progress].append(one)
    if len(groups) < 2:
        return None
    one_group = len({one.pending.group for one in live if one.pending}) == 1
    culprits = min(groups.values(), key=lambda ours: _how_far(ours, by_number=one_group))
    rest = [one for one in live if one not in culprits]
    if all(culprits[0].pending in one.passed for one in rest):
        what = f"{_who(culprits)} {_waits(culprits)}, which the others have passed, {_place(culprits)}"
        return Diagnosis("network", (), what, waiting_words(rest), culprits[0].stack)
    what = f"{_who(culprits)} {_waits(culprits)} where the others do not come, {_place(culprits)}"
    return Diagnosis("collectives", _ranks(culprits), what, waiting_words(rest), culprits[0].stack)


def _how_far(ours: Sequence[RankState], *, by_number: bool) -> tuple[Any, ...]:
    """The least is named: by the number of its operation where all are numbered alike, then the fewest, then the least far."""
    number, progress = ours[0].pending.number if ours[0].pending else 0, ours[0].progress
    return (number, len(ours), progress) if by_number else (progress, len(ours))


def never_meet(states: Sequence[RankState]) -> bool:
    """Whether ranks surely wait in operations that do not belong together: of one number in one group, by different names."""
    names: dict[tuple[str, int], set[str]] = defaultdict(set)
    for one in states:
        if one.pending:
            names[one.pending.group, one.pending.number].add(one.pending.name)
    return any(len(different) > 1 for different in names.values())


def _between(live: Sequence[RankState]) -> Diagnosis:
    what = f"{_who(live)} {_waits(live)}, {_place(live)}, and none is behind"
    return Diagnosis("network", (), what, (), live[0].stack)


def waiting_words(states: Sequence[RankState]) -> tuple[str, ...]:
    """What the others do, those that do the same together."""
    groups: dict[str, list[RankState]] = defaultdict(list)
    for one in states:
        if not one.at_its_end and not one.dead:
            groups[f"{_for_what(one)}{_place([one])}"].append(one)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    words = [f"{_who(ours, with_process=False)} {_verb(ours)}{text}" for text, ours in ordered[:_MOST_GROUPS]]
    if rest := sum(len(ours) for _, ours in ordered[_MOST_GROUPS:]):
        words.append(f"{rest} more wait elsewhere")
    return tuple(words)


def _verb(ours: Sequence[RankState]) -> str:
    if ours[0].waits_for_others:
        return "wait " if len(ours) > 1 else "waits "
    return "are " if len(ours) > 1 else "is "


def _for_what(one: RankState) -> str:
    if one.pending:
        return f"in {one.pending}, "
    return f"for {one.waits}, " if one.waits else ""


def _who(states: Sequence[RankState], *, with_process: bool = True) -> str:
    """ "rank 1 on n2 (process 77)"."""
    hosts = Counter(one.host for one in states)
    on = " and ".join(list(hosts)[:3]) + (f" and {len(hosts) - 3} more machines" if len(hosts) > 3 else "")
    pid = f" (process {states[0].pid})" if with_process and len(states) == 1 and states[0].pid else ""
    return f"{ranks_in_words(one.rank for one in states)} on {on}{pid}"


def _waits(states: Sequence[RankState]) -> str:
    where = f" in {states[0].pending}" if states[0].pending else ""
    return f"{'wait' if len(states) > 1 else 'waits'}{where}"


def _place(states: Sequence[RankState]) -> str:
    """Where the least far of them is."""
    return f"in {min(states, key=lambda one: one.progress).place}"


def _is(states: Sequence[RankState]) -> str:
    return "are" if len(states) > 1 else "is"


def _ranks(states: Sequence[RankState]) -> tuple[int, ...]:
    return tuple(sorted(one.rank for one in states))
