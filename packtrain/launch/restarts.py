"""trainer.restarts: whether a run that has failed is started again, and the record of it.

A dead or hung rank, and a lost machine, are restarted from the newest checkpoint; what another attempt would end in again (a
wrong config, a failed check) is not, nor a run that somebody stopped. The launchers stay: those that live meet anew.

torchrun's elastic agent is not used for it: it restarts whatever the exit code, knows nothing of hung ranks and of checkpoints
that bring no progress, and keeps the arguments that were made for the machines of the first start.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from packtrain.errors import PeerFailed
from packtrain.launch.exit_status import BUG, Verdict
from packtrain.plan.origin import listed
from packtrain.redact import clean
from packtrain.run_folder import RunFolder, in_time, write_json

RESTARTED = (1, PeerFailed.exit_code)
"""The exit codes after which a run is started again."""
FRUITLESS = 2
"""Restarts in a row without a new checkpoint after which the run is ended."""


@dataclass(frozen=True, slots=True)
class Restart:
    """`when` (local time), the `step` of the checkpoint that the run goes on from (0: its beginning), `why` in lines, and the
    `machines` that go on."""

    when: str
    step: int
    why: list[str]
    machines: list[str]


class Restarts:
    """The decision on each failure of a run that may be started `most` times again, and its record in the run folder."""

    def __init__(self, most: int, folder: RunFolder) -> None:
        self._most, self._folder = most, folder
        self.steps: list[int] = []
        """The step of the newest checkpoint at each failure."""
        self._step, self._what = 0, ""
        self._why: list[str] = []  # of the restart that is about to be made
        self._when = ""
        self._record: list[Mapping[str, Any]] = []

    @property
    def left(self) -> int:
        """How many failures more are followed by a restart."""
        return self._most - len(self.steps)

    def follow(self, steps: Sequence[int]) -> None:
        """Knows of a launch what the machine knows that decides, after failures at these `steps`, and may be lost."""
        self.steps, self._record = [*steps], [*self._folder.restarts()]

    def decide(self, verdict: Verdict, failed: str) -> Verdict:
        """The verdict, with `restart` set or a line that says why there is none; `failed` is the first failure in words."""
        if not self._most or verdict.code not in RESTARTED:
            return verdict
        self._note([one for one in verdict.lines if one != BUG] or [failed])
        self.steps.append(self._step)
        self._what = f"restart {len(self.steps)} of {self._most}"
        if in_time(self._done, False):
            left = "the run was done"
        elif self.steps[-FRUITLESS - 1 :] == [self._step] * (FRUITLESS + 1):
            left = f"{FRUITLESS} restarts in a row have brought no new checkpoint"
        elif self.left < 0:
            left = f"trainer.restarts={self._most}, and there were as many"
        else:
            return replace(verdict, restart=True)
        return replace(verdict, lines=[*verdict.lines, f"not started again: {left}"])

    def welcome(self, verdict: Verdict, machines: str) -> Verdict:
        """The verdict, on a run that was stopped in order, to go on with `machines` that have come back, too: no failure."""
        self._note([f"{machines} had come back"])
        self._what = f"start with {machines}, too"
        return replace(verdict, lines=(), restart=True)

    def _note(self, why: list[str]) -> None:
        self._when, self._why = time.strftime("%Y-%m-%d %H:%M:%S"), [clean(line) for line in why]
        self._step = in_time(lambda: newest_step(self._folder), 0)

    def check_unchanged(self) -> None:
        """Raises PeerFailed if the run has gone on, or ended, without this machine, which was to take the main one's place."""
        if self._done() or self._folder.restarts() != self._record:
            what = "the run went on without this machine, and has ended"
            raise PeerFailed(what, where=str(self._folder.root), fix="summary.json and the report there say how.")

    def _done(self) -> bool:
        return not self._folder.attempt.root.exists() and self._folder.status() == "done"

    def resume(self, asked: str) -> str:
        """trainer.resume of the next start, where `asked` was that of the first: auto, once this run has a checkpoint."""
        begun = not self._folder.attempt.root.exists()
        return "auto" if self._why and begun and newest_step(self._folder) else asked

    def keep(self, machines: list[str]) -> None:
        """Writes the record for a start with these machines, into the run folder that has been opened for it."""
        if self._why:
            step = newest_step(self._folder)
            self._record = [*self._record, asdict(Restart(self._when, step, self._why, machines))]
            self._why = []
        elif newest_step(self._folder):  # the run goes on, perhaps after a requeue
            self._record = [*self._folder.restarts()]
        if self._record:
            write_json(self._folder.restarted, self._record)
        else:
            self._folder.restarted.unlink(missing_ok=True)

    def sentence(self) -> str:
        """What the terminal says of the restart that is about to be made."""
        place = f"the checkpoint of step {self._step}" if self._step else "the beginning, for there is no checkpoint"
        return f"{self._what}, from {place}"


def newest_step(folder: RunFolder) -> int:
    """The step of the newest checkpoint, 0 where there is none."""
    return max(listed(folder.checkpoints), default=0)
