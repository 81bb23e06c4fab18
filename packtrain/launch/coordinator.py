"""Reports of all launchers to machine 0, its orders, and the run's one exit code.

Every call has the whole state, and every answer all orders, so that a lost call does no harm. Machine 0 decides: whether all
stop for a signal, which machine failed first, which one is lost (silent for too long), the exit code of all, and whether the run
starts again (Restarts).

After one failure the other ranks end with "lost a peer". So a wrong config or a failed check wins over a bug, and both win over a
lost peer (MOST_TELLING). Ranks that ended only because they lost others are named last. The first row that applies decides
(`decide_exit`):

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
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath

from packtrain.errors import BUG, Json, PeerFailed
from packtrain.monitor.channel import CALL_S, Client, NoAnswer, Rejected
from packtrain.monitor.heartbeat import ProcessState
from packtrain.monitor.watchdog import Diagnosis, Watchdog
from packtrain.plan.origin import list_checkpoints
from packtrain.run_folder import RunFolder, as_type, write_json
from packtrain.system import in_time, stopped_by
from packtrain.wording import clean

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


BEAT_S = 1.0
ENDING_S = 30
"""Seconds that the other launchers have after a failure to report how their processes ended."""
_SILENCE_AFTER_FAILURE_S = 10  # silence that makes a machine lost, once something has failed
REFUSED_S = 5  # machine 0 is lost after so long without a server of this run at its port
INFORM_S = 10
_POLL_S = 0.1
RESTARTED = (1, PeerFailed.exit_code)  # a run with one of these exit codes is started again
_FRUITLESS = 2  # restarts in a row without a new checkpoint that end the run
_LONGEST_CALL_S, _LONGEST_POLL_S = 20, 3  # a longer time between two: this process was suspended


@dataclass(frozen=True, slots=True)
class Orders:
    """Orders to a machine: pass on the signal `stop`, or `end` its processes.

    `end` is the reason, and `why` explains `stop` on the terminal. `verdict` is the run's, once decided.
    """

    stop: int | None = None
    why: str = ""
    end: str = ""
    verdict: Verdict | None = None


class Restarts:
    """Decisions about trainer.restarts: at most `most` restarts, each recorded.

    The run starts again from its newest checkpoint after a rank died or hung, or another machine was lost; not after a signal, nor
    after a failure that would recur (a wrong config, a failed check). The run folder's record has for each restart: `when` (local
    time), the `step` of its checkpoint (0: the beginning), `why` in lines, and the `machines` that go on. torchrun's elastic agent is
    not used: it restarts after any exit code, and knows nothing of hung ranks or of checkpoints.
    """

    def __init__(self, most: int, folder: RunFolder) -> None:
        self._most, self._folder = most, folder
        self._steps: list[int] = []  # step of the newest checkpoint at each failure
        self._next: Json | None = None  # the coming restart
        self._record: list[Json] = []

    def decide(self, verdict: Verdict, failed: str, living: tuple[int, ...] = (0,)) -> Verdict:
        """Return the verdict, with the `living` machines to restart or the reason against it. `failed` is the first failure."""
        if not self._most or verdict.code not in RESTARTED:
            return verdict
        step = in_time(lambda: newest_step(self._folder), 0)
        self._steps.append(step)
        if in_time(lambda: self._begun() and self._folder.status() == "done", False):
            why_not = "the run had finished"
        elif self._steps[-_FRUITLESS - 1 :] == [step] * (_FRUITLESS + 1):
            why_not = f"{_FRUITLESS} restarts in a row have brought no new checkpoint"
        elif len(self._steps) > self._most:
            why_not = f"all trainer.restarts={self._most} have been used"
        else:
            why = [clean(line) for line in verdict.lines if line != BUG] or [clean(failed)]
            self._next = {"when": time.strftime("%Y-%m-%d %H:%M:%S"), "step": step, "why": why}
            return replace(verdict, restart=living)
        return replace(verdict, lines=[*verdict.lines, f"not started again: {why_not}"])

    def resume_mode(self, asked: str) -> str:
        """Return trainer.resume for the next start: auto once this run has a checkpoint, else `asked`."""
        return "auto" if self._next and self._begun() and newest_step(self._folder) else asked

    def write_record(self, machines: list[str]) -> None:
        """Write the record for a start with these machines. The run folder is open by now."""
        step = newest_step(self._folder)
        if self._next:
            self._record = [*self._record, {**self._next, "step": step, "machines": machines}]
            self._next = None
        elif step:  # the run goes on, perhaps after a requeue
            self._record = [*self._folder.restarts()]
        if self._record:
            write_json(self._folder.restarted, self._record)
        else:
            self._folder.restarted.unlink(missing_ok=True)

    def sentence(self) -> str:
        """Describe the coming restart for the terminal."""
        step = self._steps[-1]
        place = f"the checkpoint of step {step}" if step else "the beginning, for there is no checkpoint"
        return f"restart {len(self._steps)} of {self._most}, from {place}"

    def _begun(self) -> bool:
        """Return whether this run has begun to train. Until then the run folder holds an earlier run."""
        return not self._folder.attempt.root.exists()


def newest_step(folder: RunFolder) -> int:
    """Return the step of the newest checkpoint, 0 if there is none."""
    return max(list_checkpoints(folder.checkpoints), default=0)


class Coordinator:
    """Machine 0's thread-safe record of all machines. Each report of its own launcher makes it check all of them."""

    def __init__(
        self,
        names: Mapping[int, str],
        per_node: int,
        silence_s: float,
        watchdog: Watchdog,
        restarts: Restarts | None = None,
    ) -> None:
        self._names, self._per_node, self._silence_s, self._watchdog = dict(names), per_node, silence_s, watchdog
        self._restarts = restarts
        self._lock = threading.RLock()
        self._silent_s = dict.fromkeys(self._names, 0.0)
        self._checked_at = time.monotonic()
        self._final_reports: dict[int, MachineReport] = {}  # the last report of each machine that has ended
        self._stop_signal: tuple[int, int] | None = None  # signal, machine
        self._end_order: tuple[str, int] | None = None  # why, and the machine that reported it
        self._end_ordered_at = 0.0
        self._diagnosis: Diagnosis | None = None
        self._verdict: Verdict | None = None
        self._informed: set[int] = set()  # machines that got the verdict

    def answer(self, body: Json) -> Json:
        """Handle the channel's call `machine`."""
        return asdict(self.receive_report(as_type(body, MachineReport)))

    def receive_report(self, report: MachineReport) -> Orders:
        """Take a report; return the orders for that machine."""
        node = report.node
        if node == 0:
            self.watch()
        self._watchdog.receive_processes(node, report.ranks)
        self._watchdog.receive_stacks(report.stacks)
        with self._lock:
            self._silent_s[node] = 0.0
            if report.signal is not None and self._stop_signal is None:
                self._stop_signal = report.signal, node
            if report.failed:
                self._order_end(report.failed, node)
            if report.ended:
                self._record(report)
            if self._verdict is not None:
                self._informed.add(node)
            orders = Orders(verdict=self._verdict)
            if self._stop_signal is not None and self._stop_signal[1] != node:
                number, asked = self._stop_signal
                why = f"stopping: {self._names[asked]} received {signal.Signals(number).name}"
                orders = replace(orders, stop=number, why=why)
            if self._end_order is not None and self._end_order[1] != node:
                orders = replace(orders, end=self._end_order[0])
            return orders

    def watch(self) -> None:
        """Record lost machines, and order the end of a run that stands still."""
        with self._lock:
            now = time.monotonic()
            passed, self._checked_at = min(now - self._checked_at, _LONGEST_POLL_S), now
            limit = self._silence_s if self._end_order is None else min(self._silence_s, _SILENCE_AFTER_FAILURE_S)
            for node in set(self._names) - set(self._final_reports) - {0}:
                self._silent_s[node] += passed
                if self._silent_s[node] > limit:
                    self._record(MachineReport(node, lost=f"silent for {self._silent_s[node]:.0f} s"))
                elif self._end_order is not None and now - self._end_ordered_at > ENDING_S:
                    lost = f"its processes had not ended {ENDING_S} s after the failure"
                    self._record(MachineReport(node, lost=lost))
            goes_on = self._end_order is None and self._verdict is None
        if goes_on and (diagnosis := self._watchdog.diagnose()):
            with self._lock:
                if self._end_order is None:
                    self._diagnosis = diagnosis
                    self._order_end(diagnosis.what, -1)

    def wait_until_all_informed(self) -> None:
        """Wait until all machines that are not lost have the verdict, at most INFORM_S."""
        end = time.monotonic() + INFORM_S
        while time.monotonic() < end:
            with self._lock:
                if self._informed.issuperset(node for node in self._living() if node):
                    return
            time.sleep(_POLL_S)

    def _living(self) -> tuple[int, ...]:
        return tuple(node for node, report in sorted(self._final_reports.items()) if not report.lost)

    def _record(self, report: MachineReport) -> None:
        """Record a machine's first report of its end. The last machine's report leads to the verdict."""
        if report.node in self._final_reports:
            return
        self._final_reports[report.node] = report
        if report.lost:
            self._order_end(f"{self._names[report.node]} was lost: {report.lost}", report.node)
        elif report.has_failed:
            self._order_end(f"the processes on {self._names[report.node]} failed", report.node)
        if self._verdict is None and set(self._final_reports) == set(self._names):
            self._verdict = self._decide()

    def _order_end(self, why: str, reporter: int) -> None:
        if self._end_order is None:
            self._end_order, self._end_ordered_at = (why, reporter), time.monotonic()

    def _decide(self) -> Verdict:
        diagnosis, living = self._diagnosis, self._living()
        codes = [code for report in self._final_reports.values() for code in report.codes.values()]
        aborts = -signal.SIGABRT if 1 in codes else 0  # NCCL aborts ranks after another rank has raised
        killed = any(code is None or (code < 0 and code != aborts) for code in codes)
        if diagnosis is None and (killed or set(codes) == {0, 4}):
            diagnosis = self._watchdog.diagnose_deaths()
        why, first = self._end_order or ("", 0)
        per_node = self._per_node
        lost = [rank for rank in range(len(self._names) * per_node) if rank // per_node not in living]
        lines = diagnosis.lines if diagnosis else ()
        waits = self._watchdog.describe_waits(but=lost) if lost else ()
        verdict = decide_exit(self._final_reports, self._names, per_node, first=first, diagnosis=lines, waits=waits)
        if verdict.lines and verdict.code in MOST_TELLING:  # packtrain doctor reads it
            self._watchdog.write_diagnosis("\n".join(verdict.lines))
        if self._restarts is not None and self._stop_signal is None and 0 in living:
            verdict = self._restarts.decide(verdict, why, living)
        return verdict


class Reporter:
    """Thread in a `with` block: sends `report` once a second, keeps the last `orders`.

    `machine_0` is the Coordinator itself on machine 0, elsewhere a client of its channel; `main` is machine 0's name. `lost` says why
    machine 0 counts as lost, "" while it does not.
    """

    def __init__(self, node: int, main: str, silence_s: float, machine_0: Coordinator | Client) -> None:
        self.report, self.orders, self.lost = MachineReport(node), Orders(), ""
        self._main, self._silence_s, self._machine_0 = main, silence_s, machine_0
        self._silent_s, self._called = 0.0, time.monotonic()
        self._wake, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._report_until_done, name="launchers", daemon=True)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """After an exception or a signal, report this machine as lost. Then the others end their workers."""
        self._over.set()
        self._wake.set()
        self._thread.join(2 * BEAT_S)
        if error is not None and not self.lost:
            lost = f"its launcher ended ({str(error) or type(error).__name__})"
            self.report = MachineReport(self.report.node, ended=True, lost=lost)
            self.send_report()

    def update(self, **facts: object) -> None:
        """Put `facts` into the report, and send it at once."""
        for name, value in facts.items():
            setattr(self.report, name, value)
        self._wake.set()

    def finish(self, host: str, per_node: int, **facts: object) -> Verdict:
        """Report the ends of this machine's processes (`facts`), and return the verdict on all machines.
        Waits for the others without limit while they report and nothing has failed, ENDING_S seconds after a failure."""
        self.update(**facts, ended=True)
        while (verdict := self.orders.verdict) is None:
            if self.lost:
                reports = {0: MachineReport(0, lost=self.lost), self.report.node: self.report}
                return decide_exit(reports, {0: self._main, self.report.node: host}, per_node)
            time.sleep(_POLL_S)
        return verdict

    def _report_until_done(self) -> None:
        while not self._over.is_set():
            self.send_report()
            self._wake.wait(BEAT_S)
            self._wake.clear()

    def send_report(self) -> None:
        """Send the report once, and note how long machine 0 has not answered."""
        try:
            if isinstance(self._machine_0, Coordinator):
                self.orders = self._machine_0.receive_report(self.report)
            else:
                limit_s = max(CALL_S, self._silence_s / 2)
                self.orders = as_type(self._machine_0.call("machine", asdict(self.report), timeout_s=limit_s), Orders)
            self._silent_s, self._called = 0.0, time.monotonic()
        except (NoAnswer, Rejected) as error:
            now = time.monotonic()
            self._silent_s, self._called = self._silent_s + min(now - self._called, _LONGEST_CALL_S), now
            ended = error.nothing_listens if isinstance(error, NoAnswer) else not error.unknown
            if self._silent_s > (REFUSED_S if ended else self._silence_s):
                why = "its launcher ended" if ended else f"silent for {self._silent_s:.0f} s"
                self.lost = self.lost or why
