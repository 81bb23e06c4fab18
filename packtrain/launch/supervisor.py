"""Supervision of one machine's processes: torchrun starts them; they end together, with none left.

torchrun sees a worker's end within a tenth of a second, but gives the others half a minute, and knows nothing of other
machines. So the launcher itself watches the workers (each writes its process id, and its exit code at the end). After the first
failure on any machine, the others have SELF_EXIT_S to exit by themselves and print their error. Then they get SIGTERM, and TERM_S
later SIGKILL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from packtrain.errors import Json
from packtrain.launch.coordinator import Reporter, Verdict, is_failure, tail_of
from packtrain.monitor.heartbeat import Life, ProcessState, count_oom_kills, crash_of, life_of, read_exits
from packtrain.system import Stopped, in_time, listening

SELF_EXIT_S = 2
TERM_S = 5
TORCHRUN_EXIT_S = 3
"""Seconds that torchrun has to report how its workers ended, once they are gone."""
EXIT_LIMIT_S = 600
"""Seconds that finished processes may take to exit: trackers upload their last files."""
_POLL_S = 0.1
_TAIL_BYTES = 2**16


class Supervisor:
    """torchrun and its workers on this machine, or a run's only worker without torchrun.

    The workers are the `ranks` of this machine (`host`). Each leads a session of its own, which includes its loader processes. Workers write
    process ids, exit codes and stacks to the folder `exits`. logs/rank-*.log are beside `log`, torchrun's own. `reporter` is the
    connection to machine 0.
    """

    def __init__(self, exits: Path, log: Path, ranks: range, host: str, reporter: Reporter) -> None:
        self._exits, self._log, self._ranks, self._host, self._reporter = exits, log, ranks, host, reporter
        self._logs = {rank: log.with_name(f"rank-{rank:05d}.log") for rank in ranks}
        self._old_sizes = {file: file.stat().st_size if file.exists() else 0 for file in (log, *self._logs.values())}
        self._received: int | None = None  # the signal that stops all
        self._passed_on = 0
        self._ending_since: float | None = None
        self._terminated = False
        self._all_finished_since: float | None = None  # when all workers had written exit codes
        self._workers: dict[int, int] = {}  # process ids by rank
        self._memory_kills = count_oom_kills()
        self._torchrun: subprocess.Popen[bytes] | None = None

    def run(self, argv: list[str], environment: Mapping[str, str]) -> Verdict:
        """Run torchrun by `argv` until it and all machines have ended. Returns the verdict on the run.

        Signals to this process stop all machines cleanly.
        """
        with listening(self._stop):
            if self._received is None:
                self._torchrun = subprocess.Popen(argv, env=dict(environment), start_new_session=True)
            self._watch()
            verdict = self._reporter.finish(self._host, len(self._ranks), **self._final_facts())
            self._follow_stop_order()  # the ranks may have stopped before this order came
            return verdict

    @property
    def _torchrun_ended(self) -> bool:
        """Whether torchrun has ended, or was never started."""
        return self._torchrun is None or self._torchrun.poll() is not None

    def _watch(self) -> None:
        """Watch until everything has ended."""
        while self._torchrun is not None and not self._torchrun_ended:
            with suppress(subprocess.TimeoutExpired):
                self._torchrun.wait(_POLL_S)
            if self._ending_since is None:  # later states only show how the launcher ended them
                self._update_states()
            self._follow_orders()
            if self._ending_since is None and (failed := self._failed()):
                self._reporter.update(failed=failed)
                self._ending_since = time.monotonic()
            elif self._ending_since is None and self._fails_to_exit():
                why = "have finished but did not exit: they are killed now"
                print(f"the processes on {self._host} {why}", file=sys.stderr, flush=True)
                self._ending_since = time.monotonic()
            self._send_due_signals(self._torchrun.pid)
        if self._ending_since is None:
            self._update_states()
        _kill_sessions(self._workers.values())

    def _stop(self, number: int) -> None:
        """Pass a signal on to the workers. The first signal also goes to the other machines.
        Raises Stopped for a further signal when workers here have ended and only other machines are awaited."""
        if self._torchrun_ended and self._received is not None:
            raise Stopped
        if self._reporter.report.signal is None:  # machine 0 may have ordered a stop before
            self._reporter.update(signal=number)
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        self._received, self._passed_on = self._received or number, self._passed_on + 1
        if self._torchrun is None or self._torchrun_ended:
            return
        send, receivers = os.killpg, [self._torchrun.pid]
        # not self._workers: a worker that began since the last look would wait for ever
        begun = read_exits(self._exits).values()
        # a second signal to torchrun would end it, and workers could say nothing
        if self._passed_on == 2 and len(begun) == len(self._ranks):
            send, receivers = os.kill, [facts["pid"] for facts in begun if facts.get("pid") and "code" not in facts]
        for pid in receivers:
            with suppress(ProcessLookupError):
                send(pid, number)

    def _update_states(self) -> None:
        """Update the report with the workers that have started, and their states."""
        states: dict[int, ProcessState] = {}
        lives: dict[int, Life] = {rank: life_of(pid) for rank, pid in self._workers.items()}
        # Read files after `lives`, else a rank that exits in between looks crashed.
        for rank, facts in read_exits(self._exits).items():
            pid, life = facts.get("pid"), lives.get(rank, "running")
            if pid is None:  # torchrun ended it before it had started
                continue
            self._workers[rank] = pid
            if "code" in facts:
                states[rank] = ProcessState(pid, "gone", facts["code"], reported=True, lost=facts.get("lost", ""))
            elif life == "gone" and self._received is not None:  # a process that is gone needs no further signal
                states[rank] = ProcessState(pid, life, 128 + self._received, reported=True)
            else:
                states[rank] = ProcessState(pid, life)
        self._reporter.report.ranks = states

    def _follow_orders(self) -> None:
        """Carry out machine 0's orders. If machine 0 is lost, end everything."""
        self._follow_stop_order()
        orders = self._reporter.orders
        end = orders.end or (self._reporter.lost and f"machine 0 was lost: {self._reporter.lost}")
        if end and self._ending_since is None:
            print(f"ending the processes on {self._host}: {end}", file=sys.stderr, flush=True)
            self._ending_since = time.monotonic()

    def _follow_stop_order(self) -> None:
        orders = self._reporter.orders
        if orders.stop is not None and self._received is None:
            print(orders.why, file=sys.stderr, flush=True)
            self._pass_on(orders.stop)

    def _failed(self) -> str:
        """Describe the failure of the first failed worker; "" if none failed."""
        for rank, state in sorted(self._reporter.report.ranks.items()):
            if state.reported and is_failure(state.code):
                return f"rank {rank} on {self._host} failed (exit code {state.code})"
            if state.state == "gone" and not state.reported:
                return f"rank {rank} on {self._host} ended without an exit code"
        return ""

    def _fails_to_exit(self) -> bool:
        """Return whether a worker or torchrun still runs though all workers finished over EXIT_LIMIT_S ago."""
        states = self._reporter.report.ranks
        if any(rank not in states or not states[rank].reported for rank in self._ranks):
            return False
        self._all_finished_since = self._all_finished_since or time.monotonic()
        return time.monotonic() - self._all_finished_since > EXIT_LIMIT_S

    def _send_due_signals(self, torchrun: int) -> None:
        """Send the signals that are due by now. torchrun is killed last, so that it can report how the workers ended."""
        if self._ending_since is None:
            return
        since = time.monotonic() - self._ending_since
        if since > SELF_EXIT_S and not self._terminated:
            self._terminated = True
            for pid in self._workers.values():
                with suppress(OSError):
                    os.kill(pid, signal.SIGTERM)
        if since > SELF_EXIT_S + TERM_S:
            _kill_sessions(pid for pid in self._workers.values() if pid != torchrun)
            if since > SELF_EXIT_S + TERM_S + TORCHRUN_EXIT_S or not self._workers:
                _kill_sessions([torchrun])

    def _final_facts(self) -> Json:
        """Return how the processes of this machine ended, as fields of MachineReport."""
        facts_of, known, stacks = read_exits(self._exits), self._reporter.report.ranks, dict[int, str]()
        ended = self._torchrun.returncode if self._torchrun else 0
        ranks = {
            rank: ProcessState(facts.get("pid", 0), "gone", facts["code"], reported=True, lost=facts.get("lost", ""))
            for rank, facts in facts_of.items()
            # skip workers ended by this launcher: 128 + SIGTERM is no information
            if "code" in facts and (self._ending_since is None or facts["code"] <= 128)
        }
        for rank, state in known.items():
            if state.state == "gone" and not state.reported and rank not in ranks:
                # a single worker runs in place of torchrun, so torchrun's signal is the worker's
                code = facts_of[rank].get("ended", ended if ended < 0 and len(self._ranks) == 1 else None)
                if text := crash_of(self._exits, state.pid):
                    stacks[rank] = text
                ranks[rank] = replace(state, code=code, oom=count_oom_kills() > self._memory_kills)
        failed = [rank for rank, state in ranks.items() if rank and is_failure(state.code)]
        logs = {rank: self._logs[rank] for rank in failed} if ranks else {-1: self._log}
        tails = in_time(lambda: {rank: self._tail(log) for rank, log in logs.items() if log.exists()}, {})
        tails |= {rank: state.lost.splitlines() for rank, state in ranks.items() if state.lost}
        launched = ended if self._ending_since is None else 0
        return {
            "ranks": ranks,
            "stacks": stacks,
            "launched": launched,
            "signal": self._received,
            "tails": tails,
            "log": str(self._log),
        }

    def _tail(self, log: Path) -> list[str]:
        """Return the last lines that were written to a log since the start."""
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - _TAIL_BYTES, self._old_sizes[log]))
            return tail_of(file.read().decode(errors="replace").splitlines())


def _kill_sessions(leaders: Iterable[int]) -> None:
    """Kill all processes in the sessions of these process ids. Ended processes are skipped."""
    for pid in leaders:
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
