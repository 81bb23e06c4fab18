"""Reports of all launchers to machine 0, once a second, and its orders in answer.

Every call has the whole state, and every answer all orders, so that a lost call does no harm. Machine 0 decides: whether all
stop for a signal, which machine failed first, which one is lost (silent for too long), the exit code of all, and whether the run
starts again (Restarts).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from packtrain.errors import BUG, PeerFailed
from packtrain.launch.exit_status import MOST_TELLING, MachineReport, Verdict, decide_exit
from packtrain.monitor.channel import CALL_S, Client, NoAnswer, Rejected
from packtrain.monitor.diagnosis import Diagnosis
from packtrain.monitor.watchdog import Watchdog
from packtrain.plan.origin import list_checkpoints
from packtrain.run_folder import RunFolder, as_type, write_json
from packtrain.system import in_time
from packtrain.wording import clean

BEAT_S = 1.0
ENDING_S = 30
"""Seconds that the other launchers have after a failure to report how their processes ended."""
_SILENCE_AFTER_FAILURE_S = 10  # silence that makes a machine lost, once something has failed
REFUSED_S = 5  # machine 0 is lost after so long without a server of this run at its port
INFORM_S = 10
_POLL_S = 0.1
_RESTARTED = (1, PeerFailed.exit_code)  # a run with one of these exit codes is started again
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
        self._next: dict[str, Any] | None = None  # the coming restart
        self._record: list[Mapping[str, Any]] = []

    def decide(self, verdict: Verdict, failed: str, living: tuple[int, ...] = (0,)) -> Verdict:
        """Return the verdict, with the `living` machines to restart or the reason against it. `failed` is the first failure."""
        if not self._most or verdict.code not in _RESTARTED:
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

    def answer(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
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

    def update(self, **facts: Any) -> None:
        """Put `facts` into the report, and send it at once."""
        for name, value in facts.items():
            setattr(self.report, name, value)
        self._wake.set()

    def finish(self, host: str, per_node: int, **facts: Any) -> Verdict:
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
