"""The exit code: of a process, from the error or signal that ended it, and of a run, from how the processes of every machine ended.

One failure makes the other ranks end with "lost a peer"; so a wrong config or a failed check wins over a bug, and both over a
lost peer (MOST_TELLING). Ranks that ended only because others had (`followers`) are named last.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from packtrain.boundary import TRACEBACK, explain
from packtrain.errors import PacktrainError, UserError
from packtrain.redact import Redactor, clean
from packtrain.standard_streams import outlive_terminal
from packtrain.wording import visible

ENDING = (signal.SIGINT, signal.SIGTERM)
"""The signals that ask a process to end."""
BUG = "This is a bug of packtrain: please report it with the lines above."
MOST_TELLING = (2, 3, 1, 4)  # exit codes, the most informative first
_PRINTED_BY_RANK_0 = (2, 3, 4)  # its own PacktrainError, on the terminal
TAIL_LINES = 20
_HEAD = re.compile(r"error:|error: \d+ problems").fullmatch
_STEP_LINE = re.compile(r"(\S+ \S+ )?step \d+/\d+ .*").fullmatch
_MACHINE_0 = "; it is machine 0, without which the run ends"
_LOST = (
    "  likely cause: the machine is down, its link is cut, or its launcher was killed or stopped",
    "  → look whether the machine is up, at its link, at its launcher's terminal or log, and at dmesg there (out of memory, time "
    "limit); start the same commands again (Slurm does, with topology.requeue): they go on from the newest checkpoint",
)


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM outside training, which has a handler of its own (train/settings.py)."""


@contextmanager
def listening(listener: Callable[[int], None]) -> Iterator[None]:
    """Inside the block SIGINT and SIGTERM call `listener` with their number, which may raise; afterwards the old handlers return.

    Only for the main thread.
    """
    before = {number: signal.signal(number, lambda received, _: listener(received)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code_of(work: Callable[[], int], *, alone: bool = True) -> int:
    """Does `work` and returns its exit code, or that of the error or signal it ended with, which is printed.

    If this is one of many processes (not `alone`), an exception is not yet called a bug, nor a lost peer, and a signal is not
    reported: the launcher does so, because it knows how the others ended, and may start them again.
    """
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        raise Stopped

    try:
        with listening(stop):
            code = work()
            sys.stdout.flush()
            return code
    except SystemExit as exit_:
        if isinstance(exit_.__context__, BrokenPipeError):  # rich ends the process so, with 1
            return 128 + signal.SIGPIPE
        raise
    except (Exception, KeyboardInterrupt) as error:
        if not received:
            return report_error(error, alone=alone)
        # whatever the error is: an interrupted import may raise its own
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        if alone:
            print(_stopped_by(received[0]), file=sys.stderr, flush=True)
        return 128 + received[0]


def report_error(error: Exception | KeyboardInterrupt, *, alone: bool = True) -> int:
    """The exit code for an error, which is printed: as the user's, or with its traceback as a bug."""
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        outlive_terminal()  # it may be the terminal itself that cannot be written to
    known = error if isinstance(error, PacktrainError) else explain(error)
    if known is not error and not alone:
        # a disk that has failed, perhaps that of one machine alone, is no mistake of the user's
        failed_disk = isinstance(error, OSError) and error.errno in (errno.EIO, errno.ESTALE, errno.ENODEV)
        if failed_disk or not isinstance(known, UserError):
            known = None
    if known is not None:
        if known.shown:
            if os.environ.get(TRACEBACK):
                _print_traceback(error)
            _print_problems(known)
        return known.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, BrokenPipeError):  # the reader of our output has left (`packtrain plan … | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    _print_traceback(error)
    if alone:
        print(BUG, file=sys.stderr)
    return 1


def _print_traceback(error: BaseException) -> None:
    print(clean("".join(traceback.format_exception(error))), end="", file=sys.stderr)


def _print_problems(error: PacktrainError) -> None:
    number = len(error.problems)
    print(f"error: {number} problems" if number > 1 else "error:", file=sys.stderr)
    redactor = Redactor(os.environ)
    for (
        problem
    ) in error.problems:  # `where` has arguments and paths; values are quoted without secrets, and may be data
        shown = redactor.certain(str(replace(problem, where=clean(problem.where))))
        print(f"  {visible(shown, whitespace=True)}", file=sys.stderr)


def tail_of(log: Sequence[str]) -> list[str]:
    """The last lines of a log: what its process said of its own end, if it did, and not the traceback or the steps before that."""
    last = list(log[max((at + 1 for at, line in enumerate(log) if _STEP_LINE(line)), default=0) :][-TAIL_LINES:])
    return last[max((at for at, line in enumerate(last) if _HEAD(line)), default=0) :]


def _stopped_by(number: int) -> str:
    return f"stopped by {signal.Signals(number).name}"


def is_failure(code: int | None) -> bool:
    """Whether this is a failure: an error, a signal, or no known code (None); not an orderly stop (128 + signal)."""
    return code is None or code < 0 or 0 < code <= 128


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one machine's processes ended: exit code by rank, negative for a signal, None if neither is known.

    `codes` leaves out ranks that the launcher ended because others had failed. `launched` is torchrun's own exit code (0 if the
    launcher ended it), `signal` the one that stopped the run, `tails` are the last lines of failed ranks, under -1 those of
    torchrun if no rank has started; `log` is torchrun's own log, beside those of the ranks. `followers` are ranks that ended only
    because others had. `lost` is why nothing is known of a machine.
    """

    codes: Mapping[int, int | None] = field(default_factory=dict)
    launched: int = 0
    signal: int | None = None
    tails: Mapping[int, Sequence[str]] = field(default_factory=dict)
    log: str = "logs/launcher.log"
    followers: Sequence[int] = ()
    lost: str = ""

    @property
    def failed(self) -> bool:
        """Whether the run has failed, so that the other machines end, too."""
        launch_failed = self.launched != 0 and self.signal is None
        return any(map(is_failure, self.codes.values())) or bool(self.lost) or launch_failed


@dataclass(frozen=True, slots=True)
class Verdict:
    """The exit code of every launcher, what machine 0's terminal shows, and the machines that `restart` the run, if any do."""

    code: int
    lines: Sequence[str] = ()
    restart: tuple[int, ...] = ()


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

    `first` is the machine that failed first, `diagnosis` the watchdog's if the run stood still or ranks were killed, `waits` what
    the ranks did when machines were lost. The first row that applies decides:

    | exit code    | if                                            | printed                                 |
    |--------------|-----------------------------------------------|-----------------------------------------|
    | 2, 3         | a rank ended with it                          | that rank                               |
    | 4            | there is a diagnosis                          | the diagnosis, lost machines            |
    | 4            | a machine is lost                             | that machine, a rank that raised        |
    | 0            | all ranks ended with 0                        |                                         |
    | 128 + signal | a launcher received a signal                  | the signal                              |
    | 1            | all ranks raised: a bug, not a lost peer      | the first rank, BUG                     |
    | 4            | a rank or torchrun failed                     | the first rank that did, else torchrun  |
    | 128 + signal | workers got a signal from elsewhere           | the signal                              |
    | 0            | workers that are not packtrain's wrote none   |                                         |
    """
    end = _End(outcomes, names, per_node, first)
    codes, total = list(end.codes.values()), len(names) * per_node
    for telling in MOST_TELLING[:2]:
        if telling in codes:
            return Verdict(telling, end.describe_rank(telling))
    lost = end.describe_lost(waits)
    if diagnosis:
        silent = [rank for rank, code in sorted(end.codes.items()) if code is None or code < 0]
        return Verdict(4, [*diagnosis, *lost, *(line for rank in silent for line in end.tail(rank))])
    if lost:
        return Verdict(4, [*lost, *end.describe_rank(1)])
    if codes == [0] * total:
        return Verdict(0)
    received = next((outcome.signal for outcome in outcomes.values() if outcome.signal is not None), None)
    if received is not None:
        in_order = not codes or codes == [128 + received] * total
        late = "" if in_order else f", but not every process could end in order: see {outcomes[min(outcomes)].log}"
        return Verdict(128 + received, [f"{_stopped_by(received)}{late}"])
    if codes == [1] * total:
        return Verdict(1, [*end.describe_rank(1), BUG])
    if any(outcome.failed for outcome in outcomes.values()):
        lines = end.describe_rank(1) or end.describe_rank(*filter(is_failure, codes))
        return Verdict(4, lines or end.describe_torchrun())
    if signalled := max((code for code in codes if code), default=0):
        return Verdict(signalled, [_stopped_by(signalled - 128)])
    return Verdict(0)


class _End:
    """How a run ended, in words: which rank or machine failed, and the last lines of its log."""

    def __init__(self, outcomes: Mapping[int, Outcome], names: Mapping[int, str], per_node: int, first: int) -> None:
        self._outcomes, self._names, self._per_node, self._first = outcomes, names, per_node, first
        self.codes = {rank: code for outcome in outcomes.values() for rank, code in outcome.codes.items()}
        self._followers = {rank for outcome in outcomes.values() for rank in outcome.followers}

    def describe_rank(self, *among: int | None) -> list[str]:
        """The first rank that failed with a code `among` these, with its last lines; [] if there is none, or if rank 0 has already
        printed the error. Codes 2 and 3 mostly end all ranks alike: rank 0 then is the one to name."""
        failed = [rank for rank, code in self.codes.items() if code in among]
        if not failed:
            return []

        def order(rank: int) -> tuple[bool, bool, int]:
            return rank in self._followers, rank // self._per_node != self._first, rank

        rank = 0 if 0 in failed and among[0] in (2, 3) else min(failed, key=order)
        node, code = rank // self._per_node, self.codes[rank]
        outcome = self._outcomes[node]
        raised_everywhere = code == 1 and len(failed) == len(self._names) * self._per_node
        if rank == 0 and 0 not in outcome.tails and (code in _PRINTED_BY_RANK_0 or raised_everywhere):
            return []
        how = f"exit code {code}" if code is not None else "no exit code"
        log = PurePath(outcome.log).with_name(f"rank-{rank:05d}.log")
        return [f"{self._names[node]}, rank {rank} failed ({how}): see {log}", *self.tail(rank)]

    def describe_lost(self, waits: Sequence[str]) -> list[str]:
        """The lost machines, what the ranks of the others did, and what to do about it."""
        heads = [
            f"{self._names[node]} was lost: {outcome.lost}{'' if node else _MACHINE_0}"
            for node, outcome in sorted(self._outcomes.items())
            if outcome.lost
        ]
        return [*heads, *(f"  {words}" for words in waits), *_LOST] if heads else []

    def describe_torchrun(self) -> list[str]:
        """The last lines of torchrun, for a failure that no rank explains."""
        lines = []
        for node, outcome in sorted(self._outcomes.items()):
            name = self._names[node]
            if outcome.launched:
                lines.append(f"{name}: torchrun ended with exit code {outcome.launched}: see {outcome.log}")
                lines += [f"{name}: {line}" for line in outcome.tails.get(-1, ())]
        return lines

    def tail(self, rank: int) -> list[str]:
        """The last lines of a rank's log, each with its name."""
        node = rank // self._per_node
        return [f"{self._names[node]}, rank {rank}: {line}" for line in self._outcomes[node].tails.get(rank, ())]
