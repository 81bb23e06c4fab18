"""The processes of one machine: started by torchrun, watched while they run, and ended together, nothing left behind.

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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from packtrain.launch.ending import Stopped, say_stopped
from packtrain.launch.line import Line
from packtrain.launch.processes import sight
from packtrain.launch.signals import heard_by
from packtrain.launch.verdict import TAIL_LINES, Outcome, Verdict, judge
from packtrain.launch.worker import exit_codes, losses, process_ids, stop_of_rank_0
from packtrain.monitor.old.diagnosis import ABORTED, Diagnosis
from packtrain.monitor.old.watchdog import STOPPED_S, Watchdog
from packtrain.run_folder import in_time
from packtrain.wording import ranks_in_words

GRACE_S = 2
TERM_S = 5
LINGER_S = 600
"""Seconds that processes which have said that they are through may take to be gone: trackers send their last files. Who is
still at work then is said, and given as long again."""
QUIET_S = 60
"""Who has not been at work for so long is not."""
_LOOK_S = 0.1
_TAIL_BYTES = 2**16


def run_children(
    argv: list[str],
    environment: Mapping[str, str],
    exits: Path,
    log: Path,
    ranks: range,
    host: str,
    line: Line | None,
    watchdog: Watchdog,
) -> Verdict:
    """Runs torchrun by `argv` with the workers `ranks` of this machine to their end, and returns the verdict on the run.

    Workers leave process ids and exit codes in `exits`; logs/rank-*.log are beside `log`, torchrun's own. `line` leads to
    the launchers of the other machines, where there are any; `watchdog` ends what stands still. Signals to this process
    stop all machines in order.
    """
    children = _Children(exits, log, ranks, host, line, watchdog)
    with heard_by(children.stop):
        children.start(argv, environment)
        children.watch()
        outcome = children.outcome()
        return line.finish(outcome) if line else judge({0: outcome}, {0: host}, len(ranks))


class _Children:
    """torchrun and its workers; `received` is the signal that all are to stop for, `ending` why they are being ended."""

    def __init__(self, exits: Path, log: Path, ranks: range, host: str, line: Line | None, watchdog: Watchdog) -> None:
        self.received: int | None = None
        self._exits, self._log, self._host, self._line, self._watchdog = exits, log, host, line, watchdog
        self._diagnosis: Diagnosis | None = None
        self._logs = {rank: log.with_name(f"rank-{rank:05d}.log") for rank in ranks}
        self._before = {file: file.stat().st_size if file.exists() else 0 for file in (log, *self._logs.values())}
        self._told: str | None = None  # why they are ended, where it is not for what they did
        self._through: float | None = None  # since when all have said so
        self._ending: float | None = None
        self._terminated = False
        self._silent: set[int] = set()
        self._frozen: tuple[int, ...] = ()
        self._waits: tuple[str, ...] = ()
        self._workers: dict[int, psutil.Process] = {}
        self._gone: set[int] = set()  # before they could be looked at
        self._family: dict[int, psutil.Process] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._halted_s, self._looked = 0.0, time.monotonic()  # since when torchrun is stopped, as far as we were awake

    @property
    def over(self) -> bool:
        """Whether torchrun does not run, or not any more."""
        return self._child is None or self._child.poll() is not None

    def start(self, argv: list[str], environment: Mapping[str, str]) -> None:
        """Starts torchrun, unless all are to stop already."""
        if self.received is None:
            self._child = subprocess.Popen(argv, env=dict(environment), start_new_session=True)

    def watch(self) -> None:
        """Returns when everything has ended."""
        while self._child is not None and not self.over:
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(_LOOK_S)
            self._obey()
            if self._ending is None and (failed := self._failed() or self._stuck()):
                self._end()
                if self._line:
                    self._line.tell_failure(failed)
            elif self._ending is None and (told := self._lingers()):
                self._told = told
                print(f"{self._told}: they are ended now", file=sys.stderr, flush=True)
                self._end()
            self._press()
        if self._ending is None:
            self._failed()  # whoever has died along with torchrun
        self._kill()

    def stop(self, number: int) -> None:
        """Passes a signal on to the workers, and to the other machines where it is the first. Raises Stopped at one that comes
        when the workers have ended for an earlier one, and only the other machines are waited for."""
        if self.over and self.received is not None:
            raise Stopped
        if self._line and self.received is None:
            self._line.tell_signal(number)
        self._pass_on(number)

    def outcome(self) -> Outcome:
        """How they ended."""
        self._watchdog.codes = exit_codes(self._exits)
        codes: dict[int, int | None] = {**self._watchdog.codes}
        if self._told is not None:  # ended by us: 128 + SIGTERM says nothing
            codes = {rank: code for rank, code in codes.items() if code is not None and code <= 128}
        codes |= dict.fromkeys(self._silent - set(codes))
        failed = self._ending is not None or Outcome(codes).failed
        if (stop := stop_of_rank_0(self._exits)) and (self.received or not failed):  # else it is ended for what is told
            say_stopped(stop)
        bad = [rank for rank, code in codes.items() if rank != 0 and (code is None or 0 < code <= 128)]
        tails = self._tails({rank: self._logs[rank] for rank in bad if rank in self._logs})
        lost = losses(self._exits)
        tails |= {rank: words.splitlines() for rank, words in lost.items() if rank in codes}
        raised = [rank for rank, code in codes.items() if code == 1]
        if raised and (error := self._watchdog.gpu_error()):  # what CUDA raises says less
            tails |= {rank: [*tails.get(rank, ()), f"the kernel says: {error}"] for rank in raised}
        ends = self._watchdog.ends(self._silent, self._log)
        followers = {*lost, *(rank for rank, end in ends.items() if end == ABORTED)}
        # who was dead before it was told to end may be why it was told: the others may be quicker to say that they lost it
        if self._diagnosis is None and (self._silent or (self._told is None and lost and not raised)):
            self._diagnosis = self._watchdog.aftermath(self._silent, exit_codes(self._exits), self._log)
        return Outcome(
            codes=codes,
            launched=self._child.returncode if self._child and self._told is None else 0,
            signal=self.received,
            frozen=self._frozen,
            diagnosis=self._diagnosis.lines if self._diagnosis else (),
            tails=tails,
            log=str(self._log),
            words=[] if codes or self._diagnosis else self._tails({0: self._log})[0],
            followers=sorted(followers),
            waits=self._waits,
        )

    def _obey(self) -> None:
        while self._line and (order := self._line.order()):
            if order.signal is None:
                if self._ending is None:
                    self._failed()  # a worker that is dead by now may be why the others failed
                    self._told = order.why
                    self._watchdog.ask_if_still()
                    print(f"ending the processes on {self._host}: {order.why}", file=sys.stderr, flush=True)
                    self._end()
            elif self.received is None:
                print(order.why, file=sys.stderr, flush=True)
                self._pass_on(order.signal)

    def _failed(self) -> str | None:
        """What the first failed worker did, in words, if there is one."""
        self._look()
        gone = self._gone | {rank for rank, worker in self._workers.items() if not _lives(worker)}
        codes = exit_codes(self._exits)  # read after, so that who left a code is not taken for silent
        silent = gone - set(codes)
        if self.received is None:
            self._silent = silent
        for rank, code in sorted(codes.items()):
            if 0 < code <= 128:
                return f"rank {rank} on {self._host} failed (exit code {code})"
        return f"rank {min(silent)} on {self._host} ended without a word" if silent else None

    def _stuck(self) -> str | None:
        """What keeps the workers from going on, in words, if they do not."""
        if self._line:
            reports = dict(self._line.reports)
            self._watchdog.hear({node: report for node, report in reports.items() if node != self._line.node})
            if self._watchdog.trains:
                self._line.trains()
        self._diagnosis = self._watchdog.look(exit_codes(self._exits)) or self._halted()
        if self._line and (report := self._watchdog.report()):
            self._line.tell_ranks(report)
        if self._diagnosis is None:
            return None
        # at once, for who is stuck has no words of its own to say; but other machines first ask theirs for their stacks
        since = GRACE_S + TERM_S - (GRACE_S if self._line else 0)
        self._ending, self._terminated = time.monotonic() - since, True
        return self._diagnosis.what

    @property
    def _all_through(self) -> bool:
        return not set(self._logs) - set(exit_codes(self._exits))

    def _halted(self) -> Diagnosis | None:
        """That torchrun is stopped (SIGSTOP), and none of its workers is: it would neither end one that has to be ended nor itself."""
        passed, self._looked = time.monotonic() - self._looked, time.monotonic()
        halted = self._child is not None and sight(self._child.pid).state == "T"
        self._halted_s = self._halted_s + min(passed, 1) if halted else 0.0  # all of us may have been suspended
        if self._child is None or self._halted_s < STOPPED_S or self._all_through:
            return None
        if any(_is_frozen(worker) for worker in self._workers.values()):
            return None
        what = (
            f"torchrun on {self._host} (process {self._child.pid}), which starts and ends the ranks there, is stopped"
        )
        return self._watchdog.write(Diagnosis("stopped", (), what))

    def _lingers(self) -> str:
        """That all workers have said that they are through, and something keeps them from ending; "" where it is not so.

        That is a torchrun that is stopped; or they have said so long ago, and something in them neither ends nor works.
        """
        if not self._all_through:
            return ""
        if self._child and self._halted_s >= STOPPED_S:
            return (
                f"the processes on {self._host} are through, but torchrun there (process {self._child.pid}) is stopped"
            )
        self._through = self._through or time.monotonic()
        if time.monotonic() - self._through <= LINGER_S:
            return ""
        if at_work := self._watchdog.at_work(QUIET_S):
            self._through = time.monotonic()
            who = f"{ranks_in_words(at_work)} on {self._host} {'are' if len(at_work) > 1 else 'is'}"
            print(f"{who} through, and still at work: a tracker that sends its files?", file=sys.stderr, flush=True)
            return ""
        return f"the processes on {self._host} are through, and do not end by themselves"

    def _end(self) -> None:
        self._ending = self._ending or time.monotonic()
        self._waits = self._watchdog.waiting(exit_codes(self._exits))
        self._frozen = tuple(sorted(rank for rank, worker in self._workers.items() if _is_frozen(worker)))

    def _press(self) -> None:
        """What is due by now to make them end."""
        if self._ending is None:
            return
        since = time.monotonic() - self._ending
        if since > GRACE_S and not self._terminated:
            self._terminated = True
            self._note_family()
            self._signal(signal.SIGTERM)
        if since > GRACE_S + TERM_S:
            self._kill()

    def _pass_on(self, number: int) -> None:
        self.received = self.received or number
        self._signal(number)

    def _signal(self, number: int) -> None:
        if self._child is not None and not self.over:
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)

    def _note_family(self) -> None:
        """Remembers who belongs to us, while their parents are there: of a dead process no children are known."""
        roots = list(self._workers.values())
        with suppress(psutil.Error):
            roots += [psutil.Process(self._child.pid)] if self._child and not self.over else []
        for one in roots:
            with suppress(psutil.Error):
                self._family |= {member.pid: member for member in (one, *one.children(recursive=True))}

    def _kill(self) -> None:
        """Whoever is left: torchrun's workers are in sessions of their own, and outlive it."""
        self._note_family()
        for member in self._family.values():
            with suppress(psutil.Error):
                member.kill()

    def _tails(self, logs: Mapping[int, Path]) -> dict[int, list[str]]:
        """The last lines of what logs have got since the start; [] where there is none, or their disk has stalled."""
        return in_time(lambda: {rank: self._tail(log) for rank, log in logs.items()}, {rank: [] for rank in logs})

    def _tail(self, log: Path) -> list[str]:
        """The last lines of what a log has got since the start; [] where there is none."""
        try:
            with log.open("rb") as file:
                file.seek(max(log.stat().st_size - _TAIL_BYTES, self._before[log]))
                return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        except OSError:
            return []

    def _look(self) -> None:
        """Notes the workers that have started since the last time."""
        for rank, pid in process_ids(self._exits).items():
            if rank not in self._workers:
                with suppress(psutil.Error):
                    self._workers[rank] = psutil.Process(pid)
                    continue
                self._gone.add(rank)


def _lives(worker: psutil.Process) -> bool:
    try:
        return worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _is_frozen(worker: psutil.Process) -> bool:
    try:
        return worker.status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
