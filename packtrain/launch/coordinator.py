"""The launchers during a run: each reports the state of its machine to machine 0 once a second, which answers with orders.

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

from packtrain.errors import PeerFailed
from packtrain.exit_code import BUG
from packtrain.launch.exit_status import MOST_TELLING, MachineReport, Verdict, decide_exit
from packtrain.monitor.channel import CALL_S, Client, NoAnswer, Rejected
from packtrain.monitor.diagnosis import Diagnosis
from packtrain.monitor.watchdog import Watchdog
from packtrain.plan.origin import list_checkpoints
from packtrain.redact import clean
from packtrain.run_folder import RunFolder, as_type, write_json
from packtrain.time_limit import in_time

BEAT_S = 1.0
ENDING_S = 30
"""Seconds after a failure for the other launchers to report how their processes ended."""
_SILENCE_AFTER_FAILURE_S = 10  # after which a machine is lost, once something has failed
REFUSED_S = 5  # without a server of this run at machine 0's port, after which machine 0 is lost
INFORM_S = 10
_POLL_S = 0.1
_RESTARTED = (1, PeerFailed.exit_code)  # exit codes after which a run is started again
_FRUITLESS = 2  # restarts in a row without a new checkpoint after which the run is ended
_LONGEST_CALL_S, _LONGEST_POLL_S = 20, 3  # a longer time between two means that this process was suspended


@dataclass(frozen=True, slots=True)
class Orders:
    """What a machine is to do: pass on the signal `stop`, `end` its processes for a reason; and the `verdict` on the
    run, once there is one. `why` explains `stop` on the terminal."""

    stop: int | None = None
    why: str = ""
    end: str = ""
    verdict: Verdict | None = None


class Restarts:
    """trainer.restarts: decides after each failure whether the run starts again, at most `most` times, and records each restart.

    The run starts again from its newest checkpoint after a rank died or hung, or another machine was lost; not after a signal, nor
    after a failure that would recur (a wrong config, a failed check). The run folder's record has for each restart: `when` (local
    time), the `step` of its checkpoint (0: the beginning), `why` in lines, and the `machines` that go on. torchrun's elastic agent is
    not used: it restarts whatever the exit code, and knows nothing of hung ranks or of checkpoints.
    """

    def __init__(self, most: int, folder: RunFolder) -> None:
        self._most, self._folder = most, folder
        self._steps: list[int] = []  # of the newest checkpoint at each failure
        self._next: dict[str, Any] | None = None  # the restart that is about to be made
        self._record: list[Mapping[str, Any]] = []

    def decide(self, verdict: Verdict, failed: str, living: tuple[int, ...] = (0,)) -> Verdict:
        """The verdict, with the `living` machines as those that restart, or a line that says why there is no restart; `failed` is
        the first failure in words."""
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
        """trainer.resume of the next start, where `asked` was that of the first: auto, once this run has a checkpoint."""
        return "auto" if self._next and self._begun() and newest_step(self._folder) else asked

    def write_record(self, machines: list[str]) -> None:
        """Writes the record for a start with these machines, into the run folder that has been opened for it."""
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
        """What the terminal says of the restart that is about to be made."""
        step = self._steps[-1]
        place = f"the checkpoint of step {step}" if step else "the beginning, for there is no checkpoint"
        return f"restart {len(self._steps)} of {self._most}, from {place}"

    def _begun(self) -> bool:
        """Whether this run has begun to train: until then the run folder holds an earlier one."""
        return not self._folder.attempt.root.exists()


def newest_step(folder: RunFolder) -> int:
    """The step of the newest checkpoint, 0 where there is none."""
    return max(list_checkpoints(folder.checkpoints), default=0)


class Coordinator:
    """Machine 0's record of all machines, itself included; thread-safe. Each report of its own launcher makes it check all."""

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
        self._final_reports: dict[int, MachineReport] = {}  # the last report of each machine whose processes have ended
        self._stop_signal: tuple[int, int] | None = None  # signal, machine
        self._end_order: tuple[str, int] | None = None  # why, and the machine that reported it
        self._end_ordered_at = 0.0
        self._diagnosis: Diagnosis | None = None
        self._verdict: Verdict | None = None
        self._informed: set[int] = set()  # machines that got the verdict

    def answer(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The handler of the channel's call `machine`."""
        return asdict(self.receive_report(as_type(body, MachineReport)))

    def receive_report(self, report: MachineReport) -> Orders:
        """Takes a report; returns the orders for that machine."""
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
        """Records lost machines, and orders the end of a run that stands still."""
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
        """Returns when all machines that are not lost have the verdict, or after INFORM_S."""
        end = time.monotonic() + INFORM_S
        while time.monotonic() < end:
            with self._lock:
                if self._informed.issuperset(node for node in self._living() if node):
                    return
            time.sleep(_POLL_S)

    def _living(self) -> tuple[int, ...]:
        return tuple(node for node, report in sorted(self._final_reports.items()) if not report.lost)

    def _record(self, report: MachineReport) -> None:
        """Records how the processes of a machine ended, the first report only; the last machine's decides the verdict."""
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
        aborts = -signal.SIGABRT if 1 in codes else 0  # NCCL aborts ranks after another one has raised
        killed = any(code is None or (code < 0 and code != aborts) for code in codes)
        if diagnosis is None and (killed or set(codes) == {0, 4}):
            diagnosis = self._watchdog.diagnose_deaths()
        why, first = self._end_order or ("", 0)
        per_node = self._per_node
        lost = [rank for rank in range(len(self._names) * per_node) if rank // per_node not in living]
        lines = diagnosis.lines if diagnosis else ()
        waits = self._watchdog.describe_waits(but=lost) if lost else ()
        verdict = decide_exit(self._final_reports, self._names, per_node, first=first, diagnosis=lines, waits=waits)
        if verdict.lines and verdict.code in MOST_TELLING:  # for packtrain doctor
            self._watchdog.write_diagnosis("\n".join(verdict.lines))
        if self._restarts is not None and self._stop_signal is None and 0 in living:
            verdict = self._restarts.decide(verdict, why, living)
        return verdict


class Reporter:
    """A context with a thread that sends the launcher's `report` to machine 0 once a second, and keeps the last `orders`.

    `machine_0` is the Coordinator there, elsewhere a client of its channel; `main` is the name of machine 0. `lost` is why machine 0
    counts as lost, "" while it does not.
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
        """After an exception or a signal reports this machine as lost, so that the others end their workers."""
        self._over.set()
        self._wake.set()
        self._thread.join(2 * BEAT_S)
        if error is not None and not self.lost:
            lost = f"its launcher ended ({str(error) or type(error).__name__})"
            self.report = MachineReport(self.report.node, ended=True, lost=lost)
            self.send_report()

    def update(self, **facts: Any) -> None:
        """Puts `facts` into the report, and sends it at once."""
        for name, value in facts.items():
            setattr(self.report, name, value)
        self._wake.set()

    def finish(self, host: str, per_node: int, **facts: Any) -> Verdict:
        """Reports how this machine's processes ended (`facts` of MachineReport), waits for those of the others, and returns the verdict
        on all: without limit while the others report and nothing has failed, ENDING_S seconds after a failure."""
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
        """Sends the report once, and notes for how long machine 0 has not answered."""
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
