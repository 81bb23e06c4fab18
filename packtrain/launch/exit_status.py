"""Exit code of a run, decided from the ends of all its processes.

After one failure the other ranks end with "lost a peer". So a wrong config or a failed check wins over a bug, and both win over a
lost peer (MOST_TELLING). Ranks that ended only because they lost others are named last.

The first row that applies decides (`decide_exit`):

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

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from packtrain.errors import BUG
from packtrain.monitor.processes import ProcessState
from packtrain.system import stopped_by

MOST_TELLING = (2, 3, 1, 4)  # exit codes, the most informative first
_PRINTED_BY_RANK_0 = (2, 3, 4)  # rank 0 prints its own PacktrainError on the terminal
TAIL_LINES = 20
_HEAD = re.compile(r"error:|error: \d+ problems").fullmatch
_STEP_LINE = re.compile(r"(\S+ \S+ )?step \d+/\d+ .*").fullmatch
_MACHINE_0 = "; it is machine 0, without which the run ends"
_LOST = (
    "  likely cause: the machine is down, its link is cut, or its launcher was killed or stopped",
    "  → check whether the machine is up, its link, its launcher's terminal or log, and dmesg there (out of memory, time "
    "limit); start the same commands again (Slurm does, with topology.requeue): they go on from the newest checkpoint",
)


def tail_of(log: Sequence[str]) -> list[str]:
    """Return the last lines of a log. If the process reported its end, they are that report; steps are left out."""
    last = list(log[max((at + 1 for at, line in enumerate(log) if _STEP_LINE(line)), default=0) :][-TAIL_LINES:])
    return last[max((at for at, line in enumerate(last) if _HEAD(line)), default=0) :]


def is_failure(code: int | None) -> bool:
    """Return whether a code is a failure: an error, a signal or None (unknown). An orderly stop (128 + signal) is none."""
    return code is None or code < 0 or 0 < code <= 128


@dataclass(slots=True)
class MachineReport:
    """A launcher's report about machine `node` and the processes of its `ranks`.

    `stacks` are from crashed processes, `signal` is the one that the launcher received, and `failed` is its first failure in words. Once all
    processes have `ended`, `ranks` leaves out those that the launcher ended because others had failed. `launched` is torchrun's exit code (0
    if the launcher ended it). `tails` are the last lines of failed ranks, or under -1 torchrun's if no rank has started. `log` is
    torchrun's log, beside the ranks' logs. `lost` says why nothing is known of a machine.
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
        """Exit code by rank, negative for a signal. None: the rank did not write the code itself (os._exit)."""
        known = {rank: process.reported or (process.code or 0) < 0 for rank, process in self.ranks.items()}
        return {rank: process.code if known[rank] else None for rank, process in sorted(self.ranks.items())}

    @property
    def has_failed(self) -> bool:
        """Whether the run has failed, so that the other machines must end, too."""
        codes = self.codes.values()
        stopped = self.signal is not None or any((code or 0) > 128 for code in codes)  # torchrun turns these into 1
        return any(map(is_failure, codes)) or bool(self.lost) or (self.launched != 0 and not stopped)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The exit code of every launcher, machine 0's last `lines`, and machines that `restart`."""

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
    """Return the verdict on a run from the `reports` of its machines, by number.

    `first` is the machine that failed first. `diagnosis` is the watchdog's, if the run stood still or ranks were killed. `waits` says what
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
        """Describe the first rank that failed with a code `among` these, with its last lines.

        Empty without such a rank, or if rank 0 has printed the error. Codes 2 and 3 mostly end all ranks: rank 0 is then named.
        """
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
        orderly = not codes or codes == [128 + received] * total
        late = "" if orderly else f", but not every process ended cleanly: see {reports[min(reports)].log}"
        return Verdict(128 + received, [f"{stopped_by(received)}{late}"])
    if everyone_raised:
        return Verdict(1, [*describe_rank(1), BUG])
    if any(report.has_failed for report in reports.values()):
        lines = describe_rank(1) or describe_rank(*filter(is_failure, codes))
        return Verdict(4, lines or _describe_torchrun(reports, names))
    if signalled := max((code for code in codes if code), default=0):
        return Verdict(signalled, [stopped_by(signalled - 128)])
    return Verdict(0)


def _describe_torchrun(reports: Mapping[int, MachineReport], names: Mapping[int, str]) -> list[str]:
    """Return torchrun's last lines, for a failure that no rank explains."""
    lines = []
    for node, report in sorted(reports.items()):
        if report.launched:
            lines.append(f"{names[node]}: torchrun ended with exit code {report.launched}: see {report.log}")
            lines += [f"{names[node]}: {line}" for line in report.tails.get(-1, ())]
    return lines
