"""The processes of one machine: started by torchrun, watched while they run, and ended together, with nothing left behind.

torchrun sees a worker's end within a tenth of a second, but gives the others half a minute, and knows nothing of other
machines. So the launcher watches the workers itself (each leaves its process id, and its exit code at the end): the first
failure on any machine gives the others GRACE_S to end with words of their own, then SIGTERM, and TERM_S later SIGKILL.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from packtrain.launch.coordinator import Reporter
from packtrain.launch.exit_status import TAIL_LINES, Outcome, Stopped, Verdict, heard_by, is_failure
from packtrain.launch.worker import left
from packtrain.monitor.processes import ProcessState, memory_kills, seen
from packtrain.monitor.stacks import crash_of, dump
from packtrain.run_folder import in_time

GRACE_S = 2
TERM_S = 5
LAST_S = 3
"""Seconds that torchrun has to say how its workers ended, once they are gone."""
LINGER_S = 600
"""Seconds that processes which are at their end may take to be gone: trackers send their last files."""
_LOOK_S = 0.1
_TAIL_BYTES = 2**16


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
        self._terminated = False
        self._through: float | None = None  # since when all have left an exit code
        self._workers: dict[int, psutil.Process | None] = {}
        self._family: dict[int, psutil.Process] = {}
        self._memory_kills = memory_kills()
        self._torchrun: subprocess.Popen[bytes] | None = None

    def run(self, argv: list[str], environment: Mapping[str, str]) -> Verdict:
        """Runs torchrun by `argv` to its end and to that of all machines, and returns the verdict on the run.

        Signals to this process stop all machines in order.
        """
        with heard_by(self._stop):
            if self._received is None:
                self._torchrun = subprocess.Popen(argv, env=dict(environment), start_new_session=True)
            self._watch()
            verdict = self._reporter.finish(self._outcome(), self._host, len(self._ranks))
            self._obey_stop()  # the ranks may have been quicker to tell each other
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
            if self._ending is None:  # once they are being ended nothing new is learned from it
                self._look()
            self._obey()
            if self._ending is None and (failed := self._failed()):
                self._reporter.tell(failed=failed)
                self._end()
            elif self._ending is None and self._linger():
                why = "are at their end, and do not end by themselves: they are ended now"
                print(f"the processes on {self._host} {why}", file=sys.stderr, flush=True)
                self._end()
            self._press()
        if self._ending is None:
            self._look()
        self._note_family()
        self._kill(self._family.values())

    def _stop(self, number: int) -> None:
        """Passes a signal on to the workers, and to the other machines where it is the first. Raises Stopped at one that comes
        when the workers have ended for an earlier one, and only the other machines are waited for."""
        if self._over and self._received is not None:
            raise Stopped
        if self._received is None:
            self._reporter.tell(signal=number)
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        self._received = self._received or number
        if self._torchrun is not None and not self._over:
            with suppress(ProcessLookupError):
                os.killpg(self._torchrun.pid, number)

    def _look(self) -> None:
        """Notes who has started, and how they are."""
        lives = {
            rank: seen(one.pid) if one is not None and one.is_running() else "gone"
            for rank, one in self._workers.items()
        }
        states: dict[int, ProcessState] = {}
        for rank, facts in left(self._exits).items():  # read after that, so that who left a code is not silent
            pid, life = facts["pid"], lives.get(rank, "running")
            if rank not in self._workers:
                self._workers[rank] = _process(pid)
            if "code" in facts:
                states[rank] = ProcessState(pid, "gone", facts["code"], told=True, lost=facts.get("lost", ""))
            elif life == "gone" and self._received is not None:  # a process that is gone needs no further signal
                states[rank] = ProcessState(pid, life, 128 + self._received, told=True)
            else:
                states[rank] = ProcessState(pid, life)
        self._reporter.report.ranks = states

    def _obey(self) -> None:
        """Carries out machine 0's orders; where that is lost, ends everything."""
        self._obey_stop()
        orders = self._reporter.orders
        end = orders.end or (self._reporter.lost and f"machine 0 was lost: {self._reporter.lost}")
        if end and self._ending is None:
            print(f"ending the processes on {self._host}: {end}", file=sys.stderr, flush=True)
            self._end()
        given = {rank: text for rank, text in self._reporter.report.stacks.items() if rank in orders.stacks}
        for rank in orders.stacks:
            if rank not in given and (worker := self._workers.get(rank)):
                given[rank] = dump(self._exits, worker.pid)
        self._reporter.report.stacks = given

    def _obey_stop(self) -> None:
        orders = self._reporter.orders
        if orders.stop is not None and self._received is None:
            print(orders.why, file=sys.stderr, flush=True)
            self._pass_on(orders.stop)

    def _failed(self) -> str:
        """What the first failed worker did, in words, if there is one."""
        for rank, one in sorted(self._reporter.report.ranks.items()):
            if one.told and is_failure(one.code):
                return f"rank {rank} on {self._host} failed (exit code {one.code})"
            if one.state == "gone" and not one.told:
                return f"rank {rank} on {self._host} ended without an exit code"
        return ""

    def _linger(self) -> bool:
        """Whether all workers have long been at their end, and something keeps one of them, or torchrun, from being gone."""
        told = {rank for rank, one in self._reporter.report.ranks.items() if one.told}
        if set(self._ranks) - told:
            return False
        self._through = self._through or time.monotonic()
        return time.monotonic() - self._through > LINGER_S

    def _end(self) -> None:
        self._ending = time.monotonic()
        self._note_family()

    def _press(self) -> None:
        """What is due by now to make them end: torchrun last, which then knows how they ended."""
        if self._ending is None or self._torchrun is None:
            return
        since = time.monotonic() - self._ending
        if since > GRACE_S and not self._terminated:
            self._terminated = True
            for worker in filter(None, self._workers.values()):
                with suppress(psutil.Error):
                    worker.terminate()
        if since > GRACE_S + TERM_S:
            self._note_family()
            last = since > GRACE_S + TERM_S + LAST_S or not self._workers
            self._kill(one for pid, one in self._family.items() if last or pid != self._torchrun.pid)

    def _note_family(self) -> None:
        """Remembers who belongs to us, while their parents are there: of a dead process no children are known."""
        torchrun = None if self._torchrun is None or self._over else _process(self._torchrun.pid)
        for one in filter(None, (torchrun, *self._workers.values())):
            with suppress(psutil.Error):
                self._family |= {member.pid: member for member in (one, *one.children(recursive=True))}

    def _kill(self, members: Iterable[psutil.Process]) -> None:
        for member in members:
            with suppress(psutil.Error):
                member.kill()

    def _outcome(self) -> Outcome:
        """How they ended."""
        said, states = left(self._exits), dict(self._reporter.report.ranks)
        codes: dict[int, int | None] = {rank: facts["code"] for rank, facts in said.items() if "code" in facts}
        if self._ending is not None:  # ended by us: 128 + SIGTERM says nothing
            codes = {rank: code for rank, code in codes.items() if code is not None and code <= 128}
        for rank, one in states.items():
            if one.state == "gone" and not one.told and rank not in codes:
                code = said[rank].get("ended")
                if text := crash_of(self._exits, one.pid):
                    self._reporter.report.stacks = {**self._reporter.report.stacks, rank: text}
                states[rank] = replace(one, code=code, oom=memory_kills() > self._memory_kills)
                codes[rank] = code if code is not None and code < 0 else None  # it has not left the number itself
        self._reporter.report.ranks = states
        bad = [rank for rank, code in codes.items() if rank and is_failure(code)]
        lost = {rank: facts["lost"] for rank, facts in said.items() if "lost" in facts}
        logs = {rank: self._logs[rank] for rank in bad} if codes else {-1: self._log}
        tails = in_time(lambda: {rank: self._tail(log) for rank, log in logs.items() if log.exists()}, {})
        return Outcome(
            codes=codes,
            launched=self._torchrun.returncode if self._torchrun and self._ending is None else 0,
            signal=self._received,
            tails={**tails, **{rank: words.splitlines() for rank, words in lost.items() if rank in codes}},
            log=str(self._log),
            followers=sorted(lost),
        )

    def _tail(self, log: Path) -> list[str]:
        """The last lines of what a log has got since the start."""
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - _TAIL_BYTES, self._before[log]))
            return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]


def _process(pid: int) -> psutil.Process | None:
    with suppress(psutil.Error):
        return psutil.Process(pid)
    return None
