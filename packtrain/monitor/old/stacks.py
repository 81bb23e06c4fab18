"""What a rank is doing right now, in Python's frames and torch's collectives, also while it is stuck in C.

On SIGUSR2 `faulthandler` writes the stacks of all threads beside the heartbeats: in the signal handler itself, so that
neither a lock nor a running interpreter is needed, and the process goes on. What collectives are pending only Python can
tell: a thread looks twice a second whether anybody asks (a file there), and answers from torch's flight recorder, which gloo
and NCCL keep anyway. It can do so while the main thread waits in a collective, which lets go of Python's lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packtrain.launch.processes import families, text_of

SIGNAL = getattr(signal, "SIGUSR2", None)
ANSWER_S = 2.5
"""How long those who ask wait for answers."""
_LOOK_S = 0.5
_WHOLE_S = 0.1  # an answer that does not grow for so long is whole
_PASSED = 8
_LOADERS = 4  # of a rank: their stacks go over the line between the launchers, which takes 1 MiB
_QUESTION = "question"
_LOADER = re.compile(r"\d+\.loader-(\d+)\.stacks")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.function}'


@dataclass(frozen=True, slots=True)
class Collective:
    """The oldest collective operation that a rank has begun and not ended: its name, its number in its group of processes,
    and what it moves ("Float 4x8")."""

    name: str
    number: int
    group: str = ""
    what: str = ""

    def __str__(self) -> str:
        return f"{self.name} number {self.number}{f' ({self.what})' if self.what else ''}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank answered: `stack` of its main thread, innermost frame first (empty: none came), `pending` collective, the
    last ones that it has `passed`, and whether it could tell at all (`told`); `text` is everything, the stacks of its loader
    processes among it."""

    stack: tuple[Frame, ...] = ()
    pending: Collective | None = None
    passed: tuple[Collective, ...] = ()
    told: bool = False
    text: str = ""
    loaders: tuple[tuple[Frame, ...], ...] = ()


def listen(folder: Path, name: str) -> None:
    """From now on the signal has this process write the stacks of its threads to `folder`/NAME.stacks."""
    if SIGNAL is None:
        return
    with contextlib.suppress(OSError):
        aside = folder / f".{name}.stacks"
        file = aside.open("a")  # kept open by faulthandler
        faulthandler.register(SIGNAL, file, all_threads=True, chain=False)
        aside.rename(
            folder / f"{name}.stacks"
        )  # only now it may be asked: whoever does not listen yet the signal would end


def answer_questions(folder: Path, rank: int) -> None:
    """Starts the thread that tells which collectives are pending."""
    threading.Thread(target=_answer, args=(folder, rank), name="collectives", daemon=True).start()


def _answer(folder: Path, rank: int) -> None:
    question, asked = folder / _QUESTION, 0
    while True:
        time.sleep(_LOOK_S)
        try:
            when = question.stat().st_mtime_ns
        except OSError:
            if not folder.exists():
                return
            continue
        if when != asked:
            asked = when
            with contextlib.suppress(Exception):  # nothing that is only told may end a run
                (folder / f"{rank}.collectives").write_text(json.dumps(_collectives()))


def _collectives() -> dict[str, list[dict[str, Any]]]:
    """Those pending and the last that were passed, by torch's flight recorders; none where torch is not loaded.

    There is one for all backends, and in builds with NCCL maybe one more.
    """
    found: dict[str, list[dict[str, Any]]] = {"pending": [], "passed": []}
    if "torch.distributed" not in sys.modules:
        return found
    c10d = importlib.import_module("torch._C._distributed_c10d")
    for dump in (getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")):
        recorded = json.loads(dump()) if dump is not None else {}
        found["pending"] += [one for one in pending_of(recorded) if one not in found["pending"]]
        found["passed"] += [one for one in passed_of(recorded) if one not in found["passed"]]
    return found


def pending_of(recorded: dict[str, Any]) -> list[dict[str, Any]]:
    """Collectives of one flight recorder's dump that were begun and have not ended, as fields of Collective."""
    return [_collective(entry) for entry in _of_groups(recorded) if not _has_ended(entry, recorded)]


def passed_of(recorded: dict[str, Any]) -> list[dict[str, Any]]:
    """The last _PASSED of a dump that have ended, the latest first."""
    ended = [entry for entry in _of_groups(recorded) if _has_ended(entry, recorded)]
    return [_collective(entry) for entry in reversed(ended[-_PASSED:])]


def _of_groups(recorded: dict[str, Any]) -> list[dict[str, Any]]:
    """Without what goes from one rank to another, which is numbered apart."""
    return [entry for entry in recorded.get("entries", []) if not entry["is_p2p"]]


def _has_ended(entry: dict[str, Any], recorded: dict[str, Any]) -> bool:
    last = recorded.get("pg_status", {}).get(str(entry["pg_id"]), {}).get("last_completed_collective", -1)
    return entry["retired"] or entry["collective_seq_id"] <= int(last)


def _collective(entry: dict[str, Any]) -> dict[str, Any]:
    sizes = zip(entry["input_dtypes"], entry["input_sizes"], strict=True)
    what = ", ".join(f"{dtype} {'x'.join(map(str, size)) or '1'}" for dtype, size in sizes)
    name, number = entry["profiling_name"], entry["collective_seq_id"]
    return {"name": name, "number": number, "group": str(entry["pg_id"]), "what": what[:200]}


def ask(folder: Path, pids: dict[int, int]) -> dict[int, Answer]:
    """Asks the ranks whose processes are `pids`, and their loader processes, and waits ANSWER_S for what they say.

    {} where the folder is gone.
    """
    for old in (*folder.glob("*.stacks"), *folder.glob("*.collectives")):
        with contextlib.suppress(OSError):
            os.truncate(old, 0)
    try:
        (folder / _QUESTION).write_text("")
        os.utime(folder / _QUESTION, ns=(time.time_ns(), time.time_ns()))
    except FileNotFoundError:
        return {}
    if SIGNAL is not None:
        listening = {int(name[1]) for file in folder.iterdir() if (name := _LOADER.fullmatch(file.name))}
        loaders = listening.intersection(itertools.chain(*families(pids.values()).values()))
        for pid in (*pids.values(), *loaders):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, SIGNAL)
    end = time.monotonic() + ANSWER_S
    while time.monotonic() < end and not all(_has_answered(folder, rank) for rank in pids):
        time.sleep(0.05)
    return {rank: _read(folder, rank) for rank in pids}


def let_answer(folder: Path, pids: dict[int, int]) -> dict[int, Answer]:
    """Lets ranks that are stopped (SIGSTOP), and have been asked, go on until they have written their stacks, ANSWER_S at most.

    They are stopped again: the others, who wait for them, are to stay where they are.
    """
    if SIGNAL is None:
        return {}
    _send(pids, signal.SIGCONT)
    end, sizes = time.monotonic() + ANSWER_S, [-1]
    while time.monotonic() < end and not (all(sizes) and sizes == _sizes(folder, pids)):
        sizes = _sizes(folder, pids)
        time.sleep(_WHOLE_S)
    _send(pids, signal.SIGSTOP)
    return {rank: _read(folder, rank) for rank in pids}


def _sizes(folder: Path, pids: dict[int, int]) -> list[int]:
    return [len(text_of(folder / f"{rank}.stacks")) for rank in pids]


def _send(pids: dict[int, int], number: int) -> None:
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _has_answered(folder: Path, rank: int) -> bool:
    return all(text_of(folder / f"{rank}.{kind}") for kind in ("stacks", "collectives"))


def _read(folder: Path, rank: int) -> Answer:
    text = text_of(folder / f"{rank}.stacks")
    try:
        told: dict[str, list[dict[str, Any]]] = json.loads(text_of(folder / f"{rank}.collectives"))
    except ValueError:
        told = {}
    collectives = [Collective(**one) for one in told.get("pending", ())]
    loaders = [text_of(file) for file in sorted(folder.glob(f"{rank}.loader-*.stacks"))]
    whole = [text, *(f"-- a loader process\n{one}" for one in loaders if one)]
    whole += [f"-- pending: {one}" for one in collectives]
    return Answer(
        stack=main_stack(text),
        pending=collectives[0] if collectives else None,
        passed=tuple(Collective(**one) for one in told.get("passed", ())),
        told=bool(told),
        text="\n".join(whole),
        loaders=tuple(main_stack(one) for one in loaders if one)[:_LOADERS],
    )


def main_stack(text: str) -> tuple[Frame, ...]:
    """The main thread's frames in a dump of faulthandler, innermost first; it comes last, as the oldest thread."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if line.endswith("(most recent call first):"):
            frames = []
        elif found := _FRAME.fullmatch(line):
            file, number, function = found.groups()
            frames.append(Frame(file, int(number) if number.isdigit() else 0, function))
    return tuple(frames)
