"""Monitoring without packtrain's launcher: under torchrun, mpirun, srun or DeepSpeed, or in one process.

Rank 0 serves the control channel from its own threads and runs the watchdog. The others get its port through torch's store
and send their heartbeats to it. A rank ends itself with exit code 4 if rank 0 orders it, if rank 0 is gone or silent for too
long, or if the launcher that started it is gone. Processes on this machine that cannot end themselves are killed. In a run
of one process the channel serves packtrain doctor, and the watchdog ends the run only if a disk has stopped.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from packtrain.errors import LostPeers, PacktrainError, PeerFailed
from packtrain.monitor.channel import Client, NoAnswer, Server, new_secret, published
from packtrain.monitor.heartbeat import ProcessState, TimeLimits, count_oom_kills, life_of, own_heartbeat
from packtrain.monitor.watchdog import POLL_S, Watchdog

SETTLE_S = 2
"""Seconds between the first death and the diagnosis. Ranks that die of it are seen by then."""
PEER_GRACE_S = 5
"""Seconds that ranks have to end by themselves after another one has failed in training."""
RANK_0_GONE_S = 10
"""Seconds without a listener at rank 0's port until rank 0 counts as gone."""
_DELIVERY_S = 3  # for the other ranks to receive an order with their next beat
_HOST = socket.gethostname()
_watched_rank: _WatchedRank | None = None  # of this process, inside `watched`


@contextmanager
def watched(logs: Path, limits: TimeLimits, ranks: int, *, by_hand: bool) -> Iterator[None]:
    """Watch this process, one of `ranks`, inside the block. With several ranks, watching begins at `beat_to_rank_0`.

    `by_hand`: the process was started from a shell, whose end is no reason to end the run.
    """
    global _watched_rank
    _watched_rank = _WatchedRank(logs, limits, ranks, by_hand=by_hand)
    code, lost = 0, None
    try:
        yield
    except BaseException as error:
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        lost = error if isinstance(error, LostPeers) else None
        if ranks > 1 and isinstance(error, Exception) and not isinstance(error, PacktrainError):
            print(f"rank {_watched_rank.rank} on {_HOST} has failed:", file=sys.stderr, flush=True)
        raise
    finally:
        reported = _watched_rank.leave(code, str(lost or ""))
        if lost is not None:
            lost.shown = not reported
        _watched_rank = None


def beat_to_rank_0(share: Callable[[str], str]) -> None:
    """Send this rank's beats to rank 0. All ranks call this once torch's store connects them.

    Does nothing if packtrain's launcher watches. `share` gives rank 0's value to all ranks; the others pass "".
    """
    if _watched_rank is not None:
        _watched_rank.connect(share)


class _WatchedRank:
    """The monitoring threads of one rank; rank 0 has the watchdog, too."""

    def __init__(self, logs: Path, limits: TimeLimits, ranks: int, *, by_hand: bool) -> None:
        self._logs, self._ranks, self._by_hand = logs, ranks, by_hand
        self._limits = replace(limits, alone=ranks == 1)
        self._heartbeat, self._parent, self._over = own_heartbeat(), os.getppid(), threading.Event()
        self.rank = self._heartbeat.rank
        self._rank_0 = f"rank 0 on {os.environ.get('MASTER_ADDR', '?')}"
        self._rank_0_pid = 0  # of rank 0 if it is on this machine
        self._client: Client | None = None
        self._watchdog: Watchdog | None = None
        self._serving = ExitStack()
        self._memory_kills = count_oom_kills()
        self._asked = False  # rank 0's own stacks and collectives are wanted
        self._ended_at: float | None = None  # when the first rank was seen to have failed or died
        self._heartbeat.enter("start")
        if ranks == 1:
            self._serve("127.0.0.1", host="127.0.0.1")
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def _serve(self, address: str, host: str = "") -> Server:
        server = Server(secret=new_secret(), host=host)
        self._watchdog = Watchdog([("", range(self._ranks))], self._limits, self._logs)
        self._watchdog.attach(server)
        self._serving.callback(server.close)
        self._serving.enter_context(published(self._logs, server, address))
        self._serving.callback(self._watchdog.close)
        return server

    def connect(self, share: Callable[[str], str]) -> None:
        """Serve the channel on rank 0. Other ranks begin to send beats to it."""
        address = os.environ["MASTER_ADDR"]
        if self.rank == 0:
            server = self._serve(address)
            share(f"{server.port} {server.secret} {_HOST} {os.getpid()}")
            return
        port, secret, host, pid = share("").split()
        self._rank_0_pid = int(pid) if host == _HOST else 0
        self._client = Client(address, int(port), secret=secret)
        self._heartbeat.connect(self._client, self._ranks, on_end=self._on_end_order, on_silence=self._on_silence)

    def leave(self, code: int, lost: str) -> bool:
        """Report the end of this rank. Returns whether rank 0, which prints the cause, got the report of another rank."""
        if code == 0:
            self._heartbeat.enter("done")
        message = {**self._heartbeat.message(), "ended": code, "lost": lost}
        if self._watchdog is not None:
            self._watchdog.receive_beat(message)
            if lost:
                self._thread.join(RANK_0_GONE_S)  # lets the watchdog diagnose; its thread exits this process
            elif self._ranks > 1 and 0 < code <= 128 and self._watchdog.has_begun_training():
                self._wait_for_others(self._watchdog)
                self._watchdog.end_reason = f"{self._rank_0} failed (exit code {code})"
                time.sleep(_DELIVERY_S)
        self._over.set()
        self._heartbeat.close()
        self._serving.close()
        if self._client is None:
            return False
        try:
            self._client.call("beat", message)
            return True
        except OSError as error:
            if lost and isinstance(error, NoAnswer) and error.nothing_listens:
                self._on_silence(math.inf, error)
            return False

    def _wait_for_others(self, watchdog: Watchdog) -> None:
        """Give the other ranks time to end by themselves, perhaps with the same error."""
        until = time.monotonic() + PEER_GRACE_S
        while time.monotonic() < until and not all(state.failed or state.gone for state in watchdog.states()):
            time.sleep(0.1)

    def _watch(self) -> None:
        """Watch in the thread that every rank has."""
        while not self._over.wait(POLL_S):
            if not self._by_hand and os.getppid() != self._parent:
                _end(f"the launcher on {_HOST} is gone: ending its processes")
            if self._watchdog is not None and (lines := self._find_end(self._watchdog)):
                self._end_all(self._watchdog, lines)

    def _find_end(self, watchdog: Watchdog) -> Sequence[str]:
        """Return why all ranks must end, in lines; () while they need not."""
        self._asked = watchdog.receive_beat(self._heartbeat.message(asked=self._asked))["ask"]
        if self._ranks > 1:
            oom = count_oom_kills() > self._memory_kills
            ours = [state for state in watchdog.states() if state.pid and state.host == _HOST and not state.gone]
            processes = {state.rank: ProcessState(state.pid, life_of(state.pid), oom=oom) for state in ours}
            watchdog.receive_processes(0, processes)
        if diagnosis := watchdog.diagnose():
            return diagnosis.lines
        states = watchdog.states()
        ended = [state for state in states if state.failed or state.dead or state.process.lost]
        if not ended or self._ranks == 1:
            return ()
        self._ended_at = self._ended_at or time.monotonic()
        waited_s = time.monotonic() - self._ended_at
        if waited_s >= SETTLE_S and (diagnosis := watchdog.diagnose_deaths()):
            return diagnosis.lines
        # before training all ranks may be about to end with the same error
        if waited_s < (PEER_GRACE_S if watchdog.has_begun_training() else self._limits.join_s):
            return ()
        if failed := next((state for state in ended if state.failed), None):
            return (f"rank {failed.rank} on {failed.host} failed",)
        silent = [state for state in states if not state.gone and (state.heard_s or 0) > _DELIVERY_S]
        names = ", ".join(f"rank {state.rank} on {state.host} (last in {state.place})" for state in silent)
        return (f"no more heartbeats from {names}" if silent else ended[0].process.lost,)

    def _end_all(self, watchdog: Watchdog, lines: Sequence[str]) -> NoReturn:
        """Order the other ranks to end, and end this process. Ranks of this machine that stay are killed first."""
        watchdog.end_reason = lines[0]
        with suppress(OSError):
            print("\n".join(lines), file=sys.stderr, flush=True)
        if self._ranks > 1:
            time.sleep(_DELIVERY_S)
        for state in watchdog.states():
            if state.pid not in (0, os.getpid()) and state.host == _HOST:
                _kill(state.pid)
        self._serving.close()
        os._exit(PeerFailed.exit_code)  # the main thread may be stuck

    def _on_end_order(self, why: str) -> None:
        _end(f"rank {self.rank} on {_HOST} is ended: {why}")

    def _on_silence(self, silent_s: float, error: NoAnswer) -> None:
        """End this rank if rank 0 has not answered for too long."""
        if error.nothing_listens and silent_s > RANK_0_GONE_S:
            _end(f"{self._rank_0} is gone: no process listens at its port any more")
        if not error.nothing_listens and silent_s > self._limits.deadline_s(self._heartbeat.phase):
            why = "it is stopped, C code holds Python's lock (GIL) there, or its machine is lost"
            _end(f"{self._rank_0} has not answered for {silent_s:.0f} s: {why}", kills=self._rank_0_pid)


def _end(why: str, kills: int = 0) -> NoReturn:
    with suppress(OSError):
        print(why, file=sys.stderr, flush=True)
    _kill(kills)  # after printing: the main thread may notice the loss, and end this process
    os._exit(PeerFailed.exit_code)  # the main thread may be stuck


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if pid:
            os.kill(pid, signal.SIGKILL)
