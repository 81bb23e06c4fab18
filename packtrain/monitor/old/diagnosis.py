"""Why a run stands still: from what is known of every rank to one culprit, its likely cause, and what to do. Pure.

Ranks that train together all stop when one does, so the question is not who stands still but who is not waiting for anyone:
a rank that is dead, stopped or at its end; else one without a pending collective, the least far of those; else, where all
wait, those that wait in another operation than the others; else nobody, and it is what lies between them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from packtrain.errors import PeerFailed
from packtrain.monitor.old.heartbeat import WRITING
from packtrain.monitor.old.rank_state import RankState
from packtrain.monitor.old.stacks import Frame
from packtrain.wording import ranks_in_words

FRAMES_SHOWN = 10
_MOST_GROUPS = 3
ABORTED = -6
"""Exit of a process that ended itself by SIGABRT."""
_FROM_LOADERS = ("_try_get_data", "_get_data")  # of torch's DataLoader with processes
_SIGNAL_NAMES = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}

Cause = Literal[
    "memory",
    "killed",
    "left",
    "stopped",
    "ended",
    "loader",
    "data",
    "storage",
    "device",
    "gpu",
    "collectives",
    "network",
    "lock",
    "stuck",
    "busy",
    "writing",
    "start",
]

_MAYBE_A_GPU: tuple[Cause, ...] = ("killed", "device", "stuck", "busy", "writing", "network")

CAUSES: Mapping[Cause, tuple[str, str]] = {
    "memory": (
        "the system killed it for want of memory",
        "give the job more memory, or take less: fewer trainer.loader_workers, a sharded strategy, another model.dtype",
    ),
    "killed": (
        "the process was killed or crashed outside Python",
        "look who did it: dmesg and the scheduler's log (memory limit, time limit), and the rank's log for a crash",
    ),
    "left": (
        "it ended itself past the training: os._exit or sys.exit, in a callback, a library, or your own code",
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
    "loader": (
        "its loader processes give it nothing: they are stuck, stopped, or deadlocked since they were forked",
        "set trainer.loader_workers=0 to see where, and look at the file system that the data is on",
    ),
    "data": (
        "reading the data does not come back",
        "look at the file system that the data and its cache (data.cache_dir) are on: ls and dd there, and dmesg",
    ),
    "storage": (
        "slow or stalled storage: the write has not come back",
        "look at the file system of trainer.output_dir (df, dd, the server's load); complete checkpoints are kept; where it "
        "comes back by itself, raise topology.checkpoint_timeout",
    ),
    "device": (
        "it is inside the GPU's driver or a kernel that does not end",
        "look at nvidia-smi and at dmesg for Xid errors on that machine; try without that GPU",
    ),
    "gpu": (
        "a GPU or its driver has failed: the kernel's log has an Xid since the start",
        "https://docs.nvidia.com/deploy/xid-errors says what it means; reset the GPU, or leave that machine out",
    ),
    "collectives": (
        "different collective operations on different ranks: they will never meet",
        "a branch that not all ranks take (data, time, rank 0 alone) has led one of them elsewhere: the stacks show where",
    ),
    "network": (
        "none is behind, yet what they send does not arrive: a link, a network card or a GPU between them is stuck",
        "packtrain env CONFIG --cluster measures the links; NCCL_DEBUG=INFO tells which one is used, GLOO_SOCKET_IFNAME sets it",
    ),
    "lock": (
        "it waits for a lock on a file, which another process holds",
        "its stack shows which: see who has the file open (fuser FILE), and whether that one still works",
    ),
    "stuck": (
        "it is alive and neither computes nor waits for the others",
        "its stack shows where it waits",
    ),
    "busy": (
        "it is still computing, far longer than usual",
        "if that is as it should be, raise topology.step_timeout; else see what else runs on that machine",
    ),
    "writing": (
        "it is still writing, longer than a checkpoint may take",
        "if the storage is as fast as it can be, raise topology.checkpoint_timeout; else look at the file system of "
        "trainer.output_dir (df, dd, the server's load); complete checkpoints are kept",
    ),
    "start": (
        "Python, or torch, does not come off the disk that it is on",
        "look at that file system (ls and dd there, and dmesg), and at logs/launcher.log",
    ),
}
"""What each cause is, and what to do about it."""


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


def not_begun(ranks: Sequence[int], host: str, after_s: float) -> Diagnosis:
    """That of ranks which are started and have said nothing yet."""
    have = "have" if len(ranks) > 1 else "has"
    what = f"{ranks_in_words(ranks)} on {host} {have} not come to {'their' if len(ranks) > 1 else 'its'} first line"
    return Diagnosis("start", tuple(ranks), f"{what} {after_s:.0f} s after the start")


def diagnose(states: Sequence[RankState]) -> Diagnosis | None:
    """The one diagnosis of a run that stands still, from all of its ranks; None where all have come to their end."""
    if all(one.at_its_end for one in states):
        return None
    found = _dead(states) or _stopped(states) or _ended(states) or _free(states) or _apart(states) or _between(states)
    return _with_gpu_error(found, states)


def _with_gpu_error(found: Diagnosis, states: Sequence[RankState]) -> Diagnosis:
    """With what the kernel says of a GPU of the culprits, or where nobody is one of any; another cause stays the likely one."""
    said = {one.host: one.gpu_error for one in states if one.gpu_error and one.rank in (found.ranks or (one.rank,))}
    if not said or found.cause not in _MAYBE_A_GPU:
        return found
    others = (
        *found.others,
        *(f"the kernel of {host} says: {text}" for host, text in list(said.items())[:_MOST_GROUPS]),
    )
    return replace(found, cause="gpu" if found.ranks else found.cause, others=others)


def _dead(states: Sequence[RankState]) -> Diagnosis | None:
    gone = [one for one in states if one.dead]
    if not gone:
        return None
    dead = _first(gone)
    killed = {one.exit for one in dead if one.exit is not None}
    by = ", ".join(_end_in_words(number) for number in sorted(killed, reverse=True))
    out_of_memory = any(one.oom for one in dead) and killed <= {-9}
    what = f"{_who(dead)} ended without a word{f' ({by})' if by else ''}, {_place(dead)}"
    rest, after = [one for one in states if not one.dead], [one for one in gone if one not in dead]
    others = (*waiting(rest), *([f"{_who(after, with_process=False)} aborted after it (SIGABRT)"] if after else []))
    left: Cause = "left" if killed and min(killed) >= 0 else "killed"
    return Diagnosis("memory" if out_of_memory else left, _ranks(dead), what, others, dead[0].stack)


def _end_in_words(number: int) -> str:
    return f"exit code {number}" if number >= 0 else _SIGNAL_NAMES.get(-number, f"signal {-number}")


def _first(dead: Sequence[RankState]) -> Sequence[RankState]:
    """Those that did not die of the others' death, for which NCCL has a rank abort; of ranks that have all aborted, the first."""
    if crashed := [one for one in dead if one.exit != ABORTED]:
        return crashed
    when = [one.died for one in dead if one.died is not None]
    return [one for one in dead if when and one.died == min(when)] or dead


def _stopped(states: Sequence[RankState]) -> Diagnosis | None:
    stopped = [one for one in states if one.state == "T"]
    if not stopped:
        return None
    rest = [one for one in states if one.state != "T"]
    what = f"{_who(stopped)} {_is(stopped)} stopped, {_place(stopped)}"
    return Diagnosis("stopped", _ranks(stopped), what, waiting(rest), stopped[0].stack)


def _ended(states: Sequence[RankState]) -> Diagnosis | None:
    ended = [one for one in states if one.at_its_end]
    rest = [one for one in states if not one.at_its_end]
    # the main process alone writes the results
    if not ended or all(one.beat is not None and one.beat.phase == "final" for one in rest):
        return None
    if not any(one.waits or one.exit == PeerFailed.exit_code for one in rest):
        return None
    what = f"{_who(ended)} {_is(ended)} at {'their' if len(ended) > 1 else 'its'} end, the others are not"
    return Diagnosis("ended", _ranks(ended), what, waiting(rest))


def _free(states: Sequence[RankState]) -> Diagnosis | None:
    """Ranks that wait for none of the others: the least far of them. One that waits for a lock only where there is no other,
    which may well hold it."""
    free = [one for one in states if not one.waits and not one.at_its_end and one.beat is not None]
    free = [one for one in free if not one.locked] or free
    if not free:
        return None
    least = min(one.beat.progress for one in free if one.beat)
    culprits = [one for one in free if one.beat and one.beat.progress == least]
    first = max(culprits, key=lambda one: one.cores)  # as long as one of them computes, it may be that it gets there
    cause = _cause(first)
    rest = [one for one in states if one not in culprits]
    what = f"{_who(culprits)} {_is(culprits)} behind: for {first.still_s:.0f} s {_place(culprits)}"
    stack = first.loaders[0] if cause == "loader" and first.loaders else first.stack
    return Diagnosis(cause, _ranks(culprits), what, waiting(rest), stack)


def _cause(one: RankState) -> Cause:
    phase = one.beat.phase if one.beat else "start"
    if one.at_work:
        return "writing" if phase in WRITING else "busy"
    if one.locked:
        return "lock"
    if any(frame.function in _FROM_LOADERS and "dataloader" in frame.file for frame in one.stack):
        return "loader"
    if phase in WRITING:
        return "storage"
    if phase in ("data", "prepare"):
        return "data"
    if one.state == "D":
        return "storage"
    if any("torch/cuda/" in frame.file for frame in one.stack[:2]):
        return "device"
    return "stuck"


def _apart(states: Sequence[RankState]) -> Diagnosis | None:
    """All wait, but not in the same operation: those of the smallest number (or the least far) are named."""
    live = [one for one in states if not one.at_its_end and one.beat is not None]
    groups: dict[Any, list[RankState]] = defaultdict(list)
    for one in live:
        groups[_operation(one)].append(one)
    if len(groups) < 2:
        return None
    one_group = len({one.pending.group for one in live if one.pending}) == 1
    culprits = min(groups.values(), key=lambda ours: _how_far(ours, by_number=one_group))
    rest = [one for one in states if one not in culprits]
    if all(culprits[0].pending in one.passed for one in live if one not in culprits):
        what = f"{_who(culprits)} {_waits(culprits)}, which the others have passed, {_place(culprits)}"
        return Diagnosis("network", (), what, waiting(rest), culprits[0].stack)
    what = f"{_who(culprits)} {_waits(culprits)} where the others do not come, {_place(culprits)}"
    return Diagnosis("collectives", _ranks(culprits), what, waiting(rest), culprits[0].stack)


def _how_far(ours: Sequence[RankState], *, by_number: bool) -> tuple[Any, ...]:
    """The least is named: by the number of its operation where all are numbered alike, then the fewest, then the least far."""
    number, progress = ours[0].pending.number if ours[0].pending else 0, ours[0].beat.progress if ours[0].beat else ()
    return (number, len(ours), progress) if by_number else (progress, len(ours))


def _operation(one: RankState) -> Any:
    if one.pending is not None:
        return (one.pending.group, one.pending.number, one.pending.name, one.pending.what)
    return one.beat.progress if one.beat else None


def _between(states: Sequence[RankState]) -> Diagnosis:
    live = [one for one in states if not one.at_its_end]
    what = f"{_who(live)} {_waits(live)}, {_place(live)}, and none is behind"
    return Diagnosis("network", (), what, (), live[0].stack)


def waiting(states: Sequence[RankState]) -> tuple[str, ...]:
    """What the others do, those that do the same together."""
    groups: dict[str, list[RankState]] = defaultdict(list)
    for one in states:
        if not one.at_its_end and not one.dead:
            said = f"in {one.pending}" if one.pending else ""
            groups[f"{said}{', ' if said else ''}{_place([one])}"].append(one)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    words = [
        f"{_who(ours, with_process=False)} {'wait' if len(ours) > 1 else 'waits'} {text}"
        for text, ours in ordered[:_MOST_GROUPS]
    ]
    if rest := sum(len(ours) for _, ours in ordered[_MOST_GROUPS:]):
        words.append(f"{rest} more wait elsewhere")
    return tuple(words)


def _who(states: Sequence[RankState], *, with_process: bool = True) -> str:
    """ "rank 1 on n2 (process 77)"."""
    hosts = Counter(one.host for one in states)
    on = " and ".join(list(hosts)[:3]) + (f" and {len(hosts) - 3} more machines" if len(hosts) > 3 else "")
    beat = states[0].beat if with_process and len(states) == 1 else None
    pid = f" (process {beat.pid})" if beat else ""
    return f"{ranks_in_words(one.rank for one in states)} on {on}{pid}"


def _waits(states: Sequence[RankState]) -> str:
    where = f" in {states[0].pending}" if states[0].pending else ""
    return f"{'wait' if len(states) > 1 else 'waits'}{where}"


def _place(states: Sequence[RankState]) -> str:
    """Where the least far of them is."""
    beats = [one.beat for one in states if one.beat]
    if not beats:
        return "before it said anything"
    return f"in {min(beats, key=lambda beat: beat.progress).place}"


def _is(states: Sequence[RankState]) -> str:
    return "are" if len(states) > 1 else "is"


def _ranks(states: Sequence[RankState]) -> tuple[int, ...]:
    return tuple(sorted(one.rank for one in states))
