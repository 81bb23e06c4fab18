"""What every rank says of itself while it works: a record of 48 bytes in memory that its launcher shares.

A collective that waits for ever cannot be asked why, so this goes beside it: the rank writes where it is into a mapped file
(on a tmpfs where there is one: a stalled disk must not stall the rank), the launcher reads it whenever it likes. Nobody waits
for anybody and nothing is sent; a record takes 2 µs, ten of them a step.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from packtrain.launch.crash import leave_crashes
from packtrain.monitor.old import stacks

HEARTBEAT_DIR = "PACKTRAIN_HEARTBEAT_DIR"

Phase = Literal[
    "start",
    "join",
    "prepare",
    "load",
    "proof",
    "data",
    "counts",
    "forward",
    "backward",
    "optimizer",
    "step end",
    "checkpoint",
    "eval",
    "final",
    "done",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""In the order in which a rank comes through them; those from `data` to `eval` once a step."""
_ORDER = {phase: order for order, phase in enumerate(PHASES)}
BEFORE_TRAINING = PHASES[: PHASES.index("data")]
WRITING: tuple[Phase, ...] = ("checkpoint", "final")
"""Those in which a rank may write for long, or read back what was written, while the others wait for it."""
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
    "optimizer": "the optimizer",
    "step end": "logging",
    "checkpoint": "the checkpoint",
    "eval": "the evaluation",
    "final": "writing the results",
    "done": "its end",
}

# number of the record, process, phase, micro-batch, step, when (time.monotonic), usual step in s, and the number once more:
# a reader that finds two different ones has met the writer half way
_RECORD = struct.Struct("<QIHHqddQ")
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Beat:
    """Where a rank is: the last of its `number` records. `at` is time.monotonic() of its machine; `usual_s` seconds of a
    step that is nothing special (0: not known yet)."""

    number: int
    pid: int
    phase: Phase
    step: int
    micro: int
    at: float
    usual_s: float = 0.0

    @property
    def progress(self) -> tuple[int, ...]:
        """Grows as the rank comes along: the one whose is least has kept the others waiting."""
        order = _ORDER[self.phase]
        if self.phase in BEFORE_TRAINING:
            return (0, order)
        if self.phase in ("final", "done"):
            return (2, order)
        passes = _ORDER["forward"]  # forward and backward of a micro-batch come before those of the next
        return (1, self.step, passes if self.phase == "backward" else order, self.micro, order)

    @property
    def place(self) -> str:
        """In words: "the forward pass of step 12 (micro-batch 3)"."""
        words = IN_WORDS[self.phase]
        if self.phase in BEFORE_TRAINING or self.phase in ("final", "done"):
            return words
        micro = f" (micro-batch {self.micro})" if self.micro > 1 else ""
        return (
            f"{words} {'after' if self.phase in ('checkpoint', 'eval', 'step end') else 'of'} step {self.step}{micro}"
        )


class Pulse:
    """A rank's end: `enter` says where it is. Without a launcher of ours (`folder` None) it says so to nobody."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._map: mmap.mmap | None = None
        self._number, self._pid = 0, os.getpid()
        self.phase: Phase = "start"
        self.step, self.micro, self.usual_s = 0, 0, 0.0
        if folder is not None and folder.is_dir():
            self._map = _mapped(folder / str(rank))
        self.enter("start")

    def enter(self, phase: Phase, *, step: int | None = None, micro: int = 0) -> float:
        """Now in `phase`, of the step before unless told; returns time.monotonic()."""
        now = time.monotonic()
        self.phase, self.micro = phase, micro
        if step is not None:
            self.step = step
        if self._map is not None:
            self._number += 1
            place = (_ORDER[phase], min(micro, 2**16 - 1), self.step)
            _RECORD.pack_into(self._map, 0, self._number, self._pid, *place, now, self.usual_s, self._number)
        return now

    def go_on(self) -> None:
        """Still where it was, and at work: for how long it has stood still there counts anew."""
        self.enter(self.phase, micro=self.micro)


def _mapped(place: Path) -> mmap.mmap | None:
    """A record in the file `place`; None where its disk is full, and to write there would end this process (SIGBUS)."""
    try:
        with place.open("w+b", buffering=0) as file:
            file.write(bytes(_RECORD.size))  # takes the room
            return mmap.mmap(file.fileno(), _RECORD.size)
    except OSError as error:
        print(f"rank {place.name} is not watched: {error.strerror} ({place})", file=sys.stderr, flush=True)
        return None


def read_beat(file: Path) -> Beat | None:
    """The rank's last record; None where there is none, or the file is none of ours."""
    for _ in range(_TRIES):
        try:
            content = file.read_bytes()
            number, pid, order, micro, step, at, usual_s, again = _RECORD.unpack(content)
        except (OSError, struct.error):
            return None
        if number == again:
            return (
                Beat(number, pid, PHASES[order], step, micro, at, usual_s) if number and order < len(PHASES) else None
            )
    return None


def read_beats(folder: Path) -> dict[int, Beat]:
    """By rank, of all that have said something."""
    try:
        files = [file for file in folder.iterdir() if file.name.isdigit()]
    except OSError:
        return {}
    found = {int(file.name): read_beat(file) for file in files}
    return {rank: beat for rank, beat in sorted(found.items()) if beat is not None}


def listen_in_loader() -> None:
    """Called in a loader process of a rank: it tells its stacks, too."""
    if folder := os.environ.get(HEARTBEAT_DIR):
        name = f"{os.environ.get('RANK', '0')}.loader-{os.getpid()}"
        stacks.listen(Path(folder), name)
        leave_crashes(Path(folder), name)


@functools.cache
def own_pulse() -> Pulse:
    """That of this process, by the environment of its launch; made before anything heavy is imported, it answers questions
    about stacks and collectives from then on."""
    folder, rank = os.environ.get(HEARTBEAT_DIR), int(os.environ.get("RANK", "0"))
    if folder and os.path.isdir(folder):
        stacks.listen(Path(folder), str(rank))
        leave_crashes(Path(folder), str(rank))
        stacks.answer_questions(Path(folder), rank)
        return Pulse(Path(folder), rank)
    return Pulse(None, rank)
