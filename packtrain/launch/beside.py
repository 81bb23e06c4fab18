"""The watchdog of processes that another launcher has started (torchrun, mpirun, srun): a small process beside those of each
machine.

The first rank of a machine starts it, and all of them leave their heartbeats and exit codes where it looks. It is no thread of
theirs, so that it can tell of a process that is stopped, killed, or stuck in C. Whoever it has to end is told to by a file, ends
with exit code 4, which the launcher hears, and is killed TERM_S later; it ends with its ranks, and when its launcher is gone they
do, too. Watchers open no port to each other: what one machine cannot tell alone they leave for each other in logs/, and that of
machine 0 tells it. Where the machines do not share that disk, the collectives' time limit ends such a run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from packtrain.errors import LostPeers, PacktrainError, PeerFailed
from packtrain.launch.children import GRACE_S, TERM_S
from packtrain.launch.own_folder import held, place_of_heartbeats
from packtrain.launch.processes import families, sight, text_of
from packtrain.launch.signals import ENDING
from packtrain.launch.worker import exit_codes, losses, report_loss
from packtrain.monitor.old.diagnosis import ABORTED
from packtrain.monitor.old.heartbeat import HEARTBEAT_DIR, own_pulse, read_beats
from packtrain.monitor.old.watchdog import DIAGNOSIS, Watchdog
from packtrain.plan.surroundings import ALSO_NEEDED, OF_MPI, RENDEZVOUS, int_of
from packtrain.run_folder import in_time, write_json
from packtrain.wording import numbered, ranks_in_words

BY_HAND = "by-hand"
# Those that start a process for each rank, the first of them first: its variables for rank, size and rank on the machine, and
# those that tell a launch from others on the machine; the process that has started it where there are none.
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_LAUNCHES = (
    (OF_MPI[0][:3], ("PMIX_NAMESPACE",)),
    (OF_MPI[1][:3], ()),
    (
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
)
_EXITS = "exits"
_LOOK_S = 0.25
_PARTING_S = 3
_SURE = 2  # looks
_NEW_S = 60
NOT_IN_A_ROW = (
    "their machine's are numbered neither in a row nor in turn: set mpirun --map-by slot, srun --distribution=block"
)
UNSEEN = "start packtrain itself on each machine, or by torchrun or mpirun; by hand set LOCAL_WORLD_SIZE, too, the processes of a machine"
"""What to do where processes of a machine do not see each other."""


@contextmanager
def watched(
    log: Path,
    *,
    host: str,
    per_node: int,
    machines: int,
    step_timeout: float,
    checkpoint_timeout: float,
    join_timeout: float,
) -> Iterator[None]:
    """Inside the block this process, which a launcher has started with `per_node` on each machine, is watched.

    What is said goes to stderr and into `log`, which is beside the other logs; that nobody watches, too.
    """
    rank = int(os.environ.get("RANK", "0"))
    folder, local = _meeting_place(log, host)
    if folder is None:
        print(f"rank {rank} on {host} is not watched: {UNSEEN}", file=sys.stderr, flush=True)
        yield
        return
    os.environ[HEARTBEAT_DIR] = str(folder)
    pulse, over, watcher, end = own_pulse(), threading.Event(), None, _end_of(folder, os.getpid())
    end.unlink(missing_ok=True)
    if not local:
        about = {"folder": str(folder), "log": str(log), "per_node": per_node, "machines": machines, "host": host}
        about |= {"step_timeout": step_timeout, "checkpoint_timeout": checkpoint_timeout, "join_timeout": join_timeout}
        about |= {"process": os.getpid(), "launcher": os.getppid(), "by_hand": f"-of-{BY_HAND}-" in folder.name}
        watcher = _start(about, folder)
    threading.Thread(target=_obey, args=(end, over), name="watchdog", daemon=True).start()
    code = 1
    try:
        yield
        pulse.enter("done")
        code = 0
    except LostPeers as error:
        code = error.exit_code
        with suppress(OSError):  # nobody watches
            report_loss(folder / _EXITS, rank, error)
            error.shown = False  # the watcher knows whether there is more to say
        raise
    except PacktrainError as error:
        code = error.exit_code
        raise
    except Exception:
        print(f"rank {rank} on {host} has failed:", file=sys.stderr, flush=True)
        raise
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        raise
    finally:
        over.set()
        _leave(folder, rank, code)
    if watcher:
        with suppress(subprocess.TimeoutExpired):
            watcher.wait(_PARTING_S)  # a scheduler kills what the first process leaves behind


def _meeting_place(log: Path, host: str) -> tuple[Path | None, int]:
    """The folder of all processes of this launch that see each other, and of no other, not even of its next run; None where
    there can be none. And the number of this process on its machine."""
    launch = launch_of(os.environ, os.getppid())
    if launch is None:
        return None, 0
    name, local = f"{launch[0]}-{re.sub(r'[^-.a-zA-Z0-9]', '-', os.environ.get('SLURM_NODEID', host))}", launch[1]
    with suppress(OSError):
        name += f"-{os.stat('/proc/self/ns/pid').st_ino}"  # in containers of their own, process ids mean others
    folder = place_of_heartbeats(f"of-{name}-{zlib.crc32(bytes(log.absolute())):08x}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        return (folder if folder.stat().st_uid == os.getuid() else None), local  # the name can be guessed
    except OSError:
        return None, local


def _start(about: Mapping[str, Any], folder: Path) -> subprocess.Popen[bytes] | None:
    """The watcher; None where it cannot be started."""
    _sweep(folder)
    with suppress(OSError):
        (folder / _EXITS).mkdir()
        argv = [sys.executable, "-m", "packtrain.launch.beside", json.dumps(about)]
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    return None


def _sweep(folder: Path) -> None:
    """Takes away what runs have left that were killed together with their watchers, be it in a folder of the same name."""
    for old in folder.parent.glob(place_of_heartbeats("of-*").name):
        with suppress(OSError):
            if old != folder and time.time() - old.stat().st_mtime > _NEW_S:
                with held(old):
                    shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(folder / _EXITS, ignore_errors=True)  # this launch leaves none before there is a watcher
    for rank, beat in read_beats(folder).items():
        if not _lives(beat.pid):
            (folder / str(rank)).unlink(missing_ok=True)


def _end_of(folder: Path, pid: int) -> Path:
    """The file that has a process end."""
    return folder / f"end-{pid}"


def _obey(end: Path, over: threading.Event) -> None:
    while not over.wait(_LOOK_S):
        if end.exists():
            os._exit(PeerFailed.exit_code)  # the main thread may be stuck


def _leave(folder: Path, rank: int, code: int) -> None:
    """Leaves the exit code for the watcher; where there is none, takes the folder away."""
    if (folder / _EXITS).exists():
        with suppress(OSError):
            (folder / _EXITS / str(rank)).write_text(str(code))
    else:
        shutil.rmtree(folder, ignore_errors=True)


class _Ranks:
    """Those of this machine: exit codes of who has left one, who is gone without (`silent`), and processes of the rest (`left`)."""

    def __init__(self, folder: Path, parents: Mapping[int, int], *, by_hand: bool) -> None:
        self.codes: dict[int, int] = {}
        self.lost: dict[int, str] = {}  # what those said that only saw others gone
        self.silent: set[int] = set()
        self.left: dict[int, int] = {}
        self.failed = 0  # looks on end that one has failed
        self._folder = folder
        self._parents = dict(parents)  # of processes
        self._by_hand = by_hand  # then the shell may well be left before them
        self.look()

    def look(self) -> None:
        """Looks at all of them that have said anything so far."""
        pids = {rank: beat.pid for rank, beat in read_beats(self._folder).items()}
        gone = {rank for rank, pid in pids.items() if not _lives(pid)}
        with suppress(OSError):  # read after, so that who left a code is not taken for silent
            self.codes, self.lost = exit_codes(self._folder / _EXITS), losses(self._folder / _EXITS)
        self.silent = gone - set(self.codes)
        self.left = {rank: pid for rank, pid in pids.items() if rank not in gone and rank not in self.codes}
        failed = self.silent or any(0 < code <= 128 for code in self.codes.values())
        self.failed = self.failed + 1 if failed else 0

    @property
    def all(self) -> set[int]:
        """Those that have said anything so far."""
        return {*self.codes, *self.silent, *self.left}

    def orphaned(self) -> bool:
        """Whether the process that has started one of them is gone."""
        if self._by_hand:
            return False
        for pid in self.left.values():
            with suppress(psutil.Error):
                parent = psutil.Process(pid).ppid()
                if self._parents.setdefault(pid, parent) != parent:
                    return True
        return False

    def end(self) -> None:
        """Has those that are left end, with PeerFailed's exit code where they can, and kills them and their children."""
        pids = list(self.left.values())
        family = {*pids, *(one for children in families(pids).values() for one in children)} - {os.getpid()}
        for pid in pids:
            with suppress(OSError):
                _end_of(self._folder, pid).touch()
        limit = time.monotonic() + TERM_S
        while (alive := [pid for pid in pids if _lives(pid)]) and time.monotonic() < limit:
            if all(sight(pid).state == "T" for pid in alive):
                for pid in alive:  # who is stopped cannot obey, and before the others are gone would go on with them
                    _signal(pid, signal.SIGCONT)
            time.sleep(_LOOK_S)
        for pid in family:
            _signal(pid, signal.SIGKILL)


class _Others:
    """What the watchers of several machines leave for each other in logs/: reports of ranks that stand still, and a diagnosis.

    None of it waits for a disk that stalls.
    """

    def __init__(self, logs: Path, node: int, machines: int) -> None:
        self._own = _report_of(logs, node)
        self._files = {} if node else {other: _report_of(logs, other) for other in range(1, machines)}
        self._heard = {other: (-float("inf"), text_of(file)) for other, file in self._files.items()}
        self._diagnosis = logs / DIAGNOSIS
        self._before = text_of(self._diagnosis)

    def __enter__(self) -> _Others:
        return self

    def __exit__(self, *_: object) -> None:
        in_time(self._own.unlink, None)

    def exchange(self, report: Sequence[Mapping[str, Any]]) -> dict[int, tuple[float, Any]]:
        """Leaves the own report; on machine 0 returns those of the others, and when (time.monotonic) each was seen first."""
        in_time(lambda: write_json(self._own, report), None)
        texts = in_time(lambda: {other: text_of(file) for other, file in self._files.items()}, {})
        for other, text in texts.items():
            if text and text != self._heard[other][1]:
                self._heard[other] = (time.monotonic(), text)
        return {other: (when, json.loads(text)) for other, (when, text) in self._heard.items() if text}

    def told(self) -> bool:
        """Whether any machine has come to a diagnosis."""
        return in_time(lambda: text_of(self._diagnosis), "") not in ("", self._before)


def _report_of(logs: Path, node: int) -> Path:
    return logs / f"standstill-{node:05d}.json"


def _watch(about: Mapping[str, Any]) -> None:
    """Until all ranks of this machine have come to their end, or have been ended for what is told."""
    folder, log, host = Path(about["folder"]), Path(about["log"]), about["host"]
    logs, per_node, machines = log.parent, about["per_node"], about["machines"]
    limits = {name: about[name] for name in ("step_timeout", "checkpoint_timeout", "join_timeout")}
    for number in ENDING:  # launchers send them to all that they find; the ranks know what to do
        signal.signal(number, signal.SIG_IGN)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        with suppress(OSError):
            stack.enter_context(held(folder))
        here = _Ranks(folder, {about["process"]: about["launcher"]}, by_hand=about["by_hand"])
        _gather(here, per_node, host, log)
        place = numbered(here.all, per_node, machines)
        if place is None:
            if len(here.all) == per_node:
                _say([f"{ranks_in_words(here.all)} on {host} are not watched: {NOT_IN_A_ROW}"], log)
            elif here.left:  # one has ended before all were there
                time.sleep(GRACE_S)
                here.look()
                _say([*here.lost.values()][:1], log)
                here.end()
            return
        ranks, node = place
        log = log.with_stem(f"{log.stem}-{node:05d}") if node else log
        watchdog = Watchdog(folder, logs, ranks=ranks, host=host, machines=machines, **limits)
        stack.enter_context(watchdog.found_by_others(node))
        others = stack.enter_context(_Others(logs, node, machines))
        alive = here.left
        while here.left and here.failed < _SURE:
            if lines := _stuck(here, others, watchdog, host):
                _say(lines, log)
                break
            time.sleep(_LOOK_S)
            here.look()
            alive = here.left or alive
        else:
            if here.failed:
                _part(here, others, watchdog, log)
            if why := watchdog.blind():
                time.sleep(GRACE_S)  # who has come to its end may still be at it, and another watcher have cleared up
                _say([why] if any(map(_lives, alive.values())) else (), log)
        watchdog.codes = here.codes
        here.end()


def _gather(here: _Ranks, per_node: int, host: str, log: Path) -> None:
    """Waits until all ranks of this machine have come, or one of them has ended; says so where some do not."""
    told = time.monotonic() + _NEW_S
    while len(here.all) < per_node and here.left and not here.failed:
        if time.monotonic() > told:
            told = float("inf")
            _say([f"{len(here.all)} of {per_node} processes have come on {host}, which are not watched: {UNSEEN}"], log)
        time.sleep(_LOOK_S)
        here.look()


def _stuck(here: _Ranks, others: _Others, watchdog: Watchdog, host: str) -> Sequence[str]:
    """Why the ranks here have to be ended, () if they have not."""
    if found := watchdog.look(here.codes):
        return found.lines
    if here.orphaned():
        return (f"the launcher on {host} is gone: its processes are ended",)
    if report := watchdog.report():
        watchdog.hear(others.exchange(report))
        if others.told():
            return (f"ending the processes on {host}: another machine has told why",)
    return ()


def _part(here: _Ranks, others: _Others, watchdog: Watchdog, log: Path) -> None:
    """One has failed: gives the others the time for words of their own, and says why, where it has not said so itself."""
    watchdog.note()
    ends = watchdog.ends(here.silent, Path(os.devnull))
    follow = {*here.lost, *(rank for rank, end in ends.items() if end == ABORTED)}
    said = any(0 < code <= 128 and rank not in follow for rank, code in here.codes.items())
    first = here.silent - follow
    # all at once were killed by their launcher, which has its reasons
    together = len(here.silent) > 1 and not (ends or here.codes or here.left)
    together = together and not any(one.oom for one in watchdog.states({}))
    said, found = said or together or others.told(), None
    if first or not said:
        found = None if together or others.told() else watchdog.aftermath(here.silent, here.codes, Path(os.devnull))
    if found and (first or found.cause == "ended"):
        _say(found.lines, log)
        said = True
    limit = time.monotonic() + GRACE_S
    while (here.left or not said) and time.monotonic() < limit:
        time.sleep(_LOOK_S)
        here.look()
    if not said and not others.told():  # nor has any other machine
        _say(watchdog.write(found).lines if found else [*here.lost.values()][:1], log)


def _say(lines: Sequence[str], log: Path) -> None:
    if not lines:
        return
    text = "\n".join(lines)
    with suppress(OSError):  # who has read may be gone
        print(text, file=sys.stderr, flush=True)
    in_time(lambda: _append(log, text + "\n"), None)


def _append(log: Path, text: str) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(text)


def _lives(pid: int) -> bool:
    return sight(pid).state not in ("", "Z", "X")


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


if __name__ == "__main__":
    _watch(json.loads(sys.argv[1]))


def launch_of(env: Mapping[str, str], parent: int) -> tuple[str, int] | None:
    """The launch that has started this process for its RANK: a name that it has for all on this machine, and the number here.

    `parent` is the process that has started this one: torchrun and DeepSpeed's launcher start all of a machine. By hand, where
    they are called BY_HAND, nothing is known of it. None where they do not have ranks of a machine.
    """
    if _TORCHRUN in env:
        return f"{parent}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", int_of(env, "LOCAL_RANK", 0)
    for (rank, size, local), names in _LAUNCHES:
        if local in env and (env.get(rank), env.get(size)) == (env.get("RANK"), env.get("WORLD_SIZE")):
            told = [env[name] for name in names if env.get(name)]
            return re.sub(r"[^\w.]", "-", "-".join(told)) or str(parent), int_of(env, local, 0)
    if any(name not in env for name in (*RENDEZVOUS, *ALSO_NEEDED)):
        return None
    if "CROSS_SIZE" in env and "LOCAL_SIZE" in env:  # DeepSpeed's
        return str(parent), int_of(env, "LOCAL_RANK", 0)
    name = re.sub(r"[^\w.]", "-", f"{env['MASTER_ADDR']}-{env['MASTER_PORT']}")
    return f"{BY_HAND}-{name}", int_of(env, "LOCAL_RANK", 0)
