"""The exit code: of a process, from the error or signal that ended it, and of a run, from how the processes of every machine ended.

A lost peer is mostly what the others see of the first failure; so a wrong config or a failed check wins over a bug, and both
over a peer that is gone (MOST_TELLING). Ranks that only lost the others (`followers`) are named last.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import PurePath
from typing import Any

from packtrain.errors import PacktrainError

ENDING = (signal.SIGINT, signal.SIGTERM)
"""The signals that ask a process to end."""
BUG = "This is a bug of packtrain: please report it with the lines above."
MOST_TELLING = (2, 3, 1, 4)
TAIL_LINES = 20
ONE_RAISED = (
    "  → the other ranks did not raise it: look at its part of the data and at its machine; where both are in order, please "
    "report it with that log"
)
_TIMED = re.compile(r": \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")
_AGAIN = "start the same commands again: they go on from the last complete checkpoint"
_UNREACHED = (
    "the machine is down, its link is cut, or its launcher was killed or stopped",
    f"look whether the machine is up, at its link, and at dmesg there (out of memory, time limit); {_AGAIN}",
)
_LOST = {
    "its launcher ended": ("it was stopped there, or has failed", f"its terminal or log says why; {_AGAIN}"),
    "its processes had not ended": (
        "they wait in the kernel, for storage or a device, and cannot be killed",
        "look for processes in state D there (ps), and at dmesg; restart that machine if they stay",
    ),
}
"""How what is said of a lost machine begins: what it likely comes from, and what to do."""


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM, where nothing better listens for it: a run that trains does (train/settings.py)."""


@contextmanager
def heard_by(listener: Callable[[int], None]) -> Iterator[None]:
    """Inside the block SIGINT and SIGTERM go to `listener`, by their number, which may raise; afterwards to whoever had them before.

    In the main thread alone.
    """

    def pass_on(number: int, _: object) -> None:
        listener(number)

    before = {number: signal.signal(number, pass_on) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say_stopped(number: int) -> None:
    """Prints that a signal has ended this process."""
    print(f"stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)


def exit_code_of(work: Callable[[], int], *, alone: bool = True, stopped: Callable[[int], None] = say_stopped) -> int:
    """Does `work` and returns its exit code, or that of the error or signal it ended with, which is printed.

    Where this is one of many processes (not `alone`), an exception is not yet called a bug; `stopped` is called for a signal.
    """
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        raise Stopped

    try:
        with heard_by(stop):
            code = work()
            sys.stdout.flush()
            return code
    except (Exception, KeyboardInterrupt) as error:
        if not received:
            return _ended_by(error, alone)
        # whatever came of it: an import that is interrupted may end with an error of its own
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        stopped(received[0])
        return 128 + received[0]


def _ended_by(error: Exception | KeyboardInterrupt, alone: bool) -> int:
    if isinstance(error, PacktrainError):
        if error.shown:
            _print_problems(error)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, BrokenPipeError):  # the reader of our output has left (`packtrain plan … | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    traceback.print_exception(error)
    if alone:
        print(BUG, file=sys.stderr)
    return 1


def _print_problems(error: PacktrainError) -> None:
    """Each problem once: where, what, and what to do; in colour on a terminal."""
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    red, bold, green, plain = ("\033[31m", "\033[1m", "\033[32m", "\033[0m") if colour else ("",) * 4
    number = len(error.problems)
    print(f"{red}error{plain}: {number} problems" if number > 1 else f"{red}error{plain}:", file=sys.stderr)
    for problem in error.problems:
        place = f"{bold}{problem.where}{plain}: " if problem.where else ""
        print(f"  {place}{problem.what}", file=sys.stderr)
        if problem.fix:
            print(f"    {green}→{plain} {problem.fix}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one machine's processes ended: exit code by rank, negative for a signal, None where neither is known.

    Ranks that were ended because others had failed are not in it. `launched` is torchrun's own exit code (0 if it was ended
    for that reason), `signal` the one that ended the run in order, `tails` are the last lines of ranks that failed; `log` is
    torchrun's own log, beside which are those of the ranks, and `words` its last lines where no rank has started. `followers`
    are ranks that ended because others had. `stuck` says that torchrun was stopped, `lost` why nothing is known of a machine.
    """

    codes: Mapping[int, int | None] = field(default_factory=dict)
    launched: int = 0
    signal: int | None = None
    tails: Mapping[int, Sequence[str]] = field(default_factory=dict)
    log: str = "logs/launcher.log"
    words: Sequence[str] = ()
    followers: Sequence[int] = ()
    stuck: str = ""
    lost: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the others need not go on."""
        rank = any(code is None or code < 0 or 0 < code <= 128 for code in self.codes.values())
        return rank or self.lost is not None or (self.launched != 0 and self.signal is None)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Outcome:
        """The outcome whose `asdict` came as JSON. Raises KeyError, TypeError or ValueError for anything else."""
        given = {one.name: values[one.name] for one in fields(cls)}
        codes = {int(rank): None if code is None else int(code) for rank, code in given["codes"].items()}
        tails = {int(rank): [str(line)[:2000] for line in lines] for rank, lines in given["tails"].items()}
        return cls(**{**given, "codes": codes, "tails": tails})


@dataclass(frozen=True, slots=True)
class Verdict:
    """The exit code of every launcher, and what machine 0's terminal shows; `alone`: that of a machine that has lost machine 0."""

    code: int
    lines: Sequence[str] = ()
    alone: bool = False


def judge(
    outcomes: Mapping[int, Outcome],
    names: Mapping[int, str],
    per_node: int,
    *,
    first: int = 0,
    diagnosis: Sequence[str] = (),
    waits: Sequence[str] = (),
) -> Verdict:
    """The verdict on a run whose machines, by number, ended like `outcomes`.

    `first` is the machine that failed first, `diagnosis` what the watchdog ended the run for, `waits` what ranks did when
    machines were lost.
    """
    run = _Ended(outcomes, names, per_node, first)
    codes, total = run.codes, len(names) * per_node
    for telling in MOST_TELLING[:2]:
        if telling in codes.values():
            return Verdict(telling, run.who(telling))
    if diagnosis:
        return Verdict(4, [*diagnosis, *run.lost(waits), *run.last_lines()])
    if stuck := [one.stuck for one in outcomes.values() if one.stuck]:
        return Verdict(4, stuck)
    raised = run.who(1) if 1 in codes.values() else []
    if lost := run.lost(waits):
        return Verdict(4, [*lost, *raised])
    if len(codes) == total and not any(codes.values()):  # all at their end, a signal or not
        return Verdict(0)
    received = next((one.signal for one in outcomes.values() if one.signal is not None), None)
    if received is not None:
        if not codes:
            return Verdict(128 + received, [f"stopped by {signal.Signals(received).name}"])
        in_order = list(codes.values()) == [128 + received] * total
        late = f"not every process could end in order after the signal: see {next(iter(outcomes.values())).log}"
        return Verdict(128 + received, [] if in_order else [late])
    # an exception in one of several is a peer that failed; in all of them, it is a bug
    if list(codes.values()) == [1] * total:
        return Verdict(1, [*raised, BUG])
    gone = run.gone()
    if raised:
        return Verdict(4, [*raised, ONE_RAISED, *gone])
    if gone:
        return Verdict(4, gone)
    if 4 in codes.values():
        return Verdict(4, run.who(4))
    if ended := [code for code in codes.values() if code]:  # someone else signalled torchrun or all workers
        return Verdict(max(ended))
    if not any(one.failed for one in outcomes.values()):  # workers that are not packtrain's leave no codes
        return Verdict(0)
    return Verdict(4, run.unexplained())


class _Ended:
    """How a run ended, in words: which rank or machine failed, and what its log ends with."""

    def __init__(
        self, outcomes: Mapping[int, Outcome], names: Mapping[int, str], per_node: int, first: int = 0
    ) -> None:
        self._outcomes, self._names, self._per_node, self._first = outcomes, names, per_node, first
        self.codes = {rank: code for one in outcomes.values() for rank, code in one.codes.items()}
        self._followers = {rank for one in outcomes.values() for rank in one.followers}
        signalled = {rank for rank, code in self.codes.items() if code is not None and code < 0}
        aborted = {rank for rank in signalled if self.codes[rank] == -signal.SIGABRT}
        if signalled != aborted:  # NCCL has ranks abort where another one is gone
            self._followers |= aborted

    def who(self, telling: int) -> list[str]:
        """The first rank that failed with the code `telling`, with its last lines; rank 0 has printed its error itself."""
        failed = [rank for rank, code in self.codes.items() if code == telling]
        rank = min(failed, key=self._order if telling == 4 else None)
        said = rank == 0 and 0 not in self._outcomes[0].tails
        if said and (telling != 1 or len(failed) == len(self._names) * self._per_node):
            return []
        name, outcome = self._rank(rank)
        log = PurePath(outcome.log).with_name(f"rank-{rank:05d}.log")
        return [f"{name} failed (exit code {telling}): see {log}", *self._tail(rank)]

    def gone(self) -> list[str]:
        """The ranks that ended without an exit code; those that followed others only where there are no others."""
        gone = [rank for rank, code in self.codes.items() if code is None or code < 0]
        said = []
        for rank in sorted([one for one in gone if one not in self._followers] or gone, key=self._order):
            (name, outcome), code = self._rank(rank), self.codes[rank]
            log = PurePath(outcome.log).with_name(f"rank-{rank:05d}.log") if rank else outcome.log
            said.append(f"{name} {_ended_without_code(code)}: see {log}")
            said += self._tail(rank)
        return said

    def last_lines(self) -> list[str]:
        """Those of ranks that ended without an exit code, without the progress, which has nothing of their end."""
        gone = [rank for rank, code in sorted(self.codes.items()) if code is None or code < 0]
        return [line for rank in gone for line in self._tail(rank) if not _TIMED.search(line)]

    def lost(self, waits: Sequence[str]) -> list[str]:
        """The machines of which nothing is known, what the ranks of others did, and what to do about it."""
        lost = {node: one.lost for node, one in sorted(self._outcomes.items()) if one.lost is not None}
        heads = [f"{self._names[node]} was lost: {why}" for node, why in lost.items()]
        causes = dict.fromkeys(
            next((about for begins, about in _LOST.items() if why.startswith(begins)), _UNREACHED)
            for why in lost.values()
        )
        return [
            *heads,
            *(f"  {one}" for one in (waits if heads else ())),
            *(line for cause, advice in causes for line in (f"  likely cause: {cause}", f"  → {advice}")),
        ]

    def unexplained(self) -> list[str]:
        """Where no rank has said anything: what torchrun has."""
        said = []
        for node, one in sorted(self._outcomes.items()):
            name = self._names[node]
            if one.launched < 0:
                said.append(f"{name}: torchrun was killed ({signal.Signals(-one.launched).name}): see {one.log}")
            elif one.launched:
                said.append(f"{name}: the processes could not be started: see {one.log}")
                said += [f"{name}: {line}" for line in one.words]
        return said or ["not every process has ended by itself"]

    def _order(self, rank: int) -> tuple[bool, bool, int]:
        return rank in self._followers, rank // self._per_node != self._first, rank

    def _rank(self, rank: int) -> tuple[str, Outcome]:
        node = rank // self._per_node
        return f"{self._names[node]}, rank {rank}", self._outcomes[node]

    def _tail(self, rank: int) -> list[str]:
        name, outcome = self._rank(rank)
        return [f"{name}: {line}" for line in outcome.tails.get(rank, ())]


def _ended_without_code(code: int | None) -> str:
    if code is None:
        return "ended without an exit code (killed, or out of memory?)"
    name = signal.Signals(-code).name
    return f"was killed ({name}; out of memory?)" if code == -signal.SIGKILL else f"was ended by {name}"
