"""What a rank is doing right now: the Python stacks of its threads, and its pending collective operations.

The rank's own heartbeat thread answers (`own`), also while the main thread waits in a collective, which lets go of Python's
lock. Where something in C holds that lock, the rank's launcher sends SIGUSR2, on which faulthandler writes the stacks in the
signal handler itself (`listen`, `dump`). Collectives come from torch's flight recorder, which gloo and NCCL keep anyway.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

FOLDER = "PACKTRAIN_STACKS"
"""Environment variable of a rank: the folder, of its launch and machine, that stacks and crashes are written into."""
SIGNAL = getattr(signal, "SIGUSR2", None)
DUMP_S = 1.0
_PASSED = 8
_MOST_LOADERS = 4
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_CRASHED = re.compile(r"^Fatal Python error: (.*)$", re.MULTILINE)
_SIGNALS = {
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": getattr(signal, "SIGBUS", signal.SIGSEGV),
    "Illegal instruction": signal.SIGILL,
    "Floating-point exception": signal.SIGFPE,
}
_RECORDER = "flight-recorder-rank-"
_DUMP = re.compile(rf"(?:{_RECORDER}|\w*trace_rank_)(\d+)")  # the other is torch's own name


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
    """A collective operation: its name, its number in its group of processes, and what it moves ("Float 4x8")."""

    name: str
    number: int
    group: str = ""
    what: str = ""

    def __str__(self) -> str:
        return f"{self.name} number {self.number}{f' ({self.what})' if self.what else ''}"


def listen(name: str | None = None) -> None:
    """From now on SIGUSR2 has this process write its stacks into FOLDER, and a crash leaves them there, too.

    `name` is that of the files: the rank unless given. Does nothing without FOLDER.
    """
    folder = Path(os.environ.get(FOLDER, ""))
    if FOLDER not in os.environ or not folder.is_dir():
        return
    name = name or os.environ.get("RANK", "0")
    with suppress(OSError):
        faulthandler.enable((folder / f"{name}.crash").open("w"))  # kept open by faulthandler
        if SIGNAL is not None:
            aside = folder / f".{name}.stacks"
            faulthandler.register(SIGNAL, aside.open("a"), all_threads=True, chain=False)
            # only now it may be asked: the signal would end a process that does not listen yet
            aside.rename(folder / f"{name}.stacks")


def listen_in_loader() -> None:
    """The same for a loader process of a rank."""
    faulthandler.disable()  # the rank's, of which this is a fork
    listen(f"{os.environ.get('RANK', '0')}.loader-{os.getpid()}")


def own() -> str:
    """The stacks of all threads of this process, and of its loader processes."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    folder, rank = Path(os.environ.get(FOLDER, os.devnull)), os.environ.get("RANK", "0")
    loaders = [int(file.stem.rpartition("-")[2]) for file in folder.glob(f"{rank}.loader-*.stacks")]
    ours = [pid for pid in loaders if _parent(pid) == os.getpid()][:_MOST_LOADERS]
    said = [dump(folder, f"{rank}.loader-{pid}", pid) for pid in ours]
    return "\n".join([*(f"-- a loader process\n{one}" for one in said if one), text])


def dump(folder: Path, name: str, pid: int) -> str:
    """The stacks of process `pid`, which listens under `name`; "" where none came within DUMP_S: it is stopped or gone."""
    file = folder / f"{name}.stacks"
    if SIGNAL is None or not file.exists():
        return ""
    with suppress(OSError):
        os.truncate(file, 0)
        os.kill(pid, SIGNAL)
        end, before = time.monotonic() + DUMP_S, -1
        while time.monotonic() < end and not 0 < file.stat().st_size == before:
            before = file.stat().st_size
            time.sleep(0.05)
        return file.read_text(errors="replace")
    return ""


def crash_of(folder: Path, name: str) -> tuple[int, str]:
    """The signal by which the process that listened under `name` crashed, and its stacks; (0, "") where it did not."""
    with suppress(OSError):
        text = (folder / f"{name}.crash").read_text(errors="replace")
        if said := [_SIGNALS[one] for one in _CRASHED.findall(text) if one in _SIGNALS]:
            return int(said[-1]), text
    return 0, ""


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


def _parent(pid: int) -> int:
    with suppress(psutil.Error):
        return psutil.Process(pid).ppid()
    return 0


def own_collectives() -> dict[str, list[dict[str, Any]]]:
    """The pending collectives of this process and the last that it passed, as fields of Collective; none without torch.

    torch has one flight recorder for all backends, and in builds with NCCL maybe one more.
    """
    found: dict[str, list[dict[str, Any]]] = {"pending": [], "passed": []}
    if "torch.distributed" not in sys.modules:
        return found
    c10d = importlib.import_module("torch._C._distributed_c10d")
    for recorder in (getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")):
        recorded = json.loads(recorder()) if recorder is not None else {}
        found["pending"] += [one for one in pending_of(recorded) if one not in found["pending"]]
        found["passed"] += [one for one in passed_of(recorded) if one not in found["passed"]]
    return found


def pending_of(recorded: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Collectives of one flight recorder's dump that were begun and have not ended, as fields of Collective."""
    return [_collective(entry) for entry in _of_groups(recorded) if not _has_ended(entry, recorded)]


def passed_of(recorded: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The last _PASSED of a dump that have ended, the latest first."""
    ended = [entry for entry in _of_groups(recorded) if _has_ended(entry, recorded)]
    return [_collective(entry) for entry in reversed(ended[-_PASSED:])]


def _of_groups(recorded: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Without what goes from one rank to another, which is numbered apart."""
    return [entry for entry in recorded.get("entries", []) if not entry["is_p2p"]]


def _has_ended(entry: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    last = recorded.get("pg_status", {}).get(str(entry["pg_id"]), {}).get("last_completed_collective", -1)
    return entry["retired"] or entry["collective_seq_id"] <= int(last)


def _collective(entry: Mapping[str, Any]) -> dict[str, Any]:
    sizes = zip(entry["input_dtypes"], entry["input_sizes"], strict=True)
    what = ", ".join(f"{dtype} {'x'.join(map(str, size)) or '1'}" for dtype, size in sizes)
    name, number = entry["profiling_name"], entry["collective_seq_id"]
    return {"name": name, "number": number, "group": str(entry["pg_id"]), "what": what[:200]}


def recorded_into(logs: Path) -> Mapping[str, str]:
    """Environment variables with which a rank whose NCCL collective runs out of time leaves its flight recorder in `logs`."""
    return {"TORCH_FR_DUMP_TEMP_FILE": str(logs.absolute() / _RECORDER), "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def dumps_in(logs: Path) -> dict[int, Path]:
    """The flight recorders that were left in `logs`, by rank."""
    found = {file: _DUMP.fullmatch(file.name) for file in logs.glob("*") if file.is_file()}
    return {int(name[1]): file for file, name in sorted(found.items()) if name}
