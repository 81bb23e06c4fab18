"""What became of a run, from how the processes of every machine ended: one exit code for all, and who was the first to fail.

Pure. A lost peer is mostly what the others see of the first failure; so a wrong config or a failed check wins over a bug,
and both over a peer that is gone (MOST_TELLING). Ranks that say no more than that others are gone (`followers`) are heard last.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from packtrain.launch.ending import BUG

MOST_TELLING = (2, 3, 1, 4)
TAIL_LINES = 20
ONE_RAISED = (
    "  → the other ranks did not raise it: look at its part of the data and at its machine; where both are in order, please "
    "report it with that log"
)
_AGAIN = "start the same commands again: they go on from the last complete checkpoint"
_UNREACHED = (
    "the machine is down, its link is cut, or its launcher is stopped",
    f"look whether the machine is up, and at its link; {_AGAIN}",
)
_LOST = {
    "silent for": _UNREACHED,
    "its launcher ended": ("it was stopped there, or has failed", f"its terminal or log says why; {_AGAIN}"),
    "its processes had not ended": (
        "they wait in the kernel, for storage or a device, and cannot be killed",
        "look for processes in state D there (ps), and at dmesg; restart that machine if they stay",
    ),
    **dict.fromkeys(
        ("the connection was closed", "Connection reset by peer", "Broken pipe"),
        (
            "its launcher was killed, or the machine went down",
            f"look at dmesg there and at the scheduler's log: out of memory, time limit; {_AGAIN}",
        ),
    ),
}
"""How what is said of a lost machine begins: what it likely comes from, and what to do."""
_MOST_WAITS = 3
_TIMED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one machine's processes ended: exit code by rank, and None for a rank that ended without a word.

    Ranks that were ended because another machine's had failed are in neither. `launched` is torchrun's own exit code (0 if
    it was ended for that reason), `signal` the one that ended the run in order, `frozen` are ranks that were found stopped
    (SIGSTOP), `diagnosis` is what the watchdog said, `tails` are a failing rank's last lines; `log` is torchrun's own log,
    beside which are those of the ranks, and `words` its last lines where no rank has come to anything. `followers` are ranks
    that ended because others had. `waits` is where the ranks were that had not failed, when they were to end for what was not
    theirs. `lost` says why nothing at all is known of a machine.
    """

    codes: Mapping[int, int | None] = field(default_factory=dict)
    launched: int = 0
    signal: int | None = None
    frozen: Sequence[int] = ()
    diagnosis: Sequence[str] = ()
    tails: Mapping[int, Sequence[str]] = field(default_factory=dict)
    log: str = "logs/launcher.log"
    words: Sequence[str] = ()
    followers: Sequence[int] = ()
    waits: Sequence[str] = ()
    lost: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the others need not go on."""
        worker = any(code is None or 0 < code <= 128 for code in self.codes.values())
        return worker or self.lost is not None or (self.launched != 0 and self.signal is None)

    @property
    def follows(self) -> bool:
        """Whether those that ended without a word here did so because others had, for all that is known."""
        silent = {rank for rank, code in self.codes.items() if code is None}
        return bool(silent) and silent <= set(self.followers)

    def to_json(self) -> dict[str, Any]:
        """Plain containers."""
        return {
            "codes": {str(rank): code for rank, code in self.codes.items()},
            "launched": self.launched,
            "signal": self.signal,
            "frozen": list(self.frozen),
            "diagnosis": list(self.diagnosis),
            "tails": {str(rank): list(lines)[-TAIL_LINES:] for rank, lines in self.tails.items()},
            "log": self.log,
            "words": list(self.words),
            "followers": list(self.followers),
            "waits": list(self.waits),
            "lost": self.lost,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Outcome:
        """What `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            codes={int(rank): None if code is None else int(code) for rank, code in values["codes"].items()},
            launched=int(values["launched"]),
            signal=None if values["signal"] is None else int(values["signal"]),
            frozen=tuple(int(rank) for rank in values["frozen"]),
            diagnosis=tuple(str(line)[:2000] for line in values["diagnosis"])[:100],
            tails={int(rank): _texts(lines) for rank, lines in values["tails"].items()},
            log=str(values["log"]),
            words=_texts(values["words"]),
            followers=tuple(int(rank) for rank in values["followers"]),
            waits=_texts(values["waits"]),
            lost=None if values["lost"] is None else str(values["lost"]),
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The exit code of every launcher, and what machine 0's terminal says about it; `alone`: that of a machine that has lost it.

    `late` is a diagnosis that came out as the verdict only where nobody knew better, and is not in logs/ yet."""

    code: int
    lines: Sequence[str] = ()
    alone: bool = False
    late: Sequence[str] = ()


def judge(outcomes: Mapping[int, Outcome], names: Mapping[int, str], per_node: int, first: int = 0) -> Verdict:
    """The verdict on a run whose machines, by number, ended like `outcomes`; `first` is the one that was the first to fail."""
    codes = {rank: code for outcome in outcomes.values() for rank, code in outcome.codes.items()}
    total = len(names) * per_node
    for telling in MOST_TELLING[:2]:
        if telling in codes.values():
            return Verdict(telling, _who(telling, codes, outcomes, names, per_node))
    diagnosed = [one for node, one in sorted(outcomes.items(), key=lambda item: item[0] != first) if one.diagnosis]
    if said := next((one.diagnosis for one in diagnosed if not one.follows), None):
        silent = [rank for rank, code in codes.items() if code is None]
        return Verdict(4, [*_with_the_others(said, outcomes, names), *_last_lines(silent, outcomes, names, per_node)])
    lost = _lost(outcomes, names)
    frozen = [
        f"{names[node]}, rank {rank} was found stopped (SIGSTOP): the others waited for it"
        for node, one in sorted(outcomes.items())
        for rank in one.frozen
    ]
    if lost or frozen:
        raised = _who(1, codes, outcomes, names, per_node) if 1 in codes.values() else []
        return Verdict(4, [*lost, *frozen, *raised])
    if len(codes) == total and not any(codes.values()):  # all at their end, a signal or not
        return Verdict(0)
    received = next((one.signal for one in outcomes.values() if one.signal is not None), None)
    if received is not None:
        if not codes:
            return Verdict(128 + received, [f"stopped by {signal.Signals(received).name}"])
        in_order = list(codes.values()) == [128 + received] * total
        logs = next(iter(outcomes.values())).log
        late = f"not every process could end in order after the signal: see {logs}"
        return Verdict(128 + received, [] if in_order else [late])
    # an exception in one of several is a peer that failed; in all of them, it is a bug
    if list(codes.values()) == [1] * total:
        return Verdict(1, [*_who(1, codes, outcomes, names, per_node), BUG])
    follow = {rank for one in outcomes.values() for rank in one.followers}
    unnamed = [rank for rank, code in codes.items() if code is None and rank not in follow]
    if 1 in codes.values():
        named = _who(1, codes, outcomes, names, per_node)
        return Verdict(4, [*named, ONE_RAISED, *_silent(unnamed, outcomes, names, per_node)])
    if unnamed:
        return Verdict(4, _silent(unnamed, outcomes, names, per_node))
    if any(code == 4 and rank not in follow for rank, code in codes.items()):
        return Verdict(4, _who(4, codes, outcomes, names, per_node))
    aborted = [rank for rank, code in codes.items() if code is None]
    if diagnosed:
        said = diagnosed[0].diagnosis
        return Verdict(4, [*said, *_last_lines(aborted, outcomes, names, per_node)], late=said)
    if aborted:
        return Verdict(4, _silent(aborted, outcomes, names, per_node))
    if 4 in codes.values():
        return Verdict(4, _who(4, codes, outcomes, names, per_node))
    if ended := [code for code in codes.values() if code]:  # someone else signalled torchrun or all workers
        return Verdict(max(code for code in ended if code is not None))
    if not any(one.failed for one in outcomes.values()):  # somebody else's workers leave no codes
        return Verdict(0)
    return Verdict(4, _unexplained(outcomes, names))


def _lost(outcomes: Mapping[int, Outcome], names: Mapping[int, str]) -> list[str]:
    """The machines of which nothing is known, what the others waited for, and what to do about it."""
    lost = {node: one.lost for node, one in sorted(outcomes.items()) if one.lost is not None}
    heads = [f"{names[node]} was lost: {why}" for node, why in lost.items()]
    causes = dict.fromkeys(_about(why) for why in lost.values())
    told = [line for cause, advice in causes for line in (f"  likely cause: {cause}", f"  → {advice}")]
    return _with_the_others([*heads, *told], outcomes, names) if heads else []


def _about(lost: str) -> tuple[str, str]:
    return next((about for begins, about in _LOST.items() if lost.startswith(begins)), _UNREACHED)


def _with_the_others(said: Sequence[str], outcomes: Mapping[int, Outcome], names: Mapping[int, str]) -> list[str]:
    """A diagnosis, and in it what the ranks of machines did of which it says nothing yet."""
    at = next((number for number, line in enumerate(said) if line.startswith("  likely cause: ")), len(said))
    known = "\n".join(said[:at])
    others = [
        one.waits
        for node, one in sorted(outcomes.items())
        if one.waits and not re.search(rf"\b{re.escape(names[node])}\b", known)
    ]
    waits = [f"  {line}" for lines in others[:_MOST_WAITS] for line in lines]
    more = len(others) - _MOST_WAITS
    waits += [f"  and so do those of {more} more machines"] if more > 0 else []
    return [*said[:at], *waits, *said[at:]]


def _who(
    telling: int,
    codes: Mapping[int, int | None],
    outcomes: Mapping[int, Outcome],
    names: Mapping[int, str],
    per_node: int,
) -> list[str]:
    """The first rank that failed with the code `telling`, with its last lines; rank 0 has said so itself, but not that only it
    has raised."""
    follow = {rank for one in outcomes.values() for rank in one.followers}
    failed = [rank for rank, code in codes.items() if code == telling]
    rank = min(failed, key=lambda one: (one in follow, one))
    said = rank == 0 and 0 not in outcomes[0].tails
    if said and (telling != 1 or len(failed) == len(names) * per_node):
        return []
    name, outcome = f"{names[rank // per_node]}, rank {rank}", outcomes[rank // per_node]
    head = f"{name} failed (exit code {telling}): see {PurePath(outcome.log).with_name(f'rank-{rank:05d}.log')}"
    return [head, *(f"{name}: {line}" for line in outcome.tails.get(rank, ()))]


def _silent(
    ranks: Sequence[int], outcomes: Mapping[int, Outcome], names: Mapping[int, str], per_node: int
) -> list[str]:
    said = []
    for rank in sorted(ranks):
        name, outcome = f"{names[rank // per_node]}, rank {rank}", outcomes[rank // per_node]
        said.append(f"{name} ended without a word (killed, or out of memory?): see {outcome.log}")
        said += [f"{name}: {line}" for line in outcome.tails.get(rank, ())]
    return said


def _last_lines(
    ranks: Sequence[int], outcomes: Mapping[int, Outcome], names: Mapping[int, str], per_node: int
) -> list[str]:
    """Of ranks that a diagnosis has been given of."""
    return [
        f"{names[rank // per_node]}, rank {rank}: {line}"
        for rank in sorted(ranks)
        for line in outcomes[rank // per_node].tails.get(rank, ())
        if not _TIMED.match(line)  # progress, which says nothing of its end
    ]


def _unexplained(outcomes: Mapping[int, Outcome], names: Mapping[int, str]) -> list[str]:
    said = []
    for node, one in sorted(outcomes.items()):
        if one.launched < 0:
            said.append(f"{names[node]}: torchrun was killed ({signal.Signals(-one.launched).name}): see {one.log}")
        elif one.launched:
            said.append(f"{names[node]}: the processes could not be started: see {one.log}")
            said += [f"{names[node]}: {line}" for line in one.words]
    return said or ["not every process has ended by itself"]


def _texts(lines: Sequence[Any]) -> tuple[str, ...]:
    return tuple(str(line)[:2000] for line in lines)[-TAIL_LINES:]
