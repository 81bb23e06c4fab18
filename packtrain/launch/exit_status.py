"""The exit code: of a process, from the error or signal that ended it, and of a run, from how the processes of every machine ended.

One failure makes the other ranks end with "lost a peer"; so a wrong config or a failed check wins over a bug, and both over a
lost peer (MOST_TELLING). Ranks that ended only because they lost others are named last.

The exit code of a run; the first row that applies decides (`decide_exit`):

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
| 0            | the workers are not packtrain's               |                                         |
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

from packtrain.boundary import TRACEBACK, explain, staying
from packtrain.errors import PacktrainError, UserError
from packtrain.monitor.processes import ProcessState
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
    "  → check whether the machine is up, its link, its launcher's terminal or log, and dmesg there (out of memory, time "
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
        with listening(stop), staying():
            code = work()
            sys.stdout.flush()
            return code
    except SystemExit as exit_:
        if isinstance(exit_.__context__, BrokenPipeError):  # as rich ends the process, with code 1
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
    # `where` has arguments and paths; values are quoted without secrets, and may be data
    for problem in error.problems:
        shown = redactor.certain(str(replace(problem, where=clean(problem.where))))
        print(f"  {visible(shown, whitespace=True)}", file=sys.stderr)


def tail_of(log: Sequence[str]) -> list[str]:
    """The last lines of a log: what its process reported about its end, if it did, and not the traceback or the steps before that."""
    last = list(log[max((at + 1 for at, line in enumerate(log) if _STEP_LINE(line)), default=0) :][-TAIL_LINES:])
    return last[max((at for at, line in enumerate(last) if _HEAD(line)), default=0) :]


def _stopped_by(number: int) -> str:
    return f"stopped by {signal.Signals(number).name}"


def is_failure(code: int | None) -> bool:
    """Whether this is a failure: an error, a signal, or no known code (None); not an orderly stop (128 + signal)."""
    return code is None or code < 0 or 0 < code <= 128


@dataclass(slots=True)
class MachineReport:
    """A launcher's report of machine `node`: the processes of its `ranks`, the `stacks` of those that crashed, the `signal` that it
    received, and its first failure in words (`failed`).

    Once all processes have `ended`, `ranks` leaves out those that the launcher ended because others had failed. `launched` is
    torchrun's own exit code (0 if the launcher ended it), `tails` are the last lines of failed ranks, under -1 those of torchrun if
    no rank has started; `log` is torchrun's own log, beside those of the ranks. `lost` is why nothing is known of a machine.
    """

    node: int
    ranks: Mapping[int, ProcessState] = field(default_factory=dict)
    stacks: Mapping[int, str] = field(default_factory=dict)
    signal: int | None = None
    failed: str = ""
    ended: bool = False
    launched: int = 0
    tails: Mapping[int, Sequence[str]] = field(default_factory=dict)
    log: str = "logs/launcher.log"
    lost: str = ""

    @property
    def codes(self) -> dict[int, int | None]:
        """Exit code by rank, negative for a signal; None where a rank did not write the code itself (os._exit)."""
        known = {rank: process.reported or (process.code or 0) < 0 for rank, process in self.ranks.items()}
        return {rank: process.code if known[rank] else None for rank, process in sorted(self.ranks.items())}

    @property
    def has_failed(self) -> bool:
        """Whether the run has failed, so that the other machines end, too."""
        failed = any(map(is_failure, self.codes.values()))
        return failed or bool(self.lost) or (self.launched != 0 and self.signal is None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The exit code of every launcher, what machine 0's terminal shows, and the machines that `restart` the run, if any do."""

    code: int
    lines: Sequence[str] = ()
    restart: tuple[int, ...] = ()


def decide_exit(
    reports: Mapping[int, MachineReport],
    names: Mapping[int, str],
    per_node: int,
    *,
    first: int = 0,
    diagnosis: Sequence[str] = (),
    waits: Sequence[str] = (),
) -> Verdict:
    """The verdict on a run whose machines, by number, ended as `reports` say.

    `first` is the machine that failed first, `diagnosis` the watchdog's if the run stood still or ranks were killed, `waits` what
    the ranks did when machines were lost. See the table above.
    """
    code_of = {rank: code for report in reports.values() for rank, code in report.codes.items()}
    followers = {rank for report in reports.values() for rank, process in report.ranks.items() if process.lost}
    codes, total = list(code_of.values()), len(names) * per_node
    everyone_raised = codes == [1] * total

    def tail(rank: int) -> list[str]:
        node = rank // per_node
        return [f"{names[node]}, rank {rank}: {line}" for line in reports[node].tails.get(rank, ())]

    def describe_rank(*among: int | None) -> list[str]:
        """The first rank that failed with a code `among` these, with its last lines; [] if there is none, or if rank 0 has printed
        the error already. Codes 2 and 3 mostly end all ranks alike: rank 0 then is the one to name."""
        failed = [rank for rank, code in code_of.items() if code in among]
        if not failed:
            return []
        order = {rank: (rank in followers, rank // per_node != first, rank) for rank in failed}
        rank = 0 if 0 in failed and among[0] in (2, 3) else min(failed, key=lambda rank: order[rank])
        node, code = rank // per_node, code_of[rank]
        report = reports[node]
        if rank == 0 and 0 not in report.tails and (code in _PRINTED_BY_RANK_0 or everyone_raised):
            return []
        how = f"exit code {code}" if code is not None else "no exit code"
        log = PurePath(report.log).with_name(f"rank-{rank:05d}.log")
        return [f"{names[node]}, rank {rank} failed ({how}): see {log}", *tail(rank)]

    for code in MOST_TELLING[:2]:
        if code in codes:
            return Verdict(code, describe_rank(code))
    heads = [f"{names[n]} was lost: {r.lost}{'' if n else _MACHINE_0}" for n, r in sorted(reports.items()) if r.lost]
    lost = [*heads, *(f"  {words}" for words in waits), *_LOST] if heads else []
    if diagnosis:
        silent = [rank for rank, code in code_of.items() if code is None or code < 0]
        return Verdict(4, [*diagnosis, *lost, *(line for rank in silent for line in tail(rank))])
    if lost:
        return Verdict(4, [*lost, *describe_rank(1)])
    if codes == [0] * total:
        return Verdict(0)
    received = next((report.signal for report in reports.values() if report.signal is not None), None)
    if received is not None:
        in_order = not codes or codes == [128 + received] * total
        late = "" if in_order else f", but not every process ended cleanly: see {reports[min(reports)].log}"
        return Verdict(128 + received, [f"{_stopped_by(received)}{late}"])
    if everyone_raised:
        return Verdict(1, [*describe_rank(1), BUG])
    if any(report.has_failed for report in reports.values()):
        lines = describe_rank(1) or describe_rank(*filter(is_failure, codes))
        return Verdict(4, lines or _describe_torchrun(reports, names))
    if signalled := max((code for code in codes if code), default=0):
        return Verdict(signalled, [_stopped_by(signalled - 128)])
    return Verdict(0)


def _describe_torchrun(reports: Mapping[int, MachineReport], names: Mapping[int, str]) -> list[str]:
    """The last lines of torchrun, for a failure that no rank explains."""
    lines = []
    for node, report in sorted(reports.items()):
        if report.launched:
            lines.append(f"{names[node]}: torchrun ended with exit code {report.launched}: see {report.log}")
            lines += [f"{names[node]}: {line}" for line in report.tails.get(-1, ())]
    return lines
