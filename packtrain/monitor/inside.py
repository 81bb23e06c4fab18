"""Runs that no launcher of ours watches: those of torchrun, mpirun, srun or DeepSpeed's launcher, and runs of one process.

Rank 0 serves the control channel from threads of its own and is the watchdog of all; the others hear of its port through the
store at which they meet, and beat to it. Who is to end, ends itself with exit code 4: when rank 0 says so, when rank 0 is gone
or silent for too long, and when the launcher that has started it is gone. Rank 0 ends what is left on its own machine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

from packtrain.errors import LostPeers, PacktrainError, PeerFailed
from packtrain.monitor import stacks
from packtrain.monitor.channel import Client, NoAnswer, Server, new_secret, published
from packtrain.monitor.diagnosis import RankState
from packtrain.monitor.heartbeat import BEFORE_TRAINING, TimeLimits, own_heartbeat
from packtrain.monitor.processes import MemoryKills, ProcessState, seen
from packtrain.monitor.watchdog import LOOK_S, SETTLE_S, Watchdog
from packtrain.run_folder import in_time

GRACE_S = 5
"""Seconds that ranks have to end by themselves where another one has failed in training."""
GONE_S = 10
"""Seconds for which nobody has listened at rank 0's port when it counts as gone."""
_PARTING_S = 3
_KEY = "packtrain channel"
_LAUNCHER_LOG = "launcher.log"


class Store(Protocol):
    """What is needed of torch's."""

    def set(self, key: str, value: str, /) -> Any:
        """Keeps a value."""

    def get(self, key: str, /) -> bytes:
        """Waits for a value."""
        ...


@contextmanager
def looked_at(logs: Path, limits: TimeLimits) -> Iterator[None]:
    """Inside the block packtrain doctor finds this run of one process, which nobody waits for, and nobody ends."""
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


def beat_to_rank_0(store: Store) -> None:
    """Called by all ranks once they have met at `store`; does nothing where a launcher of ours watches."""
    if _inside is not None:
        _inside.connect(store)


class _Inside:
    """A rank's end of it; rank 0 has the watchdog, too."""

    def __init__(self, logs: Path, limits: TimeLimits, *, by_hand: bool) -> None:
        self._logs, self._limits, self._by_hand = logs, limits, by_hand
        self._heartbeat, self._parent, self._over = own_heartbeat(), os.getppid(), threading.Event()
        self._client: Client | None = None
        self._watchdog: Watchdog | None = None
        self._server: Server | None = None
        self._memory = MemoryKills()
        self._failed_at: float | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def connect(self, store: Store) -> None:
        """Serves the channel, or begins to beat to who does."""
        rank, ranks, address = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
        if rank == "0":
            self._server = Server(secret=new_secret())
            watchdog = Watchdog([("", range(int(ranks)))], self._limits, self._logs)
            watchdog.attach(self._server)
            store.set(_KEY, json.dumps([self._server.port, self._server.secret]))
            self._watchdog = watchdog
            self._published = published(self._logs, self._server, address)
            self._published.__enter__()
            return
        port, secret = json.loads(store.get(_KEY))
        self._client = Client(address, port, secret=secret)
        self._heartbeat.connect(self._client, int(ranks), on_end=self._obey, on_silence=self._miss)

    def leave(self, code: int, lost: str = "") -> bool:
        """Says that this rank ends; returns whether it is said elsewhere why, where it has `lost` others."""
        self._over.set()
        self._heartbeat.close()
        if code == 0:
            self._heartbeat.enter("done")
        message = self._heartbeat.last_message(code, lost)
        if self._watchdog is not None:
            return self._leave_last(self._watchdog, message)
        if self._client is None:
            return False
        try:
            self._client.call("beat", message)
            return True
        except NoAnswer as error:
            if error.refused and lost:
                print(f"rank 0 on {os.environ['MASTER_ADDR']} ended without a word", file=sys.stderr, flush=True)
            return False
        except OSError:
            return False

    def _leave_last(self, watchdog: Watchdog, message: dict[str, Any]) -> bool:
        """Of rank 0, which gives the others the time to be heard, and says why they have ended if it can."""
        watchdog.hear(message)
        said, code = False, message["ended"]
        if code not in (0, PeerFailed.exit_code) and watchdog.trains():
            watchdog.end = f"rank 0 on {socket.gethostname()} failed (exit code {code})"
        end = time.monotonic() + (_PARTING_S + SETTLE_S if message["lost"] else _PARTING_S)
        while time.monotonic() < end and not (watchdog.all_know() and not message["lost"]):
            self._note_processes(watchdog)
            if message["lost"] and (found := watchdog.look()):
                self._say(found.lines)
                watchdog.end, said = found.what, True
                break
            time.sleep(0.2)
        if message["lost"] and not said and (missing := [one for one in watchdog.states() if _is_silent(one)]):
            names = ", ".join(f"rank {one.rank} on {one.host} (last in {one.place})" for one in missing)
            self._say([f"nothing is heard of {names} any more"])
        if message["lost"] and (said or watchdog.failed()):
            self._end_the_others(watchdog)
        watchdog.close()
        self._published.__exit__(None, None, None)
        if self._server is not None:
            self._server.close()
        return said

    def _watch(self) -> None:
        """The thread of every rank."""
        while not self._over.wait(LOOK_S):
            if not self._by_hand and os.getppid() != self._parent:
                self._end([f"the launcher on {socket.gethostname()} is gone: its processes are ended"])
            if self._watchdog is not None:
                self._look(self._watchdog)

    def _look(self, watchdog: Watchdog) -> None:
        watchdog.hear(self._heartbeat.message())
        self._note_processes(watchdog)
        if self._over.is_set():
            return
        found = watchdog.look()
        if found is None and (failed := watchdog.failed()):
            self._failed_at = self._failed_at or time.monotonic()
            # before training they may all be about to end for the same reason, each by itself
            patience_s = GRACE_S if watchdog.trains() else self._limits.join_s
            if time.monotonic() - self._failed_at < patience_s:
                return
            lines: Sequence[str] = [f"rank {failed.rank} on {failed.host} failed: see what it has said"]
        elif found is None:
            return
        else:
            lines = found.lines
        watchdog.end = lines[0]
        self._say(lines)
        self._end_the_others(watchdog)
        os._exit(PeerFailed.exit_code)

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
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(one.pid, signal.SIGKILL)

    def _obey(self, reason: str) -> None:
        self._end([f"rank {self._heartbeat.rank} on {socket.gethostname()} is ended: {reason}"])

    def _miss(self, silent_s: float, error: NoAnswer) -> None:
        """Rank 0 does not answer."""
        first = f"rank 0 on {os.environ['MASTER_ADDR']}"
        if error.refused and silent_s > GONE_S:
            self._end([f"{first} is gone: nobody listens at its port any more"])
        if silent_s > self._limits.deadline_s(self._heartbeat.phase):
            self._end([f"{first} has not answered for {silent_s:.0f} s: it is stopped, stuck, or its machine is lost"])

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


def _append(file: Path, text: str) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(text)


def _is_silent(one: RankState) -> bool:
    return not one.gone and one.phase not in BEFORE_TRAINING and (one.heard_s or 0) > _PARTING_S


_inside: _Inside | None = None
