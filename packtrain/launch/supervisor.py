"""The processes of one machine: started by torchrun, watched while they run, and ended together, with nothing left behind.

torchrun sees a worker's end within a tenth of a second, but gives the others half a minute, and knows nothing of other
machines. So the launcher watches the workers itself (each leaves its process id, and its exit code at the end): the first
failure on any machine gives the others GRACE_S to end with words of their own, then SIGTERM, and TERM_S later SIGKILL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil

from packtrain.launch.exit_status import TAIL_LINES, Outcome, Stopped, Verdict, heard_by, say_stopped
from packtrain.launch.machines import Reporter
from packtrain.launch.torchrun import ends_in
from packtrain.launch.worker import exit_codes, losses, process_ids, stop_of_rank_0
from packtrain.monitor.processes import MemoryKills, ProcessState
from packtrain.monitor.stacks import crash_of, dump
from packtrain.monitor.watchdog import STOPPED_S
from packtrain.run_folder import in_time

GRACE_S = 2
TERM_S = 5
LAST_S = 3
"""Seconds that torchrun has to say how its workers ended, once they are gone."""
LINGER_S = 600
"""Seconds that processes which are at their end may take to be gone: trackers send their last files."""
_LOOK_S = 0.1
_NOTE_S = 1
_TAIL_BYTES = 2**16
_Life = Literal["running", "stopped", "gone"]


class Supervisor:
    """torchrun and its workers, the `ranks` of this machine (`host`).

    Workers leave process ids, exit codes and stacks in the folder `exits`; logs/rank-*.log are beside `log`, torchrun's own.
    `reporter` leads to machine 0.
    """

    def __init__(self, exits: Path, log: Path, ranks: range, host: str, reporter: Reporter) -> None:
        self._exits, self._log, self._ranks, self._host, self._reporter = exits, log, ranks, host, reporter
        self._logs = {rank: log.with_name(f"rank-{rank:05d}.log") for rank in ranks}
        self._before = {file: file.stat().st_size if file.exists() else 0 for file in (log, *self._logs.values())}
        self._received: int | None = None  # the signal that all are to stop for
        self._ending: float | None = None
        self._told = False  # to end, for what others did
        self._terminated = False
        self._stuck = ""
        self._through: float | None = None  # since when all have left an exit code
        self._workers: dict[int, psutil.Process] = {}
        self._silent: dict[int, int] = {}  # rank → process, of those that ended without an exit code
        self._family: dict[int, psutil.Process] = {}
        self._memory = MemoryKills()
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._noted = 0.0
        self._halted_s, self._looked = 0.0, time.monotonic()  # how long torchrun is stopped

    def run(self, argv: list[str], environment: Mapping[str, str]) -> Verdict:
        """Runs torchrun by `argv` to its end and to that of all machines, and returns the verdict on the run.

        Signals to this process stop all machines in order.
        """
        with heard_by(self._stop):
            if self._received is None:
                self._torchrun = subprocess.Popen(argv, env=dict(environment), start_new_session=True)
            self._watch()
            verdict = self._reporter.finish(self._outcome(), self._host, len(self._ranks))
            if (
                self._reporter.orders.stop is not None and self._received is None
            ):  # the ranks were quicker to tell each other
                print(self._reporter.orders.why, file=sys.stderr, flush=True)
            return verdict

    @property
    def _over(self) -> bool:
        """Whether torchrun does not run, or not any more."""
        return self._torchrun is None or self._torchrun.poll() is not None

    def _watch(self) -> None:
        """Returns when everything has ended."""
        while self._torchrun is not None and not self._over:
            with suppress(subprocess.TimeoutExpired):
                self._torchrun.wait(_LOOK_S)
            self._look()
            self._obey()
            self._stuck = self._stuck or (self._halted() if self._ending is None else "")
            if self._ending is None and (failed := self._failed() or self._stuck):
                self._reporter.report.failed = failed
                self._reporter.wake()
                self._end()
            elif self._ending is None and (why := self._lingers()):
                self._told = True
                print(f"{why}: they are ended now", file=sys.stderr, flush=True)
                self._end()
            self._press()
        self._look()
        self._note_family()
        self._kill(self._family.values())

    def _stop(self, number: int) -> None:
        """Passes a signal on to the workers, and to the other machines where it is the first. Raises Stopped at one that comes
        when the workers have ended for an earlier one, and only the other machines are waited for."""
        if self._over and self._received is not None:
            raise Stopped
        if self._received is None:
            self._reporter.report.signal = number
            self._reporter.wake()
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        self._received = self._received or number
        if self._torchrun is not None and not self._over:
            with suppress(ProcessLookupError):
                os.killpg(self._torchrun.pid, number)

    def _look(self) -> None:
        """Notes who has started, and how they are; once they are being ended, nothing new."""
        if self._ending is not None:
            return
        for rank, pid in process_ids(self._exits).items():
            if rank not in self._workers and rank not in self._silent:
                try:
                    self._workers[rank] = psutil.Process(pid)
                except psutil.Error:
                    self._silent[rank] = pid
        if time.monotonic() - self._noted > _NOTE_S:
            self._noted = time.monotonic()
            for worker in self._workers.values():
                self._memory.note(worker.pid)
        seen: dict[int, _Life] = {rank: _state(one) for rank, one in self._workers.items()}
        codes, lost = exit_codes(self._exits), losses(self._exits)  # read after, so that who left a code is not silent
        if self._received is None:
            gone = {rank: self._workers[rank].pid for rank, state in seen.items() if state == "gone"}
            self._silent = {rank: pid for rank, pid in {**self._silent, **gone}.items() if rank not in codes}
        states = {rank: ProcessState(self._workers[rank].pid, state) for rank, state in seen.items()}
        if self._received is not None:  # a process that is gone needs no further signal
            ended = [rank for rank, state in seen.items() if state == "gone"]
            codes = {**dict.fromkeys(ended, 128 + self._received), **codes}
        for rank, code in codes.items():
            pid = states[rank].pid if rank in states else 0
            states[rank] = ProcessState(pid, "gone", code, told=True, lost=lost.get(rank, ""))
        states |= {rank: ProcessState(pid, "gone") for rank, pid in self._silent.items()}
        self._reporter.report.ranks = states

    def _obey(self) -> None:
        orders = self._reporter.orders
        if orders.stop is not None and self._received is None:
            print(orders.why, file=sys.stderr, flush=True)
            self._pass_on(orders.stop)
        end = orders.end or (self._reporter.lost and f"machine 0 was lost: {self._reporter.lost}")
        if end and self._ending is None:
            self._told = True
            print(f"ending the processes on {self._host}: {end}", file=sys.stderr, flush=True)
            self._end()
        given = self._reporter.report.stacks
        if wanted := [rank for rank in orders.stacks if rank in self._workers and rank not in given]:
            dumped = {rank: dump(self._exits, str(rank), self._workers[rank].pid) for rank in wanted}
            self._reporter.report.stacks = {**given, **dumped}
        elif given and not orders.stacks:
            self._reporter.report.stacks = {}

    def _failed(self) -> str:
        """What the first failed worker did, in words, if there is one."""
        for rank, code in sorted(exit_codes(self._exits).items()):
            if 0 < code <= 128:
                return f"rank {rank} on {self._host} failed (exit code {code})"
        return f"rank {min(self._silent)} on {self._host} ended without an exit code" if self._silent else ""

    def _halted(self) -> str:
        """That torchrun is stopped (SIGSTOP), and none of its workers is: it could neither end them nor itself."""
        passed, self._looked = time.monotonic() - self._looked, time.monotonic()
        stopped = self._torchrun is not None and _stopped(self._torchrun.pid)
        self._halted_s = self._halted_s + min(passed, 1) if stopped else 0.0  # all of us may have been suspended
        if self._torchrun is None or self._halted_s < STOPPED_S or self._all_through:
            return ""
        if any(state.state == "stopped" for state in self._reporter.report.ranks.values()):
            return ""
        which = f"torchrun on {self._host} (process {self._torchrun.pid})"
        return f"{which}, which starts and ends the ranks there, is stopped"

    @property
    def _all_through(self) -> bool:
        return not set(self._ranks) - set(exit_codes(self._exits))

    def _lingers(self) -> str:
        """That all workers are at their end, and something keeps them from being gone; "" where it is not so."""
        if not self._all_through:
            return ""
        if self._torchrun and self._halted_s >= STOPPED_S:
            which = f"torchrun there (process {self._torchrun.pid})"
            return f"the processes on {self._host} have ended, but {which} is stopped"
        self._through = self._through or time.monotonic()
        late = time.monotonic() - self._through > LINGER_S
        return f"the processes on {self._host} are at their end, and do not end by themselves" if late else ""

    def _end(self) -> None:
        self._ending = time.monotonic()

    def _press(self) -> None:
        """What is due by now to make them end: torchrun last, which then knows how they ended."""
        if self._ending is None:
            return
        since = time.monotonic() - self._ending
        if since > GRACE_S and not self._terminated:
            self._terminated = True
            self._note_family()
            for worker in self._workers.values():
                with suppress(psutil.Error):
                    worker.terminate()
            if not self._workers and self._torchrun is not None:
                with suppress(ProcessLookupError):
                    os.killpg(self._torchrun.pid, signal.SIGTERM)
        if since > GRACE_S + TERM_S:
            self._note_family()
            last = since > GRACE_S + TERM_S + LAST_S
            self._kill(one for pid, one in self._family.items() if last or pid != getattr(self._torchrun, "pid", 0))

    def _note_family(self) -> None:
        """Remembers who belongs to us, while their parents are there: of a dead process no children are known."""
        roots = list(self._workers.values())
        with suppress(psutil.Error):
            roots += [psutil.Process(self._torchrun.pid)] if self._torchrun and not self._over else []
        for one in roots:
            with suppress(psutil.Error):
                self._family |= {member.pid: member for member in (one, *one.children(recursive=True))}

    def _kill(self, members: Iterable[psutil.Process]) -> None:
        for member in members:
            with suppress(psutil.Error):
                member.kill()

    def _outcome(self) -> Outcome:
        """How they ended."""
        codes: dict[int, int | None] = {**exit_codes(self._exits)}
        if self._told:  # ended by us: 128 + SIGTERM says nothing
            codes = {rank: code for rank, code in codes.items() if code is not None and code <= 128}
        codes |= self._ends_of_silent(set(codes))
        failed = self._ending is not None or Outcome(codes).failed
        if (stop := stop_of_rank_0(self._exits)) and (
            self._received or not failed
        ):  # else it is ended for what is told
            say_stopped(stop)
        bad = [rank for rank, code in codes.items() if rank and (code is None or code < 0 or 0 < code <= 128)]
        tails = self._tails({rank: self._logs[rank] for rank in bad if rank in self._logs})
        lost = losses(self._exits)
        tails |= {rank: words.splitlines() for rank, words in lost.items() if rank in codes}
        return Outcome(
            codes=codes,
            launched=self._torchrun.returncode if self._torchrun and not self._told else 0,
            signal=self._received,
            tails=tails,
            log=str(self._log),
            words=[] if codes else self._tails({0: self._log})[0],
            followers=sorted(lost),
            stuck=self._stuck,
        )

    def _ends_of_silent(self, known: Collection[int]) -> dict[int, int | None]:
        """The signals of those that left no exit code, None where none is known; the report has what else is known of them."""
        ends, states, codes = ends_in(self._exits), dict(self._reporter.report.ranks), {}
        for rank, pid in self._silent.items():
            if rank in known:
                continue
            crashed, text = crash_of(self._exits, str(rank))
            code = ends.get(rank, -crashed if crashed else None)
            states[rank] = ProcessState(pid, "gone", code, crash=text, oom=self._memory.killed(pid))
            codes[rank] = code if code is not None and code < 0 else None  # it has not left the number itself
        self._reporter.report.ranks = states
        return codes

    def _tails(self, logs: Mapping[int, Path]) -> dict[int, list[str]]:
        """The last lines of what logs have got since the start; [] where there is none, or their disk has stalled."""
        return in_time(lambda: {rank: self._tail(log) for rank, log in logs.items()}, {rank: [] for rank in logs})

    def _tail(self, log: Path) -> list[str]:
        try:
            with log.open("rb") as file:
                file.seek(max(log.stat().st_size - _TAIL_BYTES, self._before[log]))
                return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        except OSError:
            return []


def _state(worker: psutil.Process) -> _Life:
    try:
        status = worker.status() if worker.is_running() else psutil.STATUS_ZOMBIE
    except psutil.Error:
        return "gone"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "running"


def _stopped(pid: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False
