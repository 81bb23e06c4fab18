"""Heartbeat of every rank: its phase, step and waits, and the facts of its process.

`enter` sets the phase, `waiting` encloses everything that waits for other ranks (collectives, barriers, the store, joining), and
`progress` reports that a long operation advances. Each only assigns a few values. A thread sends them to the watchdog once a
second (`connect`), with stacks and pending collectives if the watchdog asks for them. It reads the stacks even while the main thread
waits in a collective, which releases Python's lock (the GIL). SIGUSR2 makes loader processes write theirs (`write_stacks_on_signal`,
`dump`). Collectives come from torch's flight recorder, which gloo and NCCL always keep.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import json
import math
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from packtrain.errors import Json
from packtrain.monitor.channel import ADDRESS, SECRET, Client, NoAnswer

Life = Literal["running", "stopped", "gone"]
STACKS = "PACKTRAIN_STACKS"
"""Environment variable of a rank: the folder for stacks, one per launch and machine."""
DUMP_S = 1.0


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A rank's process as its launcher sees it.

    `code` is its exit code, negative for a signal, None if not known. `reported`: the worker reported the code before it ended. `lost` is
    the worker's message if it ended only because others were gone. `oom`: the kernel's out-of-memory killer has killed a process on
    that machine.
    """

    pid: int = 0
    state: Life = "running"
    code: int | None = None
    reported: bool = False
    lost: str = ""
    oom: bool = False


UNKNOWN = ProcessState()


def life_of(pid: int) -> Life:
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.Error:  # it exists, but belongs to another user
        return "running"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "running"


def free_memory() -> int:
    """Return the free memory in bytes. It is the machine's, or the tightest cgroup's (version 2) of this process if less."""
    free = psutil.virtual_memory().available
    with suppress(OSError):
        own = Path(Path("/proc/self/cgroup").read_text().partition("0::")[2].partition("\n")[0])
        for group in (own, *own.parents):
            folder = Path("/sys/fs/cgroup", str(group).strip("/"))
            with suppress(OSError, ValueError):  # "max", or no such file in the outermost group
                limit = int((folder / "memory.max").read_text())
                free = min(free, limit - int((folder / "memory.current").read_text()))
    return free


def count_oom_kills() -> int:
    """Count the kernel's out-of-memory kills on this machine, in all cgroups; 0 except on Linux."""
    with suppress(OSError):
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    return 0


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation. `number` counts in its process `group`, `what` is the data ("Float 4x8")."""

    name: str
    number: int
    group: str = ""
    what: str = ""

    def __str__(self) -> str:
        return f"{self.name} number {self.number}{f' ({self.what})' if self.what else ''}"


def write_stacks_on_signal() -> None:
    """Write this process's stacks into STACKS on SIGUSR2 and on a crash, from now on.
    The process is a rank or one of its loaders. Does nothing without STACKS."""
    if STACKS in os.environ:
        path = Path(os.environ[STACKS], f"{os.getpid()}.stacks")
        partial = path.with_suffix(".partial")
        with suppress(OSError):
            file = partial.open("a")
            faulthandler.enable(file)
            faulthandler.register(signal.SIGUSR2, file, all_threads=True, chain=False)
            # the final name only now: the signal would kill a process that has not registered for it yet
            partial.rename(path)


def own_stacks() -> str:
    """Return the stacks of all threads of this process, and of its loader processes."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    folder = Path(os.environ.get(STACKS, os.devnull))
    loaders = [stack for child in psutil.Process().children() if (stack := dump(folder, child.pid))]
    return "\n".join([*(f"-- a loader process\n{stack}" for stack in loaders), text])


def dump(folder: Path, pid: int) -> str:
    """Return the stacks of process `pid`. "" if it never called `write_stacks_on_signal`, or wrote none within DUMP_S (stopped, gone)."""
    file = folder / f"{pid}.stacks"
    with suppress(OSError):
        os.truncate(file, 0)  # fails if it has not called `write_stacks_on_signal`
        os.kill(pid, signal.SIGUSR2)
        end, before = time.monotonic() + DUMP_S, -1
        while time.monotonic() < end and not 0 < file.stat().st_size == before:
            before = file.stat().st_size
            time.sleep(0.05)
        return file.read_text(errors="replace")
    return ""


def crash_of(folder: Path, pid: int) -> str:
    """Return the stacks from a crash of process `pid`. "" if it did not crash, or never called `write_stacks_on_signal`."""
    with suppress(OSError):
        text = (folder / f"{pid}.stacks").read_text(errors="replace")
        return "".join(text.partition("Fatal Python error")[1:])
    return ""


def main_stack(text: str) -> tuple[str, ...]:
    """Return the main thread's calls in a faulthandler dump, innermost first. The dump has that thread last."""
    main = text.rpartition("(most recent call first):")[2]
    return tuple(line.strip() for line in main.splitlines() if line.startswith('  File "'))


def write_exit(exits: Path, rank: int, **facts: int | str) -> None:
    """Add `facts` about a rank to its file in the folder `exits`. Its launcher reads the file.

    The rank writes its process id (`pid`) as it starts and its exit `code` as it ends. If it ended only because it `lost` the others, it
    writes that message. torchrun writes how the process `ended`: the exit code, negative for a signal.
    """
    known = read_exits(exits).get(rank, {})
    partial = exits / f".{rank}.json"
    partial.write_text(json.dumps({**known, **facts}))
    partial.rename(exits / f"{rank}.json")


def read_exits(exits: Path) -> dict[int, Json]:
    """Return the facts in `exits`, by rank."""
    return {int(file.stem): json.loads(file.read_text()) for file in exits.glob("*.json") if file.stem.isdigit()}


def own_collectives() -> Json:
    """Return `last_collectives` of this process; {} without torch.

    torch has one flight recorder for all backends, and in builds with NCCL maybe one more.
    """
    if "torch.distributed" not in sys.modules:
        return {}
    c10d = importlib.import_module("torch._C._distributed_c10d")
    last: Json = {}
    for recorder in (getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")):
        recorded = last_collectives(json.loads(recorder())) if recorder is not None else {}
        last |= {name: entry for name, entry in recorded.items() if entry and not last.get(name)}
    return last


def last_collectives(recorded: Json) -> Json:
    """Return the `pending` and `finished` operations of one flight recorder's dump.

    `pending` is the first that has not ended, `finished` the last that has; each has the fields of Collective, or is None. Point-to-point
    operations have numbers of their own: they are left out."""
    last: Json = {"pending": None, "finished": None}
    for entry in recorded.get("entries", ()):
        status = recorded.get("pg_status", {}).get(str(entry["pg_id"]), {})
        name, number = entry["profiling_name"], entry["collective_seq_id"]
        ended = entry["retired"] or number <= int(status.get("last_completed_collective", -1))
        if not entry["is_p2p"] and (ended or last["pending"] is None):
            sizes = zip(entry["input_dtypes"], entry["input_sizes"], strict=True)
            what = ", ".join(f"{dtype} {'x'.join(map(str, size)) or '1'}" for dtype, size in sizes)
            fields = {"name": name, "number": number, "group": str(entry["pg_id"]), "what": what[:200]}
            last["finished" if ended else "pending"] = fields
    return last


Phase = str
IN_WORDS: Mapping[Phase, str] = {
    "start": "starting",
    "join": "joining the other processes",
    "prepare": "preparing the data",
    "load": "loading the model",
    "proof": "the checks before training",
    "data": "loading data",
    "counts": "exchanging the counts",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer update",
    "step end": "logging",
    "checkpoint": "the checkpoint",
    "eval": "the evaluation",
    "final": "writing the results",
    "done": "its end",
}
"""All phases in the order of a run. Every step passes the phases from `data` to `eval`."""
PHASES = tuple(IN_WORDS)
BEFORE_TRAINING = PHASES[: PHASES.index("data")]
LONG = ("prepare", "load", "proof", "final")
"""Phases that may take hours. No rank waits in a collective in them, so they have no limit as long as they make progress."""
_CHECKPOINT_STEPS = 3  # a checkpoint may take as long as this many steps
_MIN_CPU = 0.05  # of a core: a process that uses this much is computing
_BEATS_A_SECOND = 200  # of all ranks together
_DIAGNOSE_AHEAD_S = 5


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Time limits in seconds: collectives of a step (`step_s`), ranks that join (`join_s`).

    They come from topology.step_timeout and topology.join_timeout, and set how long a rank may be in a phase without progress. Nobody
    waits for the steps of a single process (`alone`), so only its writing has a deadline.
    """

    step_s: float = 600
    join_s: float = 300
    alone: bool = False

    def collective_s(self, phase: Phase) -> float:
        """Return the limit in seconds of a collective operation that begins in `phase`."""
        return self.step_s * (_CHECKPOINT_STEPS if phase in ("checkpoint", *LONG) else 1)

    def deadline_s(self, phase: Phase) -> float:
        """Return how many seconds a rank may stand still in `phase`."""
        if self.alone and phase not in ("checkpoint", "final"):
            return math.inf
        if phase in ("start", "join"):  # joining has its own, shorter timeout and a clearer error
            return 2 * self.join_s + 60
        limit_s = self.collective_s(phase)
        # a little less than the timeout of collectives, so that the diagnosis comes before the waiting ranks fail
        return min(0.9 * limit_s, max(limit_s - _DIAGNOSE_AHEAD_S, limit_s / 2))


def progress_of(phase: Phase, step: int, micro: int) -> tuple[int, ...]:
    """Return progress as a sortable tuple. The rank with the smallest one keeps the others waiting."""
    order = PHASES.index(phase)
    if phase in BEFORE_TRAINING:
        return (0, order)
    if phase in ("final", "done"):
        return (2, order)
    forward_order = PHASES.index("forward")  # both passes of a micro-batch come before the next one's
    return (1, step, forward_order if phase == "backward" else order, micro, order)


def place_of(phase: Phase, step: int, micro: int) -> str:
    """Describe a place: "the forward pass of step 12 (micro-batch 3)"."""
    words = IN_WORDS[phase]
    if phase in BEFORE_TRAINING or phase in ("final", "done"):
        return words
    preposition = "after" if phase in ("checkpoint", "eval", "step end") else "of"
    return f"{words} {preposition} step {step}{f' (micro-batch {micro})' if micro > 1 else ''}"


class _State(NamedTuple):
    phase: Phase = "start"
    step: int = 0
    micro: int = 0
    waits: str = ""
    changes: int = 0


class Heartbeat:
    """One rank's thread-safe heartbeat. `usual_s` is the time of an ordinary step in seconds, 0 if not yet known."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.usual_s = rank, 0.0
        self._state, self._worked = _State(), 0
        self._clocks = time.monotonic(), time.process_time()  # at the last beat
        self._over = threading.Event()

    @property
    def phase(self) -> Phase:
        return self._state.phase

    def enter(self, phase: Phase, *, step: int | None = None, micro: int = 0) -> float:
        """Enter `phase` of `step` (None: the current step); return time.monotonic()."""
        self._change(phase=phase, step=self._state.step if step is None else step, micro=micro)
        return time.monotonic()

    def progress(self) -> None:
        """Report progress within the phase: the time without progress starts again at 0."""
        self._change()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Mark the block as waiting for other ranks. `what` is in words that follow "waits for"."""
        before = self._state.waits
        self._change(waits=what)
        try:
            yield
        finally:
            self._change(waits=before)

    def _change(self, **values: object) -> None:
        self._state = self._state._replace(changes=self._state.changes + 1, **values)

    def message(self, *, asked: bool = False) -> Json:
        """Return the body of a beat, with stacks and collectives if `asked`.

        `changes` grows with every report of the rank; while it does not, the rank stands still. In a LONG phase CPU time
        counts as progress, too: libraries that work there cannot call `progress`.
        """
        state, (before, used) = self._state, self._clocks
        self._clocks = now, seconds = time.monotonic(), time.process_time()
        if state.phase in LONG and not state.waits and seconds - used >= _MIN_CPU * (now - before) > 0:
            self._worked += 1
        body = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **state._asdict(),
            "changes": state.changes + self._worked,
            "usual_s": round(self.usual_s, 3),
        }
        if asked:
            body |= {"stacks": "", "collectives": {}}
            with suppress(Exception):  # a failed diagnostic must not end the run
                body["stacks"] = own_stacks()
                body["collectives"] = own_collectives()
        return body

    def connect(
        self,
        client: Client,
        ranks: int,
        *,
        on_end: Callable[[str], None] = lambda reason: None,
        on_silence: Callable[[float, NoAnswer], None] = lambda silent_s, error: None,
    ) -> None:
        """Send beats to the watchdog from now on. More `ranks` send them less often, to bound its load.

        `on_end` is called with the reason when the watchdog orders the rank to end. `on_silence` is called when it does not answer, with
        the seconds since its last answer.
        """

        def send() -> None:
            asked, answered = False, time.monotonic()
            pause_s = random.random() * (interval_s - 1)  # not all at once
            while not self._over.wait(0 if asked else pause_s):
                pause_s = interval_s
                try:
                    answer = client.call("beat", self.message(asked=asked))
                    asked, answered = answer["ask"], time.monotonic()
                    if answer["end"]:
                        on_end(answer["end"])
                except OSError as error:
                    asked = False
                    if isinstance(error, NoAnswer):  # else refused: the watchdog is shutting down
                        on_silence(time.monotonic() - answered, error)

        interval_s = max(1.0, ranks / _BEATS_A_SECOND)
        threading.Thread(target=send, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        self._over.set()


@functools.cache
def own_heartbeat() -> Heartbeat:
    """Return this process's heartbeat; call it before heavy imports. It sends beats if packtrain's launcher has set a channel."""
    heartbeat = Heartbeat(int(os.environ.get("RANK", "0")))
    write_stacks_on_signal()
    if ADDRESS in os.environ:
        address, _, port = os.environ[ADDRESS].rpartition(":")
        client = Client(address, int(port), secret=os.environ.get(SECRET, ""))
        heartbeat.connect(client, int(os.environ.get("WORLD_SIZE", "1")))
    return heartbeat


def waiting(what: str) -> AbstractContextManager[None]:
    """Wrap code that waits for other ranks: `with waiting("…")`. The watchdog then does not blame this rank."""
    return own_heartbeat().waiting(what)


def progress() -> None:
    """Report progress. Long operations call it regularly, so that they do not count as standing still."""
    own_heartbeat().progress()
