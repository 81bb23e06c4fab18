"""The launchers during a run: each reports the state of its machine to machine 0 once a second, which answers with orders.

Every call has the whole state, and every answer all orders, so that a lost call does no harm. Machine 0 decides: whether all
stop for a signal, which machine failed first, which one is lost (silent for too long), and the exit code of all.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from packtrain.launch.exit_status import MOST_TELLING, Outcome, Verdict, judge
from packtrain.launch.restarts import Restarts
from packtrain.monitor.channel import CALL_S, Client, NoAnswer, Refused
from packtrain.monitor.diagnosis import Diagnosis
from packtrain.monitor.processes import ProcessState
from packtrain.monitor.watchdog import Watchdog
from packtrain.run_folder import as_type

BEAT_S = 1.0
ENDING_S = 30
"""Seconds after a failure for the other launchers to report how their processes ended."""
_SILENCE_AFTER_FAILURE_S = 10  # after which a machine is lost, once something has failed
_REFUSED_S = 5  # without a server of this run at machine 0's port, after which machine 0 is lost
_INFORM_S = 10
_PROGRESS_S = 30
_LOOK_S = 0.1
_LONGEST_CALL_S, _LONGEST_LOOK_S = 20, 3  # a longer time between two means that this process was suspended


@dataclass(slots=True)
class Report:
    """A launcher's report of its machine: its `ranks`' processes, their `stacks` if asked for, the `signal` that it received, its
    first failure in words (`failed`), and the `outcome` once all its processes have ended."""

    node: int
    ranks: Mapping[int, ProcessState] = field(default_factory=dict)
    stacks: Mapping[int, str] = field(default_factory=dict)
    signal: int | None = None
    failed: str = ""
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Orders:
    """What a machine is to do: pass on the signal `stop`, `end` its processes for a reason, dump the `stacks` of ranks; and the
    `verdict` on the run, once there is one. `why` explains `stop` on the terminal."""

    stop: int | None = None
    why: str = ""
    end: str = ""
    stacks: tuple[int, ...] = ()
    verdict: Verdict | None = None


class Coordinator:
    """Machine 0's record of all machines, itself included; thread-safe. It watches them whenever it hears of itself."""

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
        self._looked = time.monotonic()
        self._outcomes: dict[int, Outcome] = {}
        self._stop: tuple[int, int] | None = None  # signal, machine
        self._end: tuple[str, int] | None = None  # why, and the machine that reported it
        self._ended_at = 0.0
        self._diagnosis: Diagnosis | None = None
        self._verdict: Verdict | None = None
        self._informed: set[int] = set()  # machines that got the verdict

    def answer(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The handler of the channel's call `machine`."""
        return asdict(self.hear(as_type(body, Report)))

    def hear(self, report: Report) -> Orders:
        """Takes a report; returns the orders for that machine."""
        node = report.node
        if node == 0:
            self.watch()
        self._watchdog.take_processes(node, report.ranks)
        self._watchdog.take_stacks(report.stacks)
        with self._lock:
            self._silent_s[node] = 0.0
            if report.signal is not None and self._stop is None:
                self._stop = report.signal, node
            if report.failed:
                self._order_end(report.failed, node)
            if report.outcome is not None:
                self._record(node, report.outcome)
            if self._verdict is not None:
                self._informed.add(node)
            stop, why, end = None, "", ""
            if self._stop is not None and self._stop[1] != node:
                stop = self._stop[0]
                why = f"stop asked by {signal.Signals(stop).name} on {self._names[self._stop[1]]}"
            if self._end is not None and self._end[1] != node:
                end = self._end[0]
            return Orders(stop, why, end, tuple(self._watchdog.wanted_stacks(node)), self._verdict)

    def watch(self) -> None:
        """Records lost machines, and orders the end of a run that stands still."""
        with self._lock:
            now = time.monotonic()
            passed, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
            limit = self._silence_s if self._end is None else min(self._silence_s, _SILENCE_AFTER_FAILURE_S)
            for node in set(self._names) - set(self._outcomes) - {0}:
                self._silent_s[node] += passed
                if self._silent_s[node] > limit:
                    self._record(node, Outcome(lost=f"silent for {self._silent_s[node]:.0f} s"))
                elif self._end is not None and now - self._ended_at > ENDING_S:
                    self._record(node, Outcome(lost=f"its processes had not ended {ENDING_S} s after the failure"))
            goes_on = self._end is None and self._verdict is None
        if goes_on and (diagnosis := self._watchdog.diagnose()):
            with self._lock:
                if self._end is None:
                    self._diagnosis = diagnosis
                    self._order_end(diagnosis.what, -1)

    def wait_until_all_informed(self) -> None:
        """Returns when all machines that are not lost have the verdict, or after _INFORM_S."""
        end = time.monotonic() + _INFORM_S
        while time.monotonic() < end:
            with self._lock:
                if self._informed.issuperset(node for node in self._living() if node):
                    return
            time.sleep(_LOOK_S)

    def _living(self) -> tuple[int, ...]:
        return tuple(node for node, outcome in sorted(self._outcomes.items()) if not outcome.lost)

    def _record(self, node: int, outcome: Outcome) -> None:
        """Records how the processes of a machine ended, the first report only; the last machine's decides the verdict."""
        if node in self._outcomes:
            return
        self._outcomes[node] = outcome
        if outcome.lost:
            self._order_end(f"{self._names[node]} was lost: {outcome.lost}", node)
        elif outcome.failed:
            self._order_end(f"the processes on {self._names[node]} failed", node)
        if self._verdict is None and set(self._outcomes) == set(self._names):
            self._verdict = self._decide()

    def _order_end(self, why: str, but: int) -> None:
        if self._end is None:
            self._end, self._ended_at = (why, but), time.monotonic()

    def _decide(self) -> Verdict:
        diagnosis, living = self._diagnosis, self._living()
        codes = [code for outcome in self._outcomes.values() for code in outcome.codes.values()]
        aborts = -signal.SIGABRT if 1 in codes else 0  # NCCL aborts ranks after another one has raised
        killed = any(code is None or (code < 0 and code != aborts) for code in codes)
        if diagnosis is None and (killed or set(codes) == {0, 4}):
            diagnosis = self._watchdog.aftermath()
        why, first = self._end or ("", 0)
        per_node = self._per_node
        lost = [rank for rank in range(len(self._names) * per_node) if rank // per_node not in living]
        lines = diagnosis.lines if diagnosis else ()
        waits = self._watchdog.describe_waits(but=lost) if lost else ()
        verdict = judge(self._outcomes, self._names, self._per_node, first=first, diagnosis=lines, waits=waits)
        if verdict.lines and verdict.code in MOST_TELLING:  # for packtrain doctor
            self._watchdog.write_diagnosis("\n".join(verdict.lines))
        if self._restarts is not None and self._stop is None and 0 in living:
            verdict = self._restarts.decide(verdict, why, living)
        return verdict


def report_to(machine_0: Client, silence_s: float, report: Report) -> Orders:
    """Hands a report to machine 0; returns its orders. Raises NoAnswer or Refused."""
    answer = machine_0.call("machine", asdict(report), timeout_s=max(CALL_S, silence_s / 2))
    return as_type(answer, Orders)


class Reporter:
    """A context with a thread that sends the launcher's `report` to machine 0 once a second, and keeps the last `orders`.

    `call` hands it to the Coordinator (elsewhere than on machine 0: `report_to`); `main` is the name of machine 0. `lost` is why
    machine 0 counts as lost, "" while it does not.
    """

    def __init__(self, node: int, main: str, silence_s: float, call: Callable[[Report], Orders]) -> None:
        self.report, self.orders, self.lost = Report(node), Orders(), ""
        self._main, self._silence_s, self._call = main, silence_s, call
        self._silent_s, self._called = 0.0, time.monotonic()
        self._news, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="launchers", daemon=True)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """After an exception or a signal reports this machine as lost, so that the others end their workers."""
        self._over.set()
        self._news.set()
        self._thread.join(2 * BEAT_S)
        if error is not None and not self.lost:
            self.report.outcome = Outcome(lost=f"its launcher ended ({str(error) or type(error).__name__})")
            self.hand_in()

    def update(self, **facts: Any) -> None:
        """Puts `facts` into the report, and sends it at once."""
        for name, value in facts.items():
            setattr(self.report, name, value)
        self._news.set()

    def finish(self, outcome: Outcome, host: str, per_node: int) -> Verdict:
        """Reports how this machine's processes ended, waits for those of the others, and returns the verdict on all.

        It waits without limit while the others report and nothing has failed, and ENDING_S seconds after a failure.
        """
        self.update(outcome=outcome)
        begun = printed = time.monotonic()
        while (verdict := self.orders.verdict) is None:
            if self.lost:
                node = self.report.node
                return judge({0: Outcome(lost=self.lost), node: outcome}, {0: self._main, node: host}, per_node)
            time.sleep(_LOOK_S)
            if time.monotonic() - printed > _PROGRESS_S:
                printed = time.monotonic()
                words = f"the processes on {host} have ended; waiting {printed - begun:.0f} s for those of the others"
                print(words, file=sys.stderr, flush=True)
        return verdict

    def _serve(self) -> None:
        while not self._over.is_set():
            self.hand_in()
            self._news.wait(BEAT_S)
            self._news.clear()

    def hand_in(self) -> None:
        """Sends the report once, and notes for how long machine 0 has not answered."""
        try:
            self.orders = self._call(self.report)
            self._silent_s, self._called = 0.0, time.monotonic()
        except (NoAnswer, Refused) as error:
            now = time.monotonic()
            self._silent_s, self._called = self._silent_s + min(now - self._called, _LONGEST_CALL_S), now
            ended = error.refused if isinstance(error, NoAnswer) else not error.unknown
            if self._silent_s > (_REFUSED_S if ended else self._silence_s):
                why = "its launcher ended" if ended else f"silent for {self._silent_s:.0f} s"
                self.lost = self.lost or why
