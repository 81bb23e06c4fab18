"""Runs that no launcher of ours watches: those of torchrun, mpirun, srun or DeepSpeed's launcher, and runs of one process.

Rank 0 serves the control channel from threads of its own and is the watchdog of all; the others hear of its port through the
store at which they meet, and beat to it. A rank ends itself with exit code 4 when rank 0 orders it, when rank 0 is gone
or silent for too long, and when the launcher that started it is gone. Rank 0 ends what is left on its own machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from packtrain.errors import LostPeers, PacktrainError, PeerFailed
from packtrain.monitor import stacks
from packtrain.monitor.channel import Client, NoAnswer, Server, new_secret, published
from packtrain.monitor.diagnosis import RankState
from packtrain.monitor.heartbeat import BEFORE_TRAINING, TimeLimits, own_heartbeat
from packtrain.monitor.processes import MemoryKills, ProcessState, seen
from packtrain.monitor.watchdog import LOOK_S, Watchdog
from packtrain.run_folder import in_time

SETTLE_S = 2
"""Seconds that the others have to end, too, before it is said which rank's death they died of."""
GRACE_S = 5
"""Seconds that ranks have to end by themselves where another one has failed in training."""
GONE_S = 10
"""Seconds without a listener at rank 0's port after which it counts as gone."""
_PARTING_S = 3
_LAUNCHER_LOG = "launcher.log"


Share = Callable[[str], str]
"""Gives the value that rank 0 passes to all ranks; the others pass ""."""


@contextmanager
def looked_at(logs: Path, limits: TimeLimits) -> Iterator[None]:
    """Inside the block packtrain doctor finds this run of one process; a stall is reported there and does not end the run."""
    heartbeat = own_heartbeat()
    heartbeat.enter("start")
    watchdog = Watchdog([(socket.gethostname(), [0])], limits, logs, ends=False)
    server = Server(secret=new_secret(), host="127.0.0.1")

    def show(wish: Any) -> Any:
        watchdog.hear({**heartbeat.message(asked=True), "rank": 0})
        return watchdog.show(wish)

    server.serve("ranks", show)
    code = 1
    try:
        with published(logs, server, "127.0.0.1"):
            yield
        code = 0
    except (PacktrainError, KeyboardInterrupt) as error:
        code = error.exit_code if isinstance(error, PacktrainError) else 128 + signal.SIGINT
        raise
    finally:
        watchdog.hear({**heartbeat.last_message(code), "rank": 0})
        watchdog.close()
        server.close()


@contextmanager
def watched(logs: Path, limits: TimeLimits, *, by_hand: bool) -> Iterator[None]:
    """Inside the block this process is watched, a rank that another launcher has started; `beat_to_rank_0` begins it.

    `by_hand`: from a shell, which may be left while it runs.
    """
    global _inside
    folder = tempfile.mkdtemp(prefix="packtrain-stacks-")
    os.environ[stacks.FOLDER] = folder
    _inside = _Inside(logs, limits, by_hand=by_hand)
    try:
        yield
        _inside.leave(0)
    except LostPeers as error:
        error.shown = not _inside.leave(error.exit_code, lost=str(error))
        raise
    except PacktrainError as error:
        _inside.leave(error.exit_code)
        raise
    except KeyboardInterrupt:
        _inside.leave(128 + signal.SIGINT)
        raise
    except Exception:
        rank = os.environ.get("RANK", "0")
        print(f"rank {rank} on {socket.gethostname()} has failed:", file=sys.stderr, flush=True)
        _inside.leave(1)
        raise
    finally:
        _inside = None
        shutil.rmtree(folder, ignore_errors=True)


def beat_to_rank_0(share: Share) -> None:
    """Called by all ranks once they have met; does nothing where a launcher of ours watches."""
    if _inside is not None:
        _inside.connect(share)


class _Inside:
    """A rank's end of it; rank 0 has the watchdog, too."""

    def __init__(self, logs: Path, limits: TimeLimits, *, by_hand: bool) -> None:
        self._logs, self._limits, self._by_hand = logs, limits, by_hand
        self._heartbeat, self._parent, self._over = own_heartbeat(), os.getppid(), threading.Event()
        self._first = f"rank 0 on {os.environ.get('MASTER_ADDR', '?')}"
        self._first_pid = 0  # of rank 0 where it is on this machine
        self._client: Client | None = None
        self._watchdog: Watchdog | None = None
        self._serving = ExitStack()
        self._memory = MemoryKills()
        self._asked = False  # whether rank 0's own stacks and collectives are wanted
        self._lost = False  # whether rank 0 itself is at its end because others are gone
        self._ended_at: float | None = None  # when a rank was first seen to have ended otherwise than well
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def connect(self, share: Share) -> None:
        """Serves the channel, or begins to beat to who does."""
        ranks, address = int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
        if self._heartbeat.rank == 0:
            server = Server(secret=new_secret())
            watchdog = Watchdog([("", range(ranks))], self._limits, self._logs)
            watchdog.attach(server)
            self._serving.callback(server.close)
            self._serving.enter_context(published(self._logs, server, address))
            self._serving.callback(watchdog.close)
            self._watchdog = watchdog
            share(f"{server.port} {server.secret} {socket.gethostname()} {os.getpid()}")
            return
        port, secret, host, pid = share("").split()
        self._first_pid = int(pid) if host == socket.gethostname() else 0
        self._client = Client(address, int(port), secret=secret)
        self._heartbeat.connect(self._client, ranks, on_end=self._obey, on_silence=self._miss)

    def leave(self, code: int, lost: str = "") -> bool:
        """Says that this rank ends; returns whether rank 0 says why, where it has `lost` others."""
        if code == 0:
            self._heartbeat.enter("done")
        message = self._heartbeat.last_message(code, lost)
        if self._watchdog is not None:
            self._watchdog.hear(message)
            if 0 < code <= 128 and not lost and self._watchdog.trains():
                self._watchdog.end = f"{self._first} failed (exit code {code})"
            self._lost = bool(lost)
            self._part(self._watchdog)
        self._over.set()
        self._heartbeat.close()
        self._serving.close()
        if self._client is None:
            return False
        try:
            self._client.call("beat", message)
            return True
        except OSError as error:
            if lost and isinstance(error, NoAnswer) and error.refused:
                print(f"{self._first} ended without a word", file=sys.stderr, flush=True)
            return False

    def _part(self, watchdog: Watchdog) -> None:
        """Rank 0 stays until all others are heard. Where it has lost them, its thread may find by then why, and ends it."""
        end = time.monotonic() + (2 * _PARTING_S if self._lost else _PARTING_S)
        while time.monotonic() < end and (self._lost or not watchdog.all_know()):
            time.sleep(0.1)
        if self._lost and watchdog.end:
            self._thread.join(GONE_S)
        if self._lost and (missing := [one for one in watchdog.states() if _is_silent(one)]):
            names = ", ".join(f"rank {one.rank} on {one.host} (last in {one.place})" for one in missing)
            self._say([f"nothing is heard any more of {names}"])

    def _watch(self) -> None:
        """The thread of every rank."""
        while not self._over.wait(LOOK_S):
            if not self._by_hand and os.getppid() != self._parent:
                self._end([f"the launcher on {socket.gethostname()} is gone: its processes are ended"])
            if self._watchdog is not None and (lines := self._look(self._watchdog)):
                self._watchdog.end = lines[0]
                self._say(lines)
                self._end_the_others(self._watchdog)
                self._serving.close()
                os._exit(PeerFailed.exit_code)  # the main thread may be stuck

    def _look(self, watchdog: Watchdog) -> Sequence[str]:
        """Why all have to be ended; () while they have not."""
        self._asked = watchdog.hear(self._heartbeat.message(asked=self._asked)).get("ask", False)
        self._note_processes(watchdog)
        if found := watchdog.look():
            return found.lines
        ended = [one for one in watchdog.states() if one.failed or one.dead or one.lost_others]
        if not ended:
            return ()
        now = time.monotonic()
        self._ended_at = self._ended_at or now
        if now - self._ended_at < SETTLE_S:
            return ()
        if found := watchdog.aftermath():
            return found.lines
        # before training they may all be about to end for the same reason, each by itself
        if not self._lost and now - self._ended_at < (GRACE_S if watchdog.trains() else self._limits.join_s):
            return ()
        first = next((one for one in ended if one.failed), ended[0])
        return (
            first.process.lost if first.process and first.process.lost else f"rank {first.rank} on {first.host} failed",
        )

    def _note_processes(self, watchdog: Watchdog) -> None:
        """What is known of the processes on this machine; of those that are stuck, their stacks."""
        here = [one for one in watchdog.states() if one.pid and one.host == socket.gethostname() and not one.gone]
        found = {}
        for one in here:
            state = seen(one.pid)
            if state == "gone":
                found[one.rank] = ProcessState(one.pid, state, oom=self._memory.killed(one.pid))
            else:
                self._memory.note(one.pid)
                found[one.rank] = ProcessState(one.pid, state)
        watchdog.processes(0, found)

    def _end_the_others(self, watchdog: Watchdog) -> None:
        """Gives them the time to hear it, and ends those on this machine that do not."""
        limit = time.monotonic() + _PARTING_S
        while time.monotonic() < limit and not watchdog.all_know():
            time.sleep(0.1)
        time.sleep(0.5)
        for one in watchdog.states():
            if one.pid and one.pid != os.getpid() and one.host == socket.gethostname() and seen(one.pid) != "gone":
                _kill(one.pid)

    def _obey(self, reason: str) -> None:
        self._end([f"rank {self._heartbeat.rank} on {socket.gethostname()} is ended: {reason}"])

    def _miss(self, silent_s: float, error: NoAnswer) -> None:
        """Rank 0 does not answer."""
        if error.refused:
            if silent_s > GONE_S:
                self._end([f"{self._first} is gone: nobody listens at its port any more"])
        elif silent_s > self._limits.deadline_s(self._heartbeat.phase):
            if self._first_pid:
                _kill(self._first_pid)
            why = "it is stopped, something in C holds Python's lock there, or its machine is lost"
            self._end([f"{self._first} has not answered for {silent_s:.0f} s: {why}"])

    def _end(self, lines: Sequence[str]) -> NoReturn:
        with suppress(OSError):
            print("\n".join(lines), file=sys.stderr, flush=True)
        os._exit(PeerFailed.exit_code)  # the main thread may be stuck

    def _say(self, lines: Sequence[str]) -> None:
        """On stderr, and in the launcher's log."""
        text = "\n".join(lines) + "\n"
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
        in_time(lambda: _append(self._logs / _LAUNCHER_LOG, text), None)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _append(file: Path, text: str) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(text)


def _is_silent(one: RankState) -> bool:
    return not one.gone and one.phase not in BEFORE_TRAINING and (one.heard_s or 0) > _PARTING_S


_inside: _Inside | None = None
